"""`FaultyTensorPipeAgent`: farcall's faulty agent, with torch's constructor, options, and ways to fail.

It differs from farcall's own in what torch does otherwise:
- Builtin operators and script functions are told apart from Python functions (`SCRIPT_CALL`, `PYTHON_CALL`); what goes
  in an envelope has a name of its own in torch, too, and no rule can mean it. Nor can one mean gradients; that a
  context of distributed autograd is released is a `CLEANUP_AUTOGRAD_CONTEXT_REQ`.
- A remote call is not sent again: if it fails, there is no value, and every use of the reference says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from farcall.agent.handle import Handle, stillborn
from farcall.errors import RpcTimeoutError
from farcall.options import RpcBackendOptions
from farcall.pytorch import callees, envelopes
from farcall.pytorch.agent import TensorPipeAgent
from farcall.pytorch.autograd import post
from farcall.pytorch.options import DeviceMap, TensorPipeRpcBackendOptions
from farcall.serialization import callable_name, encode_function
from farcall.testing.faulty import FaultyAgent
from farcall.testing.faulty_options import (
    CLEANUP,
    REMOTE_CALL,
    SCRIPT_CALL,
    SCRIPT_REMOTE_CALL,
    FaultyRpcBackendOptions,
    Names,
)


def _named() -> dict[bytes, Names]:
    script, enveloped = Names(SCRIPT_CALL, SCRIPT_REMOTE_CALL), Names()
    functions: dict[Callable[..., Any], Names] = {
        callees.run_builtin: script,
        callees.run_script: script,
        callees.run_async_script: script,
        envelopes.run: enveloped,
        envelopes.run_remotely: enveloped,
        post._propagate: enveloped,
        post._abandon: enveloped,
        post._forget: enveloped,
        post._join: enveloped,
        post._release: Names(CLEANUP),
    }
    return {encode_function(function) or b"": names for function, names in functions.items()}


_NAMED: Final = _named()


@dataclass(kw_only=True)
class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """The options of the default backend, and what goes wrong: see `FaultyRpcBackendOptions`."""

    messages_to_fail: list[str] = field(default_factory=list)
    messages_to_delay: dict[str, float] = field(default_factory=dict)
    num_fail_sends: int = 0

    def for_agent(self) -> RpcBackendOptions:
        """See `TensorPipeRpcBackendOptions`. Failures of remote calls are left to `FaultyTensorPipeAgent`."""
        mine = super().for_agent()
        return FaultyRpcBackendOptions(
            **{each.name: getattr(mine, each.name) for each in dataclasses.fields(RpcBackendOptions)},
            messages_to_fail=[name for name in self.messages_to_fail if name not in (REMOTE_CALL, SCRIPT_REMOTE_CALL)],
            messages_to_delay=self.messages_to_delay,
            num_fail_sends=self.num_fail_sends,
        )


class FaultyTensorPipeAgent(TensorPipeAgent, FaultyAgent):
    """An agent with faults, for programs written for torch."""

    named: Mapping[bytes, Names] | None = _NAMED

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int | None,
        opts: FaultyTensorPipeRpcBackendOptions,
        reverse_device_maps: dict[str, DeviceMap],
        devices: list[torch.device],
    ) -> None:
        """As `TensorPipeAgent`."""
        super().__init__(store, name, rank, world_size, opts, reverse_device_maps, devices)
        # The methods of these names belong to the instance: they are a fast path.
        calling: Any = self.calling
        self._remote, self._remote_on = calling.remote, calling.remote_on
        self.remote = calling.remote = self._remote_or_fail  # type: ignore[method-assign]
        calling.remote_on = self._remote_on_or_fail

    def _remote_or_fail(self, to: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Handle:
        name = self.faults.rules.name_for(REMOTE_CALL, encode_function(function) or b"")
        if not self._fails(name):
            return self._remote(to, function, args, kwargs)  # type: ignore[no-any-return]
        owner = self.calling.peers[to].number
        return stillborn(self.book, owner, partial(_not_created, callable_name(function), name))

    def _remote_on_or_fail(self, handle: Handle, method: str, args: Any, kwargs: Any) -> Handle:
        if not self._fails(REMOTE_CALL):
            return self._remote_on(handle, method, args, kwargs)  # type: ignore[no-any-return]
        return stillborn(self.book, handle.reference.owner, partial(_not_created, method, REMOTE_CALL))

    def _fails(self, name: str) -> bool:
        options: Any = self._get_backend_options()
        return name in options.messages_to_fail and options.num_fail_sends > 0


def _not_created(function: str, message: str) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"RRef creation via rpc.remote() timed out, and its value is nowhere: the faulty agent let this {message} of "
        f"`{function}` fail. Make it anew"
    )

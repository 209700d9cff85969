"""`FaultyTensorPipeAgent`: farcall's faulty agent with torch's constructor, options and kinds of failures.

It differs from farcall's own faulty agent where torch's behaves differently:

- Builtin operators and script functions have other message names (`SCRIPT_CALL`) than Python functions (`PYTHON_CALL`).
  Calls with interceptors, and gradients, have names in torch that no rule can match. Releasing a context of distributed
  autograd is a `CLEANUP_AUTOGRAD_CONTEXT_REQ`.
- A call by `remote` is not sent again. If it fails there is no value, and every use of the reference raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from farcall.errors import RpcTimeoutError
from farcall.options import RpcBackendOptions
from farcall.pytorch import callees, envelopes
from farcall.pytorch.agent import TensorPipeAgent
from farcall.pytorch.autograd import post
from farcall.pytorch.options import DeviceMap, TensorPipeRpcBackendOptions
from farcall.runtime.handles import failed_handle
from farcall.runtime.interceptors import ClientCall, ClientInterceptor
from farcall.serialization import encode_function
from farcall.testing.faulty_agent import FaultyAgent
from farcall.testing.faulty_options import (
    CLEANUP,
    REMOTE_CALL,
    SCRIPT_CALL,
    SCRIPT_REMOTE_CALL,
    FaultyRpcBackendOptions,
    Names,
)


def _message_names() -> dict[bytes, Names]:
    """Returns the names that torch has for calls of some functions of this package, by function.

    A key is a function, encoded by `encode_function`. A value has two names: the first for calls by `rpc_sync` and
    `rpc_async`, the second for calls by `remote`. With an empty name, a call never fails and is not delayed.
    """
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


_MESSAGE_NAMES: Final = _message_names()


@dataclass(kw_only=True)
class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """The options of the default backend, and the messages that fail or are delayed.

    Args:
        messages_to_fail: The names of the messages that fail, for example `RREF_FORK_REQUEST`; none by default.
        messages_to_delay: By how many seconds messages are delayed, by the name of the message; none by default.
        num_fail_sends: How many sends of each message in `messages_to_fail` fail before one succeeds; 0, the default,
            for none.

    Raises:
        UsageError: A name or number is not valid. Raised when an agent is created, not by this class.
    """

    messages_to_fail: list[str] = field(default_factory=list)
    messages_to_delay: dict[str, float] = field(default_factory=dict)
    num_fail_sends: int = 0

    def for_agent(self) -> RpcBackendOptions:
        """Returns the options for farcall's faulty agent.

        Failures of calls by `remote` are left out, because `FaultyTensorPipeAgent` makes these fail itself. Raises
        `UsageError` if a message name or a number is not valid.
        """
        mine = super().for_agent()
        return FaultyRpcBackendOptions(
            **{each.name: getattr(mine, each.name) for each in dataclasses.fields(RpcBackendOptions)},
            messages_to_fail=[name for name in self.messages_to_fail if name not in (REMOTE_CALL, SCRIPT_REMOTE_CALL)],
            messages_to_delay=self.messages_to_delay,
            num_fail_sends=self.num_fail_sends,
        )


class FaultyTensorPipeAgent(TensorPipeAgent, FaultyAgent):
    """An agent whose messages fail or are delayed as its options say, for programs that are written for torch.

    Creating one joins a group. A call by `remote` that fails is not sent again, as in torch: every use of its reference
    raises `RpcTimeoutError`.

    Attributes:
        named: The names that torch has for calls of some functions, by the encoded function.
    """

    named: Mapping[bytes, Names] | None = _MESSAGE_NAMES

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
        """Joins the group, and returns when all workers of a fixed group have joined.

        Args:
            store: A `torch.distributed.Store`, at which the workers find each other.
            name: The name of this worker.
            rank: Its rank.
            world_size: The number of workers; None or 0 for an open group.
            opts: The options, which say which messages fail or are delayed.
            reverse_device_maps: For the name of each caller, a map from devices of this worker to devices of the
                caller; may be empty.
            devices: The devices that calls may use on this worker; may be empty.

        Raises:
            RuntimeError: torch does not accept the name.
            UsageError: A message name or a number in `opts` is not valid.
            RendezvousError: The group could not be joined.
        """
        super().__init__(store, name, rank, world_size, opts, reverse_device_maps, devices)
        failing = {REMOTE_CALL, SCRIPT_REMOTE_CALL}.intersection(opts.messages_to_fail)
        if failing and opts.num_fail_sends:
            self.add_interceptor(_FailedRemoteCalls(self, failing))


class _FailedRemoteCalls(ClientInterceptor):
    """An interceptor that makes calls by `remote` fail: the caller gets a reference that never has a value.

    A call of `agent` fails if its message name is in `failing`.
    """

    def __init__(self, agent: FaultyAgent, failing: Set[str]) -> None:
        """Creates the interceptor.

        Args:
            agent: The agent whose calls fail.
            failing: The message names of the calls that fail: `PYTHON_REMOTE_CALL`, `SCRIPT_REMOTE_CALL`.
        """
        self._agent = agent
        self._failing = failing

    def intercept(self, call: ClientCall, proceed: Callable[[ClientCall], Any]) -> Any:
        """Makes `call`. If it is a call by `remote` that has to fail, returns a handle without a value instead.

        Using that handle raises `RpcTimeoutError`. Every other call returns and raises as usual.

        Args:
            call: The call that this worker makes.
            proceed: Makes the call that it is given.
        """
        if call.is_kept:
            callee = b"" if isinstance(call.function, str) else encode_function(call.function) or b""
            name = self._agent.faults.rules.name_of_remote_call(callee)
            if name in self._failing:
                workers = self._agent.calling.numbered.items()
                owner = next(number for number, peer in workers if peer.info == call.to and not peer.is_lost)
                return failed_handle(self._agent.reference_store, owner, partial(_not_created, call.name, name))
        return proceed(call)


def _not_created(function: str, message: str) -> RpcTimeoutError:
    """Returns the error for a reference without a value, because the call by `remote` that created it failed.

    Args:
        function: The name of the function that was called.
        message: The name of the message that failed.
    """
    return RpcTimeoutError(
        f"RRef creation via rpc.remote() timed out, so it has no value: the faulty agent let this {message} of "
        f"`{function}` fail. Create the reference again"
    )

"""The faulty agent: farcall's own agent over a network that fails as it is told. For tests.

It is a backend, `BackendType.FAULTY_TENSORPIPE`, which is registered when `farcall.testing` is imported. The agent does
not know of it: it is the real one, and only its transports differ. What can go wrong is in `faulty_options` and
`faulty_control`; how it is done, in `faulty_link`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from farcall.agent import Agent
from farcall.agent.execution import RemoteJob
from farcall.api import current_agent
from farcall.backends.default import join_group
from farcall.backends.interface import RpcAgent
from farcall.backends.registry import register_backend
from farcall.errors import UsageError
from farcall.options import RpcBackendOptions
from farcall.security import Credentials
from farcall.testing.faulty_control import Faults
from farcall.testing.faulty_options import FaultyRpcBackendOptions, Names
from farcall.testing.faulty_transport import FaultyTransport
from farcall.transports.base import Transport

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

NAME: Final = "FAULTY_TENSORPIPE"


class FaultyAgent(Agent):
    """An agent with faults. Its `options` are `FaultyRpcBackendOptions`; with others nothing fails until it is told."""

    named: Mapping[bytes, Names] | None = None
    """For a subclass: which functions stand for what torch sends under other names; see `Rules`."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        credentials: Credentials | None = None,
    ) -> None:
        """Joins the group; `start` it next. Raises as `Agent`; then nothing is left running."""
        faulty = options if isinstance(options, FaultyRpcBackendOptions) else FaultyRpcBackendOptions()
        self.faults = Faults(name, faulty, self.named)
        """What goes wrong."""
        try:
            wrapped = {scheme: FaultyTransport(each, self.faults) for scheme, each in transports.items()}
            super().__init__(name, rendezvous, options, wrapped, credentials)
        except BaseException:
            self.faults.relay.close()
            raise
        self.faults.check_name = self.get_worker_info
        self._place.own_remote_job = _own_remote_job(self.faults)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """See `Agent`. What is delayed or frozen still is dropped."""
        try:
            super().shutdown(graceful, timeout)
        finally:
            self.faults.relay.close()

    def abandon(self) -> None:
        """See `Agent`."""
        super().abandon()
        self.faults.relay.abandon()


def _own_remote_job(faults: Faults) -> type[RemoteJob]:
    """What is made of a remote call of the agent to itself: one that may be late."""

    class OwnRemoteJob(RemoteJob):
        def run(self) -> None:
            delay = faults.own_remote_call_delay(self._callee) if not hasattr(self, "was_late") else 0.0
            if delay:
                self.was_late = True
                faults.later(delay, lambda: self._place.serving.submit(self))
                return None
            return super().run()  # type: ignore[return-value]  # a remote job has no reply

    return OwnRemoteJob


def faults(agent: RpcAgent | None = None) -> Faults:
    """What goes wrong at a faulty agent; by default at that of this process.

    Raises `UsageError` if it is another agent or none, `NotInitializedError` if this process has none.
    """
    agent = agent if agent is not None else current_agent()
    if not isinstance(agent, RpcAgent):
        raise UsageError(
            f"{agent!r} is no agent: give faults() one of a LocalGroup, group[0], or nothing for this worker"
        )
    if not isinstance(agent, FaultyAgent):
        raise UsageError(
            f"worker {agent.info.name!r} has no faulty agent: start it with "
            f"init_rpc(..., backend=BackendType.{NAME}), or its LocalGroup with FaultyRpcBackendOptions"
        )
    return agent.faults


def _construct_options(rpc_timeout: float, init_method: str, **chosen: Any) -> FaultyRpcBackendOptions:
    return FaultyRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **chosen)


def _init_agent(
    store: None, name: str, rank: int, world_size: int | None, rpc_backend_options: FaultyRpcBackendOptions
) -> RpcAgent:
    return join_group(FaultyAgent, name, rank, world_size, rpc_backend_options)


register_backend(NAME, _construct_options, _init_agent)

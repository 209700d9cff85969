"""The faulty agent: farcall's own agent over a network that fails as it is told. For tests.

It is a backend, `BackendType.FAULTY_TENSORPIPE`, which is registered when `farcall.testing` is imported. The agent is
the real one; only its transports differ. `faulty_options` and `faulty_control` say what can go wrong, and `faulty_link`
does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from farcall.api import current_agent
from farcall.backends.interface import RpcAgent
from farcall.backends.registry import join_group, register_backend
from farcall.errors import UsageError
from farcall.options import RpcBackendOptions
from farcall.runtime.agent import Agent
from farcall.runtime.executor import Job
from farcall.security import Credentials
from farcall.testing.faulty_control import Faults
from farcall.testing.faulty_link import FaultyTransport
from farcall.testing.faulty_options import FaultyRpcBackendOptions, Names
from farcall.transports.base import Transport

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

NAME: Final = "FAULTY_TENSORPIPE"


class FaultyAgent(Agent):
    """An agent with faults. If its options are not `FaultyRpcBackendOptions`, nothing fails until a test says so."""

    named: Mapping[bytes, Names] | None = None
    """For a subclass: which functions torch calls under names of their own. See `Rules`."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        credentials: Credentials | None = None,
    ) -> None:
        """Joins the group. `start` must follow. See `Agent` for the arguments and what it raises."""
        faulty = options if isinstance(options, FaultyRpcBackendOptions) else FaultyRpcBackendOptions()
        self.faults = Faults(name, faulty, self.get_worker_info, self.named)
        """What goes wrong."""
        wrapped = {scheme: FaultyTransport(transport, self.faults) for scheme, transport in transports.items()}
        try:
            super().__init__(name, rendezvous, options, wrapped, credentials)
        except BaseException:
            self.faults.relay.close()
            raise

    def submit_own_call(self, callee: bytes, job: Job) -> None:
        """See `Agent`. It is late if remote calls are delayed."""
        delay = self.faults.own_remote_call_delay(callee)
        if delay:
            submit = super().submit_own_call
            self.faults.relay.call_later(delay, lambda: submit(callee, job))
        else:
            super().submit_own_call(callee, job)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """See `Agent`. Messages that are still delayed or frozen are dropped."""
        try:
            super().shutdown(graceful, timeout)
        finally:
            self.faults.relay.close()

    def close_after_leaving(self) -> None:
        """See `Agent`."""
        try:
            super().close_after_leaving()
        finally:
            self.faults.relay.close()

    def abandon(self) -> None:
        """See `Agent`."""
        super().abandon()
        self.faults.relay.abandon()


def faults(agent: RpcAgent | None = None) -> Faults:
    """Returns what goes wrong at a faulty agent; by default at that of this process.

    Args:
        agent: An agent of a `LocalGroup`.

    Raises:
        UsageError: It is not a faulty agent.
        NotInitializedError: No agent was given, and this process has none.
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

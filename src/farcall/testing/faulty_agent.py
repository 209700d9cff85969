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
    """An agent whose messages fail as a test says.

    If the options are not `FaultyRpcBackendOptions`, nothing fails until the test changes `faults`.
    """

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
        """Joins the group. `start` must be called next.

        Args:
            name: The name of this worker.
            rendezvous: The connection to the store of the group.
            options: The options of the agent, with the faults if they are `FaultyRpcBackendOptions`.
            transports: The transports by scheme. Each is wrapped in a `FaultyTransport`.
            credentials: Secret and encryption; None for those of this user.

        Raises:
            RpcError: As `Agent` raises. Nothing is left running.
        """
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
        """Runs a remote call of this worker to itself: now, or later if remote calls of `callee` are delayed."""
        delay = self.faults.own_remote_call_delay(callee)
        if delay:
            submit = super().submit_own_call
            self.faults.relay.call_later(delay, lambda: submit(callee, job))
        else:
            super().submit_own_call(callee, job)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and releases all resources. Messages that are still delayed or frozen are dropped.

        Args:
            graceful: Whether to wait first until all workers are done.
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The wait failed. All resources have been released all the same.
        """
        try:
            super().shutdown(graceful, timeout)
        finally:
            self.faults.relay.close()

    def close_after_leaving(self) -> None:
        """Releases all resources of a worker that has left its group, and drops messages that are still delayed."""
        try:
            super().close_after_leaving()
        finally:
            self.faults.relay.close()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of descriptors.

        Later calls raise `ForkedProcessError`.
        """
        super().abandon()
        self.faults.relay.abandon()


def faults(agent: RpcAgent | None = None) -> Faults:
    """Returns the faults of a faulty agent, with which a test changes what fails.

    Args:
        agent: The agent, for example `group[0]` of a `LocalGroup`. None means the agent of this process.

    Raises:
        UsageError: `agent` is not an agent, or not a faulty one.
        NotInitializedError: No agent was given, and this process has none.

    Example:
        >>> faults(group[0]).cut("worker1")
    """
    agent = agent if agent is not None else current_agent()
    if not isinstance(agent, RpcAgent):
        raise UsageError(
            f"{agent!r} is no agent: give faults() one of a LocalGroup, group.agents[0], or nothing for this worker"
        )
    if not isinstance(agent, FaultyAgent):
        raise UsageError(
            f"worker {agent.info.name!r} has no faulty agent: start it with "
            f"init_rpc(..., backend=BackendType.{NAME}), or its LocalGroup with FaultyRpcBackendOptions"
        )
    return agent.faults


def _construct_options(rpc_timeout: float, init_method: str, **chosen: Any) -> FaultyRpcBackendOptions:
    """Returns options for the faulty agent.

    Raises `UsageError` for a wrong value, `BackendError` for an unknown option.
    """
    return FaultyRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **chosen)


def _init_agent(
    store: None, name: str, rank: int, world_size: int | None, rpc_backend_options: FaultyRpcBackendOptions
) -> RpcAgent:
    """Returns a new faulty agent that has joined its group. Raises what `join_group` raises."""
    return join_group(FaultyAgent, name, rank, world_size, rpc_backend_options)


register_backend(NAME, _construct_options, _init_agent)

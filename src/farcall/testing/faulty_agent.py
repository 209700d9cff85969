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
"""The name of the backend of faulty agents, `BackendType.FAULTY_TENSORPIPE`."""


class FaultyAgent(Agent):
    """An agent, the part of a process that makes it a worker, whose messages fail as a test says.

    `init_rpc(..., backend=BackendType.FAULTY_TENSORPIPE)` and a `LocalGroup` with `FaultyRpcBackendOptions` create it.
    If the options are not `FaultyRpcBackendOptions`, nothing fails until the test changes `faults`.

    Args:
        name: The name of the worker.
        rendezvous: The connection to the store of the group.
        options: The options of the agent.
        transports: The transports by scheme.
        credentials: How the worker authenticates itself; None to create the credentials from `options`.

    Attributes:
        faults: What goes wrong. A test may change it at any time.
        named: For a subclass to set: the functions whose calls torch sends under special message names. Maps a
            function, as encoded in the frame of a call, to the names of its calls. None for none.
    """

    named: Mapping[bytes, Names] | None = None

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        credentials: Credentials | None = None,
    ) -> None:
        """Joins the group. `start` must be called next, and `shutdown` at the end.

        Args:
            name: The name of this worker.
            rendezvous: The connection to the store of the group.
            options: The options of the agent, with the faults if they are `FaultyRpcBackendOptions`.
            transports: The transports by scheme. Each is wrapped in a `FaultyTransport`.
            credentials: How this worker authenticates itself; None to create the credentials from `options`.

        Raises:
            RpcError: The agent could not join, for example because its name is taken (`RendezvousError`). Nothing is
                left running.
        """
        faulty = options if isinstance(options, FaultyRpcBackendOptions) else FaultyRpcBackendOptions()
        self.faults = Faults(name, faulty, self.get_worker_info, self.named)
        """What goes wrong. A test may change it at any time."""
        wrapped = {scheme: FaultyTransport(transport, self.faults) for scheme, transport in transports.items()}
        try:
            super().__init__(name, rendezvous, options, wrapped, credentials)
        except BaseException:
            self.faults.relay.close()
            raise

    def submit_own_call(self, callee: bytes, job: Job) -> None:
        """Queues a call that this worker has made to itself with `remote`: at once, or later if such calls are delayed.

        A delayed call that is still waiting when the agent shuts down is dropped.

        Args:
            callee: The function, as encoded in the frame of a call.
            job: The job that runs the call on the executor.
        """
        delay = self.faults.own_remote_call_delay(callee)
        if delay:
            submit = super().submit_own_call
            self.faults.relay.call_later(delay, lambda: submit(callee, job))
        else:
            super().submit_own_call(callee, job)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and releases all resources. Messages that are still delayed or frozen are dropped.

        A second call with `graceful=False` does nothing.

        Args:
            graceful: Whether to wait first until the work of all workers is done; in an open group, of this one.
            timeout: How many seconds to wait at most; 0 means no limit. Ignored if `graceful` is False.

        Raises:
            ShutdownError: The wait timed out, or a worker was lost. All resources have been released all the same.
        """
        try:
            super().shutdown(graceful, timeout)
        finally:
            self.faults.relay.close()

    def close_after_leaving(self) -> None:
        """Releases all resources, the second step of a shutdown. Messages that are still delayed are dropped.

        `wait_to_leave`, the first step, must have returned before. Does nothing if all is released already.
        """
        try:
            super().close_after_leaving()
        finally:
            self.faults.relay.close()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of descriptors. The agent of the parent is not disturbed.

        Later calls in the child raise `ForkedProcessError`.
        """
        super().abandon()
        self.faults.relay.abandon()


def faults(agent: RpcAgent | None = None) -> Faults:
    """Returns the faults of a faulty agent: the object with which a test changes what fails.

    A faulty agent is an agent (what makes a process a worker) of the backend `BackendType.FAULTY_TENSORPIPE`.

    Args:
        agent: The agent, for example `group.agents[0]` of a `LocalGroup`. None means the agent of this process.

    Raises:
        UsageError: `agent` is not an agent, or not a faulty one.
        NotInitializedError: No agent was given, and this process has none.

    Example:
        >>> faults(group.agents[0]).cut("worker1")
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
    """Returns options for the faulty agent, with the given values and otherwise the defaults.

    Args:
        rpc_timeout: The default timeout of calls in seconds; 0 for no timeout.
        init_method: The rendezvous URL, which is not checked here.
        **chosen: Further options of `FaultyRpcBackendOptions`.

    Raises:
        UsageError: An option cannot have its value.
        BackendError: There is no such option.
    """
    return FaultyRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **chosen)


def _init_agent(
    store: None, name: str, rank: int, world_size: int | None, rpc_backend_options: FaultyRpcBackendOptions
) -> RpcAgent:
    """Returns a new faulty agent that has joined its group. `init_rpc` calls it.

    Args:
        store: Ignored.
        name: The name of this worker.
        rank: Its rank; -1 if `init_rpc` was not given one.
        world_size: The number of workers; None for an open group, or to take it from the environment.
        rpc_backend_options: The options of the agent.

    Raises:
        UsageError: An option, the name, the rank or the world size is not valid.
        RendezvousError: The group cannot be joined, for example because the name is taken.
    """
    return join_group(FaultyAgent, name, rank, world_size, rpc_backend_options)


register_backend(NAME, _construct_options, _init_agent)

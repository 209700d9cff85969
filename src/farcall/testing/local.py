"""A group of workers in one process, for tests that need no other process.

    with LocalGroup(3) as group:
        group.worker("worker1").call(max, 1, 2)

The group acts for its first worker; `group["worker1"]` is the group as that worker sees it. A function that runs on a
worker finds the group of that worker by itself: `farcall.worker(...)`, `rpc_sync` and the others work as they do in a
process of its own. So a program that calls them need not be changed for a test.

An open group begins with that many workers, and others come and go:

    with LocalGroup(1, is_open=True) as group:
        with group.join("worker1"):
            farcall.rpc_sync("worker0", max, (1, 2))
        group.leave("worker1")

`group.agents` has the agents behind the workers. All agents share the interpreter, so their speed says nothing.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

from farcall import current
from farcall.backends.interface import To
from farcall.errors import UsageError
from farcall.groups import Group
from farcall.options import RpcBackendOptions
from farcall.rendezvous import Rendezvous
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.leaks import Inventory
from farcall.security import Credentials, Secret, limits_from_options
from farcall.security.encryption import Encryption
from farcall.testing.faulty_agent import FaultyAgent
from farcall.testing.faulty_options import FaultyRpcBackendOptions
from farcall.testing.memory_store import MemoryStore
from farcall.transports.base import Transport
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.registry import new_transport
from farcall.transports.tcp import TcpTransport

T = TypeVar("T")

TRANSPORTS: Final = ("memory", "unix", "tcp", "tls")
"""What can connect the workers of a `LocalGroup`: names of transports, and "tls" for encrypted TCP."""

_groups: Final[weakref.WeakValueDictionary[int, LocalGroup]] = weakref.WeakValueDictionary()
"""All `LocalGroup`s of this process that exist, by number, for the unpickler."""
_numbers: Final = itertools.count(1)
"""The numbers of new `LocalGroup`s."""


class Agents(Sequence[Agent]):
    """The agents of a `LocalGroup`, in the order of its workers. An agent is found by position or by worker name.

    An agent is the part of a process that makes it a worker; a `LocalGroup` has several in one process. It is a
    sequence: `len(agents)`, `for agent in agents`, `agents[0]` and `agents["worker1"]` work.

    Args:
        agents: The agents. The list may change later.
        names: Returns the names of their workers, in the same order.
    """

    def __init__(self, agents: list[Agent], names: Callable[[], tuple[str, ...]]) -> None:
        self._agents = agents
        self._names = names

    @overload
    def __getitem__(self, which: int | str) -> Agent: ...
    @overload
    def __getitem__(self, which: slice) -> list[Agent]: ...
    def __getitem__(self, which: int | str | slice) -> Agent | list[Agent]:
        """Returns the agent at a position or of a worker name.

        A negative position counts from the end. A slice of positions gives a list of agents, which may be empty.

        Raises:
            UsageError: There is no such position or name.
        """
        if isinstance(which, slice):
            return self._agents[which]
        try:
            return self._agents[which if isinstance(which, int) else self._names().index(which)]
        except (IndexError, ValueError):
            raise UsageError(f"there is no worker {which!r} in this group; there are {self._names()!r}") from None

    def __len__(self) -> int:
        return len(self._agents)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents)


class LocalGroup(Group):
    """A group of workers in this process, for tests. Used as a `Group`, it acts as its first worker.

    Creating the object starts the workers. `shutdown`, or the end of a `with` block, ends them.

    Args:
        size: How many workers there are, at least 1.
        options: The options of all workers; None for the defaults. With `FaultyRpcBackendOptions`, all have faulty
            agents.
        names: One name for each worker; None for `worker0`, `worker1` and so on.
        is_open: Whether workers may join and leave at any time.
        transport: What connects the workers: "memory", "unix" or "tcp".

    Attributes:
        names: The names of the workers, in the order of their ranks or, in an open group, as they joined.
        agents: Their agents, in the same order. `agents["worker1"]` works as well.
        network: Where the agents listen if `transport` is "memory".

    Raises:
        UsageError: An argument is not valid.
        RpcError: A worker could not start. None is left running.

    Example:
        with LocalGroup(2) as group:
            group.worker("worker1").call(max, 1, 2)
    """

    def __init__(
        self,
        size: int,
        options: RpcBackendOptions | None = None,
        *,
        names: Sequence[str] | None = None,
        is_open: bool = False,
        transport: str = "memory",
    ) -> None:
        """Starts the workers, and returns when the group is complete.

        Args:
            size: How many workers there are, at least 1.
            options: The options of all workers; None for the defaults. The rendezvous and the transports in them are
                ignored. With `FaultyRpcBackendOptions`, all workers have faulty agents, whose messages fail as a test
                says.
            names: One name for each worker, in the order of their ranks; None for `worker0`, `worker1` and so on.
            is_open: Whether it is an open group. Its workers have no ranks, and are in the order in which they joined.
            transport: What connects the workers: "memory", "unix" or "tcp".

        Raises:
            UsageError: An argument is not valid.
            RpcError: A worker could not start, for example because two have the same name. None is left running.
        """
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"a LocalGroup has a number of workers, at least 1, not {size!r}")
        if options is not None and not isinstance(options, RpcBackendOptions):
            raise UsageError(
                "the options of a LocalGroup must be RpcBackendOptions or, for faulty agents, FaultyRpcBackendOptions, "
                f"not {options!r}"
            )
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise UsageError(f"the names of a LocalGroup must be a list of texts, not {names!r}")
        self.names = tuple(names) if names is not None else tuple(f"worker{rank}" for rank in range(size))
        if len(self.names) != size:
            raise UsageError(f"a group of {size} workers cannot have the names {self.names!r}: give one for each")
        if transport not in TRANSPORTS:
            raise UsageError(f"the transport of a LocalGroup is one of {', '.join(TRANSPORTS)}, not {transport!r}")
        super().__init__()
        self._transport = transport
        self.network = MemoryNetwork()
        """The network of the transport "memory". A test may connect to the agents through it. Unused with another
        transport.
        """
        self._number = next(_numbers)
        self._worker_options = options or RpcBackendOptions()
        self._is_open = is_open
        self._store = MemoryStore()
        self._run = uuid.uuid4().hex
        # A secret of their own: the secret file of the user who runs the tests is neither needed nor created.
        encryption = Encryption() if transport == "tls" else None
        limits = limits_from_options(self._worker_options)
        self._credentials = Credentials(Secret(secrets.token_hex(32)), encryption, limits)
        self._agents: list[Agent] = self._start()
        self.agents = Agents(self._agents, lambda: self.names)
        """The agents of the workers, by position in `names` or by name."""
        for agent in self._agents:
            current.add(agent, self)
        self._agent = self._agents[0]
        _groups[self._number] = self

    def _start(self) -> list[Agent]:
        """Starts the agents of all workers, and returns them in the order of `names`.

        If one cannot join the group (`RpcError`), shuts down those that have started, and raises the first error.
        """
        started: dict[int, Agent] = {}
        failures: list[BaseException] = []

        def start(rank: int) -> None:
            try:
                started[rank] = self._new_agent_of(rank, self.names[rank])
            except BaseException as error:
                failures.append(error)

        if self._is_open:
            for place in range(len(self.names)):
                start(place)  # one after the other: their numbers follow the names
        else:
            _in_threads([(start, (rank,)) for rank in range(len(self.names))])
        if failures:
            for agent in started.values():
                agent.shutdown(graceful=False, timeout=0)
            raise failures[0]
        return [started[rank] for rank in range(len(self.names))]

    def _new_agent_of(self, rank: int, name: str) -> Agent:
        """Returns a new agent that has joined the group as worker `name`, and was started.

        Args:
            rank: The rank of the worker; ignored in an open group.
            name: Its name.

        Raises:
            RpcError: The agent could not join, for example because its name is taken (`RendezvousError`).
        """
        store = self._store.another_end()
        rendezvous = Rendezvous(
            store, -1 if self._is_open else rank, None if self._is_open else len(self.names), "", self._run
        )
        try:
            make_agent = FaultyAgent if isinstance(self._worker_options, FaultyRpcBackendOptions) else Agent
            transport = self._new_transport()
            transports = {transport.scheme: transport}
            agent = make_agent(name, rendezvous, self._worker_options, transports, self._credentials)
            agent.start()
        except BaseException:
            store.close()
            raise
        return agent

    def _new_transport(self) -> Transport:
        """Returns a new transport of the kind that connects the workers of this group: memory, Unix sockets or TCP."""
        if self._transport == "memory":
            return MemoryTransport(self.network)
        if self._transport == "tls":
            return TcpTransport(self._credentials.encryption, even_on_loopback=True)
        return new_transport(self._transport, None)

    def join(self, name: str) -> Group:
        """Starts another worker in an open group, and returns the group as that worker sees it.

        A `with` block of the returned group acts for that worker. Leaving the block does not shut the worker down;
        `leave` and `shutdown` do.

        Args:
            name: The name of the new worker, a text. Only whether it is taken is checked.

        Raises:
            UsageError: The group is fixed.
            RendezvousError: The worker could not join; for example its name was still taken after the `init_timeout` of
                the options, by default 60 s.
        """
        if not self._is_open:
            raise UsageError(f"worker {name!r} cannot join: this group is fixed; make it with is_open=True")
        agent = self._new_agent_of(-1, name)
        self.names = (*self.names, name)
        self._agents.append(agent)
        current.add(agent, self)
        return Group.of(agent)

    def leave(self, which: int | str, graceful: bool = False, timeout: float = 10.0) -> None:
        """Shuts down one worker, and removes it from this object.

        Args:
            which: The position of the worker in `names`, or its name.
            graceful: Whether the worker waits first: in an open group until its own work is done; in a fixed group
                until all workers leave and the work of all is done.
            timeout: How many seconds it waits at most; 0 means no limit. Ignored if `graceful` is False.

        Raises:
            UsageError: There is no such worker.
            ShutdownError: The graceful shutdown failed or timed out. The worker has left all the same.
        """
        agent = self.agents[which]
        place = self._agents.index(agent)
        self._agents.remove(agent)
        self.names = self.names[:place] + self.names[place + 1 :]
        self._agent = next(iter(self._agents), None)
        current.remove(agent)
        agent.shutdown(graceful, timeout)

    def remote(
        self,
        which: int | str,
        to: To,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RRef[T]:
        """Makes worker `which` call `farcall.remote`: worker `to` runs the function and keeps the result.

        Args:
            which: The calling worker: its position in `names`, or its name.
            to: The worker that runs the function: its name, rank or `WorkerInfo`.
            func: The function.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.

        Returns:
            A reference to the result, without waiting for it. It belongs to `which`: using it makes calls of that
            worker. If the function raises, using the reference raises the same error.

        Raises:
            UsageError: There is no worker `which`, `func` cannot be called, `args` is neither a tuple nor a list, or an
                argument cannot be pickled (`SerializationError`).
            UnknownWorkerError: There is no worker `to`.
            WorkerLostError: Worker `to` has left or cannot be reached.
        """
        return RRef.of(self.agents[which].remote(to, func, args, kwargs))

    def rref(self, which: int | str, value: T) -> RRef[T]:
        """Returns a reference to a value that worker `which` owns. The value is not copied.

        Args:
            which: The position of the worker in `names`, or its name.
            value: The value; anything.

        Raises:
            UsageError: There is no such worker.
        """
        return RRef.of(self.agents[which].reference_store.own(value))

    def references(self, which: int | str) -> Inventory:
        """Returns the references that a worker owns, and those that it holds of other workers.

        The two tuples of the result, `owned` and `held`, may be empty.

        Args:
            which: The position of the worker in `names`, or its name.

        Raises:
            UsageError: There is no such worker.
        """
        return self.agents[which].reference_store.inventory()

    def __getitem__(self, which: int | str) -> Group:
        """Returns the group as one worker sees it: calls through it are calls of that worker.

        Args:
            which: The position of the worker in `names`, or its name.

        Raises:
            UsageError: There is no such worker.
        """
        return Group.of(self.agents[which])

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return _group_of_this_process, (self._number,)

    def shutdown(self, graceful: bool = True, timeout: float | None = 10.0) -> None:
        """Shuts down all workers at the same time.

        With `graceful=False`, does nothing for those that are shut down already.

        Args:
            graceful: Whether they wait first: in a fixed group until the work of all workers is done, in an open group
                each until its own work is done. In a fixed group, a second graceful shutdown raises `ShutdownError`.
            timeout: How many seconds each waits at most; 0 or None means no limit. Ignored if `graceful` is False.

        Raises:
            ShutdownError: A graceful shutdown failed or timed out; the first error if several did. All workers are shut
                down all the same.
        """
        failures: list[BaseException] = []

        def shut_down(agent: Agent) -> None:
            try:
                agent.shutdown(graceful, timeout or 0.0)
            except BaseException as error:
                failures.append(error)
            finally:
                current.remove(agent)

        _in_threads([(shut_down, (agent,)) for agent in self._agents])
        if failures:
            raise failures[0]

    def _join(self) -> None:
        """Does nothing: the workers run already. Called when the `with` block is entered."""

    def _leave(self, graceful: bool) -> None:
        """Shuts down all workers without waiting for their work. Called when the `with` block is left.

        `graceful` is ignored.
        """
        self.shutdown(graceful=False)


def _in_threads(calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    """Runs all calls at the same time, each in a thread of its own, and waits until all have ended.

    Args:
        calls: Each is a function with a tuple of its arguments. The functions must not raise. May be empty.
    """
    threads = [threading.Thread(target=function, args=args, daemon=True) for function, args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _group_of_this_process(number: int) -> LocalGroup:
    """Returns the `LocalGroup` of this process whose number is `number`. Called when a `LocalGroup` is unpickled.

    Groups are numbered from 1 in each process. Raises `UsageError` if this process has no group with that number, or
    the group does not exist any more.
    """
    group = _groups.get(number)
    if group is None:
        raise UsageError("a LocalGroup was sent to another process, or is gone; it can be used only where it lives")
    return group

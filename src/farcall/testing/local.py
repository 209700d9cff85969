"""A whole group of workers in one process: agents over a memory network, for tests that need no other process.

    with LocalGroup(3) as group:
        group[0].call("worker1", max, (1, 2), None, timeout=5).wait()

A function that a worker runs and that wants to call on needs that worker's agent. Hand it the group as an argument: a
group is not copied when it is sent, it arrives as itself, and `group["worker1"]` is the agent.

References are made by the group for one of its workers, and used as always; whoever gets one in a call holds one of its
own worker:

    rref = group.remote(0, "worker1", list, ((3, 1, 2),))
    rref.to_here()

An open group begins with so many workers, and others come and go:

    with LocalGroup(1, is_open=True) as group:
        group.join("worker1").call("worker0", max, (1, 2), None, timeout=5).wait()
        group.leave("worker1")

Not here: processes, signals, sockets of a network, the functions of `farcall` itself (they hold one agent for a
process). All agents share the interpreter, so this is for right and wrong, not for fast and slow.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from farcall.agent import Agent, Inventory
from farcall.backends.interface import To
from farcall.errors import UsageError
from farcall.options import RpcBackendOptions
from farcall.rendezvous import Rendezvous
from farcall.rref import RRef
from farcall.security import Credentials, Secret, limits_of
from farcall.testing.faulty import FaultyAgent
from farcall.testing.faulty_options import FaultyRpcBackendOptions
from farcall.testing.memory_store import MemoryStore
from farcall.transports.memory import MemoryNetwork, MemoryTransport

T = TypeVar("T")

_groups: Final[weakref.WeakValueDictionary[int, LocalGroup]] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count(1)


class LocalGroup:
    """A group of agents, named `worker0`, `worker1` ... unless `names` are given, in the order of their ranks.

    In an open group (`is_open`) they have no ranks, and are in the order in which they came. `options` go for all; what
    they say of rendezvous and transports is not used. With those of the faulty agent, all are faulty agents. Raises
    `UsageError` for what is no size, options or names, and what an agent raises that cannot start; then none is left
    running.
    """

    def __init__(
        self,
        size: int,
        options: RpcBackendOptions | None = None,
        *,
        names: Sequence[str] | None = None,
        is_open: bool = False,
    ) -> None:
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
        self.network = MemoryNetwork()
        """Where the agents listen; a test may connect to them by itself."""
        self._number = next(_numbers)
        self._options = options or RpcBackendOptions()
        self._is_open = is_open
        self._store = MemoryStore()
        self._run = uuid.uuid4().hex
        # A secret of their own: the file of whoever runs the tests is neither needed nor made.
        self._credentials = Credentials(Secret(secrets.token_hex(32)), limits=limits_of(self._options))
        self._agents: list[Agent] = self._start()
        _groups[self._number] = self

    def _start(self) -> list[Agent]:
        started: dict[int, Agent] = {}
        failures: list[BaseException] = []

        def start(rank: int) -> None:
            try:
                started[rank] = self._new_agent(rank, self.names[rank])
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

    def _new_agent(self, rank: int, name: str) -> Agent:
        store = self._store.another_end()
        meeting = Rendezvous(
            store, -1 if self._is_open else rank, None if self._is_open else len(self.names), "", self._run
        )
        try:
            make_agent = FaultyAgent if isinstance(self._options, FaultyRpcBackendOptions) else Agent
            transports = {"memory": MemoryTransport(self.network)}
            agent = make_agent(name, meeting, self._options, transports, self._credentials)
            agent.start()
        except BaseException:
            store.close()
            raise
        return agent

    def join(self, name: str) -> Agent:
        """Another worker comes into an open group. Raises `UsageError` if it is fixed, `RendezvousError`."""
        if not self._is_open:
            raise UsageError(f"worker {name!r} cannot join: this group is fixed; make it with is_open=True")
        agent = self._new_agent(-1, name)
        self.names = (*self.names, name)
        self._agents.append(agent)
        return agent

    def leave(self, which: int | str, graceful: bool = False, timeout: float = 10.0) -> None:
        """One worker goes, and is not found here any more. Raises `UsageError` if there is none, `ShutdownError`."""
        agent = self[which]
        place = self._agents.index(agent)
        self._agents.remove(agent)
        self.names = self.names[:place] + self.names[place + 1 :]
        agent.shutdown(graceful, timeout)

    def remote(
        self,
        which: int | str,
        to: To,
        func: Callable[..., T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RRef[T]:
        """What `farcall.remote` gives where that worker calls it: `to` runs the function and keeps the result.

        The reference is that worker's: what is done with it, that worker does. Raises as `farcall.remote`, and
        `UsageError` if there is no such worker here.
        """
        return RRef.of(self[which].remote(to, func, args, kwargs))

    def rref(self, which: int | str, value: T) -> RRef[T]:
        """What `farcall.RRef(value)` is where that worker makes it. Raises `UsageError` if there is no such worker."""
        return RRef.of(self[which].book.own(value))

    def references(self, which: int | str) -> Inventory:
        """What `farcall.references()` gives at that worker. Raises `UsageError` if there is no such worker."""
        return self[which].book.inventory()

    def __getitem__(self, which: int | str) -> Agent:
        """The agent of that rank or name. Raises `UsageError` if there is none."""
        try:
            return self._agents[which if isinstance(which, int) else self.names.index(which)]
        except (IndexError, ValueError):
            raise UsageError(f"there is no worker {which!r} in this group; there are {self.names!r}") from None

    def __len__(self) -> int:
        return len(self._agents)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents)

    def __reduce__(self) -> tuple[Any, ...]:
        return _group_of_this_process, (self._number,)

    def shutdown(self, graceful: bool = True, timeout: float = 10.0) -> None:
        """Takes all down at once, each in a thread of its own. Raises the first of their `ShutdownError`s."""
        failures: list[BaseException] = []

        def shut_down(agent: Agent) -> None:
            try:
                agent.shutdown(graceful, timeout)
            except BaseException as error:
                failures.append(error)

        _in_threads([(shut_down, (agent,)) for agent in self._agents])
        if failures:
            raise failures[0]

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(graceful=False)


def _in_threads(calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    threads = [threading.Thread(target=function, args=args, daemon=True) for function, args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _group_of_this_process(number: int) -> LocalGroup:
    group = _groups.get(number)
    if group is None:
        raise UsageError("a LocalGroup was sent to another process, or is gone; it can be used only where it lives")
    return group

"""A whole group of workers in one process: agents over a memory network, for tests that need no other process.

    with LocalGroup(3) as group:
        group[0].call("worker1", max, (1, 2), None, timeout=5).wait()

A function that a worker runs and that wants to call on needs that worker's agent. Hand it the group as an argument: a
group is not copied when it is sent, it arrives as itself, and `group["worker1"]` is the agent.

Not here: processes, signals, sockets of a network, the functions of `farcall` itself (they hold one agent for a
process). All agents share the interpreter, so this is for right and wrong, not for fast and slow.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

from farcall.agent import Agent
from farcall.errors import UsageError
from farcall.options import RpcBackendOptions
from farcall.rendezvous import Rendezvous
from farcall.security import Credentials, Secret, limits_of
from farcall.testing.memory_store import MemoryStore
from farcall.transports.memory import MemoryNetwork, MemoryTransport

_groups: Final[weakref.WeakValueDictionary[int, LocalGroup]] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count(1)


class LocalGroup:
    """A group of agents, named `worker0`, `worker1` ... unless `names` are given, in the order of their ranks.

    `options` go for all; what they say of rendezvous and transports is not used. Raises what an agent raises that
    cannot start; then none is left running.
    """

    def __init__(
        self, size: int, options: RpcBackendOptions | None = None, *, names: Sequence[str] | None = None
    ) -> None:
        self.names = tuple(names) if names is not None else tuple(f"worker{rank}" for rank in range(size))
        if size < 1 or len(self.names) != size:
            raise UsageError(f"a group of {size} workers cannot have the names {self.names!r}: give one for each")
        self.network = MemoryNetwork()
        """Where the agents listen; a test may connect to them by itself."""
        self._number = next(_numbers)
        self._agents: list[Agent] = self._start(options or RpcBackendOptions())
        _groups[self._number] = self

    def _start(self, options: RpcBackendOptions) -> list[Agent]:
        group = uuid.uuid4().hex
        store = MemoryStore()
        # A secret of their own: the file of whoever runs the tests is neither needed nor made.
        credentials = Credentials(Secret(secrets.token_hex(32)), limits=limits_of(options))
        started: dict[int, Agent] = {}
        failures: list[BaseException] = []

        def start(rank: int) -> None:
            meeting = Rendezvous(store.another_end(), rank, len(self.names), "", group)
            try:
                transports = {"memory": MemoryTransport(self.network)}
                agent = Agent(self.names[rank], meeting, options, transports, credentials)
                agent.start()
                started[rank] = agent
            except BaseException as error:
                failures.append(error)
                meeting.store.close()

        _in_threads([(start, (rank,)) for rank in range(len(self.names))])
        if failures:
            for agent in started.values():
                agent.shutdown(graceful=False, timeout=0)
            raise failures[0]
        return [started[rank] for rank in range(len(self.names))]

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

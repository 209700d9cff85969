"""What the embedded store knows and decides: keys and values, who is here, who waits for what.

Not a server: connections are numbers, the clock is handed in, and replies are left in a list that `take_replies`
empties. So all of it is tested without a socket.

Rules
- A rank is here once, and so is a name. A second one is refused, and the refusal names both. Two ranks with one name
  can never become a whole group: all who collect are told.
- A worker takes part from its first request on. If its connection ends after that without a good-bye it is *lost*:
  every `Collect` that is not complete fails, at once and later, until a worker of that rank comes (back). Before its
  first request it may vanish without harm: it had given up on our answer, and is about to try again.
- Once all ranks have been here, a rank that said good-bye does not come back to this store: what knocks is its next
  run, too early. It gets no answer (`introduce` gives None) and tries again until the next store is there.
- In an open group (no world size) none of this holds: whoever belongs to it is let in, and who comes, goes or vanishes
  breaks nothing. Who is alive is the business of the workers themselves.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from farcall.protocol.handshake import Hello, Welcome
from farcall.rendezvous.greeting import StoreRefused
from farcall.rendezvous.store_messages import (
    Add,
    Collect,
    Delete,
    Done,
    Entries,
    Failed,
    Get,
    GoodBye,
    Number,
    Read,
    Reply,
    Request,
    Set,
    SetNew,
    TimedOut,
    Value,
)

OPEN = "open"
"""What the id of an open group ends with."""

_LARGEST = 2**63 - 1


@dataclass
class _Member:
    name: str
    rank: int
    takes_part: bool = False

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.rank})"


@dataclass(eq=False)
class _Wait:
    connection: int
    request: Get | Collect
    settled: bool = False


class StoreTable:
    """The state of one store, which begins with `values`. Not thread-safe: one thread drives it."""

    def __init__(
        self, group: str, world_size: int | None, host_name: str, values: Mapping[str, bytes] | None = None
    ) -> None:
        self._group = group
        self._world_size = world_size
        self._host_name = host_name
        self._values: dict[str, bytes] = dict(values or {})
        self._members: dict[int, _Member] = {}  # by connection
        self._seen: set[int] = set()
        self._departed: set[int] = set()
        self._broken: dict[int, str] = {}  # rank: why no collect can succeed without it
        self._gets: dict[str, list[_Wait]] = {}
        self._collects: dict[str, list[_Wait]] = {}
        self._deadlines: list[tuple[float, int, _Wait]] = []
        self._order = itertools.count()
        self._replies: list[tuple[int, Reply]] = []

    @property
    def members(self) -> int:
        """How many workers are connected now."""
        return len(self._members)

    def take_replies(self) -> list[tuple[int, Reply]]:
        """What must be sent to which connection; it is not given twice."""
        replies, self._replies = self._replies, []
        return replies

    def introduce(self, connection: int, hello: Hello) -> Welcome | StoreRefused | None:
        """Lets a worker in, or not; None means to close the connection without a word."""
        if hello.group != self._group:
            # A group's id ends with the number of its workers, or says that it is open: see `hosting`.
            their_place, _, their_size = hello.group.rpartition(", ")
            place, _, size = self._group.rpartition(", ")
            same_place = place == their_place != ""
            open_and_fixed = same_place and OPEN in (size, their_size)
            advice = "; give all workers the same world_size" if same_place else ""
            return StoreRefused(
                f"this store serves the group {self._group!r}, not {hello.group!r}{advice}"
                + (", or none of them" if open_and_fixed else ""),
                other_group=True,
                open_and_fixed=open_and_fixed,
            )
        if self._world_size is None:
            self._members[connection] = _Member(hello.name, hello.rank)
            return Welcome(self._host_name, -1)
        if not 0 <= hello.rank < self._world_size:
            return StoreRefused(
                f"this group has {self._world_size} workers; there is no rank {hello.rank} in it", final=True
            )
        if hello.rank in self._departed and len(self._seen) == self._world_size:
            return None
        for member in self._members.values():
            if member.rank == hello.rank:
                return StoreRefused(f"rank {hello.rank} is taken: {member} is here, and {hello.name!r} wants it too")
        for member in self._members.values():
            if member.name == hello.name:
                self._break(
                    hello.rank,
                    f"the worker name {hello.name!r} is not unique: rank {member.rank} and rank {hello.rank} have it; "
                    "give each worker a name of its own",
                )
                return StoreRefused(self._broken[hello.rank], final=True)
        self._members[connection] = _Member(hello.name, hello.rank)
        self._seen.add(hello.rank)
        self._departed.discard(hello.rank)
        self._broken.pop(hello.rank, None)
        return Welcome(self._host_name, 0)

    def handle(self, connection: int, request: Request, now: float) -> None:
        """A request of a worker that was let in."""
        self._members[connection].takes_part = True
        match request:
            case Set():
                self._put(request.key, request.value)
                self._reply(connection, Done(request.id))
            case SetNew():
                if request.key not in self._values:
                    self._put(request.key, request.value)
                self._reply(connection, Value(request.id, self._values[request.key]))
            case Add():
                self._reply(connection, self._add(request))
            case Delete():
                there = self._values.get(request.key)
                gone = there is not None and request.expected in (None, there)
                if gone:
                    del self._values[request.key]
                self._reply(connection, Number(request.id, int(gone)))
            case Read():
                self._reply(connection, Entries(request.id, self._under(request.prefix)))
            case Get():
                if request.key in self._values:
                    self._reply(connection, Value(request.id, self._values[request.key]))
                else:
                    self._wait(self._gets.setdefault(request.key, []), _Wait(connection, request), now)
            case Collect():
                entries = self._under(request.prefix)
                if len(entries) >= request.count:
                    self._reply(connection, Entries(request.id, entries))
                elif self._broken:
                    self._reply(connection, Failed(request.id, self._why_broken()))
                else:
                    self._wait(self._collects.setdefault(request.prefix, []), _Wait(connection, request), now)
            case GoodBye(early):
                member = self._members.pop(connection)
                self._departed.add(member.rank)
                self._forget_waits_of(connection)
                if early:
                    self._break(member.rank, f"worker {member} has left without waiting for the others")

    def end(self, connection: int) -> None:
        """The connection is gone. Nothing happens if it was never let in, or had said good-bye."""
        member = self._members.pop(connection, None)
        if member is None:
            return
        self._forget_waits_of(connection)
        if member.takes_part:
            self._break(
                member.rank, f"worker {member} is gone without a good-bye; look at its own output for the reason"
            )

    def expire(self, now: float) -> None:
        """Ends the waits whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            wait = heapq.heappop(self._deadlines)[2]
            if wait.settled:
                continue
            present: tuple[str, ...] = ()
            if isinstance(wait.request, Collect):
                present = tuple(sorted(self._under(wait.request.prefix)))
            self._settle(wait, TimedOut(wait.request.id, present))

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        while self._deadlines and self._deadlines[0][2].settled:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail_waits(self, reason: str) -> None:
        """Ends every wait: the store is about to be closed."""
        for waits in [*self._gets.values(), *self._collects.values()]:
            for wait in list(waits):
                self._settle(wait, Failed(wait.request.id, reason))

    def _put(self, key: str, value: bytes) -> None:
        appeared = key not in self._values
        self._values[key] = value
        if not appeared:
            return
        for wait in list(self._gets.get(key, ())):
            self._settle(wait, Value(wait.request.id, value))
        for prefix in [prefix for prefix in self._collects if key.startswith(prefix)]:
            entries = self._under(prefix)
            for wait in list(self._collects[prefix]):
                if isinstance(wait.request, Collect) and len(entries) >= wait.request.count:
                    self._settle(wait, Entries(wait.request.id, entries))

    def _add(self, request: Add) -> Reply:
        try:
            total = int(self._values.get(request.key, b"0")) + request.amount
        except ValueError:
            return Failed(request.id, f"the key {request.key!r} holds no counter; nothing was added")
        if abs(total) > _LARGEST:
            return Failed(request.id, f"the counter {request.key!r} would need more than 64 bits; nothing was added")
        self._put(request.key, b"%d" % total)
        return Number(request.id, total)

    def _under(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def _break(self, rank: int, why: str) -> None:
        if self._world_size is None:
            return
        self._broken[rank] = why
        reason = self._why_broken()
        for waits in list(self._collects.values()):
            for wait in list(waits):
                self._settle(wait, Failed(wait.request.id, reason))

    def _why_broken(self) -> str:
        return "; ".join(self._broken.values())

    def _reply(self, connection: int, reply: Reply) -> None:
        self._replies.append((connection, reply))

    def _wait(self, waits: list[_Wait], wait: _Wait, now: float) -> None:
        waits.append(wait)
        heapq.heappush(self._deadlines, (now + max(0.0, wait.request.timeout), next(self._order), wait))

    def _settle(self, wait: _Wait, reply: Reply) -> None:
        self._remove(wait)
        self._reply(wait.connection, reply)

    def _forget_waits_of(self, connection: int) -> None:
        for waits in [*self._gets.values(), *self._collects.values()]:
            for wait in [wait for wait in waits if wait.connection == connection]:
                self._remove(wait)

    def _remove(self, wait: _Wait) -> None:
        wait.settled = True
        table, key = (
            (self._collects, wait.request.prefix)
            if isinstance(wait.request, Collect)
            else (self._gets, wait.request.key)
        )
        table[key].remove(wait)
        if not table[key]:
            del table[key]

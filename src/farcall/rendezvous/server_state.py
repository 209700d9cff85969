"""The data and the decisions of the store's server: keys and values, which workers are connected, who waits for what.

Pure: connections are numbers, the time is an argument, and replies go to a list that `take_replies` empties. So all of
it is tested without sockets. `server` connects it to sockets.

Rules
- Each rank and each name is connected at most once. A second worker is refused, and the refusal names both. Two ranks
  with one name can never form a complete group, so every waiting `Collect` fails too.
- A worker counts as taking part from its first request on. If its connection ends after that without a `GoodBye`, the
  worker is *lost*: every incomplete `Collect` fails, now and later, until a worker of that rank connects again. Before
  its first request a worker may disconnect without consequences: it gave up waiting for the reply and will try again.
- Once every rank has been connected, a rank that said good-bye does not come back to this store. A worker with that
  rank belongs to the next run of the program and is too early. `introduce` returns None for it, the connection is
  closed without an answer, and the worker retries until the store of the next run is there.
- In an open group (`world_size` is None) none of this applies. Any worker that knows the secret and the group is let
  in, and workers that disconnect break nothing. The members find out among themselves who is alive.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from farcall.protocol.handshake import Hello, Welcome
from farcall.rendezvous import messages
from farcall.rendezvous.handshake import StoreRefused

OPEN_GROUP_SUFFIX = "open"
"""The last part of the id of an open group, where a fixed group has its number of workers."""

MAX_COUNTER = 2**63 - 1
"""The largest absolute value of a counter: 64 bits."""


@dataclass
class _Member:
    """A worker that is connected to the store.

    `name` and `rank` are those of the worker; the rank is -1 if it has none. `takes_part` is True after its first
    request.
    """

    name: str
    rank: int
    takes_part: bool = False

    def __str__(self) -> str:
        """Returns the worker's name and rank, for messages."""
        return f"{self.name!r} (rank {self.rank})"


@dataclass(eq=False)
class _Wait:
    """A `Get` or `Collect` that cannot be answered yet, because keys are missing.

    `connection` is the number of the connection that sent it. `request` is the request. `settled` is True once it was
    answered or given up.
    """

    connection: int
    request: messages.Get | messages.Collect
    settled: bool = False


class StoreState:
    """The keys, workers and waiting requests of one store, without sockets. Not thread-safe: one thread drives it.

    The arguments are the id of the group, its size (None if it is open), the name of the worker that hosts the store,
    and the keys that exist from the start (None for none). They are not checked.

    Call `introduce` for each connection whose worker has proved the secret, `handle` for each of its requests,
    `disconnect` when it ends, and `expire` when time has passed. Then send the replies that `take_replies` returns.
    """

    def __init__(
        self, group: str, world_size: int | None, host_name: str, values: Mapping[str, bytes] | None = None
    ) -> None:
        """Creates the state of a store without connections.

        Args:
            group: The id of the group. Only workers with this id are let in.
            world_size: The number of workers; None for an open group. Not checked.
            host_name: The name of the hosting worker, which every welcomed worker is told.
            values: The keys that exist from the start, with their values, which are copied; None for none.
        """
        self._group = group
        self._world_size = world_size
        self._host_name = host_name
        self._values: dict[str, bytes] = dict(values or {})
        self._members: dict[int, _Member] = {}  # by connection
        self._seen: set[int] = set()  # every rank that was ever let in
        self._said_good_bye: set[int] = set()
        self._collect_failures: dict[int, str] = {}  # rank: why no collect can succeed without it
        self._gets: dict[str, list[_Wait]] = {}
        self._collects: dict[str, list[_Wait]] = {}
        self._deadlines: list[tuple[float, int, _Wait]] = []
        self._order = itertools.count()
        self._replies: list[tuple[int, messages.Reply]] = []

    @property
    def members(self) -> int:
        """How many workers are connected now; 0 if there are none."""
        return len(self._members)

    def take_replies(self) -> list[tuple[int, messages.Reply]]:
        """Returns the replies to send, each with the number of its connection, in order, and forgets them.

        Returns an empty list if there are none.
        """
        replies, self._replies = self._replies, []
        return replies

    def introduce(self, connection: int, hello: Hello) -> Welcome | StoreRefused | None:
        """Decides whether a worker that has proved the secret may connect.

        In an open group every worker of the group may. In a fixed group its rank must exist, and neither its rank nor
        its name may be that of a connected worker.

        Args:
            connection: The number of the connection, chosen by the caller; the other methods use it. Not checked.
            hello: Who the worker is and which group it looks for.

        Returns:
            `Welcome` if the worker is let in; `StoreRefused` with the reason if not; None if the connection is to be
            closed without an answer, because the worker belongs to the next run: its rank was here and has left.
        """
        if hello.group != self._group:
            # The id of a group ends with its number of workers or `OPEN_GROUP_SUFFIX`: see `hosted_store._group_id`.
            their_place, _, their_size = hello.group.rpartition(", ")
            place, _, size = self._group.rpartition(", ")
            same_place = place == their_place != ""
            open_and_fixed = same_place and OPEN_GROUP_SUFFIX in (size, their_size)
            advice = "; start all workers with the same world_size" if same_place else ""
            return StoreRefused(
                f"this store serves the group {self._group!r}, not {hello.group!r}{advice}"
                + (", or all without one" if open_and_fixed else ""),
                other_group=True,
                other_size=same_place,
                open_and_fixed=open_and_fixed,
            )
        if self._world_size is None:
            self._members[connection] = _Member(hello.name, hello.rank)
            return Welcome(self._host_name, -1)
        if not 0 <= hello.rank < self._world_size:
            return StoreRefused(
                f"this group has {self._world_size} workers; rank {hello.rank} does not exist in it", final=True
            )
        if hello.rank in self._said_good_bye and len(self._seen) == self._world_size:
            return None
        for member in self._members.values():
            if member.rank == hello.rank:
                return StoreRefused(
                    f"rank {hello.rank} is taken by worker {member}; start {hello.name!r} with a rank of its own"
                )
        for member in self._members.values():
            if member.name == hello.name:
                self._fail_collects(
                    hello.rank,
                    f"the worker name {hello.name!r} is not unique: rank {member.rank} and rank {hello.rank} have it; "
                    "give each worker a name of its own",
                )
                return StoreRefused(self._collect_failures[hello.rank], final=True)
        self._members[connection] = _Member(hello.name, hello.rank)
        self._seen.add(hello.rank)
        self._said_good_bye.discard(hello.rank)
        self._collect_failures.pop(hello.rank, None)
        return Welcome(self._host_name, 0)

    def handle(self, connection: int, request: messages.Request, now: float) -> None:
        """Carries out a request of a connected worker.

        `take_replies` returns the reply, now or when the wait of a `Get` or `Collect` is over. A `GoodBye` has no
        reply.

        Args:
            connection: The number of a connection that `introduce` has welcomed. Any other raises `KeyError`.
            request: The request.
            now: The current time in seconds, of the same clock as in `expire`.
        """
        self._members[connection].takes_part = True
        match request:
            case messages.Set():
                self._put(request.key, request.value)
                self._reply(connection, messages.Done(request.id))
            case messages.SetNew():
                if request.key not in self._values:
                    self._put(request.key, request.value)
                self._reply(connection, messages.Value(request.id, self._values[request.key]))
            case messages.Add():
                self._reply(connection, self._add(request))
            case messages.Delete():
                there = self._values.get(request.key)
                gone = there is not None and request.expected in (None, there)
                if gone:
                    del self._values[request.key]
                self._reply(connection, messages.Number(request.id, int(gone)))
            case messages.Read():
                self._reply(connection, messages.Entries(request.id, self._entries_with_prefix(request.prefix)))
            case messages.Get():
                if request.key in self._values:
                    self._reply(connection, messages.Value(request.id, self._values[request.key]))
                else:
                    self._wait(self._gets.setdefault(request.key, []), _Wait(connection, request), now)
            case messages.Collect():
                entries = self._entries_with_prefix(request.prefix)
                if len(entries) >= request.count:
                    self._reply(connection, messages.Entries(request.id, entries))
                elif self._collect_failures:
                    self._reply(connection, messages.Failed(request.id, self._collect_failure_text()))
                else:
                    self._wait(self._collects.setdefault(request.prefix, []), _Wait(connection, request), now)
            case messages.GoodBye(early):
                member = self._members.pop(connection)
                self._said_good_bye.add(member.rank)
                self._forget_waits_of(connection)
                if early:
                    self._fail_collects(member.rank, f"worker {member} has left without waiting for the others")

    def disconnect(self, connection: int) -> None:
        """Removes a connection that has ended.

        A worker of a fixed group that has sent a request, but no good-bye, counts as lost: every `Collect` that waits
        for keys fails. Does nothing for a connection that was never let in or has said good-bye.
        """
        member = self._members.pop(connection, None)
        if member is None:
            return
        self._forget_waits_of(connection)
        if member.takes_part:
            self._fail_collects(
                member.rank,
                f"worker {member} disconnected without leaving the group; look at its own output for the reason",
            )

    def expire(self, now: float) -> None:
        """Answers every waiting request whose deadline is at or before `now` with `TimedOut`.

        Does nothing if there are none. `now` is the current time in seconds, of the same clock as in `handle`.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            wait = heapq.heappop(self._deadlines)[2]
            if wait.settled:
                continue
            present: tuple[str, ...] = ()
            if isinstance(wait.request, messages.Collect):
                present = tuple(sorted(self._entries_with_prefix(wait.request.prefix)))
            self._settle(wait, messages.TimedOut(wait.request.id, present))

    def next_deadline(self) -> float | None:
        """Returns the time at which `expire` has something to do next; None if no request waits.

        It is in seconds of the clock that the callers of `handle` use.
        """
        while self._deadlines and self._deadlines[0][2].settled:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail_waits(self, reason: str) -> None:
        """Answers every waiting `Get` and `Collect` with `Failed(reason)`; does nothing if none waits.

        Called when the store is about to close.
        """
        for waits in [*self._gets.values(), *self._collects.values()]:
            for wait in list(waits):
                self._settle(wait, messages.Failed(wait.request.id, reason))

    def _put(self, key: str, value: bytes) -> None:
        """Sets a value, and replaces an earlier one.

        If the key is new, answers the waiting requests that it completes.
        """
        appeared = key not in self._values
        self._values[key] = value
        if not appeared:
            return
        for wait in list(self._gets.get(key, ())):
            self._settle(wait, messages.Value(wait.request.id, value))
        for prefix in [prefix for prefix in self._collects if key.startswith(prefix)]:
            entries = self._entries_with_prefix(prefix)
            for wait in list(self._collects[prefix]):
                if isinstance(wait.request, messages.Collect) and len(entries) >= wait.request.count:
                    self._settle(wait, messages.Entries(wait.request.id, entries))

    def _add(self, request: messages.Add) -> messages.Reply:
        """Adds to a counter and returns `Number` with the sum. A key that does not exist counts as 0.

        Returns `Failed`, and adds nothing, if the key holds no number or the sum would exceed 64 bits.
        """
        try:
            total = int(self._values.get(request.key, b"0")) + request.amount
        except ValueError:
            return messages.Failed(
                request.id, f"the value of the key {request.key!r} is not a number; nothing was added"
            )
        if abs(total) > MAX_COUNTER:
            return messages.Failed(request.id, f"the counter {request.key!r} would exceed 64 bits; nothing was added")
        self._put(request.key, b"%d" % total)
        return messages.Number(request.id, total)

    def _entries_with_prefix(self, prefix: str) -> dict[str, bytes]:
        """Returns all keys that start with the prefix, with their values; empty if there are none."""
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def _fail_collects(self, rank: int, why: str) -> None:
        """Records that the worker of rank `rank` is missing, and fails every waiting `Collect`.

        `why` is the reason, which the failures quote. Until a worker of that rank connects, each later `Collect` that
        would have to wait fails, too. Does nothing in an open group.
        """
        if self._world_size is None:
            return
        self._collect_failures[rank] = why
        reason = self._collect_failure_text()
        for waits in list(self._collects.values()):
            for wait in list(waits):
                self._settle(wait, messages.Failed(wait.request.id, reason))

    def _collect_failure_text(self) -> str:
        """Returns the reasons why no `Collect` can succeed, as one text; empty if there are none."""
        return "; ".join(self._collect_failures.values())

    def _reply(self, connection: int, reply: messages.Reply) -> None:
        self._replies.append((connection, reply))

    def _wait(self, waits: list[_Wait], wait: _Wait, now: float) -> None:
        """Records a request that has to wait, with its deadline. A timeout of 0 expires at once.

        Args:
            waits: The waiting requests for the same key or prefix; `wait` is appended.
            wait: The request and its connection.
            now: The current time in seconds, from which its timeout counts, of the same clock as in `expire`.
        """
        waits.append(wait)
        heapq.heappush(self._deadlines, (now + max(0.0, wait.request.timeout), next(self._order), wait))

    def _settle(self, wait: _Wait, reply: messages.Reply) -> None:
        """Removes a waiting request that is not answered yet, and queues its reply.

        The request must not have been removed before.
        """
        self._remove(wait)
        self._reply(wait.connection, reply)

    def _forget_waits_of(self, connection: int) -> None:
        """Removes the waiting requests of a connection without answering them. Does nothing if there are none."""
        for waits in [*self._gets.values(), *self._collects.values()]:
            for wait in [wait for wait in waits if wait.connection == connection]:
                self._remove(wait)

    def _remove(self, wait: _Wait) -> None:
        """Removes a waiting request from its list, and marks it as settled. It must not have been removed before.

        It stays in `_deadlines` until its deadline is reached.
        """
        wait.settled = True
        table, key = (
            (self._collects, wait.request.prefix)
            if isinstance(wait.request, messages.Collect)
            else (self._gets, wait.request.key)
        )
        table[key].remove(wait)
        if not table[key]:
            del table[key]

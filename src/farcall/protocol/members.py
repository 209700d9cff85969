"""Who is in the group, as one worker knows it: a view that only grows, so that any two can be merged.

A number is unknown, then *here*, then *gone*; it never goes back, and numbers are never used again. So views merge
without conflict, in any order, however often: what is gone in one of them is gone, what is here in one and not gone in
the other is here. The gone are kept as bare numbers, in ranges: late news of a gone worker must not bring it back.

A name belongs to the member with the highest number: whoever takes a name again makes the older one gone.

Whether somebody left or was lost matters to people, not to the protocol. Views that agree on who is gone agree; a
worker that learns of it from one who has forgotten the reason (after `REMEMBERED` others) takes it for lost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from farcall.protocol.ids import Worker
from farcall.protocol.membership_messages import Compare, Member, News, Wanted
from farcall.protocol.ranges import Range, Ranges, mixed, ranges_of

REMEMBERED: Final = 1024
"""Of so many that left it is known that they did."""

_64_BITS: Final = 2**64 - 1


class Learned(NamedTuple):
    """What was new in some news: to be passed on, and to be told to the program."""

    joined: list[Member]
    left: list[Range]
    lost: list[Range]
    removed: list[tuple[Member, bool]]
    """Those that were here, and whether they said good-bye."""

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.lost)

    def news(self) -> News:
        """The same for others. Of a member that came and is gone already, only that."""
        if not self.removed:
            return News(tuple(self.joined), tuple(self.left), tuple(self.lost))
        removed = {member.number for member, _ in self.removed}
        members = tuple(member for member in self.joined if member.number not in removed)
        return News(members, tuple(self.left), tuple(self.lost))

    def size(self) -> int:
        """How many pieces of news it is."""
        return len(self.joined) + len(self.left) + len(self.lost)


class Members:
    """One worker's view of its group."""

    def __init__(self) -> None:
        self.here: dict[Worker, Member] = {}
        self.gone = Ranges()
        self.names: dict[str, Worker] = {}
        """To whom a name belongs."""
        self._ring: list[int] = []  # places, sorted
        self._here_digest = 0
        self._left: dict[Worker, None] = {}  # oldest first

    @property
    def digest(self) -> int:
        """The same for equal views, else almost surely not."""
        return self._here_digest + self.gone.digest & _64_BITS

    # What is learned

    def is_new(self, news: News) -> bool:
        """Whether there is anything in it that is not known."""
        for member in news.members:
            if member.number not in self.here and member.number not in self.gone:
                return True
        return any(self.gone.missing(first, last) for first, last in news.left + news.lost)

    def learn(self, news: News) -> Learned:
        """Takes what is new of it. Raises `ProtocolError` if it names numbers that cannot be."""
        learned = Learned([], [], [], [])
        for first, last in news.left:
            self._part(first, last, True, learned)
        for first, last in news.lost:
            self._part(first, last, False, learned)
        for member in news.members:
            self._meet(member, learned)
        return learned

    def _meet(self, member: Member, learned: Learned) -> None:
        number = member.number
        if number in self.here or number in self.gone:
            return
        other = self.names.get(member.name)
        if other is not None and other > number:
            self._part(number, number, False, learned)
            return
        if other is not None:
            self._part(other, other, False, learned)
        self.here[number] = member
        self.names[member.name] = number
        self._here_digest = self._here_digest + mixed(number) & _64_BITS
        insort(self._ring, place_of(number))
        learned.joined.append(member)

    def _part(self, first: Worker, last: Worker, left: bool, learned: Learned) -> None:
        for piece in self.gone.missing(first, last):
            self.gone.add(*piece)
            (learned.left if left else learned.lost).append(piece)
            learned.removed.extend((self._remove(number), left) for number in self._here_within(*piece))
            if left:
                self._remember_leavers(*piece)

    def _remove(self, number: Worker) -> Member:
        member = self.here.pop(number)
        if self.names[member.name] == number:
            del self.names[member.name]
        self._here_digest = self._here_digest - mixed(number) & _64_BITS
        del self._ring[bisect_left(self._ring, place_of(number))]
        return member

    def _remember_leavers(self, first: Worker, last: Worker) -> None:
        for number in range(max(first, last - REMEMBERED + 1), last + 1):
            self._left[number] = None
            if len(self._left) > REMEMBERED:
                del self._left[next(iter(self._left))]

    def _here_within(self, first: Worker, last: Worker) -> list[Worker]:
        if last - first < len(self.here):
            return [number for number in range(first, last + 1) if number in self.here]
        return [number for number in self.here if first <= number <= last]

    # Comparing with others

    def summary(self) -> Compare:
        """The view without names and addresses."""
        return Compare(ranges_of(self.here), self.gone.pairs())

    def difference(self, other: Compare) -> tuple[News, Wanted]:
        """What the other lacks, and what this one lacks: empty if nothing."""
        here, gone, known = Ranges(other.here), Ranges(other.gone), Ranges(ranges_of(self.here))
        unknown = [piece for pair in known.pairs() for part in here.missing(*pair) for piece in gone.missing(*part)]
        members = [self.here[number] for piece in unknown for number in self._here_within(*piece)]
        ours = [piece for pair in self.gone.pairs() for piece in gone.missing(*pair)]
        theirs = [piece for pair in gone.pairs() for piece in self.gone.missing(*pair)]
        theirs += [
            piece for pair in here.pairs() for part in self.gone.missing(*pair) for piece in known.missing(*part)
        ]
        return News(tuple(members), self._leavers_among(ours), tuple(ours)), Wanted(tuple(theirs))

    def about(self, ranges: Iterable[Range]) -> News:
        """What is known of these numbers."""
        members: list[Member] = []
        gone: list[Range] = []
        for first, last in ranges:
            members += [self.here[number] for number in self._here_within(first, last)]
            # What is not missing from the gone: the complement of the complement.
            unknown = Ranges(self.gone.missing(first, last))
            gone += unknown.missing(first, last)
        return News(tuple(members), self._leavers_among(gone), tuple(gone))

    def _leavers_among(self, ranges: list[Range]) -> tuple[Range, ...]:
        """Those of the gone that left: who reads the news takes these first, so the rest was lost."""
        if not ranges or not self._left:
            return ()
        among = Ranges(ranges)
        return ranges_of(number for number in self._left if number in among)

    # The ring

    def successors(self, number: Worker, count: int) -> list[Worker]:
        """The next on the ring, at most so many; never the worker itself."""
        start = bisect_right(self._ring, place_of(number))
        return self._from(start, 1, number, count)

    def predecessors(self, number: Worker, count: int) -> list[Worker]:
        """Those of whom it is a successor: the ones before it on the ring."""
        start = bisect_left(self._ring, place_of(number)) - 1
        return self._from(start, -1, number, count)

    def _from(self, start: int, step: int, number: Worker, count: int) -> list[Worker]:
        ring = self._ring
        count = min(count, len(ring) - (number in self.here))
        return [ring[(start + step * i) % len(ring)] & _NUMBER for i in range(count)]

    def sample(self, count: int, pick: Callable[[int], int], without: tuple[Worker, ...]) -> list[Worker]:
        """At most so many others, as chance has it; fewer if it hits the same ones again and again."""
        ring, found = self._ring, list[Worker]()
        if len(ring) <= count + len(without):
            return [place & _NUMBER for place in ring if place & _NUMBER not in without][:count]
        for _ in range(4 * count):
            number = ring[pick(len(ring))] & _NUMBER
            if number not in without and number not in found:
                found.append(number)
                if len(found) == count:
                    break
        return found


_NUMBER: Final = 2**32 - 1


@lru_cache(maxsize=8192)
def place_of(number: Worker) -> int:
    """Where on the ring a worker stands: its number is the lower half.

    The upper half is mixed, so that neighbours, who watch each other, are not those that started together on one host.
    """
    return mixed(number) & ~_NUMBER | number

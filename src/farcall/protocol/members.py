"""The view that one worker has of its group: which workers are members, and which are gone.

The number of a worker is unknown, then *here*, then *gone*. It never goes back, and numbers are never reused. So views
can be merged without conflict, in any order and any number of times: a number that is gone in one view is gone, and a
number that is here in one view and not gone in the other is here. The gone numbers are kept for ever, as ranges, so
that late news of a gone worker does not bring it back.

A name belongs to the member with the highest number. If a new worker takes the name of a member, that member is gone.

Whether a gone worker has left or was lost matters to users, not to the protocol: views that agree on the gone numbers
are equal. A view remembers the last `REMEMBERED` workers that have left. All others that are gone count as lost.
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
"""How many workers that have left are remembered as such."""

_64_BITS: Final = 2**64 - 1


class Learned(NamedTuple):
    """The part of some news that was new to a view of the group. Truthy if anything was new.

    Attributes:
        joined: The members that were not known before.
        left: The numbers of workers that are now known to have left, as pairs of first and last number.
        lost: The numbers of workers that are now known to be lost, as pairs of first and last number.
        removed: The workers in `left` and `lost` that were members until now. Each comes with True if it has left, and
            with False if it was lost.
    """

    joined: list[Member]
    left: list[Range]
    lost: list[Range]
    removed: list[tuple[Member, bool]]

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.lost)

    def news(self) -> News:
        """Returns this as news for other workers; empty news if nothing was learned.

        A worker that is in both `joined` and `removed` is not among the members of the news.
        """
        if not self.removed:
            return News(tuple(self.joined), tuple(self.left), tuple(self.lost))
        removed = {member.number for member, _ in self.removed}
        members = tuple(member for member in self.joined if member.number not in removed)
        return News(members, tuple(self.left), tuple(self.lost))


class Members:
    """One worker's view of its group: which workers are members, and which are gone, by leaving or by loss.

    The members form a ring, in the order of a hash of their numbers. Each worker watches
    some of those that follow it.
    """

    def __init__(self) -> None:
        """Creates the view of a group in which no worker is known."""
        self.here: dict[Worker, Member] = {}
        """The members by number."""
        self.gone = Ranges()
        """The numbers of all workers that have left or were lost."""
        self.names: dict[str, Worker] = {}
        """The numbers of the members by name."""
        self._ring: list[int] = []  # places, sorted
        self._here_digest = 0
        self._left: dict[Worker, None] = {}  # oldest first

    @property
    def digest(self) -> int:
        """A number of 64 bits that is equal for equal views, and almost certainly different for different views."""
        return self._here_digest + self.gone.digest & _64_BITS

    # What is learned

    def is_new(self, news: News) -> bool:
        """Returns whether news says anything new to this view: an unknown member, or that a worker is gone.

        Returns False for empty news.
        """
        for member in news.members:
            if member.number not in self.here and member.number not in self.gone:
                return True
        return any(self.gone.missing(first, last) for first, last in news.left + news.lost)

    def learn(self, news: News) -> Learned:
        """Adds news to this view. News that is known or empty changes nothing.

        If two workers have the same name, the view marks the one with the lower number as lost.

        Returns:
            The part of the news that was new; falsy if nothing was.

        Raises:
            ProtocolError: A range of the news begins below 0, or ends above `LARGEST`. The ranges
                before that one may have been added already.
        """
        learned = Learned([], [], [], [])
        for first, last in news.left:
            self._part(first, last, True, learned)
        for first, last in news.lost:
            self._part(first, last, False, learned)
        for member in news.members:
            self._add(member, learned)
        return learned

    def _add(self, member: Member, learned: Learned) -> None:
        """Adds a member to the view and to `learned`. Does nothing if its number is known, as a member or as gone.

        If another member has the same name, the one with the lower number is marked as lost.
        """
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
        """Marks the workers from `first` to `last` as gone, and removes the members among them.

        They have left if `left` is True, and were lost if it is False. Adds to `learned` what this view did not know.
        Raises `ProtocolError` if `first` is negative or `last` is above `LARGEST`. Does nothing if `first` is above
        `last`.
        """
        for piece in self.gone.missing(first, last):
            self.gone.add(*piece)
            (learned.left if left else learned.lost).append(piece)
            learned.removed.extend((self._remove(number), left) for number in self._here_within(*piece))
            if left:
                self._remember_leavers(*piece)

    def _remove(self, number: Worker) -> Member:
        """Removes a member from the view, and returns it. Raises `KeyError` if there is no member with that number."""
        member = self.here.pop(number)
        if self.names[member.name] == number:
            del self.names[member.name]
        self._here_digest = self._here_digest - mixed(number) & _64_BITS
        del self._ring[bisect_left(self._ring, place_of(number))]
        return member

    def _remember_leavers(self, first: Worker, last: Worker) -> None:
        """Remembers that the workers from `first` to `last` have left.

        At most `REMEMBERED` workers are remembered in all. If there are more, those that were noted first are
        forgotten.
        """
        for number in range(max(first, last - REMEMBERED + 1), last + 1):
            self._left[number] = None
            if len(self._left) > REMEMBERED:
                del self._left[next(iter(self._left))]

    def _here_within(self, first: Worker, last: Worker) -> list[Worker]:
        """Returns the numbers of the members from `first` to `last`; an empty list if there are none."""
        if last - first < len(self.here):
            return [number for number in range(first, last + 1) if number in self.here]
        return [number for number in self.here if first <= number <= last]

    # Comparing with others

    def summary(self) -> Compare:
        """Returns the numbers in this view, without names and addresses, to compare it with another worker's view."""
        return Compare(ranges_of(self.here), self.gone.pairs())

    def difference(self, other: Compare) -> tuple[News, Wanted]:
        """Compares this view with the summary of another one.

        Args:
            other: What `summary` returned for the other view.

        Returns:
            The news that the other view lacks, and a request for the numbers that this view lacks. Both are empty if
            the views are equal.

        Raises:
            ProtocolError: `other` has a range that is not a range of workers' numbers.
        """
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
        """Returns news about some numbers: which are members, and which are gone. Unknown numbers are left out.

        Args:
            ranges: The numbers, as pairs of first and last number, which may overlap; empty news is returned for none.

        Raises:
            ProtocolError: A range is not a range of workers' numbers.
        """
        members: list[Member] = []
        gone: list[Range] = []
        # Each number once: the same range, named thousands of times, must not make an answer of thousands of groups.
        for first, last in Ranges(ranges).pairs():
            members += [self.here[number] for number in self._here_within(first, last)]
            # What is not missing from the gone: the complement of the complement.
            unknown = Ranges(self.gone.missing(first, last))
            gone += unknown.missing(first, last)
        return News(tuple(members), self._leavers_among(gone), tuple(gone))

    def _leavers_among(self, ranges: list[Range]) -> tuple[Range, ...]:
        """Returns the part of `ranges` that is remembered as having left, as ranges; an empty tuple if there is none.

        The callers put this part into `left` of a `News`, and all of `ranges` into `lost`. A worker in both counts as
        having left, because `learn` processes `left` first.
        """
        if not ranges or not self._left:
            return ()
        among = Ranges(ranges)
        return ranges_of(number for number in self._left if number in among)

    # The ring

    def successors(self, number: Worker, count: int) -> list[Worker]:
        """Returns the members that follow a number on the ring, the nearest first, without the number itself.

        Args:
            number: The number of a worker, which need not be a member.
            count: The most members to return. Fewer are returned if there are not as many, and an empty list if there
                are none.
        """
        start = bisect_right(self._ring, place_of(number))
        return self._from(start, 1, number, count)

    def predecessors(self, number: Worker, count: int) -> list[Worker]:
        """Returns the members before a number on the ring, the nearest first, without the number itself.

        Args:
            number: The number of a worker, which need not be a member.
            count: The most members to return. Fewer are returned if there are not as many, and an empty list if there
                are none.
        """
        start = bisect_left(self._ring, place_of(number)) - 1
        return self._from(start, -1, number, count)

    def _from(self, start: int, step: int, number: Worker, count: int) -> list[Worker]:
        """Returns up to `count` members, beginning at an index of the ring.

        Returns an empty list if there are no members, or `number` is the only one.

        Args:
            start: The index. It may be out of range, because the ring is closed.
            step: 1 for forwards, -1 for backwards.
            number: The worker to leave out. If it is a member, it must come last in this order.
            count: The most members to return.
        """
        ring = self._ring
        count = min(count, len(ring) - (number in self.here))
        return [ring[(start + step * i) % len(ring)] & _NUMBER for i in range(count)]

    def sample(self, count: int, pick: Callable[[int], int], without: tuple[Worker, ...]) -> list[Worker]:
        """Returns different members, chosen at random.

        Args:
            count: How many. Fewer are returned if there are not enough, or if `pick` repeats itself too often.
            pick: Returns a random number from 0 to its argument minus one.
            without: Members that are not returned.

        Returns:
            The numbers of the members; an empty list if there are no others.
        """
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
    """Returns the position of a worker on the ring: a hash in the upper 32 bits, and the worker's number in the lower.

    Because of the hash, neighbours on the ring, which watch each other, are usually not workers that were started
    together on one host.
    """
    return mixed(number) & ~_NUMBER | number

"""A set of numbers that needs memory only for its gaps.

It stores the numbers of workers that are gone. A `Watermark` does not suit: a worker that lives for long, or a number
that was assigned and never used, would hold the mark back, and all numbers after it would be stored one by one. The
size of this set is bounded by the number of current members.

A range is a pair of its first and last number. The ranges of a set are sorted, and no two of them touch, so that equal
sets have equal ranges and equal digests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from farcall.errors import ProtocolError

Range: TypeAlias = tuple[int, int]
"""First and last number, both included."""

LARGEST: Final = 2**32 - 1
"""The largest number that a worker can have."""
_64_BITS: Final = 2**64 - 1


@lru_cache(maxsize=8192)
def mixed(number: int) -> int:
    """Returns a 64-bit hash of `number`. Numbers that are close to each other get very different hashes.

    Any integer is allowed. Only its lowest 64 bits count.
    """
    number = (number + 1) * 0x9E3779B97F4A7C15 & _64_BITS
    number = (number ^ (number >> 29)) * 0xD6E8FEB86659FD93 & _64_BITS
    number = (number ^ (number >> 32)) * 0xD6E8FEB86659FD93 & _64_BITS
    return number ^ (number >> 32)


class Ranges:
    """A set of numbers from 0 to `LARGEST`, stored as ranges.

    A range is a pair of first and last number, both included.

    Args:
        ranges: The ranges whose numbers are in the set at first. They may overlap. Empty for an empty set.

    Raises:
        ProtocolError: A range begins below 0, ends above `LARGEST`, or ends before it begins.
    """

    __slots__ = ("_firsts", "_lasts", "digest")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.digest = 0
        """A number of 64 bits that is equal for equal sets, and almost certainly different for different sets."""
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        """Adds all numbers from `first` to `last`, whether or not some are in the set already.

        Raises:
            ProtocolError: `first` is negative or greater than `last`, or `last` is greater than `LARGEST`. Nothing is
                changed.
        """
        if not 0 <= first <= last <= LARGEST:
            raise ProtocolError(f"{first} to {last} is no range of workers' numbers")
        firsts, lasts = self._firsts, self._lasts
        begin = bisect_left(lasts, first - 1)
        end = bisect_right(firsts, last + 1)
        if begin < end:
            first, last = min(first, firsts[begin]), max(last, lasts[end - 1])
        digest = self.digest + _digest(first, last)
        for place in range(begin, end):
            digest -= _digest(firsts[place], lasts[place])
        self.digest = digest & _64_BITS
        firsts[begin:end] = [first]
        lasts[begin:end] = [last]

    def missing(self, first: int, last: int) -> list[Range]:
        """Returns the parts of the range from `first` to `last` that are not in the set, sorted.

        Returns an empty list if the set has all of the range, or if `first` is greater than `last`.
        """
        found = []
        for place in range(bisect_left(self._lasts, first), len(self._firsts)):
            if self._firsts[place] > last:
                break
            if first < self._firsts[place]:
                found.append((first, self._firsts[place] - 1))
            first = self._lasts[place] + 1
        if first <= last:
            found.append((first, last))
        return found

    def __contains__(self, number: int) -> bool:
        """Returns whether a number is in the set."""
        place = bisect_left(self._lasts, number)
        return place < len(self._firsts) and self._firsts[place] <= number

    def pairs(self) -> tuple[Range, ...]:
        """Returns the ranges of the set, sorted; an empty tuple if the set is empty."""
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.pairs() == other.pairs()

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        shown = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in self.pairs())
        return f"Ranges({shown})"


def _digest(first: int, last: int) -> int:
    """Returns a 64-bit hash of the range from `first` to `last`.

    The digest of a set is the sum of the hashes of its ranges, modulo 2**64.
    """
    return mixed(first << 32 | last)


def ranges_of(numbers: Iterable[int]) -> tuple[Range, ...]:
    """Returns the fewest ranges that have exactly these numbers, sorted; an empty tuple if there are no numbers.

    A range is a pair of first and last number, both included. The numbers may come in any order and more than once.
    They are not checked.
    """
    found: list[Range] = []
    for number in sorted(numbers):
        if found and number <= found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)

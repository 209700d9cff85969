"""A set of numbers that costs memory only for its gaps.

It keeps the numbers of workers that are gone. A `Watermark` would not do: a worker that lives for long, or a number
that was given out and never used, would hold the mark back, and every number after it would be kept one by one. Here
what is kept is bounded by the workers that are there.

Ranges are pairs of their first and last number; those of a set are sorted, and no two of them touch, so that equal sets
have equal ranges and equal digests.
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
_64_BITS: Final = 2**64 - 1


@lru_cache(maxsize=8192)
def mixed(number: int) -> int:
    """64 bits that look nothing like the number's: a multiplication spreads the bits up, a shift brings them down."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & _64_BITS
    number = (number ^ (number >> 29)) * 0xD6E8FEB86659FD93 & _64_BITS
    number = (number ^ (number >> 32)) * 0xD6E8FEB86659FD93 & _64_BITS
    return number ^ (number >> 32)


class Ranges:
    """A set of numbers from 0 to `LARGEST`."""

    __slots__ = ("_firsts", "_lasts", "digest")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.digest = 0
        """The same for equal sets, whatever the order in which they grew; else almost surely not."""
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        """Puts all numbers from first to last into the set. Raises `ProtocolError` if that is no range."""
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
        """What of a range is not in the set."""
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
        place = bisect_left(self._lasts, number)
        return place < len(self._firsts) and self._firsts[place] <= number

    def pairs(self) -> tuple[Range, ...]:
        """The set as ranges, in order."""
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.pairs() == other.pairs()

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        shown = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in self.pairs())
        return f"Ranges({shown})"


def _digest(first: int, last: int) -> int:
    return mixed(first << 32 | last)


def ranges_of(numbers: Iterable[int]) -> tuple[Range, ...]:
    """Numbers as sorted ranges."""
    found: list[Range] = []
    for number in sorted(numbers):
        if found and number <= found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)

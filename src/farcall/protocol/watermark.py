"""A set of the numbers of a sequence that were seen, which needs little memory in whatever order they come.

Numbers begin at 1, and each comes at least once in the end. So nearly all seen numbers are below one mark.
"""

from __future__ import annotations


class Watermark:
    """The numbers that were seen: all numbers up to `mark`, and those in `beyond`. Empty at first, with the mark 0."""

    __slots__ = ("beyond", "mark")

    def __init__(self) -> None:
        self.mark = 0
        self.beyond: set[int] = set()

    def add(self, number: int) -> bool:
        """Marks a number as seen. Returns False if it was seen before; numbers below 1 count as seen."""
        if number <= self.mark or number in self.beyond:
            return False
        if number != self.mark + 1:
            self.beyond.add(number)
            return True
        self.mark = number
        while self.mark + 1 in self.beyond:
            self.mark += 1
            self.beyond.remove(self.mark)
        return True

    def __contains__(self, number: int) -> bool:
        return number <= self.mark or number in self.beyond

    def __repr__(self) -> str:
        return f"Watermark({self.mark}{', ' + repr(sorted(self.beyond)) if self.beyond else ''})"

"""Which numbers of a sequence have been seen, in little memory whatever their order.

Numbers begin at 1 and each comes at least once in the end, so that nearly all that were seen are below one mark.
"""

from __future__ import annotations


class Watermark:
    """All numbers up to `mark` have been seen, and those in `beyond`."""

    __slots__ = ("beyond", "mark")

    def __init__(self) -> None:
        self.mark = 0
        self.beyond: set[int] = set()

    def add(self, number: int) -> bool:
        """Marks it as seen; False if it had been seen before."""
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

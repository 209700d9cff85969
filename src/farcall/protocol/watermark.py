"""A set of the numbers of a sequence that were seen, which needs memory only for its gaps.

Numbers begin at 1, and each comes at least once in the end. So nearly all seen numbers are below one mark.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from farcall.errors import ProtocolError

MAX_RANGES: Final = 1 << 19
"""The most ranges of numbers beyond the mark, which take some 70 MB.

Each needs a gap below it: a number that was assigned, and that this worker has not read although it has read a later
one. A correct sender cannot have that many. Each of its threads can have one, between assigning and sending. All others
are in frames that were sent, on the other of its two connections to this worker. A frame with a number has at least 80
bytes: of requests, less than 32 MiB can be on the way (`MAX_BACKLOG_BYTES` and the buffers of a socket), and replies
are no more than this worker has asked for. While one large frame is being sent, any number of later ones may arrive:
together they are one range.
"""


class Watermark:
    """A set of the numbers of a sequence that were seen. It is empty at first, and numbers begin at 1.

    `mark` is the highest number up to which all were seen. `beyond` has the seen numbers above that, as sorted pairs of
    first and last number.
    """

    __slots__ = ("beyond", "mark")

    def __init__(self) -> None:
        """Creates an empty set."""
        self.mark = 0
        """All numbers up to this one were seen; 0 at first."""
        self.beyond: list[tuple[int, int]] = []
        """The seen numbers above `mark + 1`, as pairs of first and last number, sorted. No two pairs touch."""

    def add(self, number: int) -> bool:
        """Marks a number as seen.

        Returns:
            True if the number is new; False if it was seen before, or is below 1.

        Raises:
            ProtocolError: `beyond` would get more than `MAX_RANGES` pairs, because too many numbers are missing.
                Nothing is changed.
        """
        if number <= self.mark:
            return False
        beyond = self.beyond
        first = last = number
        begin = end = bisect_left(beyond, (number + 1,))  # the first range that begins after the number
        if begin and beyond[begin - 1][1] >= number - 1:
            begin -= 1
            first = beyond[begin][0]
            if beyond[begin][1] >= number:
                return False
        if end < len(beyond) and beyond[end][0] == number + 1:
            last = beyond[end][1]
            end += 1
        if first <= self.mark + 1:  # less if a signal handler has raised an error between the next two lines
            self.mark = last
            del beyond[:end]
            return True
        if begin == end and len(beyond) >= MAX_RANGES:
            raise ProtocolError(
                f"the other end left out too many numbers: {number} is the beginning of range {len(beyond) + 1:,}"
            )
        beyond[begin:end] = [(first, last)]
        return True

    def __contains__(self, number: int) -> bool:
        """Returns whether a number was seen. Numbers below 1 count as seen."""
        place = bisect_left(self.beyond, (number + 1,))
        return number <= self.mark or (place > 0 and self.beyond[place - 1][1] >= number)

    def __repr__(self) -> str:
        return f"Watermark({self.mark}{', ' + repr(self.beyond) if self.beyond else ''})"

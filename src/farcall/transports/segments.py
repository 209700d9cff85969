"""What a segment of shared memory looks like: the one thing that its lender and its borrower must agree on.

    offset  size  what
    0       16    the lender's token: who opens another file by mistake sees that
    16      4     the segment's number, little-endian
    20      1     1 while it is lent, 2 if the borrower never gives it back
    21      1     1 while the borrower has it mapped
    4096    ...   the buffers, each at a multiple of `ALIGNMENT`

Nothing here is opened, mapped or changed.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

ALIGNMENT: Final = 64
TOKEN_SIZE: Final = 16
NUMBER: Final = struct.Struct("<I")
NUMBER_AT: Final = TOKEN_SIZE
LENT_AT: Final = 20
MAPPED_AT: Final = 21
DATA: Final = mmap.PAGESIZE

FREE: Final = 0
LENT: Final = 1
KEPT: Final = 2

_WITHOUT_THE_LOCK: Final = 1 << 20
"""From this size on a copy is made with the interpreter let go of, if numpy is there to do it."""


class Place(NamedTuple):
    """Where the buffers of a message are."""

    descriptor: int
    """The segment's, in the lender's process."""
    number: int
    """The segment's own: descriptors are used again, numbers are not."""


def aligned(size: int) -> int:
    """How much room a buffer of that size takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def ends(sizes: Sequence[int]) -> list[int]:
    """Where each buffer's place ends, in a segment's data."""
    end = 0
    found = []
    for size in sizes:
        end += aligned(size)
        found.append(end)
    return found


def begins(ends: Sequence[int]) -> list[int]:
    """Where each buffer begins: where the one before it ends."""
    return [0, *ends[:-1]]


def views(data: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """The buffers of these sizes at these places in a segment's data."""
    return [data[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True)]


def are_apart(offsets: Sequence[int], sizes: Sequence[int], capacity: int) -> bool:
    """Whether buffers lie at such places as buffers are put in, all inside of so many bytes, and none on another."""
    if len(sizes) == 1:  # as below, in a third of the time
        return 0 <= offsets[0] <= capacity - sizes[0] and not offsets[0] % ALIGNMENT
    end = 0  # which a negative one is before
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if offset < end or offset % ALIGNMENT:
            return False
        end = offset + size
    return end <= capacity


def copy(target: memoryview, source: memoryview) -> None:
    """Copies all of one buffer into another of the same size."""
    numpy: Any = sys.modules.get("numpy") if target.nbytes >= _WITHOUT_THE_LOCK else None
    if numpy is None:
        target[:] = source
    else:
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))

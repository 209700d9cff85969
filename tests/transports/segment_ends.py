"""The writer and the reader of shared segments in one process, and how many segments that process has."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farcall.transports.shm_segments import Place, ReturnableBuffers, SegmentPool, SegmentReader, SegmentWriter

MIN_CAPACITY = 1 << 18
"""Bytes that the smallest segment holds."""


class Ends:
    """A writer and its reader, both in this process."""

    def __init__(self, max_bytes: int = 1 << 26, max_segments: int = 64) -> None:
        self.problems: list[str] = []
        """What the pool has warned of."""
        self.pool = SegmentPool(max_bytes, max_segments, self.problems.append)
        self.writer = SegmentWriter(self.pool)
        self.reader = SegmentReader(os.getpid(), self.pool.token)

    def send(self, *buffers: bytes) -> list[memoryview] | None:
        """Returns what arrives of these buffers. None if there was no segment for them."""
        place = self.write(*buffers)
        return None if place is None else self.reader.read(place, [len(each) for each in buffers])

    def write(self, *buffers: bytes) -> Place | None:
        """Puts them into a segment that is not read yet."""
        return self.writer.write([memoryview(each) for each in buffers])

    def find_returnable(self, *buffers: memoryview) -> ReturnableBuffers:
        """Returns these received buffers, ready to be sent back; fails if they cannot be."""
        returnable = self.reader.find_returnable(buffers)
        assert returnable is not None
        return returnable

    def segments(self) -> list[Any]:
        """Returns the segments of the writer."""
        return self.writer._segments

    def mappings(self) -> dict[int, Any]:
        """Returns the segments that the reader has mapped, by number."""
        return self.reader._mappings

    def numbers(self) -> list[int]:
        """Returns the numbers of the writer's segments."""
        return [segment.number for segment in self.segments()]

    def states(self) -> list[int]:
        """Returns the states of the writer's segments."""
        return [segment.state() for segment in self.segments()]

    def take_returned(self, returnable: ReturnableBuffers) -> Sequence[memoryview]:
        """Returns what the writer gets when buffers were sent back."""
        return self.writer.take_returned(returnable.number, returnable.offsets, returnable.sizes)

    def close(self) -> None:
        """Ends the link: the reader forgets its mappings then."""
        self.writer.close()
        self.pool.close()
        self.mappings().clear()


def data(seed: int, size: int = MIN_CAPACITY) -> bytes:
    """Returns so many bytes, which differ from those of other seeds and from zeros."""
    return bytes([seed % 251 + 1]) * size


_before = [0, 0]
"""What was there before the test: one that fails keeps what it had."""


def count_from_here() -> None:
    """Has `mapping_count` and `descriptor_count` leave out what is there now."""
    gc.collect()
    _before[:] = 0, 0
    _before[:] = mapping_count(), descriptor_count()


def mapping_count() -> int:
    """Returns how many segments this process has mapped, at either end."""
    return Path("/proc/self/maps").read_text().count("/memfd:farcall") - _before[0]


def descriptor_count() -> int:
    """Returns how many descriptors of segments this process has."""
    return len(open_segments()) - _before[1]


def open_segments() -> set[str]:
    """Returns the descriptors of segments that this process has, as text."""
    return {name for name in os.listdir("/proc/self/fd") if "/memfd:farcall" in _target(name)}


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""

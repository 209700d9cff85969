"""A lender and a borrower of shared memory in one process, and how much of it that process has."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from farcall.transports.borrowed_memory import Borrower
from farcall.transports.segments import Place
from farcall.transports.shared_memory import Lender, Pool

LEAST = 1 << 18
"""What the smallest segment holds."""


class Ends:
    """A lender and its borrower, both in this process."""

    def __init__(self, limit: int = 1 << 26, most: int = 64) -> None:
        self.trouble: list[str] = []
        self.pool = Pool(limit, most, self.trouble.append)
        self.lender = Lender(self.pool)
        self.borrower = Borrower(os.getpid(), self.pool.token)

    def pass_on(self, *buffers: bytes) -> list[memoryview] | None:
        """What arrives of these; None if nothing could be lent."""
        place = self.lend(*buffers)
        return None if place is None else self.borrower.take(place, [len(each) for each in buffers])

    def lend(self, *buffers: bytes) -> Place | None:
        return self.lender.lend([memoryview(each) for each in buffers])

    def numbers(self) -> list[int]:
        return [segment.number for segment in self.lender._segments]

    def close(self) -> None:
        self.lender.close()
        self.pool.close()
        self.borrower._mappings.clear()  # what a connection that has ended does


def data(seed: int, size: int = LEAST) -> bytes:
    return bytes([seed % 251 + 1]) * size


before: list[int] = [0, 0]
"""What was there before the test: one that fails keeps what it had."""


def count_from_here() -> None:
    """What is there now is no business of the test."""
    gc.collect()
    before[:] = 0, 0
    before[:] = mapped(), descriptors()


def mapped() -> int:
    """How many segments this process has mapped, at either end."""
    return Path("/proc/self/maps").read_text().count("/memfd:farcall") - before[0]


def descriptors() -> int:
    return len(segments_open()) - before[1]


def segments_open() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if "/memfd:farcall" in _target(name)}


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""

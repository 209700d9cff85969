"""What the tests of large buffers between two workers of one host look at: segments, bytes, descriptors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from farcall.agent.lanes import LEAST
from farcall.testing import LocalGroup
from farcall.transports.shared_memory import Lender

NewPair = Callable[..., LocalGroup]
"""Makes two workers in this process, over Unix sockets, with these options; worker0 has called worker1."""
SIZE = 4 * LEAST
"""Bytes of an array that goes through shared memory."""


def sent_by(group: LocalGroup) -> list[int]:
    """Bytes that went through shared memory so far, from worker0 and back, each copied once; -1 if none can."""
    return [found.lent if found is not None else -1 for found in lenders(group)]


def returned_to(group: LocalGroup) -> int:
    """Bytes that worker0 has got back in memory that it had lent."""
    found = lenders(group)[0]
    return found.returned if found is not None else -1


def segments(group: LocalGroup) -> list[Any]:
    """Those of worker0's connection, of both sides."""
    return [segment for found in lenders(group) if found is not None for segment in found._segments]


def lenders(group: LocalGroup) -> list[Lender | None]:
    """Those of worker0's connection: worker0's, and worker1's for its replies."""
    (out,) = group[0]._connections
    (back,) = group[1]._incoming
    return [out.lane._lender, back.lane._lender]


def open_segments() -> int:
    """How many descriptors of segments this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "/memfd:farcall" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass
    return found


def pattern(size: int = SIZE, seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(size) * 7 + seed).astype(np.uint8)


def all_free(group: LocalGroup) -> bool:
    gc.collect()
    return all(segment.is_free() for segment in segments(group))


def changed(value: Any) -> Any:
    value[::2] = 1
    return value

"""Pairs of workers with large data between them, and how much of their shared memory there is."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from farcall.agent.lanes import LEAST
from farcall.options import RpcBackendOptions
from farcall.testing import LocalGroup
from farcall.transports.shared_memory import Lender
from group_stage import call, echo

NewPair = Callable[..., LocalGroup]

SIZE = 4 * LEAST
"""Bytes of an array that goes through shared memory."""
kept: list[Any] = []
"""What a worker holds on to."""


@contextmanager
def pairs() -> Iterator[NewPair]:
    """Makes groups of two, which are connected; they are taken down at the end, and what they kept is let go of."""
    groups: list[LocalGroup] = []

    def new(**options: Any) -> LocalGroup:
        groups.append(LocalGroup(2, RpcBackendOptions(**options)))
        call(groups[-1][0], 1, echo, 0)
        return groups[-1]

    yield new
    kept.clear()
    for group in groups:
        group.shutdown(graceful=False)
    gc.collect()


def keep(value: Any) -> Any:
    kept.append(value)
    return value


def copied(value: Any) -> Any:
    """The same in other memory: what it got does not go back with the reply."""
    return value.copy()


def changed(value: Any) -> Any:
    """The same memory, with other contents."""
    value[::2] = 1
    return value


def pattern(size: int = SIZE, seed: int = 0) -> np.ndarray[Any, Any]:
    """An array that is not like another."""
    return (np.arange(size) * 7 + seed).astype(np.uint8)


def lenders(group: LocalGroup) -> list[Lender | None]:
    """Those of worker0's connection: worker0's, and worker1's for its replies."""
    (out,) = group[0]._connections
    (back,) = group[1]._incoming
    return [out.lane._lender, back.lane._lender]


def sent_by(group: LocalGroup) -> list[int]:
    """Bytes that went through shared memory so far, to and fro, each copied once; -1 where none can."""
    return [found.lent if found is not None else -1 for found in lenders(group)]


def returned_to(group: LocalGroup) -> int:
    """Bytes that worker0 has got back in memory that it had lent."""
    found = lenders(group)[0]
    return found.returned if found is not None else -1


def segments(group: LocalGroup) -> list[Any]:
    return [segment for found in lenders(group) if found is not None for segment in found._segments]


def all_free(group: LocalGroup) -> bool:
    gc.collect()
    return all(segment.is_free() for segment in segments(group))


there_before = [0]
"""Descriptors of segments before the test: one that fails keeps what it had."""


def count_from_here() -> None:
    """What is there now is no business of the test."""
    gc.collect()
    there_before[0] = 0
    there_before[0] = memfds()


def memfds() -> int:
    """How many descriptors of segments there are more than there were."""
    found = -there_before[0]
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "/memfd:farcall" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass
    return found

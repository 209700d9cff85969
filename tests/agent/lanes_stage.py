"""Pairs of workers with large data between them, and how much of their shared memory there is."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farcall.options import RpcBackendOptions
from farcall.testing import LocalGroup
from group_stage import call, echo

NewPair = Callable[..., LocalGroup]

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


def segments(group: LocalGroup) -> list[Any]:
    (out,) = group[0]._connections
    (back,) = group[1]._incoming
    return [segment for lane in (out.lane, back.lane) if lane._lender for segment in lane._lender._segments]


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

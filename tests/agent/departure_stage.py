"""Workers that want to leave, and made-up stores in which they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from farcall.agent.departure import wait_for_everybody
from farcall.errors import RendezvousError
from farcall.protocol.ids import WorkerInfo
from farcall.rendezvous import Rendezvous
from farcall.sleeping import FOREVER

NAMES = ("ann", "bob", "cem", "dai")


class Worker:
    """One that wants to leave: idle, unless it is told otherwise."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.info = WorkerInfo(NAMES[rank], rank)
        self._world_size = world_size
        self.calls = 0
        self.busy = 0  # functions that run here
        self.gone: set[int] = set()  # lost, or left
        self.missed: list[str] = []  # lost
        self.expelled = False

    def is_expelled(self) -> bool:
        return self.expelled

    def is_idle(self) -> bool:
        return not self.busy

    def under_way(self) -> str:
        return "a walk"

    def calls_started(self) -> int:
        return self.calls

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        return [(WorkerInfo(NAMES[rank], rank), rank in self.gone) for rank in range(self._world_size)]

    def lost(self) -> list[str]:
        return self.missed


class Board:
    """A store that only gathers. `heard` are the values of each round, `on_collect` what happens in it."""

    def __init__(self, wait: Callable[[Callable[[], bool]], None] | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.timeouts: list[float] = []
        self.on_collect: Callable[[int], None] = lambda number: None
        self._changed = threading.Condition()
        self._wait = wait

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values, "said twice in one round"
            self.values[key] = value
            self._changed.notify_all()

    def within(self, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()

    def under(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        self.timeouts.append(timeout)
        if prefix.startswith("departure/"):
            self.on_collect(int(prefix.split("/")[1]))
        if self._wait is not None:
            self._wait(lambda: len(self.under(prefix)) == count)
        else:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.under(prefix)) == count, 30)
        return self.under(prefix)

    @property
    def rounds(self) -> list[list[int]]:
        """What was said in each round, by rank."""
        number = 0
        rounds = []
        while said := self.under(f"departure/{number}/"):
            rounds.append([int(said[key]) for key in sorted(said)])
            number += 1
        return rounds


def way_in(board: Any, rank: int, world_size: int) -> Rendezvous:
    return Rendezvous(store=board, rank=rank, world_size=world_size, host="127.0.0.1", group="g")


def leave_alone(worker: Worker, board: Any, deadline: float = FOREVER) -> None:
    wait_for_everybody(worker, way_in(board, 0, 1), deadline)


class Unmoved:
    """A store in which the others never come."""

    def __init__(self, error: RendezvousError) -> None:
        self.error = error
        self.timeouts: list[float] = []
        self.now = 0.0
        self.limits: list[float] = []
        self.after = lambda: None

    def within(self, seconds: float) -> AbstractContextManager[None]:
        self.limits.append(seconds)
        return nullcontext()

    def set(self, key: str, value: bytes) -> None:
        pass

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        self.timeouts.append(timeout)
        self.now += timeout
        self.after()
        raise self.error

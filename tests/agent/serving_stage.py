"""Serving pools with made-up jobs, and how they come in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from eventually import PATIENCE, eventually
from farcall.agent.poller import Poller
from farcall.agent.serving import Serving
from farcall.agent.spinning import Spinning


class Origin:
    """Whom to answer; remembers how it was answered."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def answer(self, reply: Any) -> None:
        self.events.append(("now", reply.decode()) if isinstance(reply, bytes) else ("now", *reply))

    def queue_answer(self, reply: bytes) -> None:
        self.events.append(("later", reply.decode()))

    def flush_answers(self) -> None:
        if self.events[-1:] != ["flush"]:
            self.events.append("flush")


class FakeJob:
    """Says when it begins, does what it is told, and replies with its name."""

    def __init__(
        self,
        name: str,
        function: Callable[[], object] = lambda: None,
        kind: object = None,
        origin: Origin | None = None,
        must_run: bool = False,
        pieces: list[Any] | None = None,
    ) -> None:
        self.name = name
        self._pieces = pieces
        self.kind: object = name if kind is None else kind
        self.origin = origin
        self.must_run = must_run
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.thread = ""
        self._function = function

    def run(self) -> bytes | list[Any] | None:
        self.thread = threading.current_thread().name
        self.begun.set()
        self._function()
        self.ended.set()
        return None if self.origin is None else self._pieces or self.name.encode()


class Blocking(FakeJob):
    """Runs until it is released; asleep in no wait of ours."""

    def __init__(self, name: str, **more: Any) -> None:
        self._release = threading.Event()
        super().__init__(name, lambda: self._release.wait(PATIENCE), **more)

    def release(self) -> None:
        self._release.set()

    def end(self) -> None:
        self.release()
        assert self.ended.wait(PATIENCE)


class Stage:
    """Pools that are closed at the end of the test, whatever happens."""

    def __init__(self) -> None:
        self._pollers: list[Poller] = []
        self._pools: list[Serving] = []
        self._blocking: list[Blocking] = []
        self.woken = 0

    def serving(self, limit: int = 4, spinning: Spinning | None = None) -> Serving:
        poller = Poller()
        self._pollers.append(poller)
        pool = Serving("w", poller, limit, spinning or Spinning(0.0), self._wake_supervisor)
        self._pools.append(pool)
        pool.start()
        return pool

    def _wake_supervisor(self) -> None:
        self.woken += 1

    def blocking(self, name: str, **more: Any) -> Blocking:
        job = Blocking(name, **more)
        self._blocking.append(job)
        return job

    def close(self) -> None:
        for job in self._blocking:
            job.release()
        left = [name for pool in self._pools for name in pool.close(time.monotonic() + PATIENCE)]
        for poller in self._pollers:
            poller.close()
        assert left == []


def run(pool: Serving, *jobs: FakeJob) -> None:
    """Has the jobs come in at once, and waits until they have ended."""
    come_in(pool, *jobs)
    for job in jobs:
        assert job.ended.wait(PATIENCE)


def come_in(pool: Serving, *jobs: FakeJob) -> None:
    eventually(lambda: pool.asleep)
    pool.ready.extend(jobs)
    pool._poller.ring()


def depose(pool: Serving, job: FakeJob) -> None:
    """What the supervisor does about a leader that has been running this job for a while."""
    assert job.begun.wait(PATIENCE)
    pool.depose_stuck_leader()
    pool.depose_stuck_leader()


def run_by_a_follower(pool: Serving, job: Blocking) -> None:
    """Has it run, and the lead taken from the thread that runs it."""
    come_in(pool, job)
    depose(pool, job)
    eventually(lambda: pool.asleep)

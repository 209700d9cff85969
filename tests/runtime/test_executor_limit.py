"""The executor's own rules. What users are promised of it is in tests/behaviour/test_executor.py."""

from __future__ import annotations

import threading
from time import monotonic
from types import TracebackType
from typing import cast

from farcall.backends import RpcAgent
from farcall.runtime.executor import Executor, Task
from farcall.transports.poller import Poller

SOON_S = 20.0


class LockThatAnotherThreadTakesFirst:
    """Replaces the executor's lock. A follower starts a job right before another thread gets the lock.

    That happens once, when a job is queued. The follower's job runs until `end_job`.
    """

    def __init__(self, executor: Executor) -> None:
        self._state = vars(executor)
        self._lock = self._state["_lock"]
        self._state["_lock"] = self
        self.has_started_job = threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._state["ready"] and not self.has_started_job.is_set():
            self._state["_running"] += 1
            self.has_started_job.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def end_job(self) -> None:
        with self._lock:
            self._state["_running"] -= 1


def test_the_leader_respects_the_limit_although_a_follower_starts_a_job_at_the_same_moment() -> None:
    poller = Poller(0.0)
    executor = Executor("alone", poller, 1, cast("RpcAgent", None))
    lock = LockThatAnotherThreadTakesFirst(executor)
    ran = threading.Event()
    executor.start()
    try:
        executor.submit(Task(ran.set))
        assert lock.has_started_job.wait(SOON_S)
        assert not ran.wait(0.1), "two jobs ran, and the limit is one"
        lock.end_job()
        poller.wake()
        assert ran.wait(SOON_S)
    finally:
        assert executor.close(monotonic() + SOON_S) == 0
        poller.close()

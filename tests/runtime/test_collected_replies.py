"""Replies of jobs that are queued together are sent together, and no reply waits for a job that takes long."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import cast

import pytest

from farcall.backends import RpcAgent
from farcall.gate import asleep
from farcall.runtime.executor import Executor, Task
from farcall.transports import poller as poller_module
from farcall.transports.base import Link
from farcall.transports.poller import Poller

SOON_S = 20.0


class RecordedLink:
    """Stands for a link over a socket. Records which frames each `flush` sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._appended: list[bytes] = []
        self.sent: list[list[bytes]] = []
        self.has_sent = threading.Event()

    def fileno(self) -> int:
        return self._socket.fileno()

    def append(self, frame: bytes) -> None:
        self._appended.append(frame)

    def flush(self) -> None:
        frames, self._appended = self._appended, []
        if frames:
            self.sent.append(frames)
            self.has_sent.set()


class Stage:
    """An executor whose leader reads one link."""

    def __init__(self, link: RecordedLink, max_running: int = 4) -> None:
        self.link = link
        self.poller = Poller(0.0)
        self.poller.watch(cast("Link", link), lambda: None)
        self.executor = Executor("alone", self.poller, max_running, cast("RpcAgent", None))
        self.refused: list[bytes] = []

    def reply(self, frame: bytes) -> None:
        if not self.poller.collect(self.link, frame):
            self.refused.append(frame)

    def queue(self, *functions: Callable[[], object]) -> None:
        self.executor.ready.extend(Task(function) for function in functions)

    def start_leader_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Starts the leader and no standby thread, which could take the lead from it on a slow machine."""
        monkeypatch.setattr(Executor, "_see_to_successor", lambda executor: None)
        start_thread: Callable[[], None] = vars(Executor)["_start_thread"].__get__(self.executor)
        start_thread()

    def close(self) -> None:
        assert self.executor.close(monotonic() + SOON_S) == 0
        self.poller.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(poller_module, "_COLLECT_S", 600.0)
    ours, theirs = socket.socketpair()
    stage = Stage(RecordedLink(ours))
    yield stage
    stage.close()
    ours.close()
    theirs.close()


def test_replies_of_queued_jobs_are_sent_together_before_the_last_job_runs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    sent_before_last: list[list[bytes]] = []

    def last() -> None:
        sent_before_last.extend(stage.link.sent)
        stage.reply(b"last")
        done.set()

    stage.queue(*(lambda number=number: stage.reply(b"%d" % number) for number in range(5)), last)
    stage.start_leader_alone(monkeypatch)
    assert done.wait(SOON_S)
    assert sent_before_last == [[b"0", b"1", b"2", b"3", b"4"]]
    assert stage.refused == [b"last"]  # no other job was queued: it is sent at once


def test_replies_are_collected_for_a_limited_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller_module, "_COLLECT_S", 0.0)
    done = threading.Event()
    stage.queue(*(lambda number=number: stage.reply(b"%d" % number) for number in range(3)), done.set)
    stage.start_leader_alone(monkeypatch)
    assert done.wait(SOON_S)
    assert stage.link.sent == [[b"0"], [b"1"], [b"2"]]


def test_a_collected_reply_does_not_wait_for_the_next_job(stage: Stage) -> None:
    is_sent: list[bool] = []
    done = threading.Event()
    stage.queue(
        lambda: stage.reply(b"first"),
        lambda: is_sent.append(stage.link.has_sent.wait(SOON_S)),
        lambda: None,
        done.set,
    )
    stage.executor.start()
    assert done.wait(SOON_S)
    stage.close()
    assert is_sent == [True]


def test_a_collected_reply_does_not_wait_for_a_job_that_waits_for_a_call_of_its_own(stage: Stage) -> None:
    """Other threads take the jobs that are queued, so no thread is woken to become the leader."""
    is_sent: list[bool] = []
    done = threading.Event()

    def wait() -> None:
        stage.executor.ready.clear()
        with asleep():
            is_sent.append(stage.link.has_sent.wait(SOON_S))
        done.set()

    stage.queue(lambda: stage.reply(b"first"), wait, lambda: None)
    stage.executor.start()
    assert done.wait(2 * SOON_S)
    assert is_sent == [True]


def test_only_the_leader_collects_replies(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def reply_in_another_thread() -> None:
        thread = threading.Thread(target=stage.reply, args=(b"other",))
        thread.start()
        thread.join()

    stage.queue(reply_in_another_thread, lambda: None, done.set)
    stage.start_leader_alone(monkeypatch)
    assert done.wait(SOON_S)
    assert stage.refused == [b"other"]
    assert stage.link.sent == []


def test_what_was_collected_is_sent_when_another_thread_has_taken_the_other_jobs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first() -> None:
        stage.reply(b"first")
        stage.executor.ready.clear()

    stage.queue(first, lambda: None)
    stage.start_leader_alone(monkeypatch)
    assert stage.link.has_sent.wait(SOON_S)
    assert stage.link.sent == [[b"first"]]

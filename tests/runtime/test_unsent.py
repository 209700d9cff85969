"""What waits for a connection: it is sent before everything that finds the connection, once, and fails with it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from eventually import eventually
from farcall.errors import RpcError, WorkerLostError
from farcall.runtime.executor import Executor
from farcall.testing import LocalGroup
from group_stage import echo


class Note:
    """Waits for a connection, and notes what happens to it."""

    def __init__(self, notes: list[str], name: str, then: Callable[[], Any] | None = None) -> None:
        self.made_at = monotonic()
        self._notes = notes
        self._name = name
        self._then = then

    def send(self, connection: Any) -> None:
        self._notes.append(f"{self._name} sent")
        if self._then is not None:
            self._then()

    def fail(self, error: RpcError) -> None:
        self._notes.append(f"{self._name} failed: {type(error).__name__}")

    def abandon(self, error: RpcError) -> None:
        self._notes.append(f"{self._name} abandoned")


def peer_of(group: LocalGroup, name: str) -> Any:
    calling: Any = group.agents[0].reference_store.calling
    return calling.numbered[group.agents[0].get_worker_info(name).id]


@pytest.fixture
def asides(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Returns a list of the functions that threads of their own would run, such as that which connects for a queue."""
    functions: list[Callable[[], object]] = []
    monkeypatch.setattr(Executor, "run_aside", lambda _, function: functions.append(function))
    return functions


def test_what_comes_while_the_queue_is_sent_is_queued_behind_it() -> None:
    """The connection is not known before the queue is empty, so no call overtakes another."""
    with LocalGroup(2) as group:
        peer, notes, seen = peer_of(group, "worker1"), list[str](), list[Any]()

        def late() -> None:
            seen.append((peer.connection, peer.send_when_connected(Note(notes, "second"))))

        assert peer.send_when_connected(Note(notes, "first", late)) is None
        eventually(lambda: peer.connection is not None)
        assert notes == ["first sent", "second sent"]
        assert seen == [(None, None)]
        eventually(lambda: not peer.has_unsent())
        assert peer.send_when_connected(Note(notes, "third")) is peer.connection
        assert notes == ["first sent", "second sent"]


def test_a_connection_that_another_thread_makes_takes_the_queue_along(asides: list[Callable[[], object]]) -> None:
    with LocalGroup(2) as group:
        peer, notes = peer_of(group, "worker1"), list[str]()
        assert peer.send_when_connected(Note(notes, "first")) is None
        assert peer.send_when_connected(Note(notes, "second")) is None
        assert len(asides) == 1
        connection = peer.connect(monotonic() + 10)
        assert notes == ["first sent", "second sent"]
        asides.pop()()  # nothing is left for it
        assert peer.connection is connection
        assert notes == ["first sent", "second sent"]
        assert group.worker("worker1").call(echo, 1) == 1


def test_an_interrupted_send_closes_the_connection_and_the_rest_is_sent_by_another(
    asides: list[Callable[[], object]],
) -> None:
    with LocalGroup(2) as group:
        peer, notes = peer_of(group, "worker1"), list[str]()

        def interrupt() -> None:
            raise KeyboardInterrupt

        assert peer.send_when_connected(Note(notes, "first", interrupt)) is None
        assert peer.send_when_connected(Note(notes, "second")) is None
        connect = asides[0]
        with pytest.raises(KeyboardInterrupt):
            peer.connect(monotonic() + 10)
        assert peer.connection is None
        connect()
        assert notes == ["first sent", "second sent"]
        assert group.worker("worker1").call(echo, 1) == 1


def test_everything_fails_when_the_worker_is_gone(asides: list[Callable[[], object]]) -> None:
    with LocalGroup(2) as group:
        peer, notes = peer_of(group, "worker1"), list[str]()
        assert peer.send_when_connected(Note(notes, "first")) is None
        assert peer.send_when_connected(Note(notes, "second")) is None
        peer.lose(has_left=False)
        asides.pop()()
        assert notes == [f"{name} failed: {WorkerLostError.__name__}" for name in ("first", "second")]
        assert peer.send_when_connected(Note(notes, "third")) is None  # a new thread connects, or rather fails
        assert len(asides) == 1
        asides.pop()()
        assert notes[2:] == ["third failed: WorkerLostError"]

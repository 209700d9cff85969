"""Looking for a store: what is tried again, what is final, and what is said at the end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_stage import GROUP, Stage

from eventually import eventually
from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.rendezvous import client as client_module
from farcall.rendezvous.client import Candidate, find_store, is_alive


def find(
    candidates: Callable[[], Sequence[Candidate]], only_one: bool, timeout: float, name: str = "w", rank: int = 1
) -> socket.socket:
    return find_store(candidates, only_one, "somewhere", name, rank, timeout)[0]


def at(port: int, group: str = GROUP) -> Candidate:
    return Candidate("127.0.0.1", port, group)


@pytest.fixture
def parrot() -> Iterator[int]:
    """The port of a server that says something of its own to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                sock, _ = listener.accept()
                with sock:
                    if sock.recv(4096) == b"enough":
                        return
                    sock.sendall(b"SSH-2.0-parrot and more\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        yield port
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"enough")
        thread.join()


def test_a_store_that_is_there_is_found(stage: Stage) -> None:
    with find(lambda: [at(stage.server.port)], True, 10) as sock:
        assert sock.getpeername()[1] == stage.server.port


def test_a_store_that_comes_late_is_found(
    stages: Callable[..., Stage], background: ThreadPoolExecutor, free_port: int
) -> None:
    asked = threading.Event()
    places = [at(free_port)]

    def candidates() -> list[Candidate]:
        asked.set()
        return places

    finding = background.submit(find, candidates, True, 30)
    assert asked.wait(10)
    stage = stages()
    places[:] = [at(stage.server.port)]
    finding.result(10).close()


def test_without_a_store_the_error_says_where_who_and_why(free_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousTimeoutError) as caught:
        find(lambda: [at(free_port)], True, 0.05)
    assert 0.05 <= time.monotonic() - started < 3
    text = str(caught.value)
    assert "worker 'w' (rank 1) found no store at somewhere in 0.05 s" in text
    assert "rank 0, which hosts the store, has not started it yet" in text
    assert f"127.0.0.1:{free_port}: [Errno 111] Connection refused" in text


def test_nothing_to_connect_to_and_trouble_on_the_way_there_are_said() -> None:
    with pytest.raises(RendezvousTimeoutError, match="there was nothing to connect to"):
        find(list, False, 0.01)

    def unreadable() -> list[Candidate]:
        raise PermissionError(13, "Permission denied", "the file")

    with pytest.raises(RendezvousTimeoutError, match="Permission denied: 'the file'"):
        find(unreadable, False, 0.01)


def test_a_refusal_is_believed_after_a_while(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)
    stage.client(1)
    for only_one in (True, False):
        with pytest.raises(
            RendezvousError, match=r"'w' \(rank 1\) cannot join at somewhere: .* rank 1 is taken"
        ) as caught:
            find(lambda: [at(stage.server.port)], only_one, 30)
        assert not isinstance(caught.value, RendezvousTimeoutError)


def test_a_refusal_is_believed_when_the_time_is_over(stage: Stage) -> None:
    stage.client(1)
    with pytest.raises(RendezvousError, match="rank 1 is taken"):
        find(lambda: [at(stage.server.port)], True, 0.01)


def test_a_refusal_by_the_remains_of_an_earlier_worker_passes(
    stage: Stage, background: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    remains = stage.client(1)
    finding = background.submit(find, lambda: [at(stage.server.port)], True, 30)
    eventually(lambda: "rank 1 is taken" in caplog.text)
    remains.close()
    finding.result(10).close()


def test_a_refusal_that_is_final_is_believed_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 1000)
    stage.client(0, "w")
    with pytest.raises(RendezvousError, match="the worker name 'w' is not unique: rank 0 and rank 1"):
        find(lambda: [at(stage.server.port)], True, 30)


def test_another_group_is_final_where_there_is_no_other_place(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)
    with pytest.raises(RendezvousError, match="serves the group 'the group', not 'mine'"):
        find(lambda: [at(stage.server.port, "mine")], True, 30)


def test_another_group_another_program_and_silence_are_passed_over(
    stage: Stage, parrot: int, occupied: Callable[..., socket.socket], stages: Callable[..., Stage]
) -> None:
    silent = occupied().getsockname()[1]
    places = [at(silent), at(parrot), at(stage.server.port, "mine"), at(stages().server.port)]
    with find(lambda: places, False, 30) as sock:
        assert sock.getpeername()[1] == places[-1].port


def test_who_answered_is_said_when_the_right_one_was_not_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.0)
    with pytest.raises(RendezvousTimeoutError, match=r"a program answered: .* not 'mine'"):
        find(lambda: [at(stage.server.port, "mine")], False, 0.01)


def test_another_program_at_the_only_place_is_said(parrot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.0)
    with pytest.raises(RendezvousError, match=f"the store at 127.0.0.1:{parrot} does not speak farcall"):
        find(lambda: [at(parrot)], True, 30)


def test_is_alive_tells_ours_from_others_and_takes_part_in_nothing(stage: Stage, parrot: int, free_port: int) -> None:
    assert is_alive(at(stage.server.port))
    assert not is_alive(at(stage.server.port, "another run"))
    assert not is_alive(at(parrot))
    assert not is_alive(at(free_port))
    assert stage.server._state.members == 0


# -- where this worker may host the store itself


def test_where_nobody_is_the_store_may_be_opened(stages: Callable[..., Stage], free_port: int) -> None:
    opened: list[Stage] = []
    asked: list[list[Candidate]] = []

    def host_store(vacant: Sequence[Candidate]) -> str | None:
        asked.append(list(vacant))
        if len(asked) < 3:
            return "not yet"
        opened.append(stages())
        return None

    def candidates() -> list[Candidate]:
        return [at(opened[0].server.port)] if opened else [at(free_port)]

    with find_store(candidates, True, "somewhere", "w", 1, 10, host_store)[0] as sock:
        assert sock.getpeername()[1] == opened[0].server.port
    assert asked == 3 * [[at(free_port)]]


def test_where_somebody_is_no_store_is_opened(
    stage: Stage, parrot: int, occupied: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_FIRST_ATTEMPT_S", 0.1)
    asked: list[Sequence[Candidate]] = []

    def host_store(vacant: Sequence[Candidate]) -> str:
        asked.append(vacant)
        return "of others who are there"

    silent = occupied().getsockname()[1]
    places = [at(silent), at(parrot), at(stage.server.port, "another group")]
    with pytest.raises(RendezvousTimeoutError, match="this worker cannot host it either: of others who are there"):
        find_store(lambda: places, False, "somewhere", "w", -1, 0.5, host_store)
    assert asked
    assert not any(asked)


def test_a_refusal_is_no_reason_to_open_another_store(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSAL_RETRY_S", 0.05)

    def host_store(vacant: Sequence[Candidate]) -> str | None:
        raise AssertionError("there is a store")

    with pytest.raises(RendezvousError, match="rank 9 does not exist"):
        find_store(lambda: [at(stage.server.port)], False, "somewhere", "w", 9, 10, host_store)

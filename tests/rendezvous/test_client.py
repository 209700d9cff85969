"""A worker's end of the store: many threads, Ctrl-C, and a store that is gone or stuck."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_stage import Stage

from eventually import eventually
from farcall.errors import ProtocolError, RendezvousError, RendezvousTimeoutError
from farcall.protocol.handshake import Welcome
from farcall.rendezvous import client as client_module
from farcall.rendezvous.client import Limit, StoreClient
from farcall.rendezvous.messages import Number, pack_reply


@pytest.fixture
def stuck() -> Iterator[tuple[StoreClient, socket.socket]]:
    """A client, and the other end of its connection, which nobody serves."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    client = StoreClient(ours, Welcome("host", 0), grace=0.02)
    with theirs:
        yield client, theirs
        theirs.shutdown(socket.SHUT_RDWR)  # else close would wait for it
        client.close()


@pytest.fixture(autouse=True)
def _unix_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "peer_text", lambda sock: "a test")


def test_many_threads_wait_at_once_and_each_gets_its_own(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(0)
    waiting = [background.submit(client.get, f"k{number}", 30) for number in range(16)]
    for number in reversed(range(16)):
        client.set(f"k{number}", b"%d" % number)
    assert [future.result(10) for future in waiting] == [b"%d" % number for number in range(16)]
    assert not client._pending


def test_many_threads_count_without_losing_any(stage: Stage, background: ThreadPoolExecutor) -> None:
    clients = [stage.client(rank) for rank in range(4)]
    sums = background.map(lambda number: clients[number % 4].add("n", 1), range(400))
    assert sorted(sums) == list(range(1, 401))


def test_a_get_in_vain_ends_at_its_time(stage: Stage) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match=r"after 0.05 s the store has no key 'k'"):
        stage.client(0).get("k", 0.05)
    assert 0.05 <= time.monotonic() - started < 3


def test_a_collect_in_vain_says_what_was_there(stage: Stage) -> None:
    client = stage.client(0)
    client.set("p/2", b"")
    client.set("p/1", b"")
    with pytest.raises(RendezvousTimeoutError, match="2 of 3 keys that begin with 'p/': p/1, p/2") as caught:
        client.collect("p/", 3, 0.01)
    assert caught.value.present == ("p/1", "p/2")
    assert isinstance(caught.value, TimeoutError)


def test_a_wait_without_end_is_allowed(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(0)
    waiting = background.submit(client.get, "k", math.inf)
    eventually(lambda: client._pending)
    client.set("k", b"v")
    assert waiting.result(10) == b"v"


def test_what_the_store_cannot_do_is_an_error(stage: Stage) -> None:
    client = stage.client(0)
    client.set("k", b"text")
    with pytest.raises(RendezvousError, match="is not a number"):
        client.add("k", 1)
    for amount in (2**64, -(2**63) - 1):
        with pytest.raises(RendezvousError, match="the amount to add to 'n' exceeds 64 bits; nothing was added"):
            client.add("n", amount)
    assert client.add("n", 2**63 - 1) == 2**63 - 1


def test_a_value_that_is_too_large_is_refused_here(stage: Stage) -> None:
    client = stage.client(0)
    with pytest.raises(RendezvousError, match="too large"):
        client.set("k", bytes(17 * 1024 * 1024))
    client.set("k", b"small")


def test_ctrl_c_ends_a_wait_at_once_and_the_client_lives_on(stage: Stage) -> None:
    client = stage.client(0)

    def interrupt() -> None:
        eventually(lambda: stage.server._state._gets and not client._send_lock.locked())  # it waits, or is about to
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        client.get("never", 30)
    assert time.monotonic() - started < 10
    thread.join()
    assert not client._pending
    client.set("never", b"late")  # the reply to the abandoned wait comes now, and finds nobody
    assert client.get("never", 1) == b"late"


def test_when_the_store_dies_every_wait_ends(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(1)
    waiting = [background.submit(client.get, f"k{number}", math.inf) for number in range(8)]
    eventually(lambda: len(client._pending) == 8)
    stage.server._state.fail_waits = lambda reason: None  # type: ignore[method-assign]  # as if it had been killed
    stage.server.close(linger=0)
    for future in waiting:
        with pytest.raises(RendezvousError, match=r"the store in 'host' \(rank 0\) at a test is gone"):
            future.result(10)
    for ask in (lambda: client.set("k", b""), lambda: client.read(""), lambda: client.collect("", 1, 60)):
        with pytest.raises(RendezvousError, match="is gone"):
            ask()
    client.close()


def test_a_stuck_store_ends_waits_a_little_late(stuck: tuple[StoreClient, socket.socket]) -> None:
    with pytest.raises(RendezvousTimeoutError, match="does not answer; its worker may be frozen or stopped"):
        stuck[0].get("k", 0.01)


def test_a_stuck_store_that_takes_nothing_ends_the_sending(
    stuck: tuple[StoreClient, socket.socket],
) -> None:
    stuck[0]._sock.settimeout(0.02)
    with pytest.raises(RendezvousError, match="is gone: timed out"):
        stuck[0].set("k", bytes(8 * 1024 * 1024))
    with pytest.raises(RendezvousError, match="is gone"):
        stuck[0].read("")


def test_a_broken_off_request_ends_the_connection(
    stuck: tuple[StoreClient, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, theirs = stuck

    class Interrupted:
        def sendall(self, data: bytes) -> None:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(sock, name)

    sock = client._sock
    with monkeypatch.context() as patch:
        patch.setattr(client, "_sock", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            client.set("k", b"")
    with pytest.raises(RendezvousError, match="sending a request to it was interrupted"):
        client.set("k", b"")
    theirs.settimeout(10)
    assert theirs.recv(1) == b""


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\1\0\0\0\xc1"])
def test_a_store_that_sends_garbage_is_gone(stuck: tuple[StoreClient, socket.socket], garbage: bytes) -> None:
    stuck[1].sendall(garbage)
    with pytest.raises(RendezvousError, match="is gone: a "):
        stuck[0].get("k", 10)


def test_a_reply_of_the_wrong_kind_is_a_protocol_error(stuck: tuple[StoreClient, socket.socket]) -> None:
    client, theirs = stuck
    replier = threading.Thread(target=lambda: theirs.recv(100) and theirs.sendall(pack_reply(Number(1, 1))))
    replier.start()
    with pytest.raises(ProtocolError, match="answered a Set with a Number"):
        client.set("k", b"")
    replier.join()


def test_close_ends_the_waits_of_other_threads(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(1)
    waiting = background.submit(client.get, "k", 60)
    eventually(lambda: stage.server._state._gets)
    client.close()
    with pytest.raises(RendezvousError, match="was closed by this worker"):
        waiting.result(10)
    with pytest.raises(RendezvousError, match="was closed by this worker"):
        client.set("k", b"")


def test_close_may_be_called_twice_and_calls_what_comes_after_once(stage: Stage) -> None:
    calls: list[str] = []
    client = stage.client(1)
    client._after_close = lambda: calls.append("closed")
    client.close()
    client.close()
    assert calls == ["closed"]


def test_close_waits_until_the_good_bye_is_read(stage: Stage, background: ThreadPoolExecutor) -> None:
    client, reading = stage.client(1), threading.Event()
    handle = stage.server._state.handle
    stage.server._state.handle = lambda *args: reading.wait(10) and handle(*args)  # type: ignore[method-assign,assignment]
    closing = background.submit(client.close)
    with pytest.raises(TimeoutError):
        closing.result(0.1)
    reading.set()
    closing.result(10)
    assert stage.server._state.members == 0


def test_a_client_may_be_idle_for_longer_than_a_request_may_take(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.01)
    client = stage.client(1)
    with pytest.raises(RendezvousTimeoutError, match="has no key"):
        client.get("k", 0.1)


def test_close_of_a_dead_store_is_quiet(stage: Stage) -> None:
    client = stage.client(1)
    stage.server.close(linger=0)
    client.close()


@pytest.mark.parametrize("ask", ["set", "get", "add", "read", "collect"])
def test_when_the_host_is_known_to_be_lost_every_wait_ends(
    stuck: tuple[StoreClient, socket.socket], background: ThreadPoolExecutor, ask: str
) -> None:
    """It is frozen, and so its connection is open."""
    client, _ = stuck
    asked = {
        "set": lambda: client.set("k", b""),
        "get": lambda: client.get("k", 30),
        "add": lambda: client.add("k", 1),
        "read": lambda: client.read("k"),
        "collect": lambda: client.collect("k", 2, 30),
    }[ask]
    waiting = background.submit(asked)
    eventually(lambda: client._pending)
    client.report_lost(0, "worker 'host' was lost")
    why = r"the store in 'host' \(rank 0\) at a test is lost: worker 'host' was lost"
    with pytest.raises(RendezvousError, match=why):
        waiting.result(10)
    with pytest.raises(RendezvousError, match=why):
        asked()


def test_when_another_is_lost_nobody_waits_for_all_any_more(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(1)
    waiting, other = background.submit(client.collect, "p/", 3, 30), background.submit(client.get, "k", 30)
    eventually(lambda: len(client._pending) == 2)
    client.report_lost(2, "worker 'w2' was lost")
    with pytest.raises(RendezvousError, match=r"^worker 'w2' was lost$"):
        waiting.result(10)
    with pytest.raises(RendezvousError, match=r"^worker 'w2' was lost$"):
        client.collect("p/", 3, 30)
    client.set("k", b"v")  # all else goes on
    assert other.result(10) == b"v"


def test_what_is_asked_within_some_seconds_ends_in_them(stuck: tuple[StoreClient, socket.socket]) -> None:
    client, _ = stuck
    with client.within(30), client.within(0.02), pytest.raises(RendezvousTimeoutError, match="does not answer"):
        client.set("k", b"")
    with client.within(0.02), client.within(30), pytest.raises(RendezvousTimeoutError, match="does not answer"):
        client.set("k", b"")
    assert client._limit.deadline == math.inf


def test_a_limit_is_that_of_one_thread(background: ThreadPoolExecutor) -> None:
    limit = Limit()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    client = StoreClient(ours, Welcome("host", -1), limit=limit, good_bye_timeout=0)
    limit.deadline = time.monotonic() + 0.05
    with theirs:
        other = background.submit(client.read, "k")
        with pytest.raises(RendezvousTimeoutError, match="the store in 'host' at a test does not answer"):
            client.read("k")
        limit.deadline = 0.0
        with pytest.raises(RendezvousTimeoutError):
            client.read("k")
        assert not other.done()
        client.close()  # at once, and without a word
        assert b"good_bye" not in theirs.recv(4096)
        with pytest.raises(RendezvousError, match="closed by this worker"):
            other.result(10)


@pytest.mark.parametrize("how", ["reading", "sending"])
def test_that_the_store_is_lost_is_told_once(how: str) -> None:
    lost = threading.Semaphore(0)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    client = StoreClient(ours, Welcome("host", -1), on_lost=lost.release, good_bye_timeout=0)
    assert not client.is_ended
    if how == "sending":
        client._end("a request could not be sent")
    theirs.close()
    assert lost.acquire(timeout=10)
    assert client.is_ended
    client.close()
    assert not lost.acquire(blocking=False)


def test_that_it_was_closed_here_is_not_told(stage: Stage) -> None:
    lost = threading.Event()
    client = StoreClient(stage.hello(0), Welcome("host", 0), on_lost=lost.set)
    client.close()
    assert not lost.is_set()

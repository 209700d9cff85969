"""The store's thread when workers go, with a good-bye or without one, and its own end."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from rendezvous_stage import GROUP, Stage, wait_for_end

from eventually import eventually
from farcall.errors import RendezvousError
from farcall.rendezvous import server as server_module
from farcall.rendezvous.addresses import listen
from farcall.rendezvous.client import Candidate, try_candidate
from farcall.rendezvous.messages import Done, Get, Set, pack_request
from farcall.rendezvous.server import StoreServer
from farcall.security import Credentials

# -- who goes


def test_a_worker_that_vanishes_fails_the_collects(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(0)
    waiting = background.submit(client.collect, "p/", 2, 30)
    eventually(lambda: stage.server._state._collects)
    worker = stage.hello(1)
    worker.sendall(pack_request(Set(1, "p/1", b"")))
    assert worker.recv(100)
    worker.close()
    with pytest.raises(RendezvousError, match=r"'worker1' \(rank 1\) disconnected without leaving the group"):
        waiting.result(10)
    with pytest.raises(RendezvousError, match=r"'worker1' \(rank 1\)"):
        client.collect("p/", 2, 30)
    stage.client(1)
    waiting = background.submit(client.collect, "p/", 2, 30)
    client.set("p/0", b"")
    assert waiting.result(10) == {"p/0": b"", "p/1": b""}


def reset(sock: socket.socket) -> None:
    """Hangs up as one does that had not read all: the other end sees a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("is_known", [True, False])
def test_who_hangs_up_before_it_has_read_all_is_no_news(
    stage: Stage, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    """It found the answer slow, say, and tries again."""
    caplog.set_level(logging.DEBUG, server_module.__name__)
    sock = stage.hello(1) if is_known else stage.raw()
    eventually(lambda: stage.server._connections)
    reset(sock)
    eventually(lambda: not stage.server._connections)
    (record,) = [record for record in caplog.records if "closes the connection" in record.message]
    assert record.levelname == ("DEBUG" if is_known else "INFO")
    assert "the connection ended: [Errno 104] Connection reset by peer" in record.message
    assert ("left before it had proved" in record.message) is not is_known


def test_who_takes_no_answer_any_more_is_no_news(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, server_module.__name__)
    with stage.hello(1):
        (connection,) = stage.server._connections.values()
        connection.sock.shutdown(socket.SHUT_WR)  # as if the other end had closed it: what is sent breaks the pipe
        stage.server._state._reply(connection.number, Done(1))
        stage.client(0).set("k", b"")
        eventually(lambda: connection.number not in stage.server._connections)
    (record,) = [record for record in caplog.records if "closes the connection" in record.message]
    assert (record.levelname, "Broken pipe" in record.message) == ("DEBUG", True)


def test_a_connection_that_breaks_is_told(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    class Cut(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with stage.hello(1) as sock:
        (connection,) = stage.server._connections.values()
        connection.sock = Cut(fileno=connection.sock.detach())
        sock.sendall(b"x")
        eventually(lambda: not stage.server._connections)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "from 'worker1' (rank 1, " in record.message
    assert "the connection broke: [Errno 110] Connection timed out" in record.message


def test_a_killed_process_is_noticed(stage: Stage, background: ThreadPoolExecutor) -> None:
    program = (
        "import sys\n"
        "from farcall.rendezvous.client import StoreClient\n"
        "from farcall.rendezvous.client import Candidate, try_candidate\n"
        "place = Candidate('127.0.0.1', int(sys.argv[1]), 'the group')\n"
        "StoreClient(*try_candidate(place, 'victim', 3, 10)).get('never', 60)\n"
    )
    client = stage.client(0)
    waiting = background.submit(client.collect, "p/", 2, 30)
    with subprocess.Popen([sys.executable, "-c", program, str(stage.server.port)]) as victim:
        try:
            eventually(lambda: stage.server._state._gets)
        finally:
            victim.send_signal(signal.SIGKILL)
    with pytest.raises(RendezvousError, match=r"'victim' \(rank 3\) disconnected"):
        waiting.result(10)


def test_a_good_bye_fails_nothing(stage: Stage, background: ThreadPoolExecutor) -> None:
    client, other = stage.client(0), stage.client(1)
    waiting = background.submit(client.collect, "p/", 1, 30)
    eventually(lambda: stage.server._state._collects)
    other.close()
    assert stage.server._state.members == 1  # it was read before close returned
    client.set("p/", b"")
    assert waiting.result(10) == {"p/": b""}


def test_a_worker_that_does_not_read_its_replies_holds_up_nobody(stage: Stage) -> None:
    client = stage.client(0)
    client.set("k", bytes(4 * 1024 * 1024))
    with stage.hello(1) as lazy:
        for number in range(20):
            lazy.sendall(pack_request(Get(number, "k", 1)))
        eventually(lambda: any(connection.outgoing for connection in stage.server._connections.values()))
        client.set("other", b"v")
        assert client.get("other", 10) == b"v"
        # Only the first of its requests was answered; the others wait in the kernel, not as replies in our memory.
        assert sum(len(connection.outgoing) for connection in stage.server._connections.values()) < 100 * 1024 * 1024


@pytest.mark.parametrize(("world_size", "level"), [(2, logging.WARNING), (None, logging.INFO)])
def test_a_connection_that_breaks_is_worth_a_warning_where_nobody_may_go(
    world_size: int | None, level: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(store: StoreServer, connection: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "no way there")

    credentials = Credentials()
    server = StoreServer(listen("127.0.0.1", [0]), GROUP, world_size, "host", credentials=credentials)
    place = Candidate("127.0.0.1", server.port, GROUP)
    with caplog.at_level(logging.INFO):
        sock, _ = try_candidate(place, "worker1", 1, 10, credentials)
        monkeypatch.setattr(StoreServer, "_receive", broken)
        with sock:
            sock.sendall(b"anything")
            eventually(lambda: "the connection broke" in caplog.text)
    server.close(linger=0)
    assert [record.levelno for record in caplog.records if "broke" in record.message] == [level]


# -- the end


def test_close_waits_for_the_others_to_go(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(1)
    closing = background.submit(stage.server.close, 30)
    eventually(lambda: stage.server._listener.fileno() < 0)
    client.set("k", b"v")
    assert client.get("k", 10) == b"v"
    with pytest.raises(ConnectionRefusedError):
        stage.raw()
    client.close()
    closing.result(10)


def test_close_does_not_wait_for_ever_and_tells_those_who_wait(stage: Stage, background: ThreadPoolExecutor) -> None:
    client = stage.client(1)
    waiting = background.submit(client.get, "never", 60)
    eventually(lambda: stage.server._state._gets)
    stage.server.close(linger=0.05)
    with pytest.raises(RendezvousError, match=r"the store was closed by 'host' \(rank 0\)"):
        waiting.result(10)
    with pytest.raises(RendezvousError, match=r"the store in 'host' \(rank 0\) at 127.0.0.1:[0-9]+ is gone"):
        client.get("never", 60)


def test_close_does_not_wait_for_strangers(stage: Stage) -> None:
    with stage.raw() as stranger:
        eventually(lambda: stage.server._connections)
        stage.server.close(linger=60)
        assert wait_for_end(stranger) == b""


def test_who_closes_again_waits_no_longer_for_the_others(stage: Stage, background: ThreadPoolExecutor) -> None:
    """As after Ctrl-C in the midst of waiting for them."""
    stage.client(1)
    closing = background.submit(stage.server.close, 60)
    eventually(lambda: stage.server._listener.fileno() < 0)
    assert not closing.done()
    stage.server.close(linger=0)
    stage.server.close(linger=60)
    closing.result(10)


def test_close_may_be_called_twice(stage: Stage) -> None:
    stage.server.close()
    stage.server.close()


def test_the_port_is_free_again_at_once_many_times() -> None:
    port = 0
    for _ in range(20):
        server = StoreServer(listen("127.0.0.1", [port]), "g", 2, "host")
        port = server.port
        with socket.create_connection(("127.0.0.1", port)):
            server.close(linger=0)


def test_the_thread_ends_and_is_a_daemon(stage: Stage) -> None:
    assert stage.server._thread.daemon
    stage.server.close()
    assert not stage.server._thread.is_alive()


def test_a_store_whose_thread_fails_is_gone_for_its_clients(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    client = stage.client(0)
    stage.server._state.expire = lambda now: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(RendezvousError):
        client.get("never", 60)
    stage.server.close()
    assert "ZeroDivisionError" in caplog.text


def test_what_a_request_breaks_is_only_its_connection(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    client, other = stage.client(0), stage.client(1)
    handle = stage.server._state.handle

    def broken(connection: int, request: object, now: float) -> None:
        if isinstance(request, Set) and request.key == "bad":
            raise RuntimeError("a bug")
        handle(connection, request, now)  # type: ignore[arg-type]

    stage.server._state.handle = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(RendezvousError, match="is gone"):
        other.set("bad", b"")
    client.set("good", b"")
    assert "a bug" in caplog.text

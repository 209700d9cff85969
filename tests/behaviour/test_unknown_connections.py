"""Connections of those who do not belong to the group: raw bytes at the sockets of a worker and of its store."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hostile_member import CALLS, STORE, HandMade, listening_ports

import farcall as rpc
from eventually import eventually
from gates import SOON, arrived, new_gate, wait_at
from ports import free_port

pytestmark = pytest.mark.timeout(60)

SECRET = "the secret of this test"


class Worker:
    """This process is a worker, which listens at TCP ports of loopback, and hosts its store."""

    def __init__(self, **options: Any) -> None:
        self.store = free_port()
        before = listening_ports()
        given = {"init_method": f"tcp://127.0.0.1:{self.store}", "transports": ("tcp",), "secret": SECRET, **options}
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(**given))
        (self.port,) = listening_ports() - before - {self.store}

    def is_well(self) -> bool:
        return rpc.rpc_sync("w0", int, args=(5,)) == 5 and rpc.remote("w0", int, args=(6,)).to_here() == 6


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    rpc.shutdown(graceful=False)


def is_closed(sock: socket.socket) -> bool:
    """Waits until the other side closes the connection; whether it does."""
    sock.settimeout(SOON)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "random": os.urandom(5000),
    "right beginning": b"farcall\0" + os.urandom(500),
    "huge length": b"farcall\0" + b"\xff" * 100,
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("place", ["port", "store"])
def test_bytes_that_are_no_handshake_close_the_connection_and_harm_nobody(
    worker: Worker, place: str, kind: str
) -> None:
    gate = new_gate("call")
    future = rpc.rpc_async("w0", wait_at, args=("call", 7))
    assert arrived["call"].wait(SOON)
    with socket.create_connection(("127.0.0.1", getattr(worker, place)), SOON) as sock:
        try:
            sock.sendall(GARBAGE[kind])
        except ConnectionError:
            pass  # it was closed before it had read all of it
        assert is_closed(sock)
    assert worker.is_well()
    gate.set()
    assert future.wait() == 7


@pytest.mark.parametrize("place", ["port", "store"])
def test_a_connection_that_does_not_know_the_secret_is_refused(worker: Worker, place: str) -> None:
    purpose = CALLS if place == "port" else STORE
    with HandMade(getattr(worker, place), purpose, "another secret of some length") as hand:
        answer = hand.greet(group="g", name="w0", wanted="w0", wanted_number=0, number=0, host="", addresses=[])
        assert answer["type"] != "welcome"
        assert hand.is_closed()
    assert worker.is_well()


def test_a_connection_that_ends_in_the_middle_of_its_handshake_harms_nobody(worker: Worker) -> None:
    for size in (0, 1, 7, 8, 15, 16, 40):
        with socket.create_connection(("127.0.0.1", worker.port), SOON) as sock:
            sock.sendall((b"farcall\0" + bytes(100))[:size])
    assert worker.is_well()


def test_of_too_many_silent_connections_the_oldest_are_closed() -> None:
    worker = Worker(max_strangers=8, proof_timeout=600)
    try:
        with ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", worker.port), SOON)) for _ in range(30)
            ]
            assert is_closed(silent[0])
            assert worker.is_well()
            eventually(lambda: sum(is_open(sock) for sock in silent) <= 8)
            assert is_open(silent[-1])
            assert worker.is_well()
    finally:
        rpc.shutdown(graceful=False)


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(65536))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_silent_connection_is_closed_when_its_time_is_over() -> None:
    worker = Worker(proof_timeout=0.2)
    try:
        for port in (worker.port, worker.store):
            with socket.create_connection(("127.0.0.1", port), SOON) as sock:
                assert is_closed(sock)
        assert worker.is_well()
    finally:
        rpc.shutdown(graceful=False)


def test_a_handshake_that_is_too_long_is_refused() -> None:
    worker = Worker(max_greeting_size=1024)
    try:
        with HandMade(worker.port, CALLS, SECRET) as hand:
            hand.send(bytes(2000))
            assert hand.is_closed()
        assert worker.is_well()
    finally:
        rpc.shutdown(graceful=False)

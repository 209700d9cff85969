"""The yardstick: the least that Python can do for a pickled call over a socket.

No thread to hop to, no errors, no futures, no second call under way.

A request is the pickle of (id, function name, args, kwargs), a reply that of (id, result), each behind its length. One
side has at most one message under way, so what `recv` returns is one message or the beginning of one.

`RawCopy` is the yardstick for large data: bytes there and back over TCP, sent from where they are and received into
memory that is there already, with nothing else around it.

Two ways to wait: blocking, and spinning, where both ends ask `poll` without waiting for at most `SPIN` seconds before
they sleep. Trying `recv` on a non-blocking socket instead was not faster.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from farcall.bench import payloads
from farcall.bench.system import START_LIMIT_S, Address, Caller, Server, System

SPIN: Final = 100e-6
"""Seconds; the default of farcall's `spin` option, so that both are alike."""
_LENGTH: Final = struct.Struct("!I")
_SIZE: Final = struct.Struct("!Q")
_READ: Final = 65536


def noop() -> None:
    """The callee."""


_FUNCTIONS: Final[dict[str, Callable[..., object]]] = {"noop": noop}


class _Link:
    """Messages over one connected socket."""

    def __init__(self, sock: socket.socket, spins: bool) -> None:
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        sock.setblocking(True)
        self._recv = self._recv_spinning if spins else self._recv_blocking
        self._arrival = select.poll()
        self._arrival.register(sock, select.POLLIN)

    def send(self, message: object) -> None:
        body = pickle.dumps(message, 5)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message. Raises EOFError once the other end has hung up."""
        data = self._recv()
        while len(data) < 4 or len(data) < 4 + _LENGTH.unpack_from(data)[0]:
            data += self._recv()
        return pickle.loads(memoryview(data)[4:])

    def send_bytes(self, data: bytes | bytearray) -> None:
        self._sock.sendall(data)

    def receive_into(self, memory: bytearray) -> bytearray:
        """The memory, filled. Raises EOFError once the other end has hung up."""
        view = memoryview(memory)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return memory

    def _recv_blocking(self) -> bytes:
        data = self._sock.recv(_READ)
        if not data:
            raise EOFError
        return data

    def _recv_spinning(self) -> bytes:
        poll = self._arrival.poll
        if not poll(0):
            deadline = time.perf_counter() + SPIN
            while not poll(0):
                if time.perf_counter() > deadline:
                    poll()
                    break
        return self._recv_blocking()  # does not block: something is there

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was quicker
        self._sock.close()


class _RawServer:
    """Serves one caller in a thread that reads, runs and answers by itself; the main thread sleeps meanwhile."""

    def __init__(self, listener: socket.socket, spins: bool) -> None:
        self._listener = listener
        self._spins = spins
        self._link: _Link | None = None
        self._thread = threading.Thread(target=self._run, name="raw-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed, or nobody came in time: the caller's side reports it
        link = self._link = _Link(connection, self._spins)
        try:
            while True:
                call_id, name, args, kwargs = link.receive()
                link.send((call_id, _FUNCTIONS[name](*args, **kwargs)))
        except (EOFError, OSError):
            return

    def close(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # ends a thread that still waits for its caller
        except OSError:
            pass
        if self._link is not None:
            self._link.close()
        self._thread.join(5.0)
        self._listener.close()


class _RawCaller:
    def __init__(self, link: _Link) -> None:
        self._link = link
        self._calls = 0

    def noop(self) -> None:
        self._calls += 1
        self._link.send((self._calls, "noop", (), {}))
        call_id, result = self._link.receive()
        if call_id != self._calls or result is not None:
            raise RuntimeError(f"call {self._calls} got the reply of call {call_id}: {result!r}")

    def pipelined(self, calls: int) -> None:
        raise NotImplementedError("the ping-pong has one call under way at a time")

    def close(self) -> None:
        self._link.close()


class Raw(System):
    """Pickled ping-pong over a Unix or a TCP socket, spinning or blocking."""

    pipelines = False

    def __init__(self, kind: str, spins: bool) -> None:
        self._unix = kind == "unix"
        self._spins = spins
        way = "spin" if spins else "block"
        self.name = f"raw-{way}-{kind}"
        self.label = f"raw socket, {'spinning' if spins else 'blocking'}, {kind}"

    def serve(self, address: Address) -> Server:
        if self._unix:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address.socket_path)
            listener.listen(1)
        else:
            listener = socket.create_server(("127.0.0.1", address.port), backlog=1)
        listener.settimeout(START_LIMIT_S)
        return self._server(listener)

    def connect(self, address: Address) -> Caller:
        if self._unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(START_LIMIT_S)
            sock.connect(address.socket_path)
        else:
            sock = socket.create_connection(("127.0.0.1", address.port), START_LIMIT_S)
        return self._caller(_Link(sock, self._spins))

    def _server(self, listener: socket.socket) -> Server:
        return _RawServer(listener, self._spins)

    def _caller(self, link: _Link) -> Caller:
        return _RawCaller(link)


class _CopyServer(_RawServer):
    """Sends back what it gets, each message behind its length."""

    def _run(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        link = self._link = _Link(connection, self._spins)
        memory = bytearray()
        try:
            while True:
                size = _SIZE.unpack(link.receive_into(bytearray(_SIZE.size)))[0]
                if len(memory) != size:
                    memory = bytearray(size)
                link.send_bytes(link.receive_into(memory))
        except (EOFError, OSError):
            return


class _CopyCaller(_RawCaller):
    def __init__(self, link: _Link) -> None:
        super().__init__(link)
        self._memory = bytearray()

    def noop(self) -> None:
        self.echo(bytearray(1))

    def payload(self, size: int) -> bytearray:
        return bytearray(payloads.plain(size))

    def echo(self, payload: bytearray) -> bytearray:
        """What came back; it is overwritten by the next."""
        if len(self._memory) != len(payload):
            self._memory = bytearray(len(payload))
        self._link.send_bytes(_SIZE.pack(len(payload)))
        self._link.send_bytes(payload)
        return self._link.receive_into(self._memory)

    def in_flight(self, calls: int, window: int) -> None:
        raise NotImplementedError("the copy has one message under way at a time")


class RawCopy(Raw):
    """Bytes there and back over TCP, by `sendall` and `recv_into`."""

    def __init__(self) -> None:
        super().__init__("tcp", spins=False)
        self.name = "raw-copy-tcp"
        self.label = "raw socket, copy, tcp"

    def _server(self, listener: socket.socket) -> Server:
        return _CopyServer(listener, self._spins)

    def _caller(self, link: _Link) -> Caller:
        return _CopyCaller(link)

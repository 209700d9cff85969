"""What is measured between hosts: farcall in clear text and encrypted, torch's RPC, and plain TLS sockets.

The server of each is on the second host (`namespaces`), the caller on the first. What goes over TCP alone between real
hosts goes over TCP alone here: both are on one machine in truth, so shared memory is turned off.
"""

from __future__ import annotations

import os
import pickle
import socket
import ssl
import struct
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import Any, Final

from farcall.bench import payloads
from farcall.bench.farcall_rpc import FarcallEnd
from farcall.bench.system import CALLER, OWNER, START_LIMIT_S, Address, Caller, Server, System
from hosts.namespaces import FAR, INTERFACE, enter
from systems.torch_rpc import TorchEnd

_HEAD: Final = struct.Struct("!Q")


@dataclass(frozen=True)
class Place(Address):
    """An address on the second host."""

    host: str = FAR
    namespace: str = ""
    """The namespace of the second host, as a file."""


class FarcallBetweenHosts(System):
    """farcall over TCP."""

    package = "farcall"
    refers = threads = starts_together = True

    def __init__(self, encrypts: bool, source: str = "") -> None:
        """Chooses one of the kinds.

        Args:
            encrypts: Whether the connection is encrypted.
            source: The directory `src` of another checkout, whose farcall is measured; by default the one here.
        """
        self._encrypts = encrypts
        self._source = source
        way = "encrypted" if encrypts else "clear"
        self.name = f"farcall-{way}" + ("-beside" if source else "")
        self.label = f"farcall, {'encrypted' if encrypts else 'clear text'}" + (
            " (the other checkout)" if source else ""
        )

    def serve(self, address: Address) -> Server:
        _go_to(address)
        return self._end(OWNER, 0, address)

    def connect(self, address: Address) -> Caller:
        return self._end(CALLER, 1, address)

    def _end(self, name: str, rank: int, address: Address) -> FarcallEnd:
        if self._source:
            sys.path.insert(0, self._source)
        return FarcallEnd(name, rank, address, "tcp", encrypts=self._encrypts)


class TorchBetweenHosts(System):
    """torch's RPC with what it chooses between hosts: shared memory is left out of its lists."""

    name = "torch"
    label = "torch.distributed.rpc, clear text"
    package = "torch"
    refers = threads = starts_together = True

    def serve(self, address: Address) -> Server:
        _go_to(address)
        return self._end(OWNER, 0, address)

    def connect(self, address: Address) -> Caller:
        return self._end(CALLER, 1, address)

    def _end(self, name: str, rank: int, address: Address) -> TorchEnd:
        for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            os.environ[variable] = INTERFACE  # else it takes the address that the host's name has
        return TorchEnd(name, rank, address, _transports=["uv"], _channels=["mpt_uv", "basic"])


class PlainTls(System):
    """Two blocking `ssl` sockets with nothing around them: the least that Python can do for encrypted bytes.

    A no-op is a pickled request and a pickled reply. Payloads are sent from where they are, and received into memory
    that is there already.
    """

    name = "plain-tls"
    label = "plain `ssl` sockets, blocking"
    pipelines = False

    def serve(self, address: Address) -> Server:
        _go_to(address)
        return _TlsServer(socket.create_server((address.host, address.port), backlog=1))

    def connect(self, address: Address) -> Caller:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        sock = socket.create_connection((address.host, address.port), START_LIMIT_S)
        return _TlsCaller(context.wrap_socket(sock))


class _Stream:
    """Messages over one TLS socket."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(True)

    def send(self, message: object) -> None:
        body = pickle.dumps(message, 5)
        self._sock.sendall(_HEAD.pack(len(body)) + body)

    def receive(self) -> Any:
        data = self._recv()
        while len(data) < _HEAD.size or len(data) < _HEAD.size + _HEAD.unpack_from(data)[0]:
            data += self._recv()
        return pickle.loads(memoryview(data)[_HEAD.size :])

    def _recv(self) -> bytes:
        data = self._sock.recv(65536)
        if not data:
            raise EOFError
        return data

    def send_bytes(self, data: bytearray) -> None:
        self._sock.sendall(data)

    def receive_into(self, memory: bytearray) -> None:
        view = memoryview(memory)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]

    def close(self) -> None:
        self._sock.close()


class _TlsServer:
    """Serves one caller in a thread of its own."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._context = _server_context()
        self._thread = threading.Thread(target=self._run, name="plain-tls", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            sock, _ = self._listener.accept()
            stream = _Stream(self._context.wrap_socket(sock, server_side=True))
            memory = bytearray()
            while True:
                size = stream.receive()
                if size and len(memory) != size:
                    memory = bytearray(size)
                if size:
                    stream.receive_into(memory)
                    stream.send_bytes(memory)
                else:
                    stream.send(None)
        except (EOFError, OSError):
            return

    def close(self) -> None:
        self._thread.join(5.0)
        self._listener.close()


class _TlsCaller:
    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._stream = _Stream(sock)
        self._memory = bytearray()

    def noop(self) -> None:
        self._stream.send(0)
        self._stream.receive()

    def payload(self, size: int) -> bytearray:
        return bytearray(payloads.plain(size))

    def echo(self, payload: bytearray) -> bytearray:
        if len(self._memory) != len(payload):
            self._memory = bytearray(len(payload))
        self._stream.send(len(payload))
        self._stream.send_bytes(payload)
        self._stream.receive_into(self._memory)
        return self._memory

    def pipelined(self, calls: int) -> None:
        raise NotImplementedError("the ping-pong has one call under way at a time")

    def in_flight(self, calls: int, window: int) -> None:
        raise NotImplementedError("the ping-pong has one call under way at a time")

    def close(self) -> None:
        self._stream.close()


def _server_context() -> ssl.SSLContext:
    """Returns a context with a certificate as farcall makes them."""
    from farcall.security.encryption import self_signed

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(self_signed()[0])
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _go_to(address: Address) -> None:
    """Moves this process to the second host."""
    if isinstance(address, Place):
        enter(address.namespace)

"""The protocol of farcall by hand, for tests that send what no worker would: raw bytes over a socket.

It knows the layout from the documentation of the protocol. Only the number of the protocol's version is farcall's own,
so that a new version does not need a change here unless the layout itself has changed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from typing import Any

import msgspec

from farcall.protocol.handshake import VERSION as VERSION

CALLS, STORE = 1, 2
CALL, KEEP, RESULT, FAILURE, REFERENCES, CONTROL, GOSSIP, CANCEL = range(1, 9)
HAS_REFERENCES, HAS_ANNOTATIONS = 1, 2
INLINE, ANNOUNCE, CHUNK, SHARED, RETURNED, OFFER, OPENED, MISSING, SETUP, SETUP_DONE, LONG = range(1, 12)
_PROLOGUE = struct.Struct("<8sHH")
_WORD = struct.Struct("<I")
_INTERNAL = 1 << 31
_WHOLE_MAX_BYTES = 1 << 16


def header(kind: int, flags: int = 0, callee_size: int = 0, milliseconds: int = 0, call_id: int = 0) -> bytes:
    """The first 16 bytes of a frame between workers."""
    return struct.pack("<BBHIQ", kind, flags, callee_size, milliseconds, call_id)


def internal_frames(frame: bytes, number: int = 1) -> list[bytes]:
    """The internal frames in which a link sends a large frame."""
    chunks = [frame[begin : begin + _WHOLE_MAX_BYTES] for begin in range(0, len(frame), _WHOLE_MAX_BYTES)]
    announcement = struct.pack("<BBHIQ", ANNOUNCE, 0, 0, number, len(frame))
    return [announcement, *(struct.pack("<BxxxI", CHUNK, number) + chunk for chunk in chunks)]


def _sockets_of_this_process() -> set[str]:
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return inodes


def listening_ports() -> set[int]:
    """The TCP ports at which this process listens."""
    inodes = _sockets_of_this_process()
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def listening_paths() -> set[str]:
    """The paths of unix sockets at which this process listens."""
    inodes = _sockets_of_this_process()
    with open("/proc/net/unix", encoding="utf-8") as table:
        rows = [line.split() for line in table][1:]
    accepts = 0x10000  # the flag __SO_ACCEPTCON
    bound = [row for row in rows if len(row) == 8 and int(row[3], 16) & accepts]
    return {row[7].removesuffix(".new") for row in bound if f"socket:[{row[6]}]" in inodes}


class HandMade:
    """A connection that says what it is told to: to a port of 127.0.0.1, to a unix socket, or one that was accepted."""

    def __init__(self, place: int | str | socket.socket, purpose: int, secret: str) -> None:
        if isinstance(place, socket.socket):
            self.sock = place
            self.sock.settimeout(20)
        elif isinstance(place, int):
            self.sock = socket.create_connection(("127.0.0.1", place), 20)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(20)
            self.sock.connect(place)
        self._purpose = purpose
        self._secret = secret.encode()
        self._has_sent = self._has_received = False
        self.last_frame = b""
        """What came last, as it came."""

    def __enter__(self) -> HandMade:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def greet(self, **hello: Any) -> dict[str, Any]:
        """The other side's last word: a welcome or a refusal. The proof is right if the secret is."""
        body = msgspec.msgpack.encode({"type": "hello", "rank": 0, "nonce": secrets.token_bytes(32), **hello})
        self.send(body)
        answer = self.receive()
        if answer["type"] != "challenge":
            return answer
        mac = proof(self._secret, b"the side that connects", self._purpose, body, answer["nonce"])
        self.send(msgspec.msgpack.encode({"type": "proof", "mac": mac}))
        while (answer := self.receive())["type"] == "proof":
            pass
        return answer

    def send(self, body: bytes, version: int = VERSION) -> None:
        """A message of the handshake."""
        prologue = b""
        if self._purpose == STORE or not self._has_sent:
            prologue = _PROLOGUE.pack(b"farcall\0", version, self._purpose)
        self._has_sent = True
        self.sock.sendall(prologue + _WORD.pack(len(body)) + body)

    def receive(self) -> dict[str, Any]:
        """A message of the handshake."""
        if self._purpose == STORE or not self._has_received:
            magic, version, purpose = _PROLOGUE.unpack(self.exactly(_PROLOGUE.size))
            assert (magic, version, purpose) == (b"farcall\0", VERSION, self._purpose)
        self._has_received = True
        message: dict[str, Any] = msgspec.msgpack.decode(self.receive_frame())
        return message

    def receive_frame(self) -> bytes:
        """The next frame of the link, whatever it is."""
        (word,) = _WORD.unpack(self.exactly(_WORD.size))
        self.last_frame = self.exactly(word & ~_INTERNAL)
        return self.last_frame

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("it hung up")
            data += piece
        return data

    def ask_store(self, **request: Any) -> dict[str, Any]:
        """One request to a store, and its reply."""
        body = msgspec.msgpack.encode({"id": 1, **request})
        self.sock.sendall(struct.pack("<I", len(body)) + body)
        (length,) = struct.unpack("<I", self.exactly(4))
        reply: dict[str, Any] = msgspec.msgpack.decode(self.exactly(length))
        return reply

    def frame(self, kind: int, body: bytes, **fields: int) -> None:
        """A frame between workers; its header has these fields."""
        frame = header(kind, **fields) + body
        if len(frame) <= _WHOLE_MAX_BYTES:
            self.sock.sendall(_WORD.pack(len(frame)) + frame)
        else:
            for internal in internal_frames(frame):
                self.internal(internal)

    def internal(self, data: bytes) -> None:
        """An internal frame of the link."""
        self.sock.sendall(_WORD.pack(len(data) | _INTERNAL) + data)

    def is_closed(self) -> bool:
        """Waits for the end; whether it comes."""
        try:
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


def network_of_this_process() -> str:
    """What a hello says of the network namespace; releases that do not know it ignore it."""
    from farcall.transports import network

    function = getattr(network, "network_identity", str)
    identity: str = function()
    return identity


class HandMadeCallee:
    """A member that others call, and that answers what it is told to."""

    def __init__(self, secret: str, name: str, number: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(20)
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._secret = secret.encode()
        self.name = name
        self._welcome = {"type": "welcome", "name": name, "rank": -1, "number": number}

    def __enter__(self) -> HandMadeCallee:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def accept(self) -> HandMade:
        """The next connection, once it is welcome."""
        hand = HandMade(self._listener.accept()[0], CALLS, "")
        hand.receive()
        hello, nonce = hand.last_frame, secrets.token_bytes(32)
        hand.send(msgspec.msgpack.encode({"type": "challenge", "nonce": nonce}))
        hand.receive()
        mac = proof(self._secret, b"the side that listens", CALLS, hello, nonce)
        hand.send(msgspec.msgpack.encode({"type": "proof", "mac": mac}))
        hand.send(msgspec.msgpack.encode(self._welcome))
        return hand


def proof(secret: bytes, side: bytes, purpose: int, hello: bytes, nonce: bytes) -> bytes:
    """What shows that one end of a connection without encryption knows the secret."""
    parts = (f"farcall proof {VERSION}".encode(), side, bytes([purpose]), hello, nonce, b"")
    return hmac.digest(secret, b"".join(struct.pack("<Q", len(part)) + part for part in parts), "sha256")

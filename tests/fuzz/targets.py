"""What is fuzzed: each target takes any bytes, and raises only if something is wrong with the decoder.

A decoder may give a message or raise its one error; it must do the same however the bytes are cut.
"""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from farcall.errors import NotAllowedError, ProtocolError, SerializationError
from farcall.protocol import frames as wire
from farcall.protocol import membership_messages
from farcall.protocol.handshake import (
    Challenge,
    Hello,
    Proof,
    Purpose,
    Welcome,
    encode,
    pack,
    pack_prologue,
    take,
    unpack,
)
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, ForkRequest
from farcall.rendezvous.messages import (
    Add,
    Collect,
    Get,
    GoodBye,
    Set,
    pack_reply,
    pack_request,
    take_frame,
    unpack_reply,
    unpack_request,
)
from farcall.rendezvous.server_state import StoreState
from farcall.runtime.reference_outbox import pack_control, unpack_control
from farcall.security import ClientHandshake, Secret, ServerHandshake
from farcall.security.allowed import AllowList
from farcall.serialization import decode_failure, encode_failure
from farcall.serialization.payload import dumps_arguments
from farcall.serialization.restricted.unpickler import loads_restricted
from farcall.transports import shm_buffers
from farcall.transports.base import LinkOptions
from farcall.transports.buffer_pool import BufferPool
from farcall.transports.large_frames import pack_announcement, pack_chunk_header, pack_inline, pack_supply
from farcall.transports.shm_segments import SegmentPool
from farcall.transports.stream import INTERNAL, StreamLink
from farcall.transports.unix import LONG, SETUP, UnixLink

_SECRET: Final = Secret("the secret of the fuzzing")
_MAX_FRAME_SIZE: Final = 1 << 20
_HANDSHAKE_LIMIT: Final = 1 << 12
_HELLO: Final = Hello("g", "a", 0, "b", nonce=bytes(32))


class _NoPoller:
    """For links that no executor reads."""

    has_rings = False
    leader_event = standby_event = -1

    def await_room(self, link: object, is_awaited: bool) -> None: ...


_SEGMENTS: Final = SegmentPool(1 << 22, 8, lambda problem: None)
_OPTIONS: Final = LinkOptions(
    cast("Any", _NoPoller()), _SEGMENTS, BufferPool(0), 0.0, copy_shared=True, max_frame_size=_MAX_FRAME_SIZE
)


def frames(data: bytes) -> None:
    """What comes through a socket once a link is established, in one piece and in small ones: the outcome is the same.

    Then the frames themselves, as a worker takes them apart.
    """
    whole, pieces = _receive_all(data, max(1, len(data))), _receive_all(data, 7)
    assert whole == pieces, (whole, pieces)
    for frame, _ in whole[0]:
        _take_apart(frame)


def _receive_all(data: bytes, step: int) -> tuple[list[tuple[bytes, list[bytes]]], bool]:
    """The frames of a link that receives these bytes, and whether it was closed for them."""
    ours, theirs = socket.socketpair()
    link = StreamLink(ours, "it", _HANDSHAKE_LIMIT)
    received: list[tuple[bytes, list[bytes]]] = []
    try:
        theirs.sendall(pack_prologue() + struct.pack("<I", 0))
        assert link.receive() == [(b"", ())]
        link.establish(_OPTIONS)
        for begin in range(0, len(data), step):
            theirs.sendall(data[begin : begin + step])
            size = link.counts()[0] + len(data[begin : begin + step])
            while link.counts()[0] < size:
                received += [(bytes(frame), [bytes(each) for each in buffers]) for frame, buffers in link.receive()]
    except ProtocolError:
        # What came whole in the same piece as the fault is dropped with it.
        return [], True
    finally:
        link.close()
        theirs.close()
    return received, False


def _take_apart(frame: bytes) -> None:
    try:
        _, flags, callee_size, _, _ = wire.unpack_header(frame)
    except struct.error:
        return
    at = wire.HEADER_SIZE + callee_size
    try:
        if flags & wire.HAS_REFERENCES:
            _, _, at = wire.unpack_references(frame, at)
        if flags & wire.HAS_ANNOTATIONS:
            _, at = wire.unpack_annotations(frame, at)
        assert at <= max(len(frame), wire.HEADER_SIZE + callee_size)
    except ProtocolError:
        pass


def shared(data: bytes) -> None:
    """Internal frames of a link on one host. Each begins with its length in two bytes."""
    ours, theirs = socket.socketpair()
    link = UnixLink(ours, "it", _HANDSHAKE_LIMIT, os.getpid())
    try:
        theirs.sendall(pack_prologue() + struct.pack("<I", 0))
        assert link.receive() == [(b"", ())]
        link.establish(_OPTIONS)
        setup = struct.pack("<BBxxIi16s", SETUP, 0, 0, *_OFFER)
        theirs.sendall(struct.pack("<I", len(setup) | INTERNAL) + setup)
        assert link.receive() == []
        link.send(b"frame", [memoryview(bytes(1 << 14))])  # now there is a segment that the other end may name
        while data:
            (size,) = struct.unpack("<H", data[:2].ljust(2, b"\0"))
            internal, data = data[2 : 2 + size], data[2 + size :]
            theirs.sendall(struct.pack("<I", len(internal) | INTERNAL) + internal)
            end = link.counts()[0] + 4 + len(internal)
            while link.counts()[0] < end:
                for frame, buffers in link.receive():
                    assert len(frame) + sum(each.nbytes for each in buffers) <= _MAX_FRAME_SIZE
    except ProtocolError:
        pass
    finally:
        link.close()
        theirs.close()


def heads(data: bytes) -> None:
    """What frames carry about references and the group."""
    for decode in (
        lambda data: wire.unpack_references(data, 0),
        lambda data: wire.unpack_annotations(data, 0),
        lambda data: wire.unpack_handle(data, 0),
        unpack_control,
        membership_messages.decode,
    ):
        try:
            decode(data)
        except ProtocolError:
            pass


def handshake(data: bytes) -> None:
    """The handshake of a link, with a stranger at the other end: nothing but small frames comes through, if any."""
    outcomes = []
    for step in (max(1, len(data)), 5):
        ours, theirs = socket.socketpair()
        link = StreamLink(ours, "it", _HANDSHAKE_LIMIT)
        server = ServerHandshake(_SECRET, Purpose.CALLS, bytes(32))
        taken: list[bytes] = []
        try:
            for begin in range(0, len(data), step):
                theirs.sendall(data[begin : begin + step])
                end = link.counts()[0] + len(data[begin : begin + step])
                while link.counts()[0] < end:
                    taken += [frame for frame, _ in link.receive()]
        except ProtocolError:
            pass
        finally:
            link.close()
            theirs.close()
        for frame in taken:
            assert len(frame) <= _HANDSHAKE_LIMIT
            try:
                server.take(unpack(frame, "it"), frame)
            except ProtocolError:
                pass
        assert not server.is_proven
        outcomes.append(taken)
    assert outcomes[0] == outcomes[1]


def greeting(data: bytes) -> None:
    """Both sides of the greeting, with a stranger at the other: nobody gets in."""
    for purpose in Purpose:
        server = ServerHandshake(_SECRET, purpose, bytes(32))
        client = ClientHandshake(_SECRET, purpose, _HELLO, "it")
        buffer = bytearray(data)
        try:
            while (taken := take(buffer, purpose, "it")) is not None:
                for side in (lambda: server.take(*taken), lambda: client.take(taken[0])):  # noqa: B023
                    try:
                        side()
                    except ProtocolError:
                        pass
        except ProtocolError:
            pass
        assert not server.is_proven
        assert not client.is_proven


def store(data: bytes) -> None:
    """The store's requests, and what its table makes of them."""
    table = StoreState("g", 2, "host")
    table.introduce(1, Hello("g", "a", 0, ""))
    buffer = bytearray(data)
    try:
        while (frame := take_frame(buffer)) is not None:
            request = unpack_request(frame)
            table.handle(1, request, 0.0)
            if isinstance(request, GoodBye):
                break
    except ProtocolError:
        pass
    table.expire(1e12)
    for _, reply in table.take_replies():
        assert unpack_reply(pack_reply(reply)[4:]) == reply


def pickles(data: bytes) -> None:
    """Arguments and failures at a worker that allows nothing but plain data: they can be looked at, and printed."""
    guard = AllowList([])
    try:
        value = loads_restricted(data, (), guard)
    except (NotAllowedError, SerializationError):
        pass
    else:
        _look_at(value)
    for load in (lambda payload: None, lambda payload: loads_restricted(payload, (), guard)):
        error = decode_failure(data, load)
        assert isinstance(error, BaseException)
        before = set(sys.modules)
        "".join(traceback.format_exception(error))
        assert not {name for name in set(sys.modules) - before if not name.startswith("encodings")}


def _look_at(value: object) -> None:
    """What any program does with what it gets."""
    for look in (hash, repr, str, lambda value: value == value, pickle.dumps):
        try:
            look(value)
        except Exception:
            pass


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "frames": frames,
    "shared": shared,
    "heads": heads,
    "handshake": handshake,
    "greeting": greeting,
    "store": store,
    "pickles": pickles,
}

_BUFFER: Final = memoryview(b"buffer")
_OFFER: Final = _SEGMENTS.probe_descriptor(), _SEGMENTS.token
_REFERENCE: Final = RRefId(0, 1, 2, bytes(16))
_FORK: Final = ForkId(1, 3)


def _framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def _internal(*frames: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(frame) | INTERNAL) + frame for frame in frames)


def _short(*frames: bytes) -> bytes:
    """Internal frames for the target `shared`."""
    return b"".join(struct.pack("<H", len(frame)) + frame for frame in frames)


CORPUS: Final[dict[str, list[bytes]]] = {
    "frames": [
        _framed(wire.pack_call(7, b"builtins\0int", b"body", 0.0), wire.pack_reply(wire.RESULT, 7, b"body")),
        _framed(
            wire.pack_request(
                8,
                b"m\0f",
                b"body",
                10,
                wire.pack_handle(_REFERENCE, _FORK),
                wire.pack_references(1, [Carried(_REFERENCE, _FORK)]),
                wire.pack_annotations({"a": b"b"}),
            )
        ),
        _internal(pack_inline(b"frame", [_BUFFER, _BUFFER]) + b"framebufferbuffer"),
        _internal(
            pack_announcement(1, b"frame", [_BUFFER]),
            pack_chunk_header(1) + b"fra",
            pack_announcement(2, b"", ()),
            pack_chunk_header(1) + b"me",
            pack_chunk_header(1) + b"buffer",
        ),
        _internal(pack_supply(1, 1, [_BUFFER]), pack_chunk_header(1) + b"buffer"),
        _framed(b"", b"x" * 20) + b"\xff",
        struct.pack("<I", (1 << 20) + 1),
        struct.pack("<I", INTERNAL) * 2,
        _internal(struct.pack("<BBHIQ", 2, 0, 0, 1, 1 << 63)),
        _internal(struct.pack("<BBHIQQ", 2, 0, 1, 1, 1 << 19, 1 << 63)),
    ],
    "shared": [
        _short(struct.pack("<BBHiIxxxxQ", shm_buffers.SHARED, 0, 1, _OFFER[0], 1, 0) + b"frame"),
        _short(struct.pack("<BBHiIxxxxQ", shm_buffers.SHARED, 1, 1, _OFFER[0], 2, 1 << 14)),
        _short(struct.pack("<BxHIQQ", shm_buffers.RETURNED, 1, 2, 0, 1 << 14) + b"frame"),
        _short(struct.pack("<BxHIQQ", shm_buffers.RETURNED, 1, 2, 64, 1 << 40) + b"frame"),
        _short(struct.pack("<Bxxxi16s", shm_buffers.OFFER, *_OFFER), bytes([shm_buffers.OPENED])),
        _short(struct.pack("<BxHIQ", shm_buffers.MISSING, 1, 2, 1 << 14)),
        _short(pack_supply(1, 1, [_BUFFER]), pack_chunk_header(1) + b"buffer"),
        _short(struct.pack("<BBxxI", LONG, 0, 1) + b"\1", struct.pack("<BBxxI", LONG, 1, 1) + bytes(7)),
        _short(struct.pack("<BBxxI", LONG, 1, 1) + struct.pack("<BBxxI", LONG, 1, 1)),
        _short(struct.pack("<BBxxIi16s", SETUP, 1, 1 << 16, *_OFFER)),
    ],
    "heads": [
        membership_messages.encode(membership_messages.News(())),
        wire.pack_references(3, [Carried(_REFERENCE, _FORK)]),
        wire.pack_annotations({"a": b"b", "c": b""}),
        wire.pack_handle(_REFERENCE, _FORK),
        pack_control(5, [(1, ForkRequest(_REFERENCE, _FORK))]),
        bytes(16),
    ],
    "handshake": [
        pack_prologue() + _framed(encode(_HELLO), encode(Proof(bytes(32)))),
        pack_prologue() + _framed(encode(Challenge(bytes(32)))),
        pack_prologue() + _internal(b"\1"),
        pack_prologue() + struct.pack("<I", _HANDSHAKE_LIMIT + 1),
        struct.pack("<8sHHI", b"farcall\0", 2, 1, 4) + bytes(4),
        b"\x16\x03\x01",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    "greeting": [
        pack(Purpose.CALLS, _HELLO) + pack(Purpose.CALLS, Proof(bytes(32))),
        pack(Purpose.STORE, Challenge(bytes(32))) + pack(Purpose.STORE, Proof(bytes(32))),
        pack(Purpose.CALLS, Welcome("b", 1)),
        pack(Purpose.CALLS, Challenge(b"")) + encode(_HELLO),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    "store": [
        pack_request(Set(1, "k", b"v")) + pack_request(Get(2, "k", 1.0)),
        pack_request(Add(1, "n", 2**62)) + pack_request(Add(2, "n", 2**62)) + pack_request(Add(3, "k", -1)),
        pack_request(Collect(1, "p/", 3, 0.0)) + pack_request(Get(2, "x", float("nan"))),
        pack_request(Get(1, "x", float("inf"))) + pack_request(GoodBye(True)),
    ],
    "pickles": [
        dumps_arguments("f", (1, "two", {3.5: [None, True]}), {"k": b"v"})[0],
        encode_failure(ValueError("x", 3), "w", "f"),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x05)" + b"\x85\x94" * 1200 + b".",
        b"\x80\x05\x8f(K\0\x94h\0\x86\x94h\1\x86\x94h\2\x86\x90.",
        b"\x80\x05Nr\xff\xff\xff\x0f.",
        b"\x80\x05\x96\xff\xff\xff\xff\1\0\0\0.",
        pickle.dumps([datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), ImportError("i", name="n"), {1}, range(3)]),
        pickle.dumps(SyntaxError("s", ("f", 1, 2, "text", 1, 3))),
        pickle.dumps(UnicodeDecodeError("utf8", b"abc", 0, 1, "r")),
        pickle.dumps(deque([deque([1])], 5)),
        pickle.dumps(ExceptionGroup("g", [ValueError("v"), KeyError("k")])),
        encode_failure(ExceptionGroup("g", [ValueError("v"), KeyError("k")]), "w", "f"),
    ],
}
"""Inputs to begin with, and some that were interesting."""

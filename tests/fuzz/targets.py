"""What is fuzzed: each target takes any bytes, and raises only if something is wrong with the decoder.

A decoder may give a message or raise its one error; it must do the same however the bytes are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from farcall.errors import NotAllowedError, ProtocolError, SerializationError
from farcall.protocol import control, membership_messages, wire
from farcall.protocol.handshake import Challenge, Hello, Proof, Purpose, Welcome, encode, pack, take
from farcall.protocol.wire import Decoder, Message, Sizes
from farcall.rendezvous import store_messages
from farcall.rendezvous.store_messages import Add, Collect, Get, GoodBye, Set, pack_request, take_frame, unpack_request
from farcall.rendezvous.table import StoreTable
from farcall.security import Applicant, Doorkeeper, Secret
from farcall.security.allowed import Allowed
from farcall.serialization import decode_failure, encode_failure
from farcall.serialization.guarded import loads_arguments_guarded
from farcall.serialization.pickler import dumps_arguments

_SECRET: Final = Secret("the secret of the fuzzing")
_LIMITS: Final = Sizes(head=1 << 12, message=1 << 20)
_HELLO: Final = Hello("g", "a", 0, "b", nonce=bytes(32))


def frames(data: bytes) -> None:
    """Messages between workers, in one piece and byte by byte: the outcome is the same."""
    whole, pieces = _decode(data, max(1, len(data))), _decode(data, 7)
    assert whole == pieces, (whole, pieces)


def _decode(data: bytes, chunk: int) -> tuple[list[tuple[int, int, bytes, bytes, list[bytes]]], bool]:
    decoder = Decoder()
    decoder.limits = _LIMITS
    decoder.shared = lambda descriptor, number, sizes: [b"%d %d" % (descriptor, size) for size in sizes]
    decoder.returned = lambda number, offsets, sizes: [b"%d %d" % each for each in zip(offsets, sizes, strict=True)]
    messages: list[Message] = []
    failed = False
    try:
        while data:
            if decoder.space is None:
                messages += decoder.feed(data[:chunk])
                data = data[chunk:]
            else:
                count = min(decoder.space.nbytes, chunk, len(data))
                decoder.space[:count] = data[:count]
                messages += decoder.filled(count)
                data = data[count:]
    except ProtocolError:
        failed = True
    plain = [
        (kind, call, head, bytes(body), [bytes(each) for each in rest]) for kind, call, head, body, rest in messages
    ]
    # What came whole in the same chunk as the fault is dropped with it.
    return ([], True) if failed else (plain, False)


def heads(data: bytes) -> None:
    """What messages carry about references and the group."""
    for decode in (
        control.unpack_section,
        control.unpack_remote,
        control.unpack_handle,
        control.unpack_control,
        membership_messages.decode,
    ):
        try:
            decode(data)
        except ProtocolError:
            pass


def greeting(data: bytes) -> None:
    """Both sides of the greeting, with a stranger at the other: nobody gets in."""
    for purpose in Purpose:
        door = Doorkeeper(_SECRET, purpose, bytes(32))
        applicant = Applicant(_SECRET, purpose, _HELLO, "it")
        buffer = bytearray(data)
        try:
            while (taken := take(buffer, purpose, "it")) is not None:
                for side in (lambda: door.take(*taken), lambda: applicant.take(taken[0])):  # noqa: B023
                    try:
                        side()
                    except ProtocolError:
                        pass
        except ProtocolError:
            pass
        assert not door.is_proven
        assert not applicant.is_proven


def store(data: bytes) -> None:
    """The store's requests, and what its table makes of them."""
    table = StoreTable("g", 2, "host")
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
        assert store_messages.unpack_reply(store_messages.pack_reply(reply)[4:]) == reply


def pickles(data: bytes) -> None:
    """Arguments and failures at a worker that allows nothing but plain data.

    Not with a place in pickle's memo that is named by a number: Python reserves memory up to any such place. That is a
    limit of the promise (SECURITY.md), and would be found again and again.
    """
    if set(data) & set(b"pr"):
        return
    try:
        loads_arguments_guarded(data, (), Allowed([]))
    except (NotAllowedError, SerializationError):
        pass
    assert isinstance(decode_failure(data, lambda payload: None), BaseException)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "frames": frames,
    "heads": heads,
    "greeting": greeting,
    "store": store,
    "pickles": pickles,
}

_BUFFER: Final = memoryview(b"buffer")

CORPUS: Final[dict[str, list[bytes]]] = {
    "frames": [
        wire.encode(wire.CALL, 7, b"builtins\0int", b"body"),
        wire.encode_start(wire.RESULT, 8, b"", b"b" * 70, [_BUFFER, _BUFFER]) + b"bufferbuffer",
        wire.encode(wire.CALL, 9, b"h", bytes(70_000)),
        wire.encode_shared(wire.RESULT, 8, b"", b"body", [6, 6], 3, 4),
        wire.encode_returned(wire.RESULT, 8, b"", b"body", [6, 6], 4, [64, 0]),
        wire.encode(wire.CALL, 1, b"", b"") * 3 + b"\xff",
        bytes([1, 0, 2, 0]) + bytes(20) + (1 << 60).to_bytes(8, "little") * 2,
    ],
    "heads": [
        membership_messages.encode(membership_messages.News(())),
        control.pack_section(3, []),
        b"\1" + bytes(40),
        bytes(16),
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
    ],
}
"""Inputs to begin with, and some that were interesting."""

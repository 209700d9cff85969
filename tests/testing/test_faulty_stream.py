from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.handshake import Challenge, Hello, Proof, Purpose, Welcome, pack
from farcall.protocol.wire import CALL, RESULT, encode, encode_start
from farcall.testing.faulty_stream import Item, Stream, encode_message

HELLO = Hello("group", "worker0", 0, "worker1")
PROOF = Proof(b"mac")
GREETING = pack(Purpose.CALLS, HELLO)
WHOLE = GREETING + pack(Purpose.CALLS, PROOF)
SMALL = encode(CALL, 7, b"builtins\0max", b"arguments")
LARGE = encode_start(RESULT, 8, b"", b"x" * 70_000, [memoryview(b"y" * 5), memoryview(b"")]) + b"y" * 5


def fed(data: bytes, chunk: int) -> list[Item]:
    stream = Stream()
    return [item for at in range(0, len(data), chunk) for item in stream.feed(data[at : at + chunk])]


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000, 1 << 20])
def test_bytes_become_what_they_say_however_they_are_cut(chunk: int) -> None:
    greeting, raw, proof, raw_proof, *messages = fed(WHOLE + SMALL + LARGE + SMALL, chunk)
    assert (greeting, proof) == (HELLO, PROOF)
    assert (raw, raw_proof) == (GREETING, WHOLE[len(GREETING) :])
    assert [message[0] for message in messages] == [CALL, RESULT, CALL]  # type: ignore[index]
    again = b"".join(bytes(piece) for message in messages for piece in encode_message(message))  # type: ignore[arg-type]
    assert again == SMALL + LARGE + SMALL


def test_the_other_side_greets_too() -> None:
    said = [Challenge(b"nonce"), PROOF, Welcome("worker1", 1)]
    packed = [pack(Purpose.CALLS, each) for each in said]
    *greeting, message = fed(b"".join(packed) + SMALL, 5)
    assert greeting == [item for pair in zip(said, packed, strict=True) for item in pair]
    assert message[0] == CALL  # type: ignore[index]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    "unknown",
    [
        b"GET / HTTP/1.1\r\n",
        b"farce",
        b"farcall\0" + b"\xff" * 40,
        pack(Purpose.STORE, HELLO),
        GREETING[:16] + b"!" * 999,
    ],
)
def test_what_is_unknown_passes_as_it_is(unknown: bytes, chunk: int) -> None:
    assert b"".join(fed(unknown, chunk)) == unknown  # type: ignore[arg-type]


def test_what_can_be_no_message_behind_a_greeting_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="unknown kind 255"):
        fed(WHOLE + b"\xff" * 24, 1000)

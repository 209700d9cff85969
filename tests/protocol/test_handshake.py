"""The first bytes on a connection: laid out as the drawing says, and refused with a clear word if they are not ours."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farcall.errors import EncryptionError, ProtocolError, VersionMismatchError
from farcall.protocol.fields import quoted
from farcall.protocol.handshake import (
    MAGIC,
    MAX_MESSAGE,
    PREAMBLE_SIZE,
    PROLOGUE_SIZE,
    VERSION,
    Challenge,
    Greeting,
    Hello,
    Proof,
    Purpose,
    Refused,
    Welcome,
    body_length,
    check_prologue,
    pack,
    pack_prologue,
    take,
    unpack,
)

names = st.text(st.characters(codec="utf-8"), max_size=50).filter(str.isprintable)
ranks = st.integers(-1, 2**31)
nonces = st.binary(max_size=40)
limits = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
greetings: st.SearchStrategy[Greeting] = st.one_of(
    st.builds(Hello, group=names, name=names, rank=ranks, wanted=names, nonce=nonces, limits=limits),
    st.builds(Welcome, name=names, rank=ranks, limits=limits),
    st.builds(Refused, reason=names),
    st.builds(Challenge, nonce=nonces),
    st.builds(Proof, mac=st.binary(max_size=40)),
)
HELLO = Hello(group="g", name="a", rank=0, wanted="b")


def preamble(magic: bytes = MAGIC, version: int = VERSION, purpose: int = Purpose.CALLS, length: int = 0) -> bytes:
    return struct.pack("<8sHHI", magic, version, purpose, length)


@given(st.sampled_from(Purpose), greetings)
def test_what_is_packed_is_read_again(purpose: Purpose, message: Greeting) -> None:
    packed = pack(purpose, message)
    body = packed[PREAMBLE_SIZE:]
    assert body_length(packed[:PREAMBLE_SIZE], purpose, "the other") == len(body)
    assert unpack(body, "the other") == message


def test_the_layout_that_never_changes() -> None:
    packed = pack(Purpose.STORE, HELLO)
    assert packed[:8] == b"farcall\0"
    assert packed[8:10] == bytes([VERSION, 0])
    assert packed[10:12] == b"\2\0"
    assert packed[12:16] == (len(packed) - 16).to_bytes(4, "little")
    assert PREAMBLE_SIZE == 16
    assert [int(purpose) for purpose in (Purpose.CALLS, Purpose.STORE)] == [1, 2]
    assert msgspec.msgpack.decode(packed[16:]) == {
        "type": "hello",
        "group": "g",
        "name": "a",
        "rank": 0,
        "wanted": "b",
        "number": 0,
        "host": "",
        "addresses": [],
        "wanted_number": 0,
        "network": "",
        "dialed": "",
        "nonce": b"",
        "limits": [0, 0],
    }


def test_a_stranger_is_told_from_us_by_the_first_bytes() -> None:
    with pytest.raises(ProtocolError, match=r"10\.0\.0\.1 does not speak farcall: its first bytes were b'GET / HT'"):
        body_length(b"GET / HTTP/1.1\r\n", Purpose.CALLS, "10.0.0.1")


@pytest.mark.parametrize("version", [0, 1, 2, VERSION + 1, 0xFFFF])
def test_another_version_is_named_with_ours_and_with_what_to_do(version: int) -> None:
    with pytest.raises(VersionMismatchError) as refused:
        body_length(preamble(version=version, purpose=77, length=0xFFFFFFFF), Purpose.CALLS, "worker 'b'")
    assert str(refused.value) == (
        f"worker 'b' speaks version {version} of the farcall protocol, this worker speaks version {VERSION}; "
        "install the same release of farcall on all workers"
    )


def test_a_link_begins_as_a_preamble_does() -> None:
    """So a worker of any version understands what is wrong, whatever the frames behind it look like."""
    assert pack_prologue() == preamble()[:PROLOGUE_SIZE]
    for size in range(1, PROLOGUE_SIZE + 1):
        check_prologue(pack_prologue()[:size], "it")


@pytest.mark.parametrize(
    ("first", "error", "text"),
    [
        (
            preamble(version=2)[:12],
            VersionMismatchError,
            f"it speaks version 2 .* this worker speaks version {VERSION}; ",
        ),
        (preamble(purpose=2)[:12], ProtocolError, "another kind"),
        (b"farcall\1", ProtocolError, "does not speak farcall"),
        (b"G", ProtocolError, "does not speak farcall"),
        (b"\x16\x03", EncryptionError, "it encrypts"),
    ],
)
def test_a_link_that_does_not_begin_as_ours_is_refused(first: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_prologue(first, "it")


@pytest.mark.parametrize("purpose", [Purpose.STORE, 0, 3])
def test_a_connection_of_another_kind(purpose: int) -> None:
    with pytest.raises(ProtocolError, match=rf"another kind \({int(purpose)}, not 1\); is this the address of the st"):
        body_length(preamble(purpose=purpose), Purpose.CALLS, "it")


def test_the_longest_greeting() -> None:
    assert body_length(preamble(length=MAX_MESSAGE), Purpose.CALLS, "it") == MAX_MESSAGE
    with pytest.raises(
        ProtocolError, match=f"announced a handshake message of {MAX_MESSAGE + 1} bytes; at most {MAX_MESSAGE}"
    ):
        body_length(preamble(length=MAX_MESSAGE + 1), Purpose.CALLS, "it")


def test_a_greeting_that_is_too_long_is_not_sent() -> None:
    overhead = len(pack(Purpose.CALLS, Refused("x" * 60_000))) - PREAMBLE_SIZE - 60_000
    longest = "x" * (MAX_MESSAGE - overhead)
    assert len(pack(Purpose.CALLS, Refused(longest))) == PREAMBLE_SIZE + MAX_MESSAGE
    with pytest.raises(ProtocolError, match="use shorter names"):
        pack(Purpose.CALLS, Refused(longest + "x"))


@given(st.binary(min_size=PREAMBLE_SIZE, max_size=PREAMBLE_SIZE))
@example(preamble(length=MAX_MESSAGE + 1))
def test_any_first_bytes_are_ours_or_refused(first: bytes) -> None:
    try:
        assert 0 <= body_length(first, Purpose.CALLS, "it") <= MAX_MESSAGE
    except ProtocolError:
        pass


@given(st.one_of(st.binary(max_size=64), greetings.map(msgspec.msgpack.encode)), st.data())
@example(msgspec.msgpack.encode(HELLO).replace(b"\xa1b", b"\xa1\xff"), None)
@example(b"\x91" * 5000, None)
def test_any_body_is_a_greeting_or_refused(body: bytes, data: st.DataObject | None) -> None:
    if data is not None and body:
        at = data.draw(st.integers(0, len(body) - 1))
        body = body[:at] + data.draw(st.binary(max_size=3)) + body[at + 1 :]
    try:
        assert isinstance(unpack(body, "it"), Greeting)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "message",
    [{}, {"type": "farewell"}, {"type": "welcome", "name": "a"}, {"type": "welcome", "name": 1, "rank": 0}, [], None],
)
def test_a_message_that_is_none_of_ours(message: object) -> None:
    with pytest.raises(ProtocolError, match="it sent a handshake message that cannot be read"):
        unpack(msgspec.msgpack.encode(message), "it")


def test_a_later_member_of_a_message_is_passed_over() -> None:
    body = msgspec.msgpack.encode({"type": "welcome", "name": "a", "rank": 1, "color": "red"})
    assert unpack(body, "it") == Welcome("a", 1)


def test_a_message_is_taken_piece_by_piece() -> None:
    stream = pack(Purpose.STORE, HELLO) + b"more"
    buffer = bytearray()
    for position, byte in enumerate(stream[:-5]):
        buffer.append(byte)
        assert take(buffer, Purpose.STORE, "it") is None, position
    buffer += stream[-5:]
    assert take(buffer, Purpose.STORE, "it") == (HELLO, stream[PREAMBLE_SIZE:-4])
    assert buffer == b"more"


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "does not speak farcall"),
        (b"G", ProtocolError, "does not speak farcall: its first bytes were b'G'"),
        (struct.pack("<8sHHI", b"farcall\0", 9, 2, 0), VersionMismatchError, "version 9"),
        (pack(Purpose.CALLS, HELLO), ProtocolError, "another kind"),
        (struct.pack("<8sHHI", b"farcall\0", VERSION, 2, 101), ProtocolError, "101 bytes; at most 100 are"),
    ],
)
def test_what_is_no_message_is_refused_as_soon_as_it_can_be(data: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        take(bytearray(data), Purpose.STORE, "it", limit=100)


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise_anything_but_our_error(data: bytes, framed: bool) -> None:
    buffer = bytearray(preamble(length=len(data)) + data if framed else data)
    try:
        taken = take(buffer, Purpose.CALLS, "it")
    except ProtocolError:
        return
    assert taken is None or taken[1] == data


def test_what_a_stranger_says_stays_one_line_of_a_log() -> None:
    forged = msgspec.msgpack.encode({"type": "x\nworker 'a': all is well \x1b[2J" * 2000})
    with pytest.raises(ProtocolError) as refused:
        unpack(forged, "it")
    assert str(refused.value).isprintable()
    assert "\\nworker" in str(refused.value)
    assert len(str(refused.value)) < 5000
    assert quoted("plain: 'ü'") == "plain: 'ü'"

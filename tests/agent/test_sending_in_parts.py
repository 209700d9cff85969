"""Large messages go in parts: straight from their memory, with others in between, and never half."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from time import monotonic

import pytest

from eventually import eventually
from farcall.agent import sending
from farcall.agent.sending import InParts, Sender
from farcall.protocol.wire import CALL, Decoder, Message, encode, encode_in_parts
from farcall.sleeping import FOREVER
from farcall.transports.base import Buffer
from interruption import Interrupt

pytestmark = pytest.mark.timeout(30)


def in_parts(*pieces: Buffer, call_id: int = 7) -> InParts:
    """Of a call without a head, whose first piece is its body."""
    body, *buffers = pieces
    views = [memoryview(buffer) for buffer in buffers]
    return InParts(encode_in_parts(CALL, call_id, b"", bytes(body), views), call_id, (b"", body, *views))


def decoded(stream: bytes) -> list[Message]:
    return Decoder().feed(bytes(stream))


@pytest.fixture
def pipe() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


class Pipe:
    """A channel over a real socket, which can be full."""

    address = "pipe:there"

    def __init__(self, sock: socket.socket) -> None:
        self.fileno, self.send, self.send_gather = sock.fileno, sock.send, sock.sendmsg


def test_a_large_message_comes_out_as_it_was(
    pipe: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pipe
    monkeypatch.setattr(sending, "PART_SIZE", 100)
    sender = Sender(Pipe(ours), lambda on: None)  # type: ignore[arg-type]
    sender.send_in_parts(in_parts(b"b" * 250, b"x" * 99, b"", b"y" * 301), FOREVER, lambda: False)
    ((kind, call_id, head, body, buffers),) = decoded(theirs.recv(1 << 16))
    assert (kind, call_id, head, bytes(body)) == (CALL, 7, b"", b"b" * 250)
    assert [bytes(buffer) for buffer in buffers] == [b"x" * 99, b"", b"y" * 301]


def test_others_have_their_turn_between_two_parts(pipe: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pipe
    wanted: list[bool] = []
    sender = Sender(Pipe(ours), wanted.append)  # type: ignore[arg-type]
    large = bytearray(8 * sending.PART_SIZE)
    thread = threading.Thread(target=sender.send_in_parts, args=(in_parts(b"body", large), FOREVER, lambda: False))
    thread.start()
    eventually(lambda: sender.waiting > 0)  # the socket is full, in the midst of the large one
    small = encode(CALL, 8, b"head", b"small")
    sender.send(small)
    assert not any(wanted), "whoever sends the large one flushes, too; nobody else is to be woken for that"
    size = len(large) + 4 + len(small)
    decoder, messages = Decoder(), []
    theirs.settimeout(10)
    while len(messages) < 2:
        space = decoder.space
        messages += decoder.filled(theirs.recv_into(space)) if space is not None else decoder.feed(theirs.recv(4096))
    thread.join(10)
    assert [message[1] for message in messages] == [8, 7]
    assert bytes(messages[1][4][0]) == bytes(large)
    assert decoder.received > size
    assert sender.waiting == 0


def test_what_is_not_taken_in_time_is_copied_and_waits(pipe: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pipe
    wanted: list[bool] = []
    sender = Sender(Pipe(ours), wanted.append)  # type: ignore[arg-type]
    large = bytearray(b"a" * (4 * sending.PART_SIZE))
    sender.send_in_parts(in_parts(b"body", large), monotonic() + 0.05, lambda: False)
    large[:] = bytes(len(large))  # it is the caller's again
    assert wanted[-1], "the poller flushes the rest"
    came = bytearray()
    theirs.settimeout(10)
    while sender.waiting:
        came += theirs.recv(1 << 20)
        sender.flush()
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            came += theirs.recv(1 << 20)
    ((*_, (buffer,)),) = decoded(came)
    assert bytes(buffer) == b"a" * len(large)
    assert not wanted[-1]


def test_who_sends_a_large_message_hears_that_the_connection_is_over(pipe: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pipe
    sender = Sender(Pipe(ours), lambda on: None)  # type: ignore[arg-type]
    over = threading.Event()
    thread = threading.Thread(
        target=sender.send_in_parts, args=(in_parts(b"", bytes(1 << 23)), FOREVER, over.is_set), daemon=True
    )
    thread.start()
    eventually(lambda: sender.waiting > 0)
    over.set()
    thread.join(10)
    assert not thread.is_alive()


def test_two_large_messages_go_side_by_side(pipe: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pipe
    sender = Sender(Pipe(ours), lambda on: None)  # type: ignore[arg-type]
    larges = {number: bytes([number]) * (4 * sending.PART_SIZE + number) for number in (1, 2, 3)}
    threads = [
        threading.Thread(
            target=sender.send_in_parts, args=(in_parts(b"", large, call_id=number), FOREVER, lambda: False)
        )
        for number, large in larges.items()
    ]
    for thread in threads:
        thread.start()
    decoder, messages = Decoder(), []
    theirs.settimeout(10)
    while len(messages) < 3:
        space = decoder.space
        messages += decoder.filled(theirs.recv_into(space)) if space is not None else decoder.feed(theirs.recv(4096))
    for thread in threads:
        thread.join(10)
    assert {call_id: bytes(buffers[0]) for _, call_id, _, _, buffers in messages} == larges


def test_an_interrupt_in_the_midst_of_a_large_message_breaks_the_channel(
    pipe: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pipe
    sender = Sender(Pipe(ours), lambda on: None)  # type: ignore[arg-type]

    def interrupt() -> bool:
        raise Interrupt

    with pytest.raises(Interrupt):
        sender.send_in_parts(in_parts(b"", bytes(1 << 23)), FOREVER, interrupt)
    assert sender.is_broken()
    with pytest.raises(ConnectionError):
        sender.send(b"more")
    assert sender.waiting == 0

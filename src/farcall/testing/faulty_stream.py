"""The bytes of one direction of a connection, as the greeting and the messages that they are.

What does not begin as a connection between workers does is passed on as it comes, and not looked at.
"""

from __future__ import annotations

from typing import TypeAlias

from farcall.errors import ProtocolError
from farcall.protocol.handshake import (
    MAGIC,
    PREAMBLE_SIZE,
    Greeting,
    Hello,
    Proof,
    Purpose,
    Refused,
    Welcome,
    body_length,
    unpack,
)
from farcall.protocol.wire import Decoder, Message, encode, encode_start
from farcall.transports.base import Buffer

Item: TypeAlias = Message | Greeting | bytes
"""A message, a greeting, or bytes that are to be passed on: those of the greeting before it, and what is unknown."""


class Stream:
    """Turns bytes into what they say."""

    def __init__(self) -> None:
        self._start = b""
        self._begun_with: type[Greeting] | None = None  # which side's it is, and so how its greeting ends
        self._decoder: Decoder | None = None
        self._unknown = False

    def feed(self, data: bytes) -> list[Item]:
        """All that is whole now. A greeting comes before its bytes, which follow as they are.

        Raises `ProtocolError` for what can be no message behind a greeting.
        """
        if self._unknown:
            return [data]
        if self._decoder is not None:
            return list(_decode(self._decoder, data))
        self._start += data
        items: list[Item] = []
        while True:
            try:
                greeting = self._greeting()
            except ProtocolError:
                self._unknown = True
                return [*items, self._start]
            if greeting is None:
                return items
            said, end = greeting
            items += [said, self._start[:end]]
            self._start = self._start[end:]
            if self._is_last(said):
                self._decoder = Decoder()
                return [*items, *_decode(self._decoder, self._start)]

    def _is_last(self, said: Greeting) -> bool:
        """Whether messages follow: behind the proof of the side that connects, and the other's last word."""
        if self._begun_with is None:
            self._begun_with = type(said)
        return isinstance(said, Proof if self._begun_with is Hello else (Welcome, Refused))

    def _greeting(self) -> tuple[Greeting, int] | None:
        """The next message of the greeting and its length, once it is whole. Raises `ProtocolError` if it is none."""
        start = self._start
        if start[: len(MAGIC)] != MAGIC[: len(start)]:
            raise ProtocolError("not between workers")
        if len(start) < PREAMBLE_SIZE:
            return None
        end = PREAMBLE_SIZE + body_length(start[:PREAMBLE_SIZE], Purpose.CALLS, "the other end")
        return (unpack(start[PREAMBLE_SIZE:end], "the other end"), end) if len(start) >= end else None


def _decode(decoder: Decoder, data: bytes) -> list[Message]:
    messages: list[Message] = []
    while data:
        space = decoder.space
        if space is None:
            messages += decoder.feed(data)
            break
        count = min(space.nbytes, len(data))
        space[:count] = data[:count]
        messages += decoder.filled(count)
        data = data[count:]
    return messages


def encode_message(message: Message) -> list[Buffer]:
    """The message as bytes again."""
    kind, call_id, head, body, buffers = message
    if not buffers:
        return [encode(kind, call_id, head, bytes(body))]
    views = [memoryview(buffer) for buffer in buffers]
    return [encode_start(kind, call_id, head, bytes(body), views), *views]

"""Bytes that a worker of this process sends, altered on their way: a member that is not honest.

It knows how the ids of a reference and of a fork stand in a message, and nothing else of farcall.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def ids_of_reference(owner: int, creator: int, number: int) -> bytes:
    """What everybody can guess of a reference."""
    return struct.pack("<IIQ", owner, creator, number)


def ids_of_fork(creator: int, number: int) -> bytes:
    """The id of one holder's share of a reference, which everybody can guess too."""
    return struct.pack("<IQ", creator, number)


class Tampering:
    """While it is `replacing`, all that is sent has one thing in place of another of the same length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """To be made before the sockets that it is to tamper with."""
        self._replaced: dict[bytes, bytes] = {}
        self.times = 0
        """How often something was replaced: a test in which nothing was has shown nothing."""
        send, sendmsg = socket.socket.send, socket.socket.sendmsg

        def tampered_send(sock: socket.socket, data: Any, *more: Any) -> int:
            return send(sock, self._altered(data), *more)

        def tampered_sendmsg(sock: socket.socket, buffers: Any, *more: Any) -> int:
            return sendmsg(sock, [self._altered(b"".join(buffers))], *more)

        monkeypatch.setattr(socket.socket, "send", tampered_send)
        monkeypatch.setattr(socket.socket, "sendmsg", tampered_sendmsg)

    def _altered(self, data: Any) -> bytes:
        altered = bytes(data)
        for right, wrong in self._replaced.items():
            self.times += altered.count(right)
            altered = altered.replace(right, wrong)
        return altered

    @contextmanager
    def replacing(self, *pairs: tuple[bytes, bytes]) -> Iterator[None]:
        """Replaces the first of each pair by the second."""
        assert all(len(right) == len(wrong) for right, wrong in pairs)
        self._replaced.update(pairs)
        try:
            yield
        finally:
            for right, _ in pairs:
                self._replaced.pop(right, None)

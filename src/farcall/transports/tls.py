"""A TCP socket whose bytes are encrypted, with the methods of a socket that channels and stores use.

Non-blocking by nature: TLS runs over buffers in memory, and the socket below is only read and written when it can be.
With a timeout set, `recv` and `sendall` wait, by polling, for so long. One thread may receive while another sends:
OpenSSL itself does not allow that, so a lock keeps them apart, and nobody waits while holding it.

Two rules of channels take some care here, as bytes below and above are not the same:

- *It polls readable while there is something.* What was taken off the kernel and not given out yet is seen by no poll.
  So no more is taken than can be given out: of `size` bytes below there come less than `size` above. Where that would
  be too little for a whole record, the bytes are looked at without taking them (MSG_PEEK), and the last one of them is
  left there as a flag until all of the record is given out.
- *It polls writable when it takes something.* A record that the kernel took a part of must be sent to its end before
  anything else, and only `send` can do that. So what is in such a record is not reported as sent; the caller, who has
  to come again with it, finds that it went out meanwhile.

Which end of a channel uses which certificate is not known here: it is handed in (`Encryption`).
"""

from __future__ import annotations

import errno
import hashlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from farcall.transports.base import Buffer
from farcall.transports.sockets import OwnSocket
from farcall.transports.tls_failures import ENCRYPTED_ONLY, ended_early, explained, is_plain, not_tls

if TYPE_CHECKING:
    import ssl

_RECORD: Final = 16 * 1024
_OVERHEAD: Final = 5 + 256
"""Bytes at most that a record has more than what is in it (RFC 8446, 5.2)."""
_CHUNK: Final = 256 * 1024
_FIRST_BYTES: Final = (b"\x16", b"\x15")
"""Of all that may come first on a TLS connection: its greeting, or an alert in its place (RFC 8446, 5.1)."""


class Encryption(Protocol):
    """Certificates, and what is asked of the other side's. See `security.encryption`."""

    def listening(self) -> ssl.SSLContext:
        """For the side that listens."""

    def connecting(self) -> ssl.SSLContext:
        """For the side that connects."""

    def fingerprint(self) -> bytes:
        """Of our own certificate."""


class TlsSocket(OwnSocket):
    """A connected TCP socket, which belongs to it from now on, encrypted. Raises nothing but `OSError`."""

    __slots__ = (
        "_fed",
        "_has_begun",
        "_held",
        "_incoming",
        "_lock",
        "_outgoing",
        "_owed",
        "_ready",
        "_timeout",
        "_tls",
        "_unsent",
        "binding",
    )

    def __init__(self, sock: socket.socket, encryption: Encryption, listens: bool) -> None:
        import ssl

        timeout = sock.gettimeout()
        super().__init__(sock)
        super().setblocking(False)  # below, whatever is wanted above
        self._timeout = timeout
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = encryption.listening() if listens else encryption.connecting()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._lock = threading.Lock()
        self._ready = False
        self._fed = False  # something has come at all
        self._has_begun = False  # something of what is encrypted has come
        self._held = False  # the last byte that was looked at is still in the kernel, and counts no more
        self._unsent = memoryview(b"")  # the rest of what is encrypted
        self._owed = 0  # bytes of the caller's that are in it, and were not reported as sent
        self.binding = encryption.fingerprint() if listens else b""
        """The fingerprint of the certificate of the side that listens; of the other's not before `shake_hands`."""

    def shake_hands(self, timeout: float) -> None:
        """For the side that connects: blocks until the channel is encrypted. Raises `OSError`, `TimeoutError`."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                try:
                    self._advance()
                    return
                except BlockingIOError:
                    pass
            self._wait(select.POLLIN, deadline - time.monotonic(), "no encrypted connection in time")

    def settimeout(self, value: float | None) -> None:
        """As a socket's."""
        self._timeout = value

    def gettimeout(self) -> float | None:
        """As a socket's."""
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        """As a socket's."""
        self._timeout = None if flag else 0.0

    # Receiving

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As a socket's; `flags` are of no account."""
        buffer = bytearray(size)
        count = self.recv_into(memoryview(buffer))
        return bytes(memoryview(buffer)[:count])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As a socket's; `nbytes` and `flags` are of no account."""
        timeout = self.gettimeout()
        while True:
            try:
                with self._lock:
                    return self._receive(buffer)
            except BlockingIOError:
                if timeout == 0:
                    raise
            self._wait(select.POLLIN, timeout, "timed out")

    def _receive(self, view: memoryview) -> int:
        if not self._ready:
            self._advance()
        count = self._decrypt(view)
        while not count:
            self._drop_held()
            sure = len(view) - _RECORD - _OVERHEAD  # with what is kept of an unfinished record, it cannot be too much
            data = self._below(sure) if sure > 0 else self._below_looking(_RECORD + _OVERHEAD)
            if not data:
                return 0
            self._incoming.write(data)
            count = self._decrypt(view)
        if not self._tls.pending() and not self._incoming.pending:
            self._drop_held()
        return count

    def _decrypt(self, view: memoryview) -> int:
        """As much as there is; 0 if there is no whole record."""
        import ssl

        total = 0
        try:
            while total < len(view):
                count = cast(int, self._tls.read(len(view) - total, view[total:]))  # with a buffer it counts
                if not count:
                    break
                total += count
                if not self._tls.pending() and not self._incoming.pending:
                    break
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            # The side that listens looks at our certificate when the connection is encrypted for us already.
            raise explained(error, self._has_begun) from error
        self._has_begun = self._has_begun or total > 0
        return total

    def _below(self, size: int) -> bytes:
        return super().recv(min(size, _CHUNK))

    def _below_looking(self, size: int) -> bytes:
        """What has come; all but its last byte is taken, and the last one is as good as taken."""
        data = super().recv(size, socket.MSG_PEEK)
        if data:
            self._held = True
            if len(data) > 1:
                super().recv(len(data) - 1)
        return data

    def _drop_held(self) -> None:
        if self._held:
            self._held = False
            super().recv(1)

    # Sending

    def send(self, data: Buffer, flags: int = 0) -> int:  # type: ignore[override]
        """As a socket's, but who is told that a part was taken must come with the rest next. `flags` do not count."""
        with self._lock:
            if not self._ready:
                self._advance()
            return self._send(memoryview(data).cast("B"))

    def sendmsg(self, buffers: Sequence[Buffer], *_: Any) -> int:  # type: ignore[override]
        """As `send`, of several."""
        with self._lock:
            if not self._ready:
                self._advance()
            total = 0
            for piece in _joined(buffers):
                try:
                    sent = self._send(piece)
                except BlockingIOError:
                    if not total:
                        raise
                    return total
                total += sent
                if sent < len(piece):
                    break
            return total

    def sendall(self, data: Buffer, flags: int = 0) -> None:  # type: ignore[override]
        """As a socket's; the timeout counts anew whenever something went out."""
        rest = memoryview(data).cast("B")
        timeout = self.gettimeout()
        while rest:
            try:
                rest = rest[self.send(rest) :]
            except BlockingIOError:
                if timeout == 0:
                    raise
                self._wait(select.POLLOUT, timeout, "timed out")

    def _send(self, data: memoryview) -> int:
        import ssl

        self._flush()
        total = min(self._owed, len(data))
        self._owed -= total
        while total < len(data):
            part = data[total : total + _CHUNK]
            ends: list[tuple[int, int]] = []  # of each record: of what is in it, and of its bytes below
            try:
                for begin in range(0, len(part), _RECORD):
                    self._tls.write(part[begin : begin + _RECORD])
                    ends.append((min(begin + _RECORD, len(part)), self._outgoing.pending))
            except ssl.SSLError as error:
                raise explained(error, self._has_begun) from error
            encrypted = memoryview(self._outgoing.read())
            try:
                count = super().send(encrypted)
            except BlockingIOError:
                count = 0
            except ConnectionError as error:
                refusal = None if self._has_begun else self._last_word()
                if refusal is None:
                    raise
                raise refusal from error
            total += max((end for end, below in ends if below <= count), default=0)
            if count < len(encrypted):
                self._unsent = encrypted[count:]
                self._owed = len(part) - max((end for end, below in ends if below <= count), default=0)
                break
        if not total and data:
            raise BlockingIOError(errno.EAGAIN, "the kernel takes nothing more now")
        return total

    def _last_word(self) -> OSError | None:
        """Nothing can be sent any more: why the other side has hung up, if it has said so before its first word."""
        import ssl

        try:
            self._drop_held()
            self._incoming.write(super().recv(_CHUNK))
            self._tls.read(1)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return None
        except ssl.SSLError as error:
            return explained(error, has_begun=False)
        except OSError:
            pass
        return None

    def _flush(self) -> None:
        """Sends what is encrypted already. Raises `BlockingIOError` if it does not all go."""
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent) :]

    # The beginning

    def _advance(self) -> None:
        """Goes on with TLS' own greeting. Raises `BlockingIOError` until it is done."""
        import ssl

        while True:
            try:
                self._tls.do_handshake()
                self._ready = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with suppress(OSError):  # it may be gone
                    self._say_below()  # the other side hears what is wrong
                    super().recv(_CHUNK)  # closing with unread bytes could lose that on its way
                raise explained(error, has_begun=False) from error
            self._say_below()
            if self._ready:
                if not self.binding:
                    certificate = self._tls.getpeercert(binary_form=True)
                    self.binding = hashlib.sha256(certificate or b"").digest()
                return
            data = super().recv(_CHUNK if not self._tls.server_side else _RECORD, socket.MSG_PEEK)
            if not data:
                raise ended_early()
            if not self._fed and data[:1] not in _FIRST_BYTES:
                if self._tls.server_side and is_plain(data):
                    with suppress(OSError):  # it may be gone
                        super().recv(_RECORD)  # closing with unread bytes could lose the answer on its way
                        super().send(ENCRYPTED_ONLY)
                raise not_tls(data)
            self._fed = True
            # One record at a time: what comes behind the greeting is to be seen by polls.
            size = min(len(data), 5 + int.from_bytes(data[3:5]) if len(data) >= 5 else len(data))
            self._incoming.write(super().recv(size))

    def _say_below(self) -> None:
        data = self._outgoing.read()
        if data and super().send(data) != len(data):  # it fits into any socket's empty buffer
            raise ConnectionError("the kernel does not take what begins an encrypted connection")

    def _wait(self, event: int, timeout: float | None, why: str) -> None:
        poll = select.poll()
        poll.register(self.fileno(), event)
        if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            raise TimeoutError(errno.ETIMEDOUT, why)


def _joined(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Small ones in a row joined, as each piece is at least one record."""
    pieces: list[memoryview] = []
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) >= _RECORD:
            if small:
                pieces.append(memoryview(b"".join(small)))
                small = []
            pieces.append(memoryview(buffer).cast("B"))
        else:
            small.append(buffer)
    if small:
        pieces.append(memoryview(b"".join(small)))
    return [piece for piece in pieces if piece]

"""`TlsSocket`, an encrypted TCP socket with the methods of a socket that links and stores use.

TLS runs over buffers in memory, and the TCP socket is non-blocking. If a timeout is set, `recv` and `sendall` wait by
polling. One thread may receive while another sends. OpenSSL does not allow that, so a lock protects it, and no thread
waits while it holds the lock.

The numbers of encrypted and decrypted bytes differ, so two properties of sockets need care:

- *The socket is readable in poll while there is data to receive.* Bytes that were read from the kernel but not returned
  by `recv` are not seen by poll. So at most as many bytes are read as can be returned: `size` encrypted bytes have less
  than `size` decrypted ones (`_receive_much`). If that is too little for a whole record, the bytes are read with
  MSG_PEEK first, and the last byte is left in the kernel until the whole record is returned (`_receive_little`).
- *The socket is writable in poll when it accepts data.* If the kernel has accepted a part of a record, the rest must be
  sent before anything else, and only `send` can do that. So the data in such a record is not reported as sent. The
  caller calls `send` again with the same data, and `send` does not encrypt it again.

Large data moves in blocks of many records: one system call and one call of OpenSSL encrypt and send a block, and one
system call receives one. OpenSSL returns one record for each call, directly into the memory of the caller.

The other end may be a stranger, and `recv` runs in the thread that reads all links of a worker. So the work that the
other end can cause is limited:

- One call reads from the kernel `_READS_PER_CALL` times at most, and decrypts at most as many records as the number of
  bytes it must return. The next poll reports what is left, after other connections were read.
- OpenSSL gets at most `_RECORDS_PER_CALL` records at a time. Otherwise it would process any number of records without
  data (key updates, session tickets, empty records) in one call. A farcall worker sends no such records, so a
  connection with more than `MAX_EMPTY_RECORDS` of them is closed. They are counted by what is missing: each record
  that was passed on and gave no data is one of them.
- The TLS handshake may have `MAX_HANDSHAKE_RECORDS` records and `MAX_HANDSHAKE_BYTES` bytes, and one call processes at
  most `_RECORDS_PER_CALL` of the records.
- A deadline is checked in every iteration of a loop, also if there is data to read.

The certificates are provided by an `Encryption`.
"""

from __future__ import annotations

import errno
import hashlib
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from farcall.errors import ProtocolError
from farcall.transports.base import Buffer
from farcall.transports.sockets import OwnSocket
from farcall.transports.tls_failures import ENCRYPTED_ONLY, ended_early, explained, is_plain, not_tls

if TYPE_CHECKING:
    import ssl

_RECORD: Final = 16 * 1024
"""The most bytes of data in a record."""
_OVERHEAD: Final = 5 + 256
"""The most bytes of a record in addition to its data (RFC 8446, 5.2)."""
_BLOCK: Final = 256 * 1024
"""The most bytes to encrypt, or to receive, at once."""
_SEALED_EXTRA: Final = 5 + 1 + 16
"""The bytes of a record of ours in addition to its data: header, type and the tag of AES-GCM or ChaCha20-Poly1305."""
_NOTHING: Final = memoryview(b"")
"""No bytes."""
_FIRST_BYTES: Final = (b"\x16", b"\x15")
"""The possible first bytes of a TLS connection: a handshake record or an alert (RFC 8446, 5.1)."""
_HEADER: Final = 5
"""The size of the header of a record. Its last two bytes are the size of the rest (RFC 8446, 5.1)."""

MAX_EMPTY_RECORDS: Final = 8
"""The most records without data that the other end may send on a connection."""
MAX_HANDSHAKE_RECORDS: Final = 64
"""The most records of a handshake. With client certificates it has about ten."""
MAX_HANDSHAKE_BYTES: Final = 256 * 1024
"""The most bytes of a handshake. Certificate chains are the largest part."""
_RECORDS_PER_CALL: Final = 16
"""The most records that OpenSSL gets at a time, and that one call processes in the TLS handshake."""
_READS_PER_CALL: Final = 4
"""A record needs up to three reads, and one more shows the end of a stream in the middle of a record."""


class Encryption(Protocol):
    """The certificates of a worker, and how it checks those of other workers."""

    def listening(self) -> ssl.SSLContext:
        """Returns the TLS context for links that this worker accepts."""

    def connecting(self) -> ssl.SSLContext:
        """Returns the TLS context for links that this worker opens."""

    def fingerprint(self) -> bytes:
        """Returns the SHA-256 fingerprint of the certificate of this worker."""


_free_buffers: Final[deque[memoryview]] = deque(maxlen=8)
"""Memory of `_BLOCK` bytes that is not in use. New memory of that size would come from the kernel, page by page.

A finalizer may interrupt a thread that uses a buffer, and receive data itself. So a buffer belongs to a call, not to a
thread."""


def _take_buffer() -> memoryview:
    """Returns memory of `_BLOCK` bytes with undefined contents. The caller appends it to `_free_buffers` after use."""
    try:
        return _free_buffers.pop()
    except IndexError:
        return memoryview(bytearray(_BLOCK))


class TlsSocket(OwnSocket):
    """A socket that encrypts with TLS over a connected TCP socket. It has those methods of a socket that farcall uses.

    The TLS handshake happens during the first `recv` or `send`, or in `do_handshake`. All errors are `OSError`s.

    The constructor sends and receives nothing.

    Args:
        sock: The TCP socket, which cannot be used any more. Its timeout becomes the timeout of this object.
        encryption: The certificates of this worker.
        listens: True at the end that accepted the TCP connection: it is the server of the TLS handshake. False at the
            end that connected.
    """

    __slots__ = (
        "_ended",
        "_fed",
        "_handshake_records",
        "_has_begun",
        "_header",
        "_held",
        "_incoming",
        "_lock",
        "_outgoing",
        "_owed",
        "_ready",
        "_record_left",
        "_records_fed",
        "_records_without_data",
        "_timeout",
        "_tls",
        "_undecrypted",
        "_unsent",
        "binding",
    )

    def __init__(self, sock: socket.socket, encryption: Encryption, listens: bool) -> None:
        import ssl

        timeout = sock.gettimeout()
        super().__init__(sock)
        super().setblocking(False)  # the TCP socket, whatever the timeout of this object is
        self._timeout = timeout
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = encryption.listening() if listens else encryption.connecting()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._lock = threading.Lock()
        self._ready = False
        self._fed = 0  # the number of bytes of the handshake so far
        self._handshake_records = 0
        self._header = bytearray()  # the header of the next record, while it is not complete
        self._record_left = 0  # the number of bytes of that record that are missing
        self._undecrypted = _NOTHING  # bytes that were read, and not passed to OpenSSL yet
        self._records_fed = 0  # whole records that OpenSSL has got, and not returned
        self._records_without_data = 0
        self._ended = False  # the other end has sent close_notify
        self._has_begun = False  # encrypted data was received
        self._held = False  # a byte that was peeked and used is still in the kernel
        self._unsent = _NOTHING  # encrypted bytes that the kernel has not accepted
        self._owed = 0  # the number of data bytes in `_unsent` that were not reported as sent
        self.binding = encryption.fingerprint() if listens else b""
        """The SHA-256 fingerprint of the certificate of the accepting end. Empty at the connecting end before the
        handshake."""

    def do_handshake(self, timeout: float) -> None:
        """Waits until the TLS handshake is done. Only for the connecting end.

        Args:
            timeout: How many seconds to wait at most. With 0, `TimeoutError` is raised unless the handshake can be
                completed at once.

        Raises:
            TimeoutError: The timeout has expired.
            EncryptionError: The other end does not encrypt, or one end refuses the certificate of the other.
            ProtocolError: The other end has sent bytes that are not TLS.
            ConnectionError: The other end has closed the connection.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                try:
                    self._advance()
                    return
                except BlockingIOError:
                    pass
            self._wait(select.POLLIN, deadline, "no encrypted connection in time")

    def settimeout(self, value: float | None) -> None:
        """Sets how many seconds `recv`, `recv_into` and `sendall` wait at most.

        Args:
            value: The seconds; None to wait without a limit, 0 to raise `BlockingIOError` instead of waiting.
        """
        self._timeout = value

    def gettimeout(self) -> float | None:
        """Returns the seconds that `settimeout` has set; None for no limit, 0 for no waiting."""
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        """Sets the timeout to None (no limit) if `flag` is True.

        If `flag` is False, sets it to 0: methods raise `BlockingIOError` instead of waiting.
        """
        self._timeout = None if flag else 0.0

    # Receiving

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Returns decrypted bytes, as soon as there are any.

        Args:
            size: The most bytes to return. More than 256 KiB counts as 256 KiB.
            flags: Ignored.

        Returns:
            At least one byte; empty bytes at the end of the stream.

        Raises:
            BlockingIOError: No data is there, and the timeout is 0.
            TimeoutError: No data came within the timeout.
            OSError: The connection is broken, or the TLS handshake failed.
        """
        with self._lock:
            data = self._receive_one_record(size)
        if data is not None:
            return data
        buffer = _take_buffer()
        try:
            return bytes(buffer[: self.recv_into(buffer[:size])])
        finally:
            _free_buffers.append(buffer)

    def _receive_one_record(self, size: int) -> bytes | None:
        """Receives and decrypts a TLS record if exactly one has arrived: the fast path of `recv` for small frames.

        `size` is the most bytes to return. Returns the data; empty bytes if the end of the stream has arrived. Returns
        None in all other cases; then the caller must use `recv_into`. That is so if more or less than one record with
        data has arrived, an earlier record is not processed completely, `size` is not larger than the largest record,
        the TLS handshake is not done, or an earlier call has found the end of the stream. Raises `OSError` if the
        connection is broken.
        """
        sure = min(size, _BLOCK) - _RECORD - _OVERHEAD  # as in `_receive`
        if sure <= 0 or not self._ready or self._is_inside_record() or self._ended:
            return None
        try:
            encrypted = super().recv(sure)
        except BlockingIOError:
            return None
        if len(encrypted) <= _HEADER or len(encrypted) != _HEADER + (encrypted[3] << 8 | encrypted[4]):
            self._undecrypted = memoryview(encrypted)
            return None if encrypted else b""
        self._incoming.write(encrypted)
        try:
            data = self._tls.read(len(encrypted))
        except OSError as error:
            self._record_without_data(error)
            return None
        if data:
            self._has_begun = True
        else:  # close_notify
            self._ended = True
        return data

    def _record_without_data(self, error: OSError) -> None:
        """Counts a TLS record without data. `error` is the error of OpenSSL when it decrypted the record.

        For a record without data, `error` is an `SSLWantReadError`. For any other `error`, counts nothing, and raises
        an `OSError` that explains it. Raises `ProtocolError` if there were more than `MAX_EMPTY_RECORDS` such records.
        """
        import ssl

        if not isinstance(error, ssl.SSLWantReadError):
            raise explained(cast("ssl.SSLError", error), self._has_begun) from error
        self._count_records_without_data(1)

    def _is_inside_record(self) -> bool:
        """Returns whether a TLS record was read only in part, or was read and its data not returned yet."""
        return bool(self._undecrypted or self._records_fed or self._record_left or self._header or self._held)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receives decrypted bytes into `buffer`, as soon as there are any.

        Args:
            buffer: Writable memory of bytes, such as a `memoryview`, not empty.
            nbytes: Ignored.
            flags: Ignored.

        Returns:
            The number of bytes that were received; 0 at the end of the stream.

        Raises:
            BlockingIOError: No data is there, and the timeout is 0.
            TimeoutError: No data came within the timeout.
            OSError: The connection is broken, or the TLS handshake failed.
        """
        timeout = self.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                with self._lock:
                    return self._receive(buffer)
            except BlockingIOError:
                if timeout == 0:
                    raise
            self._wait(select.POLLIN, deadline, "timed out")

    def _receive(self, view: memoryview) -> int:
        """Receives data into `view` without waiting. Returns the number of bytes, 0 at the end of the stream.

        Raises `BlockingIOError` if no whole record with data has arrived, and `OSError` if the connection is broken.
        """
        if not self._ready:
            self._advance()
        count = 0
        if self._undecrypted or self._records_fed:
            count = self._decrypt(view)
        for _ in range(_READS_PER_CALL):
            if count or self._ended:
                break
            if self._held:
                self._drop_held()
            # What fits even with the bytes of an incomplete record, which were received before.
            sure = len(view) - _RECORD - _OVERHEAD
            received = self._receive_much(view, sure) if sure > 0 else self._receive_little(view)
            if received is None:
                return 0
            count = received
        if self._held and not self._records_fed and not self._undecrypted:
            self._drop_held()
        if not count and not self._ended:
            raise BlockingIOError(errno.EAGAIN, "no whole record with data has come yet")
        return count

    def _receive_much(self, view: memoryview, size: int) -> int | None:
        """Receives at most `size` encrypted bytes into a buffer, and decrypts all whole records of them into `view`.

        `view` must be larger than `size` by at least the largest record, so that no data is left over. That is not
        checked. Returns the number of decrypted bytes, which may be 0; None at the end of the stream. Raises
        `BlockingIOError` if no bytes have arrived.
        """
        buffer = _take_buffer()
        try:
            received = super().recv_into(buffer[: min(size, _BLOCK)])
            if not received:
                return None
            self._undecrypted = buffer[:received]
            return self._decrypt(view)
        finally:
            self._undecrypted = _NOTHING  # all of it is in `view` or in OpenSSL now, because `view` is larger
            _free_buffers.append(buffer)

    def _receive_little(self, view: memoryview) -> int | None:
        """Receives at most as many bytes as the largest TLS record has, and decrypts whole records into `view`.

        `view` may be too small for the data. The rest stays in this object for the next call. So that poll shows the
        socket as readable until then, the last received byte also stays in the kernel. Returns the number of decrypted
        bytes, which may be 0; None at the end of the stream. Raises `BlockingIOError` if no bytes have arrived.
        """
        data = super().recv(_RECORD + _OVERHEAD, socket.MSG_PEEK)
        if not data:
            return None
        self._held = True
        if len(data) > 1:
            super().recv(len(data) - 1)
        self._undecrypted = memoryview(data)
        return self._decrypt(view)

    def _drop_held(self) -> None:
        """Removes the byte that `_receive_little` has left in the kernel. Does nothing if there is none."""
        if self._held:
            self._held = False
            super().recv(1)

    def _decrypt(self, view: memoryview) -> int:
        """Decrypts TLS records that were read before into `view`, until it is full or no whole record is left.

        Returns the number of bytes of data; 0 if there is no whole record with data. Raises `OSError` if TLS fails, or
        the other end has sent too many records without data.
        """
        import ssl

        tls = self._tls
        total, size = 0, len(view)
        # A small `view` may be full before OpenSSL has got to the end of the records that were passed to it.
        limit = _RECORDS_PER_CALL if size > _RECORD else 1
        try:
            while total < size and (self._records_fed or self._feed(limit)):
                try:
                    count = cast(int, tls.read(size - total, view[total:] if total else view))  # a number
                except ssl.SSLWantReadError:
                    self._count_records_without_data(self._records_fed)
                    self._records_fed = 0
                    continue
                if not count:  # close_notify: OpenSSL ignores everything after it
                    self._ended, self._undecrypted, self._records_fed = True, _NOTHING, 0
                    break
                total += count
                if total < size or not tls.pending():  # OpenSSL returns the rest of a record in further calls
                    self._records_fed -= 1
        except ssl.SSLError as error:
            # The accepting end checks our certificate when the handshake is done already at this end.
            raise explained(error, self._has_begun) from error
        self._has_begun = self._has_begun or total > 0
        return total

    def _feed(self, limit: int) -> bool:
        """Passes encrypted bytes from `_undecrypted` to OpenSSL, up to the end of `limit` TLS records.

        Returns whether at least one record is complete now; False if there are no bytes, or only a part of a record.
        """
        data = self._undecrypted
        size = len(data)
        end = records = 0
        while end < size and records < limit:
            if size - end >= _HEADER and not self._record_left and not self._header:  # repeats `_record_part`
                whole = _HEADER + (data[end + 3] << 8 | data[end + 4])
                if whole <= size - end:
                    end += whole
                    records += 1
                    continue
            end += self._record_part(data[end:])
            records += not self._record_left and not self._header
        if end:
            self._incoming.write(data[:end])
            self._undecrypted = data[end:]
        self._records_fed = records
        return records > 0

    def _record_part(self, data: memoryview | bytes) -> int:
        """Returns how many bytes at the beginning of `data` belong to the current TLS record; 0 if `data` is empty.

        `data` are the encrypted bytes after those that earlier calls have counted. Each call counts the bytes that it
        returns: the next `data` must begin after them.
        """
        header = self._header
        size = 0
        if len(data) >= _HEADER and not self._record_left and not header:  # the usual case, without a copy
            whole = _HEADER + (data[3] << 8 | data[4])
            size = min(whole, len(data))
            self._record_left = whole - size
            return size
        if not self._record_left:
            size = min(_HEADER - len(header), len(data))
            header += data[:size]
            if len(header) < _HEADER:
                return size
            self._record_left = int.from_bytes(header[3:])
            header.clear()
        rest = min(self._record_left, len(data) - size)
        self._record_left -= rest
        return size + rest

    def _count_records_without_data(self, count: int) -> None:
        """Adds `count` to the number of TLS records without data on this connection.

        Raises `ProtocolError` if that number exceeds `MAX_EMPTY_RECORDS`.
        """
        self._records_without_data += count
        if self._records_without_data > MAX_EMPTY_RECORDS:
            raise ProtocolError(
                f"it sent more than {MAX_EMPTY_RECORDS} TLS records without data, which no farcall worker does"
            )

    # Sending

    def send(self, data: Buffer, flags: int = 0) -> int:  # type: ignore[override]
        """Encrypts and sends data, as much as the kernel accepts. Does not wait, whatever the timeout is.

        Args:
            data: The data. If not all bytes were accepted, the next call must begin with the rest, because it may be
                encrypted already. This is not checked.
            flags: Ignored.

        Returns:
            How many bytes of `data` were accepted; 0 only if it is empty.

        Raises:
            BlockingIOError: No bytes can be accepted now, or the TLS handshake is not done.
            OSError: The connection is broken, or the TLS handshake failed.
        """
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer], *_: Any) -> int:  # type: ignore[override]
        """Encrypts and sends several buffers, as much as the kernel accepts. Does not wait, whatever the timeout is.

        Args:
            buffers: The buffers. If not all bytes were accepted, the next call must begin with the rest, because it may
                be encrypted already. This is not checked.
            *_: Ignored.

        Returns:
            How many bytes were accepted; 0 only if there are none.

        Raises:
            BlockingIOError: No bytes can be accepted now, or the TLS handshake is not done.
            OSError: The connection is broken, or the TLS handshake failed.
        """
        with self._lock:
            if not self._ready:
                self._advance()
            return self._send(buffers)

    def sendall(self, data: Buffer, flags: int = 0) -> None:  # type: ignore[override]
        """Encrypts and sends all data, and waits until the kernel has accepted it.

        Args:
            data: The data; nothing is sent if it is empty.
            flags: Ignored.

        Raises:
            TimeoutError: The kernel accepted nothing for as long as the timeout. The time starts again whenever some
                data was accepted.
            BlockingIOError: The kernel does not accept all data, and the timeout is 0. A part may have been sent.
            OSError: The connection is broken, or the TLS handshake failed.
        """
        rest = memoryview(data).cast("B")
        timeout = self.gettimeout()
        while rest:
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                rest = rest[self.send(rest) :]
            except BlockingIOError:
                if timeout == 0:
                    raise
                self._wait(select.POLLOUT, deadline, "timed out")

    def _send(self, buffers: Sequence[Buffer]) -> int:
        """Encrypts and sends buffers. Returns how many bytes were accepted; 0 only if there are none.

        Raises `BlockingIOError` if none can be accepted now, and `OSError` if the connection is broken.
        """
        if self._unsent:
            self._flush()
        if not self._owed and len(buffers) == 1 and 0 < len(buffers[0]) <= _RECORD:  # the usual case
            self._encrypt(buffers[0])
            total = self._send_encrypted(len(buffers[0]))
        else:
            total = self._send_in_blocks(buffers)
        if not total and any(buffers):
            raise BlockingIOError(errno.EAGAIN, "the kernel takes nothing more now")
        return total

    def _send_in_blocks(self, buffers: Sequence[Buffer]) -> int:
        """Encrypts and sends buffers, about `_BLOCK` bytes at a time. Returns how many bytes were accepted, perhaps 0.

        The first `_owed` bytes are not sent again, but count as accepted: an earlier call has encrypted them without
        counting them, and they were sent since. Raises `OSError` if the connection is broken.
        """
        total = min(self._owed, sum([len(buffer) for buffer in buffers]))
        self._owed -= total
        block = 0
        for piece in _whole_records(buffers, total):
            self._encrypt(piece)
            block += len(piece)
            if block >= _BLOCK:
                total += self._send_encrypted(block)
                block = 0
                if self._unsent:
                    break
        if block:
            total += self._send_encrypted(block)
        return total

    def _encrypt(self, data: Buffer) -> None:
        """Encrypts data into `_outgoing`, from which it is sent later. Raises `OSError` if TLS has failed."""
        try:
            self._tls.write(data)
        except OSError as error:  # an `ssl.SSLError`: no socket is below
            raise explained(cast("ssl.SSLError", error), self._has_begun) from error

    def _send_encrypted(self, size: int) -> int:
        """Empties `_outgoing`, and sends its encrypted bytes as far as the kernel accepts them.

        `size` is the number of bytes of data, before encryption, in `_outgoing`. All its TLS records but the last must
        have the largest size. Returns the number of bytes of data in the records that the kernel has accepted as a
        whole, perhaps 0. Keeps encrypted bytes that were not accepted in `_unsent`, and sets `_owed` to the bytes of
        data that are not in the result. Raises `OSError` if the connection is broken.
        """
        encrypted = self._outgoing.read()
        try:
            count = super().send(encrypted)
        except BlockingIOError:
            count = 0
        except ConnectionError as error:
            refusal = None if self._has_begun else self._read_alert()
            if refusal is None:
                raise
            raise refusal from error
        if count == len(encrypted):
            return size
        sent = min(count // (_RECORD + _SEALED_EXTRA) * _RECORD, size)  # only whole records are reported
        self._unsent = memoryview(encrypted)[count:]
        self._owed = size - sent
        return sent

    def _read_alert(self) -> OSError | None:
        """Returns the error for the TLS alert that the other end has sent before it closed; None if there is none.

        Called after sending has failed.
        """
        try:
            self._drop_held()
            self._undecrypted = memoryview(super().recv(_RECORD))
            self._decrypt(memoryview(bytearray(1)))
        except ProtocolError as error:
            return error
        except OSError:
            pass
        return None

    def _flush(self) -> None:
        """Sends the encrypted bytes in `_unsent`, which the kernel did not accept before.

        Raises `BlockingIOError` if the kernel does not accept all of them now, and `OSError` if the connection is
        broken.
        """
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent) :]

    # The TLS handshake

    def _advance(self) -> None:
        """Continues the TLS handshake as far as that is possible without waiting. Returns only if it is done.

        Raises:
            BlockingIOError: The handshake is not done yet. To be called again when the socket is readable.
            EncryptionError: The other end does not encrypt, or one end refuses the certificate of the other.
            ProtocolError: The other end has sent bytes that are not TLS, or a handshake that is too long.
            ConnectionError: The other end has closed the connection.
        """
        import ssl

        for _ in range(_RECORDS_PER_CALL):
            try:
                self._tls.do_handshake()
                self._ready = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with suppress(OSError):  # it may be gone
                    self._say_below()  # tells the other end what is wrong
                    super().recv(_BLOCK)  # closing a socket with unread bytes could discard that message
                raise explained(error, has_begun=False) from error
            self._say_below()
            if self._ready:
                if not self.binding:
                    certificate = self._tls.getpeercert(binary_form=True)
                    self.binding = hashlib.sha256(certificate or b"").digest()
                return
            data = super().recv(_RECORD + _OVERHEAD, socket.MSG_PEEK)
            if not data:
                raise ended_early()
            if not self._fed and data[:1] not in _FIRST_BYTES:
                if self._tls.server_side and is_plain(data):
                    with suppress(OSError):  # it may be gone
                        super().recv(_RECORD)  # closing a socket with unread bytes could discard the answer
                        super().send(ENCRYPTED_ONLY)
                raise not_tls(data)
            # One record at a time, so that poll sees the bytes after the handshake.
            size = self._record_part(data)
            self._fed += size
            self._handshake_records += not self._header and not self._record_left
            if self._fed > MAX_HANDSHAKE_BYTES or self._handshake_records > MAX_HANDSHAKE_RECORDS:
                raise ProtocolError(
                    f"its TLS handshake is longer than {MAX_HANDSHAKE_RECORDS} records or {MAX_HANDSHAKE_BYTES} bytes"
                )
            self._incoming.write(super().recv(size))
        raise BlockingIOError(errno.EAGAIN, "the TLS handshake goes on after other connections had their turn")

    def _say_below(self) -> None:
        """Sends the bytes that OpenSSL has produced for the TLS handshake. Does nothing if there are none.

        Raises `OSError` if the kernel does not accept all of them, or the connection is broken.
        """
        data = self._outgoing.read()
        if data and super().send(data) != len(data):  # it fits into the empty buffer of a socket
            raise ConnectionError("the kernel does not take what begins an encrypted connection")

    def _wait(self, event: int, deadline: float | None, why: str) -> None:
        """Waits until the socket is ready for `event`, POLLIN or POLLOUT.

        Raises `TimeoutError`, with the text `why`, at the time `deadline` of the monotonic clock. If that time has
        passed already, raises it at once, whether the socket is ready or not. A `deadline` of None means no limit.
        """
        poll = select.poll()
        poll.register(self.fileno(), event)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and (left <= 0 or not poll.poll(math.ceil(left * 1000))):
            raise TimeoutError(errno.ETIMEDOUT, why)
        if left is None:
            poll.poll()


def _whole_records(buffers: Sequence[Buffer], begin: int) -> Iterator[Buffer]:
    """Yields the bytes of all buffers in order, in pieces that fill whole TLS records.

    The length of each piece but the last is a multiple of `_RECORD`, at most `_BLOCK`. The last piece may be shorter
    than `_RECORD`. Yields nothing if no bytes are left.

    Args:
        buffers: The buffers; some may be empty.
        begin: How many bytes to leave out at the beginning.
    """
    parts: list[Buffer] = []  # of a record that is not complete
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[begin:]
        begin = max(0, begin - len(buffer))
        if size:
            parts.append(view[: _RECORD - size])
            size += len(parts[-1])
            if size < _RECORD:
                continue
            view = view[len(parts[-1]) :]
            yield b"".join(parts)
        end = len(view) // _RECORD * _RECORD
        for at in range(0, end, _BLOCK):
            yield view[at : min(at + _BLOCK, end)]
        parts, size = [view[end:]], len(view) - end
    if size:
        yield b"".join(parts)

"""The store in the process that hosts it: one daemon thread that moves bytes between sockets and a `StoreState`.

Rank 0 hosts the store of a fixed group; any member may host the store of an open group. `server_state` decides about
keys and workers, and `security.proof` decides which connections to trust; this module only reads, writes and closes.

Rules
- A connection that sends invalid data, or nothing for too long, is closed with a log line and affects no other.
- No request is read before its sender has proved that it knows the group's secret.
- No memory is reserved because a message announces its size. Buffers grow with the bytes that arrive, and before the
  proof they hold at most one message of the handshake. If too many connections have not proved themselves, the oldest
  of them is closed.
- A stranger causes one log line per kind of failure, however often it connects.
- A connection with unsent replies is not read until they are sent, so that replies cannot pile up in memory.
- `close` closes the listening socket first: a worker that connects afterwards belongs to the next store on this port.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Final

from farcall.errors import AuthenticationError, EncryptionError, ProtocolError
from farcall.protocol.fields import quoted
from farcall.protocol.handshake import MAGIC, PREAMBLE_SIZE, Purpose, Refused, Welcome, take
from farcall.rendezvous.addresses import keep_alive, loopback_text, peer_text, stop_keep_alive
from farcall.rendezvous.handshake import pack_message
from farcall.rendezvous.messages import GoodBye, pack_reply, take_frame, unpack_request
from farcall.rendezvous.server_state import StoreState
from farcall.rendezvous.store import CLOSE_TIMEOUT_S
from farcall.security import Credentials, EncryptionRequired, ServerHandshake, refusal_for, stranger_kind
from farcall.transports.network import is_loopback, network_identity, numeric_host

_READ_BYTES: Final = 64 * 1024
_HANDSHAKE_READ_BYTES: Final = 1024
_TLS_HANDSHAKE: Final = b"\x16"
"""The first byte of a TLS connection."""
_ACCEPT_PAUSE_S: Final = 0.1
_DRAIN_S: Final = 2.0
"""How many seconds a refused connection may stay open while its other end reads the refusal."""
_LONGEST_SLEEP_S: Final = 3600.0
_MAX_REFUSAL_KINDS: Final = 4
"""How many different refusals (by host and kind) `refusals` remembers."""

_log = logging.getLogger(__name__)


class _Connection:
    """One accepted connection: its socket, its handshake, and the bytes that were received or are to be sent.

    Args:
        number: The number of the connection, unique in this server.
        sock: The socket.
        proof_deadline: When the other end must have proved that it knows the secret, in seconds of `time.monotonic`.
            The attribute is None once it has.
        handshake: The server's side of the handshake.

    Attributes:
        other: The address of the other end, later with the name and rank of the worker, for messages.
        incoming: Bytes that were received and not handled yet.
        outgoing: Bytes that are still to be sent.
        may_encrypt: True until the first byte tells whether this is TLS.
        ending: True if the connection is to be closed as soon as everything is sent.
    """

    def __init__(self, number: int, sock: socket.socket, proof_deadline: float, handshake: ServerHandshake) -> None:
        self.number = number
        self.sock = sock
        self.other = peer_text(sock)
        self.proof_deadline: float | None = proof_deadline
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.handshake = handshake
        self.may_encrypt = False  # True until the first byte tells whether this is TLS
        self.ending = False  # to be closed as soon as everything is sent


class StoreServer:
    """Serves a group's store on a listening socket until `close`, with a thread of its own.

    Owns the socket from now on. The other arguments are the id of the group, its size (None if it is open), the name of
    the hosting worker, the keys that exist from the start (None for none), and the secret and encryption (None for
    those of this user). They are not checked.

    Attributes:
        linger: Seconds that `close` waits by default for the workers to disconnect: 5 in a fixed group, 0 in an open
            one.
        port: The port on which the server listens.

    Example:
        server = StoreServer(listener, "my group, 2 workers", 2, "worker0")
        ...
        server.close()
    """

    def __init__(
        self,
        listener: socket.socket,
        group: str,
        world_size: int | None,
        host_name: str,
        values: Mapping[str, bytes] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Starts to serve.

        Args:
            listener: A listening TCP socket.
            group: The id of the group; workers with another id are refused.
            world_size: The number of workers; None for an open group. Not checked.
            host_name: The name of the worker that hosts this store.
            values: The keys that the store has from the start, with their values; None for none.
            credentials: The secret and the encryption; None means those of this user.

        Raises:
            RuntimeError: The system cannot create a thread.
            OSError: `listener` is closed, or no descriptors are left.
        """
        self.linger = CLOSE_TIMEOUT_S if world_size is not None else 0.0
        """Seconds that `close` waits by default for the workers to disconnect; 0 in an open group."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._state = StoreState(group, world_size, host_name, values)
        self._host_name = host_name
        self._is_open = world_size is None
        self._credentials = credentials or Credentials()
        self._limits = self._credentials.limits
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._accepting = False
        self._accept_from = 0.0
        self._close_by: float | None = None
        self._last_refusal = ""
        self._refused: dict[tuple[str, str], tuple[int, str]] = {}  # by host and kind: how often, and why at last
        if self._credentials.encryption is not None and not is_loopback(numeric_host(listener.getsockname())):
            self._credentials.encryption.listening()  # makes the certificate now; it would delay the first connection
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"farcall store :{self.port}", daemon=True)
        self._thread.start()

    def leave_losses_to_group(self) -> None:
        """Turns TCP keep-alive off on all connections: the group, not the store, decides which workers are lost.

        Raises nothing. Closed connections are skipped.
        """
        for connection in list(self._connections.values()):
            stop_keep_alive(connection.sock)

    def close(self, linger: float | None = None) -> None:
        """Stops accepting workers, waits up to `linger` seconds for the connected ones to leave, then ends the store.

        Requests that are still waiting then fail with a message that the store was closed. May be called again, also
        after an interrupt (Ctrl-C) in an earlier call. A second call can only shorten the wait of the first.

        Args:
            linger: How many seconds to wait; 0 does not wait. None means the attribute `linger`.
        """
        close_by = time.monotonic() + (self.linger if linger is None else linger)
        self._close_by = close_by if self._close_by is None else min(close_by, self._close_by)
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # the socket is full of wake-ups, or the thread has ended and closed it
        self._thread.join()

    def abandon(self) -> None:
        """Called in a forked child: closes the inherited descriptors. The store goes on in the parent.

        Raises nothing.
        """
        # Close only: a shutdown, or an unregistration from epoll, would also act on the parent's connections.
        for connection in self._connections.values():
            connection.sock.close()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.close()
        self._selector.close()

    def refusals(self) -> str:
        """Returns a text that says how many connections were refused, from where and why; empty if none was.

        May be called from any thread.
        """
        return "; and ".join(
            f"{count} connection{'s' if count > 1 else ''} from {host}: {why}"
            for (host, _), (count, why) in list(self._refused.items())
        )

    def _remember_refusal(self, connection: _Connection, kind: str, why: str) -> None:
        """Counts a refusal for `refusals`, by host and kind. Only the first `_MAX_REFUSAL_KINDS` combinations are kept.

        Args:
            connection: The refused connection.
            kind: The kind of failure, such as "wrong secret"; empty for a worker that knows the secret.
            why: The reason; the last one of each kind is kept.
        """
        key = connection.other.rpartition(":")[0], kind
        if key in self._refused or len(self._refused) < _MAX_REFUSAL_KINDS:
            self._refused[key] = self._refused.get(key, (0, ""))[0] + 1, why

    def _run(self) -> None:
        """The server's thread: serves until closed, then closes every socket.

        An unexpected error is logged and ends it, too.
        """
        try:
            while not self._is_closed():
                self._step()
        except Exception:
            _log.exception("the store in worker %r failed; the other workers lose their connections", self._host_name)
        finally:
            self._close_all()

    def _is_closed(self) -> bool:
        """Returns True when the server must end, and False before `close` was called.

        After `close`, closes the listening socket. The server must end then as soon as no workers are connected, or
        when the time that `close` gives them is over.
        """
        if self._close_by is None:
            return False
        if self._listener.fileno() >= 0:
            self._stop_listening()
        return not self._state.members or time.monotonic() >= self._close_by

    def _step(self) -> None:
        """Waits for the next event or deadline, and serves everything that is ready.

        A connection that did not prove in time that it knows the secret is closed. Errors close single connections
        only.
        """
        now = time.monotonic()
        if self._close_by is None and not self._accepting and now >= self._accept_from:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True
        for key, events in self._selector.select(max(0.0, self._next_wakeup(now) - now)):
            if key.fileobj is self._wake_read:
                self._wake_read.recv(_READ_BYTES)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.data, events)
        now = time.monotonic()
        self._state.expire(now)
        self._deliver()
        for connection in self._unproven_connections():
            if connection.proof_deadline is not None and connection.proof_deadline <= now:
                level = logging.DEBUG if connection.ending else logging.WARNING
                why = f"it did not prove within {self._limits.proof_timeout:g} s that it knows the secret"
                self._drop(connection, why, level, "silent")

    def _next_wakeup(self, now: float) -> float:
        """Returns the time, in seconds of `time.monotonic`, at which `_step` has to wake up even if no socket is ready.

        That is the earliest deadline, and at most `_LONGEST_SLEEP_S` after `now`.
        """
        times = [now + _LONGEST_SLEEP_S]
        times += [
            connection.proof_deadline
            for connection in self._unproven_connections()
            if connection.proof_deadline is not None
        ]
        if (deadline := self._state.next_deadline()) is not None:
            times.append(deadline)
        if self._close_by is not None:
            times.append(self._close_by)
        elif not self._accepting:
            times.append(self._accept_from)
        return min(times)

    def _unproven_connections(self) -> list[_Connection]:
        """Returns the connections that have not proved the secret or are being refused, oldest first; may be empty."""
        return [connection for connection in self._connections.values() if connection.proof_deadline is not None]

    def _accept(self) -> None:
        """Accepts one connection, and prepares its handshake. Does nothing if the other end has already given up.

        If there are too many connections without a proof of the secret, the oldest of them is closed. If the system
        cannot accept connections, logs a warning, and none is accepted for `_ACCEPT_PAUSE_S` seconds.
        """
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the other end has already closed the connection
        except OSError as error:
            # Usually out of descriptors. The listening socket stays readable, so an immediate retry would spin.
            _log.warning("the store on port %d cannot accept connections for the moment: %s", self.port, error)
            self._selector.unregister(self._listener)
            self._accepting = False
            self._accept_from = time.monotonic() + _ACCEPT_PAUSE_S
            return
        if len(strangers := self._unproven_connections()) >= self._limits.max_strangers:
            why = f"more than {self._limits.max_strangers} connections have not proved that they know the secret"
            self._drop(strangers[0], why, kind="too many")
        sock.setblocking(False)
        binding, network, may_encrypt = b"", "", False
        try:
            keep_alive(sock)
            # Loopback is not encrypted, so the proof is bound to the address instead. Otherwise another user of this
            # host could listen on [::1] while the store is on 127.0.0.1, and relay connections made to `localhost`.
            address = loopback_text(sock.getsockname())
            if not is_loopback(numeric_host(sock.getpeername())):
                sock, binding = self._wrap_in_tls(sock)
            else:
                network, may_encrypt = network_identity(sock), self._credentials.encryption is not None
        except OSError as error:
            _log.debug("the store on port %d: a new connection ended at once: %s", self.port, error)
            sock.close()
            return
        handshake = self._credentials.server_handshake(Purpose.STORE, address, binding, network)
        connection = _Connection(next(self._numbers), sock, time.monotonic() + self._limits.proof_timeout, handshake)
        connection.may_encrypt = may_encrypt
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _wrap_in_tls(self, sock: socket.socket) -> tuple[socket.socket, bytes]:
        """Returns the socket wrapped in TLS, and the fingerprint of the certificate, which a proof must be bound to.

        If this worker does not encrypt, returns the socket unchanged, with empty bytes. Sends nothing yet. Raises
        `OSError` if the socket is closed.
        """
        encryption = self._credentials.encryption
        if encryption is None:
            return sock, b""
        from farcall.transports.tls import TlsSocket  # late: it needs ssl

        encryption.listening()  # may fail for want of a certificate: before the socket is wrapped
        encrypted = TlsSocket(sock, encryption, listens=True)
        return encrypted, encrypted.binding

    def _decide_on_encryption(self, connection: _Connection) -> None:
        """Looks at the first byte of a loopback connection, and switches to TLS if it starts a TLS handshake.

        Raises `BlockingIOError` if no byte has arrived yet, and `OSError` if the connection is broken.
        """
        if connection.sock.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            plain = connection.sock
            connection.sock, binding = self._wrap_in_tls(plain)
            self._selector.unregister(plain)  # the TLS socket has the same descriptor
            connection.handshake = self._credentials.server_handshake(Purpose.STORE, "", binding)
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)
        connection.may_encrypt = False

    def _serve(self, connection: _Connection, events: int) -> None:
        """Reads from and writes to one connection that is ready.

        An error closes this connection only, and is not raised.

        Args:
            connection: The connection. Nothing is done if it was closed meanwhile.
            events: What it is ready for: `EVENT_READ`, `EVENT_WRITE` or both.
        """
        if connection.number not in self._connections:
            return  # dropped while an earlier event of this round was served
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection)
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
        except ProtocolError as error:
            if isinstance(error, EncryptionError):
                self._remember_refusal(connection, "encryption", quoted(str(error)))
            self._drop(connection, str(error), kind=stranger_kind(error))
        except OSError as error:
            self._drop_broken(connection, error)
        except Exception:
            # A bug that one connection triggers must not end the store for the others.
            _log.exception("the store failed to serve %s", connection.other)
            self._drop(connection, "its request could not be served")

    def _receive(self, connection: _Connection) -> None:
        """Reads once from a connection, and handles every complete message. Does nothing if no bytes have arrived.

        A connection that the other end has closed is closed here, too. Raises `ProtocolError` for an invalid message,
        and `OSError` if the connection is broken.
        """
        is_known = connection.proof_deadline is None
        room = _READ_BYTES
        if not is_known and not connection.ending:  # at most one message of the handshake: see the rules
            room = min(_HANDSHAKE_READ_BYTES, PREAMBLE_SIZE + self._limits.max_message_bytes - len(connection.incoming))
        try:
            if connection.may_encrypt:
                self._decide_on_encryption(connection)
            data = connection.sock.recv(room)
        except BlockingIOError:
            return
        if not data:
            self._drop_disconnected(connection, "the connection ended")
            return
        if connection.ending:
            return  # the worker has said good-bye or was refused; further data is ignored
        connection.incoming += data
        if connection.proof_deadline is not None and not self._continue_handshake(connection):
            return
        while not connection.ending and (frame := take_frame(connection.incoming)) is not None:
            request = unpack_request(frame)
            self._state.handle(connection.number, request, time.monotonic())
            connection.ending = isinstance(request, GoodBye)
        self._deliver()
        if connection.ending and not connection.outgoing:
            self._drop(connection, "said good-bye", level=logging.DEBUG)

    def _continue_handshake(self, connection: _Connection) -> bool:
        """Continues the handshake with the bytes that have arrived. Returns True once the worker is let in.

        Returns False if more bytes are needed, and if the other end was refused: it does not know the secret, is no
        worker, or may not join. Raises nothing for wrong bytes.
        """
        handshake = connection.handshake
        while not handshake.is_proven:
            is_ours = connection.incoming.startswith(MAGIC)
            try:
                taken = take(connection.incoming, Purpose.STORE, connection.other, self._limits.max_message_bytes)
                if taken is None:
                    return False
                reply = handshake.take(*taken)
            except EncryptionRequired as error:
                # The worker connects again at once, with TLS, so this is not worth a log line.
                self._refuse(connection, refusal_for(error), level=logging.DEBUG)
                return False
            except AuthenticationError as error:
                self._refuse(connection, refusal_for(error), stranger_kind(error), str(error))
                return False
            except ProtocolError as error:
                if is_ours:  # another version of farcall, which can read the refusal
                    self._refuse(connection, refusal_for(error), "no handshake")
                else:
                    self._drop(connection, str(error), kind="no handshake")
                return False
            self._send(connection, pack_message(reply))
        hello = handshake.hello
        if hello is None or connection.number not in self._connections:
            return False
        verdict = self._state.introduce(connection.number, hello)
        self._deliver()
        if not isinstance(verdict, Welcome):
            if verdict is None:
                self._drop(connection, f"{hello.name!r} (rank {hello.rank}) belongs to the next run", logging.DEBUG)
            else:
                self._refuse(connection, verdict)
            return False
        connection.proof_deadline = None
        connection.other = f"{hello.name!r} (rank {hello.rank}, {connection.other})"
        self._send(connection, pack_message(verdict))
        return connection.number in self._connections

    def _refuse(
        self, connection: _Connection, refusal: Refused, kind: str = "", why: str = "", level: int = logging.WARNING
    ) -> None:
        """Sends a refusal, and closes the connection once the other end has read it.

        Args:
            connection: The connection to refuse.
            refusal: What the other end is sent.
            kind: The kind of failure, such as "wrong secret", if the other end has not proved that it knows the secret;
                each kind is logged once per host. Empty for a worker.
            why: The reason for the log, if it should say more than the refusal; empty for the reason in the refusal.
            level: The log level of the first refusal of its kind; later ones are logged at level DEBUG.
        """
        why = quoted(why or refusal.reason)
        is_new = self._credentials.stranger_log.is_new(connection.other, kind) if kind else why != self._last_refusal
        if level > logging.DEBUG:
            self._last_refusal = why
            self._remember_refusal(connection, kind, why)
        level = level if is_new else logging.DEBUG  # a refused worker retries for a while
        _log.log(level, "the store on port %d refused %s: %s", self.port, connection.other, why)
        connection.ending = True
        connection.incoming.clear()
        if connection.proof_deadline is not None:
            connection.proof_deadline = min(connection.proof_deadline, time.monotonic() + _DRAIN_S)
        self._send(connection, pack_message(refusal))
        # Close only our direction, and read on until the other end closes or `proof_deadline`. Closing a socket with
        # unread bytes makes the kernel reset the connection, and the refusal could be lost.
        if not connection.outgoing and connection.number in self._connections:
            connection.sock.shutdown(socket.SHUT_WR)

    def _deliver(self) -> None:
        """Sends the replies that are ready.

        Drops those whose connections are closed. Does nothing if there are none.
        """
        for number, reply in self._state.take_replies():
            if number in self._connections:
                self._send(self._connections[number], pack_reply(reply))

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Queues bytes for a connection and sends as much as possible now. An error closes the connection."""
        connection.outgoing += data
        try:
            self._flush(connection)
        except OSError as error:
            self._drop_broken(connection, error)

    def _drop_disconnected(self, connection: _Connection, how: str) -> None:
        """Closes a connection whose other end has hung up; `how` says how, for the log.

        Does nothing if it is closed already.
        """
        known = connection.proof_deadline is None or connection.handshake.is_proven or connection.ending
        why = how if known else f"it left before it had proved that it knows the secret ({how})"
        self._drop(connection, why, logging.DEBUG if known else logging.INFO, "left")

    def _drop_broken(self, connection: _Connection, error: OSError) -> None:
        """Closes a connection that failed with `error`. Does nothing if it is closed already.

        The log level is WARNING only for a worker of a fixed group whose connection broke without a reset. Other
        failures are ordinary, and are logged at level INFO or DEBUG.
        """
        # A worker that finds the reply slow hangs up and tries again. If it had not read everything we sent, the kernel
        # reports that as a reset, so a reset is an ordinary end.
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            self._drop_disconnected(connection, f"the connection ended: {error}")
        else:
            # A refusal was logged already. A connection without a proof may be a worker whose timeout was over, and
            # workers of an open group end their connections without a good-bye.
            may_go = connection.proof_deadline is not None or self._is_open
            level = logging.DEBUG if connection.ending else logging.INFO if may_go else logging.WARNING
            self._drop(connection, f"the connection broke: {error}", level, "left")

    def _flush(self, connection: _Connection) -> None:
        """Sends queued bytes until the socket would block, and chooses what to wait for next: writable or readable.

        Closes the connection once all is sent after a good-bye. Raises `OSError` if the connection is broken.
        """
        try:
            while connection.outgoing:
                sent = connection.sock.send(connection.outgoing[:_READ_BYTES])
                del connection.outgoing[:sent]
        except BlockingIOError:
            pass
        if connection.ending and connection.proof_deadline is None and not connection.outgoing:
            self._drop(connection, "said good-bye", level=logging.DEBUG)
            return
        wanted = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)

    def _drop(self, connection: _Connection, why: str, level: int = logging.WARNING, kind: str = "broken") -> None:
        """Closes a connection, logs why, and counts its worker as disconnected. Does nothing if it is already closed.

        Args:
            connection: The connection.
            why: The reason, for the log.
            level: The log level.
            kind: The kind of failure, if the other end has not proved that it knows the secret; each kind is logged
                once per host.
        """
        if self._connections.pop(connection.number, None) is None:
            return
        is_stranger = connection.proof_deadline is not None and level >= logging.INFO
        if is_stranger and not self._credentials.stranger_log.is_new(connection.other, kind):
            level = logging.DEBUG
        why = quoted(why)
        _log.log(level, "the store on port %d closes the connection from %s: %s", self.port, connection.other, why)
        self._selector.unregister(connection.sock)
        _shut_down(connection.sock)
        self._state.disconnect(connection.number)
        self._deliver()

    def _stop_listening(self) -> None:
        """Closes the listening socket and every connection that has not proved yet that it knows the secret."""
        if self._accepting:
            self._selector.unregister(self._listener)
            self._accepting = False
        _shut_down(self._listener)
        for connection in self._unproven_connections():
            self._drop(connection, "the store is closing", level=logging.DEBUG)

    def _close_all(self) -> None:
        """Fails the waiting requests, then closes all sockets."""
        rank = "" if self._is_open else " (rank 0)"
        self._state.fail_waits(f"the store was closed by {self._host_name!r}{rank}, which hosts it")
        self._deliver()
        for connection in list(self._connections.values()):
            _shut_down(connection.sock)
        self._connections.clear()
        _shut_down(self._listener)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _shut_down(sock: socket.socket) -> None:
    """Shuts a socket down and closes it. Without the shutdown it would stay open in a forked child.

    Does nothing if the socket is closed already.
    """
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # already disconnected
    sock.close()

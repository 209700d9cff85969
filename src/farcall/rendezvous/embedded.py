"""The store inside the worker that hosts it (rank 0, or any in an open group): one daemon thread that moves bytes from
sockets to a `StoreTable` and back.

It decides nothing about keys or workers (`table` does) and nothing about trust (`security.proof` does).

Rules
- A connection that says nothing sensible, or nothing for too long, is closed with a log line and harms nobody else.
- No request is read before its sender has proved that it knows the group's secret.
- No memory is reserved on anybody's word: buffers grow with the bytes that came, and before the proof they hold no more
  than a greeting may. If there are too many who have not proved themselves, the oldest of them goes.
- Of a stranger one line is logged, however often it comes.
- A connection with unsent replies is not read from until they are gone, so that nobody can pile them up.
- `close` closes the listening socket first: whoever comes now belongs to the next store on this port.
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
from farcall.protocol.handshake import MAGIC, PREAMBLE_SIZE, Purpose, Refused, Welcome, take
from farcall.rendezvous.addresses import keep_alive, loopback_text, peer_text
from farcall.rendezvous.greeting import answer
from farcall.rendezvous.store import PATIENCE
from farcall.rendezvous.store_messages import GoodBye, pack_reply, take_frame, unpack_request
from farcall.rendezvous.table import StoreTable
from farcall.security import Credentials, Doorkeeper, kind_of, refusal_of
from farcall.transports.network import is_loopback, numeric_host

_CHUNK: Final = 64 * 1024
_ACCEPT_PAUSE: Final = 0.1
_LONGEST_SLEEP: Final = 3600.0
_REFUSALS: Final = 4
"""Kinds of refusals that are remembered, for a message to people."""

_log = logging.getLogger(__name__)


class _Connection:
    def __init__(self, number: int, sock: socket.socket, hello_by: float, door: Doorkeeper) -> None:
        self.number = number
        self.sock = sock
        self.other = peer_text(sock)
        self.hello_by: float | None = hello_by
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.door = door
        self.ending = False  # closed as soon as all is sent


class EmbeddedStore:
    """Serves a listening socket until `close`. The socket is its own from now on."""

    def __init__(
        self,
        listener: socket.socket,
        group: str,
        world_size: int | None,
        host_name: str,
        values: Mapping[str, bytes] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`world_size` None is an open group; `values` is what the store holds from the beginning.

        The `credentials` are by default those of this user.
        """
        self.linger = PATIENCE if world_size is not None else 0.0
        """Seconds that `close` waits for the others to go; those of an open group need not."""
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._table = StoreTable(group, world_size, host_name, values)
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
            self._credentials.encryption.listening()  # now, so that the first who connects holds up nobody
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"farcall store :{self.port}", daemon=True)
        self._thread.start()

    def close(self, linger: float | None = None) -> None:
        """Takes nobody in any more, waits up to `linger` seconds for those who are here to go, then ends.

        Whoever still waits for something then is told that the store is closed. May be called twice, also by who was
        interrupted in it: then the shorter time counts.
        """
        close_by = time.monotonic() + (self.linger if linger is None else linger)
        self._close_by = close_by if self._close_by is None else min(close_by, self._close_by)
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # it is full of such words, or the thread has ended already, and its sockets with it
        self._thread.join()

    def abandon(self) -> None:
        """In a forked child: closes its copies of the descriptors; the store goes on in the parent. Raises nothing."""
        # Nothing is shut down or unregistered: the connections and the poller behind the descriptors are the parent's.
        for connection in self._connections.values():
            connection.sock.close()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.close()
        self._selector.close()

    def refusals(self) -> str:
        """Who was refused so far, and why, in words; empty if nobody was. Any thread may ask."""
        return "; and ".join(
            f"{count} connection{'s' if count > 1 else ''} from {host}: {why}"
            for (host, _), (count, why) in list(self._refused.items())
        )

    def _note_refused(self, connection: _Connection, kind: str, why: str) -> None:
        key = connection.other.rpartition(":")[0], kind
        if key in self._refused or len(self._refused) < _REFUSALS:
            self._refused[key] = self._refused.get(key, (0, ""))[0] + 1, why

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._step()
        except Exception:
            _log.exception("the store of worker %r failed; the other workers see it as gone", self._host_name)
        finally:
            self._release()

    def _is_over(self) -> bool:
        if self._close_by is None:
            return False
        if self._listener.fileno() >= 0:
            self._stop_listening()
        return not self._table.members or time.monotonic() >= self._close_by

    def _step(self) -> None:
        now = time.monotonic()
        if self._close_by is None and not self._accepting and now >= self._accept_from:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True
        for key, events in self._selector.select(max(0.0, self._next_time(now) - now)):
            if key.fileobj is self._wake_read:
                self._wake_read.recv(_CHUNK)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._serve(key.data, events)
        now = time.monotonic()
        self._table.expire(now)
        self._deliver()
        for connection in self._strangers():
            if connection.hello_by is not None and connection.hello_by <= now:
                level = logging.DEBUG if connection.ending else logging.WARNING
                why = f"did not prove within {self._limits.patience:g} s that it knows the secret"
                self._drop(connection, why, level, "silent")

    def _next_time(self, now: float) -> float:
        times = [now + _LONGEST_SLEEP]
        times += [connection.hello_by for connection in self._strangers() if connection.hello_by is not None]
        if (deadline := self._table.next_deadline()) is not None:
            times.append(deadline)
        if self._close_by is not None:
            times.append(self._close_by)
        elif not self._accepting:
            times.append(self._accept_from)
        return min(times)

    def _strangers(self) -> list[_Connection]:
        return [connection for connection in self._connections.values() if connection.hello_by is not None]

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # whoever knocked is gone again
        except OSError as error:
            # Out of descriptors, mostly. The listening socket stays readable, so trying on at once would spin.
            _log.warning("the store on port %d cannot take connections for the moment: %s", self.port, error)
            self._selector.unregister(self._listener)
            self._accepting = False
            self._accept_from = time.monotonic() + _ACCEPT_PAUSE
            return
        if len(strangers := self._strangers()) >= self._limits.most:
            why = f"more than {self._limits.most} connections have not proved themselves yet"
            self._drop(strangers[0], why, kind="too many")
        sock.setblocking(False)
        binding = b""
        try:
            keep_alive(sock)
            # Loopback is not encrypted: any user of this host might listen on another address of it, say [::1] while
            # this is 127.0.0.1, and hand through what `localhost` led there.
            address = loopback_text(sock.getsockname())
            encryption = self._credentials.encryption
            if encryption is not None and not is_loopback(numeric_host(sock.getpeername())):
                from farcall.transports.tls import TlsSocket  # late: it needs ssl

                sock = encrypted = TlsSocket(sock, encryption, listens=True)
                binding = encrypted.binding
        except OSError as error:
            _log.debug("the store on port %d: who knocked is gone again: %s", self.port, error)
            sock.close()
            return
        door = self._credentials.doorkeeper(Purpose.STORE, address, binding)
        connection = _Connection(next(self._numbers), sock, time.monotonic() + self._limits.patience, door)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        if connection.number not in self._connections:
            return  # dropped by an earlier event of the same round
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection)
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
        except ProtocolError as error:
            if isinstance(error, EncryptionError):
                self._note_refused(connection, "encryption", str(error))
            self._drop(connection, str(error), kind=kind_of(error))
        except OSError as error:
            self._broke(connection, error)
        except Exception:
            # Whatever one connection sends must not end the store for the others.
            _log.exception("the store could not serve %s", connection.other)
            self._drop(connection, "what it sent could not be served")

    def _receive(self, connection: _Connection) -> None:
        is_known = connection.hello_by is None
        room = _CHUNK if is_known else PREAMBLE_SIZE + self._limits.greeting - len(connection.incoming)
        try:
            data = connection.sock.recv(room)
        except BlockingIOError:
            return
        if not data:
            self._left(connection, "the connection ended")
            return
        if connection.ending:
            return  # it has said good-bye, or was refused: nothing it adds counts
        connection.incoming += data
        if connection.hello_by is not None and not self._greet(connection):
            return
        while not connection.ending and (frame := take_frame(connection.incoming)) is not None:
            request = unpack_request(frame)
            self._table.handle(connection.number, request, time.monotonic())
            connection.ending = isinstance(request, GoodBye)
        self._deliver()
        if connection.ending and not connection.outgoing:
            self._drop(connection, "said good-bye", level=logging.DEBUG)

    def _greet(self, connection: _Connection) -> bool:
        """Whether the worker is in now."""
        door = connection.door
        while not door.is_proven:
            is_ours = connection.incoming.startswith(MAGIC)
            try:
                taken = take(connection.incoming, Purpose.STORE, connection.other, self._limits.greeting)
                if taken is None:
                    return False
                reply = door.take(*taken)
            except AuthenticationError as error:
                self._refuse(connection, refusal_of(error), kind_of(error), str(error))
                return False
            except ProtocolError as error:
                if is_ours:  # another version of ours: it can read why
                    self._refuse(connection, refusal_of(error), "no greeting")
                else:
                    self._drop(connection, str(error), kind="no greeting")
                return False
            self._send(connection, answer(reply))
        hello = door.hello
        if hello is None or connection.number not in self._connections:
            return False
        verdict = self._table.introduce(connection.number, hello)
        self._deliver()
        if not isinstance(verdict, Welcome):
            if verdict is None:
                self._drop(
                    connection, f"{hello.name!r} (rank {hello.rank}) is too early for its next run", logging.DEBUG
                )
            else:
                self._refuse(connection, verdict)
            return False
        connection.hello_by = None
        connection.other = f"{hello.name!r} (rank {hello.rank}, {connection.other})"
        self._send(connection, answer(verdict))
        return connection.number in self._connections

    def _refuse(self, connection: _Connection, refusal: Refused, kind: str = "", why: str = "") -> None:
        """`kind`: what sort of stranger it is, if it is one; `why`: for the log, if that is to know more."""
        is_new = (
            self._credentials.notebook.is_new(connection.other, kind) if kind else refusal.reason != self._last_refusal
        )
        level = logging.WARNING if is_new else logging.DEBUG  # whoever was refused tries again for a while
        self._last_refusal = refusal.reason
        _log.log(level, "the store on port %d refused %s: %s", self.port, connection.other, why or refusal.reason)
        self._note_refused(connection, kind, why or refusal.reason)
        connection.ending = True
        connection.incoming.clear()
        self._send(connection, answer(refusal))
        # Half-closed, and drained until the other end or `hello_by`: closing with unread bytes would reset the
        # connection, and the refusal could be lost on its way.
        if not connection.outgoing and connection.number in self._connections:
            connection.sock.shutdown(socket.SHUT_WR)

    def _deliver(self) -> None:
        for number, reply in self._table.take_replies():
            if number in self._connections:
                self._send(self._connections[number], pack_reply(reply))

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.outgoing += data
        try:
            self._flush(connection)
        except OSError as error:
            self._broke(connection, error)

    def _left(self, connection: _Connection, how: str) -> None:
        """The other end has hung up. Who waits for that worker is told by the table; here it is no news."""
        known = connection.hello_by is None or connection.door.is_proven or connection.ending
        why = how if known else f"left before it had proved that it knows the secret ({how})"
        self._drop(connection, why, logging.DEBUG if known else logging.INFO, "left")

    def _broke(self, connection: _Connection, error: OSError) -> None:
        # Whoever finds the answer slow hangs up and tries again, and what we had sent by then was read by nobody: for
        # the kernel, that is a reset.
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            self._left(connection, f"the connection ended: {error}")
        else:
            # Of who was refused all is said. Who goes unproven may be a worker of ours whose time was over, and in an
            # open group nobody says good-bye to the store.
            may_go = connection.hello_by is not None or self._is_open
            level = logging.DEBUG if connection.ending else logging.INFO if may_go else logging.WARNING
            self._drop(connection, f"the connection broke: {error}", level, "left")

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.outgoing:
                sent = connection.sock.send(connection.outgoing[:_CHUNK])
                del connection.outgoing[:sent]
        except BlockingIOError:
            pass
        if connection.ending and connection.hello_by is None and not connection.outgoing:
            self._drop(connection, "said good-bye", level=logging.DEBUG)
            return
        wanted = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)

    def _drop(self, connection: _Connection, why: str, level: int = logging.WARNING, kind: str = "broken") -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        is_stranger = connection.hello_by is not None and level >= logging.INFO
        if is_stranger and not self._credentials.notebook.is_new(connection.other, kind):
            level = logging.DEBUG
        _log.log(level, "the store on port %d closes the connection of %s: %s", self.port, connection.other, why)
        self._selector.unregister(connection.sock)
        _shut(connection.sock)
        self._table.end(connection.number)
        self._deliver()

    def _stop_listening(self) -> None:
        if self._accepting:
            self._selector.unregister(self._listener)
            self._accepting = False
        _shut(self._listener)
        for connection in self._strangers():
            self._drop(connection, "the store is closing", level=logging.DEBUG)

    def _release(self) -> None:
        rank = "" if self._is_open else " (rank 0)"
        self._table.fail_waits(f"the store was closed by {self._host_name!r}{rank}, which hosts it")
        self._deliver()
        for connection in list(self._connections.values()):
            _shut(connection.sock)
        self._connections.clear()
        _shut(self._listener)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _shut(sock: socket.socket) -> None:
    """Ends it for good, also where a forked child still holds a copy of the descriptor."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was not connected any more
    sock.close()

"""A worker's end of the embedded store, also at the worker that hosts it.

One connection; a small daemon thread reads the replies and hands each to the thread that waits for its id. Threads wait
on events, so Ctrl-C ends a wait in the main thread at once.

Every wait ends: the store ends it at its time; if the store is gone the connection ends and with it every wait; if the
store is there but stuck, the wait ends a little after its time; and when the group has found out that the store's host
is lost (it may be frozen, and its connection open), all of them end at once.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TypeVar

from farcall.errors import ProtocolError, RendezvousError, RendezvousTimeoutError
from farcall.protocol.handshake import Welcome
from farcall.rendezvous.addresses import peer_text
from farcall.rendezvous.embedded import EmbeddedStore
from farcall.rendezvous.store import PATIENCE, Store
from farcall.rendezvous.store_messages import (
    Add,
    Collect,
    Delete,
    Done,
    Entries,
    Failed,
    Get,
    GoodBye,
    Number,
    Read,
    Reply,
    Request,
    Set,
    SetNew,
    TimedOut,
    Value,
    pack_request,
    take_frame,
    unpack_reply,
)

ANSWER_TIMEOUT: Final = 30.0
"""Seconds that a store may take for what needs no waiting, and for taking a request off our hands."""

_GRACE: Final = 5.0
_FAREWELL: Final = 2.0
_CHUNK: Final = 64 * 1024

_R = TypeVar("_R", Value, Number, Entries, Done)


class Limit(threading.local):
    """Until when what this thread asks must be answered, on the monotonic clock; see `ANSWER_TIMEOUT` otherwise."""

    deadline = math.inf

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """See `Store`."""
        before = self.deadline
        self.deadline = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.deadline = before


class _Pending:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived = threading.Event()
        self.reply: Reply | None = None


class StoreClient(Store):
    """A store at the other end of a connection that was welcomed. The socket is its own from now on.

    `after_close` is called once, when the good-bye has been said: the hosting worker ends the store there. `hosted` is
    the store itself at the hosting worker: `close` tells it how long to wait, and `abandon` lets go of it.

    `on_lost` is called once, on the reading thread, if the connection ends and it was not closed here; it must not
    block. `farewell` is for how long `close` waits for the store to have heard it; 0 hangs up without a word.
    """

    def __init__(
        self,
        sock: socket.socket,
        welcome: Welcome,
        after_close: Callable[[], None] = lambda: None,
        hosted: EmbeddedStore | None = None,
        grace: float = _GRACE,
        *,
        limit: Limit | None = None,
        on_lost: Callable[[], None] = lambda: None,
        farewell: float = _FAREWELL,
    ) -> None:
        rank = f" (rank {welcome.rank})" if welcome.rank >= 0 else ""
        self._host = welcome.rank
        self._where = f"the store in {welcome.name!r}{rank} at {peer_text(sock)}"
        self._limit = limit or Limit()
        self._on_lost = on_lost
        self._farewell = farewell
        self._sock = sock
        self._after_close = after_close
        self._hosted = hosted
        self._grace = grace
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # guards what is below; a signal handler may hear of a loss in its midst
        self._send_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._ended: str | None = None
        self._lost: str | None = None  # why nobody can wait for all workers any more
        self._closing = False
        sock.settimeout(ANSWER_TIMEOUT)
        self._reader = threading.Thread(target=self._read_replies, name="farcall store replies", daemon=True)
        self._reader.start()

    @property
    def is_ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._ended is not None

    def set(self, key: str, value: bytes) -> None:
        self._ask(Set(next(self._ids), key, value), Done)

    def set_new(self, key: str, value: bytes) -> bytes:
        return self._ask(SetNew(next(self._ids), key, value), Value).value

    def get(self, key: str, timeout: float) -> bytes:
        return self._ask(Get(next(self._ids), key, timeout), Value, timeout + self._grace).value

    def add(self, key: str, amount: int) -> int:
        return self._ask(Add(next(self._ids), key, amount), Number).number

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        return self._ask(Delete(next(self._ids), key, expected), Number).number > 0

    def read(self, prefix: str) -> Mapping[str, bytes]:
        return self._ask(Read(next(self._ids), prefix), Entries).entries

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        return self._ask(Collect(next(self._ids), prefix, count, timeout), Entries, timeout + self._grace).entries

    def within(self, seconds: float) -> AbstractContextManager[None]:
        return self._limit.within(seconds)

    def lost(self, rank: int, why: str) -> None:
        if rank == self._host:
            self._end(f"{self._where} is lost: {why}")
            return
        with self._lock:
            self._lost = self._lost or why
            waiting = [one for one in self._pending.values() if isinstance(one.request, Collect)]
        for one in waiting:
            one.arrived.set()

    def close(self, early: bool = False, patience: float = PATIENCE) -> None:
        with self._close_lock:
            self._closing = True
            if self._hosted is not None:
                self._hosted.linger = patience
            with self._lock:
                alive, self._ended = self._ended is None, self._ended or f"{self._where} was closed by this worker"
            try:
                if alive and self._farewell > 0:
                    self._say_good_bye(early)
                self._hang_up()
            except BaseException:
                if self._hosted is not None:
                    self._hosted.linger = 0.0  # Ctrl-C: nobody is waited for
                raise
            finally:
                self._after_close()
                self._after_close = lambda: None  # not before: who is interrupted closes again

    def refusals(self) -> str:
        return "" if self._hosted is None else self._hosted.refusals()

    def abandon(self) -> None:
        # Other threads of the parent may have held the locks when it forked; nobody will release them here.
        self._lock, self._send_lock, self._close_lock = threading.RLock(), threading.Lock(), threading.Lock()
        self._ended = f"{self._where} belongs to the process that this one was forked from"
        self._after_close = lambda: None
        self._sock.close()
        if self._hosted is not None:
            self._hosted.abandon()

    def _say_good_bye(self, early: bool) -> None:
        try:
            self._send(pack_request(GoodBye(early)))
            # The store closes the connection when it has read it; hanging up before could lose the word on its way.
            self._reader.join(self._farewell)
        except OSError:
            pass  # the store has gone first

    def _hang_up(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader; closing alone would not
        except OSError:
            pass
        self._reader.join()
        self._sock.close()

    def _ask(self, request: Request, expected: type[_R], wait: float = ANSWER_TIMEOUT) -> _R:
        assert not isinstance(request, GoodBye)
        wait = min(wait, max(0.0, self._limit.deadline - time.monotonic()))
        data = pack_request(request)
        pending = _Pending(request)
        with self._lock:
            if self._ended is not None:
                raise RendezvousError(self._ended)
            if self._lost is not None and isinstance(request, Collect):
                raise RendezvousError(self._lost)
            self._pending[request.id] = pending
        try:
            try:
                self._send(data)
            except OSError:
                pass  # every wait has been ended, ours too
            if not pending.arrived.wait(min(wait, threading.TIMEOUT_MAX)):
                raise RendezvousTimeoutError(f"{self._where} does not answer; its worker may be stuck or stopped")
        finally:
            with self._lock:
                self._pending.pop(request.id, None)
        reply = pending.reply
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, TimedOut):
            raise _timeout_error(request, reply)
        if isinstance(reply, Failed):
            raise RendezvousError(reply.reason)
        if reply is None:
            raise RendezvousError(self._ended or self._lost or f"{self._where} is gone")
        raise ProtocolError(f"{self._where} answered a {type(request).__name__} with a {type(reply).__name__}")

    def _send(self, data: bytes) -> None:
        with self._send_lock:
            try:
                self._sock.sendall(data)
            except OSError as error:
                self._end(f"{self._where} is gone: {error}")
                raise
            except BaseException:
                # Half a request may be on its way (Ctrl-C): what follows would not be understood.
                self._end(f"{self._where} cannot be used any more: sending a request to it was broken off")
                raise

    def _read_replies(self) -> None:
        buffer = bytearray()
        why = "it closed the connection"
        try:
            while True:
                try:
                    data = self._sock.recv(_CHUNK)
                except TimeoutError:
                    continue  # the socket's timeout is meant for sending
                if not data:
                    break
                buffer += data
                while (frame := take_frame(buffer)) is not None:
                    self._hand_over(unpack_reply(frame))
        except OSError as error:  # ProtocolError among them
            why = str(error)
        finally:
            self._end(f"{self._where} is gone: {why}")
            if not self._closing:
                self._on_lost()

    def _hand_over(self, reply: Reply) -> None:
        with self._lock:
            pending = self._pending.pop(reply.id, None)
        if pending is not None:  # else its thread has given up waiting
            pending.reply = reply
            pending.arrived.set()

    def _end(self, why: str) -> None:
        """Nothing can be asked any more; the first reason counts."""
        with self._lock:
            self._ended = self._ended or why
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.arrived.set()
        if threading.current_thread() is not self._reader:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _timeout_error(request: Request, reply: TimedOut) -> RendezvousTimeoutError:
    match request:
        case Get():
            return RendezvousTimeoutError(f"after {round(request.timeout, 2):g} s the store has no key {request.key!r}")
        case Collect():
            there = ", ".join(reply.present) or "none"
            return RendezvousTimeoutError(
                f"after {round(request.timeout, 2):g} s the store has {len(reply.present)} of {request.count} keys "
                f"that begin with {request.prefix!r}: {there}",
                reply.present,
            )
    return RendezvousTimeoutError(f"the store gave up on a {type(request).__name__}")

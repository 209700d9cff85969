"""A worker's connection to the store: `find_store` finds and enters it, `StoreClient` sends requests.

The worker that hosts the store uses both as well, over loopback.

Finding the store. `find_store` tries every candidate in turn, in rounds with growing pauses, until one welcomes this
worker.

- If nobody listens, the connection breaks or no answer comes, the next round tries again.
- A refusal is retried for `REFUSAL_RETRY_S`, because it may come from the store of an earlier run that is just ending.
  After that it is final. It is final at once if the store said that a retry is useless.
- A store of another group, or a program that speaks another protocol, is final only if there is no other candidate. A
  store with another secret or other encryption is also final if all candidates have the same port, because then it is
  our store. So is a store at our place with another world size.
- If nobody hosts the store of an open group, the callback `host_store` may host it, and the next round finds it.

Sending requests. There is one connection. A daemon thread reads the replies, and gives each to the thread that waits
for its id. Threads wait on a `threading.Event`, so Ctrl-C ends a wait in the main thread at once.

Every wait ends: normally the store ends it at the timeout. If the store is gone, its connection ends, and all waits
with it. If the store hangs, the wait ends a few seconds after the timeout. If the group has found out that the host of
the store is lost (it may be frozen, with its connection open), all waits end at once; see `report_lost`.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from farcall.errors import (
    AuthenticationError,
    EncryptionError,
    PeerRefusedError,
    ProtocolError,
    RendezvousError,
    RendezvousTimeoutError,
)
from farcall.protocol.fields import quoted
from farcall.protocol.handshake import Hello, Welcome
from farcall.rendezvous.addresses import connect, host_port, loopback_text, peer_text, stop_keep_alive
from farcall.rendezvous.handshake import FinalRefusalError, OtherGroupError, OtherSizeError, introduce_worker
from farcall.rendezvous.messages import (
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
from farcall.rendezvous.server import StoreServer
from farcall.rendezvous.store import CLOSE_TIMEOUT_S, Store
from farcall.security import Credentials, EncryptionRequired
from farcall.transports.network import is_loopback, network_identity, numeric_host

# -- finding the store

REFUSAL_RETRY_S: Final = 2.0
"""How many seconds a refusal is retried before it is believed."""

_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.2
_FIRST_ATTEMPT_S: Final = 0.5
_LONGEST_ATTEMPT_S: Final = 2.0


class Candidate(NamedTuple):
    """An address where the store may be: `host` (a name or address) and `port`, and the id of the group, `group`.

    A store that serves another group refuses the worker. Nothing is checked here.
    """

    host: str
    port: int
    group: str

    def __str__(self) -> str:
        """Returns `host:port`."""
        return host_port(self.host, self.port)


@dataclass
class _SearchLog:
    """What `find_store` has seen so far, for its error message. All fields are empty, False or None by default.

    `failure` is how the last failed connection failed. `refusal` is the last refusal by any program, and
    `refused_by_ours` the last one by the group's own store. `is_unanswered` is True if a program accepted a connection
    and then closed it. `hosting` is why this worker does not host the store; None if that is not its task.
    """

    failure: str = ""  # how the last failed connection failed
    refusal: str = ""  # the last refusal by any program
    refused_by_ours: str = ""  # the last refusal by our own store, in any round
    is_unanswered: bool = False  # in the last round with an outcome, a connection was accepted and then closed
    hosting: str | None = None  # why this worker does not host the store; None if it should not

    def note_round(self, failures: Sequence[OSError]) -> None:
        """Sets `is_unanswered` after a round, in which each candidate was tried once, from its `failures`.

        It becomes True if a connection was reset. Timeouts are ignored, because the last round may have had no time
        left. Does nothing if there are no other failures.
        """
        outcomes = [error for error in failures if not isinstance(error, TimeoutError)]
        if outcomes:
            self.is_unanswered = any(isinstance(error, ConnectionResetError) for error in outcomes)


def find_store(
    candidates: Callable[[], Sequence[Candidate]],
    only_one: bool,
    where: str,
    name: str,
    rank: int,
    timeout: float,
    host_store: Callable[[Sequence[Candidate]], str | None] | None = None,
    credentials: Credentials | None = None,
    diagnose: Callable[[], str] = lambda: "",
) -> tuple[socket.socket, Welcome]:
    """Finds the group's store and returns a connection that the store has welcomed.

    Tries all candidates in rounds, until one welcomes this worker, refuses it for good, or the time is over.

    Args:
        candidates: Called before each round; returns where to look, which may be nowhere. May raise `OSError`, which
            counts as nowhere.
        only_one: True if there is just one possible place, so that any refusal from it concerns this worker.
        where: The place in words, for error messages.
        name: The name of this worker.
        rank: The rank of this worker; -1 if it has none.
        timeout: How many seconds to search. Even with 0 each candidate is tried once.
        host_store: For open groups. Called after a round that found no store, with the candidates where nobody listens.
            Starts the store and returns None, or returns why this worker does not. None: this worker never hosts the
            store.
        credentials: The secret and the encryption; None means those of this user.
        diagnose: Called when the search has failed; returns what seems to be wrong with the place itself, or "".

    Returns:
        The connected socket, and the welcome of the store, which names the worker that hosts it.

    Raises:
        RendezvousError: The store refused this worker, for good or for `REFUSAL_RETRY_S` seconds. Other errors of
            `candidates` and errors of `host_store` are raised as they are.
        RendezvousTimeoutError: No store was found in time.
    """
    credentials = credentials or Credentials()
    deadline = time.monotonic() + timeout
    pause, attempt = _FIRST_PAUSE_S, _FIRST_ATTEMPT_S
    refused_since: float | None = None
    tried = _SearchLog(hosting=None if host_store is None else "there was no time left for it")
    while True:
        refusal: ProtocolError | None = None
        outcomes: list[OSError] = []
        vacant: list[Candidate] = []
        try:
            found = candidates()
        except OSError as error:
            found, tried.failure = [], str(error)
        # In an open group all candidates lead to one store. If it is frozen, one round must leave time to host another.
        share = attempt if host_store is None else attempt / max(1, len(found))
        for candidate in found:
            limit = max(0.001, min(share, deadline - time.monotonic()))
            try:
                return try_candidate(candidate, name, rank, limit, credentials)
            except ProtocolError as error:
                tried.refusal = str(error)
                if only_one or _is_our_store(error, found):
                    refusal = error
                    tried.refused_by_ours = str(error)
                if isinstance(error, FinalRefusalError):
                    break
            except OSError as error:
                tried.failure = f"{candidate}: {error}"
                outcomes.append(error)
                if not isinstance(error, TimeoutError | ConnectionResetError):
                    vacant.append(candidate)
        tried.note_round(outcomes)
        now = time.monotonic()
        if refusal is None:
            refused_since = None
        else:
            refused_since = refused_since or now
            believed = isinstance(refusal, FinalRefusalError) or now >= refused_since + REFUSAL_RETRY_S
            if believed or now >= deadline:
                raise RendezvousError(
                    f"worker {_worker_text(name, rank)} cannot join at {where}: {refusal}"
                ) from refusal
        if now < deadline and refusal is None and host_store is not None:
            tried.hosting = host_store(vacant)
            if tried.hosting is None:
                continue
        if now >= deadline:
            raise RendezvousTimeoutError(_not_found_message(where, name, rank, timeout, tried, diagnose()))
        time.sleep(min(pause, deadline - now))
        pause, attempt = min(2 * pause, _LONGEST_PAUSE_S), min(2 * attempt, _LONGEST_ATTEMPT_S)


def try_candidate(
    candidate: Candidate, name: str, rank: int, timeout: float, credentials: Credentials | None = None
) -> tuple[socket.socket, Welcome]:
    """Makes one attempt to connect to a candidate and to be welcomed there.

    Args:
        candidate: The address and the group.
        name: The name of this worker.
        rank: The rank of this worker; -1 if it has none.
        timeout: How many seconds the attempt may take. 0 leaves about a millisecond.
        credentials: The secret and the encryption; None means those of this user.

    Returns:
        The connected socket, and the welcome of the store, which names the worker that hosts it.

    Raises:
        ProtocolError: The other end refused this worker (`PeerRefusedError`, `AuthenticationError`), or is no farcall
            store.
        OSError: No program listens there, or no answer came in time.
    """
    credentials = credentials or Credentials()
    deadline = time.monotonic() + timeout
    try:
        return _try(candidate, name, rank, timeout, credentials, even_on_loopback=False)
    except EncryptionRequired as error:
        if credentials.encryption is None:
            raise EncryptionError(str(error)) from None
    # The store does not see a loopback connection: a tunnel or another user relays it. So it must be encrypted.
    left = max(0.001, deadline - time.monotonic())
    return _try(candidate, name, rank, left, credentials, even_on_loopback=True)


def _try(
    candidate: Candidate, name: str, rank: int, timeout: float, credentials: Credentials, even_on_loopback: bool
) -> tuple[socket.socket, Welcome]:
    """Makes one attempt to connect to `candidate` and to be welcomed there, within `timeout` seconds, more than 0.

    `name` and `rank` (-1 for none) are this worker's, `credentials` its secret and encryption. `even_on_loopback` says
    whether a loopback connection is encrypted, too. Returns the socket and the store's welcome. Raises
    `EncryptionRequired` if the store asks for TLS on a loopback connection, another `ProtocolError` if it refuses this
    worker or is no farcall store, and `OSError` if no program listens there or answers in time.
    """
    deadline = time.monotonic() + timeout
    sock = connect(candidate.host, candidate.port, timeout)
    try:
        binding = b""
        peer = sock.getpeername()  # before TLS: a socket that is refused during the TLS handshake has no peer any more
        on_loopback = is_loopback(numeric_host(peer))
        network = network_identity(sock) if on_loopback and not even_on_loopback else ""
        if credentials.encryption is not None and (even_on_loopback or not on_loopback):
            from farcall.transports.tls import TlsSocket  # late: it needs ssl

            # The first TLS socket makes a certificate, which may take longer than the attempt: that time is added.
            before = time.monotonic()
            sock = encrypted = TlsSocket(sock, credentials.encryption, listens=False)
            deadline += time.monotonic() - before
            encrypted.do_handshake(max(0.001, deadline - time.monotonic()))
            binding = encrypted.binding
        hello = Hello(candidate.group, name, rank, wanted="", dialed=loopback_text(peer), network=network)
        remaining = max(0.001, deadline - time.monotonic())
        return sock, introduce_worker(sock, hello, f"the store at {candidate}", remaining, credentials, binding)
    except BaseException:
        sock.close()
        raise


def is_alive(candidate: Candidate, credentials: Credentials | None = None, timeout: float = _FIRST_ATTEMPT_S) -> bool:
    """Returns True if a store of the candidate's group answers within `timeout` seconds, and False if not.

    Only an answer with a proof of the secret counts. Otherwise any program that listens at an address left over from an
    earlier run could keep the group from starting. The probe has rank -1, so it does not count as a worker.

    Args:
        candidate: The address and the group.
        credentials: The secret and the encryption; None means those of this user.
        timeout: How many seconds to wait for the answer. 0 leaves about a millisecond.
    """
    try:
        try_candidate(candidate, "is anybody here", -1, timeout, credentials)[0].close()
    except (OtherSizeError, FinalRefusalError):  # raised only after the store has proved that it knows the secret
        return True
    except OSError:
        return False
    return True


def _is_our_store(refusal: ProtocolError, found: Sequence[Candidate]) -> bool:
    """Returns True if the refusal comes from the store of this worker's group, rather than from another group's.

    If the other end has another secret or other encryption, returns True only if all of `found` have the same port.
    With several ports, another group's store may be on one of them.

    Args:
        refusal: What the handshake raised.
        found: All candidates of this round, which are the addresses where the store may be; not empty.
    """
    if isinstance(refusal, AuthenticationError):
        return len({candidate.port for candidate in found}) == 1
    if isinstance(refusal, OtherSizeError):
        return True
    return isinstance(refusal, PeerRefusedError) and not isinstance(refusal, OtherGroupError)


def _worker_text(name: str, rank: int) -> str:
    """Returns how messages name this worker: `'name' (rank 3)`, or just `'name'` for rank -1."""
    return f"{name!r} (rank {rank})" if rank >= 0 else repr(name)


def _not_found_message(where: str, name: str, rank: int, timeout: float, tried: _SearchLog, diagnosis: str) -> str:
    """Returns the message for a search that timed out: first what is certain, then what is likely, then what to do.

    Args:
        where: The place in words.
        name: The name of this worker.
        rank: Its rank; -1 if it has none.
        timeout: How many seconds were searched.
        tried: What the search has seen.
        diagnosis: What is wrong with the place itself; empty if nothing is known.
    """
    seconds = f"{round(timeout, 2):g} s"
    who = _worker_text(name, rank)
    last = f"the last attempt failed with: {tried.failure}" if tried.failure else "there was nothing to connect to"
    if tried.hosting is None and tried.refused_by_ours:
        return (
            f"worker {who} cannot join at {where}: {tried.refused_by_ours}. That store is gone, so its group has "
            f"ended, and no other store appeared in {seconds} ({last}). Start all workers of the group again"
        )
    if tried.hosting is not None:
        missing = f"no worker hosts it, and this worker cannot host it either: {tried.hosting}"
        advice = "Start a worker that can host it"
    elif tried.is_unanswered:
        missing = (
            f"a program there closes the connection without an answer. A store does that if rank {rank} was in its "
            "group and has left it, or if the store is just ending"
        )
        advice = "End the other workers of that run and start all workers again"
    elif diagnosis:
        missing = diagnosis
        advice = "If rank 0 has the same problem it cannot host the store; look at its own output"
    else:
        missing = (
            "its own store does not answer" if rank == 0 else "rank 0, which hosts the store, has not started it yet"
        )
        advice = "Start rank 0"
    attempts = [last] if tried.failure or not tried.refusal else []
    attempts += [f"a program answered: {tried.refusal}"] if tried.refusal else []
    return (
        f"worker {who} found no store at {where} in {seconds}: {missing} "
        f"({'; '.join(attempts)}). "
        f"{advice}, check that all workers use the same address, or allow more time (init_timeout)"
    )


# -- sending requests

ANSWER_TIMEOUT_S: Final = 30.0
"""How many seconds the store may take to accept a request, and to answer one that does not wait for a key."""

_REPLY_GRACE_S: Final = 5.0
_GOOD_BYE_TIMEOUT_S: Final = 2.0
_READ_BYTES: Final = 64 * 1024
_MAX_REASON_CHARS: Final = 10_000

_R = TypeVar("_R", Value, Number, Entries, Done)


class Limit(threading.local):
    """The deadline for the requests that the current thread sends to the store; each thread has its own.

    The attribute `deadline` is in seconds of `time.monotonic`, infinite by default.
    """

    deadline = math.inf

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Context manager: lowers the deadline to at most `seconds` from now inside the block.

        With 0 or less the deadline has passed at once. An earlier deadline stays in effect. The old deadline is
        restored at the end of the block.
        """
        before = self.deadline
        self.deadline = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.deadline = before


class _Pending:
    """A request that has been sent to the store and whose reply a thread waits for.

    `request` is the request. The event `arrived` is set when the reply is there or cannot come any more. `reply` is
    None until the event is set, and stays None if the connection has ended or a worker was lost.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived = threading.Event()
        self.reply: Reply | None = None


class StoreClient(Store):
    """A `Store` at the other end of a connected socket on which the handshake has succeeded. Owns the socket.

    Normal use is `StoreClient(*find_store(...))`, requests such as `set` and `get`, and `close` at the end. Only the
    worker that hosts the store, and open groups, need the arguments with defaults, which `__init__` describes. No
    argument is checked.
    """

    def __init__(
        self,
        sock: socket.socket,
        welcome: Welcome,
        after_close: Callable[[], None] = lambda: None,
        hosted: StoreServer | None = None,
        grace: float = _REPLY_GRACE_S,
        *,
        limit: Limit | None = None,
        on_lost: Callable[[], None] = lambda: None,
        good_bye_timeout: float = _GOOD_BYE_TIMEOUT_S,
    ) -> None:
        """Starts the thread that reads replies.

        Args:
            sock: The connected socket, after the handshake.
            welcome: The welcome of the store, which names the worker that hosts it.
            after_close: Called once, at the end of `close`: the hosting worker ends its store there.
            hosted: The server, if the store is in this process; else None. `close` tells it how long to wait for other
                workers.
            grace: Seconds that `get` and `collect` wait after their timeout for the store to reply that it expired.
            limit: The deadlines of requests, one for each thread, which several clients can share; None for new ones.
            on_lost: Called once, on the reading thread, if the connection ends although `close` was not called. Must
                not block.
            good_bye_timeout: Seconds that `close` waits for the store to read the good-bye; 0 sends none.
        """
        rank = f" (rank {welcome.rank})" if welcome.rank >= 0 else ""
        self._host = welcome.rank
        self._where = f"the store in {welcome.name!r}{rank} at {peer_text(sock)}"
        self._limit = limit or Limit()
        self._on_lost = on_lost
        self._good_bye_timeout = good_bye_timeout
        self._sock = sock
        self._after_close = after_close
        self._hosted = hosted
        self._grace = grace
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # guards _pending, _ended, _lost; re-entrant: signal handlers may report a loss
        self._send_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._ended: str | None = None
        self._lost: str | None = None  # why `collect` cannot succeed any more; see `report_lost`
        self._closing = False
        sock.settimeout(ANSWER_TIMEOUT_S)
        self._reader = threading.Thread(target=self._read_replies, name="farcall store replies", daemon=True)
        self._reader.start()

    @property
    def is_ended(self) -> bool:
        """True if the connection has ended, so that every further request raises `RendezvousError`."""
        return self._ended is not None

    def set(self, key: str, value: bytes) -> None:
        """Sets a key, replacing any earlier value. The value may be empty; neither type is checked.

        Raises `RendezvousError` if the store is gone or the value is too large (16 MiB), and `RendezvousTimeoutError`
        if the store does not answer within 30 seconds.
        """
        self._ask(Set(next(self._ids), key, value), Done)

    def set_new(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it exists, and returns the value that it has now: `value`, or the earlier one.

        Raises `RendezvousError` if the store is gone or the value is too large (16 MiB), and `RendezvousTimeoutError`
        if the store does not answer within 30 seconds.
        """
        return self._ask(SetNew(next(self._ids), key, value), Value).value

    def get(self, key: str, timeout: float) -> bytes:
        """Waits up to `timeout` seconds for a key, and returns its value. 0 or less does not wait.

        Raises `RendezvousTimeoutError` if the key does not appear in time, and `RendezvousError` if the store is gone.
        """
        return self._ask(Get(next(self._ids), key, max(0.0, timeout)), Value, timeout + self._grace).value

    def add(self, key: str, amount: int) -> int:
        """Adds `amount`, which may be negative, to the counter at `key`, and returns the sum.

        A key that does not exist counts as 0. Raises `RendezvousError` if the store is gone, the key holds no counter,
        or the sum would exceed 64 bits, `RendezvousTimeoutError` if the store does not answer within 30 seconds, and
        `OverflowError` if `amount` itself exceeds 64 bits.
        """
        return self._ask(Add(next(self._ids), key, amount), Number).number

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Deletes a key; if `expected` is not None, only if the key has that value.

        Returns whether the key was deleted. Returns False if the key does not exist. Raises `RendezvousError` if the
        store is gone, and `RendezvousTimeoutError` if it does not answer within 30 seconds.
        """
        return self._ask(Delete(next(self._ids), key, expected), Number).number > 0

    def read(self, prefix: str) -> Mapping[str, bytes]:
        """Returns all keys that begin with `prefix`, with their values; empty if there are none. "" means all keys.

        Raises `RendezvousError` if the store is gone, and `RendezvousTimeoutError` if it does not answer within 30
        seconds.
        """
        return self._ask(Read(next(self._ids), prefix), Entries).entries

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        """Waits until at least `count` keys begin with `prefix`, and returns all of them with their values.

        A `count` of 0 returns at once. Raises `RendezvousTimeoutError` after `timeout` seconds (0 or less does not
        wait), with the keys that are there in its attribute `present`, and `RendezvousError` if the store is gone or a
        worker was lost.
        """
        request = Collect(next(self._ids), prefix, count, max(0.0, timeout))
        return self._ask(request, Entries, timeout + self._grace).entries

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Context manager: limits all requests of this thread inside the block to `seconds` in total.

        A request that takes longer raises `RendezvousTimeoutError`; with 0 that is every request. Of nested limits the
        shortest counts.
        """
        return self._limit.within(seconds)

    def report_lost(self, rank: int, why: str) -> None:
        """Makes `collect` raise `RendezvousError` with the text `why` from now on, also where it is waiting.

        `rank` is the rank of a lost worker. If that worker hosts the store, every request fails from now on. Of several
        losses the first text is kept. Raises nothing.
        """
        if rank == self._host:
            self._end(f"{self._where} is lost: {why}")
            return
        with self._lock:
            self._lost = self._lost or why
            waiting = [one for one in self._pending.values() if isinstance(one.request, Collect)]
        for one in waiting:
            one.arrived.set()

    def leave_losses_to_group(self) -> None:
        """Turns off TCP keep-alive, so that the group and not the store decides which workers are lost.

        In the worker that hosts the store, does so for all connections of the store. Raises nothing.
        """
        # Keep-alive would end the connection 30 seconds after the network fails, and the store would count this worker
        # as lost. The group may not: another worker may still reach it, or heartbeat_patience may be longer.
        stop_keep_alive(self._sock)
        if self._hosted is not None:
            self._hosted.leave_losses_to_group()

    def close(self, early: bool = False, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Disconnects from the store. In the worker that hosts the store, also ends the store. May be called again.

        Requests raise `RendezvousError` from then on, also those that are waiting. Raises nothing if the store is gone.

        Args:
            early: Whether this worker leaves without waiting for others, so that their waits for it fail at once.
            timeout: How many seconds the hosting worker waits for the others to disconnect; 0 does not wait.
        """
        with self._close_lock:
            self._closing = True
            if self._hosted is not None:
                self._hosted.linger = timeout
            with self._lock:
                alive, self._ended = self._ended is None, self._ended or f"{self._where} was closed by this worker"
            try:
                if alive and self._good_bye_timeout > 0:
                    self._say_good_bye(early)
                self._hang_up()
            except BaseException:
                if self._hosted is not None:
                    self._hosted.linger = 0.0  # Ctrl-C: do not wait for the other workers
                raise
            finally:
                self._after_close()
                self._after_close = lambda: None  # only now: after an interrupt, `close` is called again

    def refusals(self) -> str:
        """Returns a text about the connections that the store has refused, for error messages.

        Returns an empty text if none was refused, or if the store is not in this process.
        """
        return "" if self._hosted is None else self._hosted.refusals()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of descriptors. The parent keeps its connection.

        Later requests in the child raise `RendezvousError`.
        """
        # Threads of the parent may have held the locks at the fork. They do not exist here and cannot release them.
        self._lock, self._send_lock, self._close_lock = threading.RLock(), threading.Lock(), threading.Lock()
        self._ended = f"{self._where} belongs to the process that this one was forked from"
        self._after_close = lambda: None
        self._sock.close()
        if self._hosted is not None:
            self._hosted.abandon()

    def _say_good_bye(self, early: bool) -> None:
        """Tells the store that this worker leaves. Waits up to `good_bye_timeout` seconds until the store has read it.

        `close` calls this only if `good_bye_timeout` is more than 0. `early` says whether this worker leaves without
        waiting for the others. Ignores a store that is gone.
        """
        try:
            self._send(pack_request(GoodBye(early)))
            # The store closes the connection when it has read the good-bye. Closing earlier could lose it on the way.
            self._reader.join(self._good_bye_timeout)
        except OSError:
            pass  # the store is already gone

    def _hang_up(self) -> None:
        """Closes the connection, and waits for the end of the reading thread.

        Ignores a connection that is broken already.
        """
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reading thread; `close` alone would not
        except OSError:
            pass
        self._reader.join()
        self._sock.close()

    def _ask(self, request: Request, expected: type[_R], wait: float = ANSWER_TIMEOUT_S) -> _R:
        """Sends a request, waits for its reply and returns it.

        Raises `RendezvousTimeoutError` if the reply is `TimedOut`, or none comes in `wait` seconds or before the
        deadline of this thread, `RendezvousError` if the reply is `Failed` or the store is gone, and `ProtocolError` if
        the reply is of another type than `expected`. A `GoodBye`, which has no reply, is not allowed here.
        """
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
                pass  # `_send` has ended every wait, ours too
            if not pending.arrived.wait(min(wait, threading.TIMEOUT_MAX)):
                raise RendezvousTimeoutError(f"{self._where} does not answer; its worker may be frozen or stopped")
        finally:
            with self._lock:
                self._pending.pop(request.id, None)
        reply = pending.reply
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, TimedOut):
            raise _timeout_error(request, reply)
        if isinstance(reply, Failed):
            raise RendezvousError(quoted(reply.reason, _MAX_REASON_CHARS))
        if reply is None:
            raise RendezvousError(self._ended or self._lost or f"{self._where} is gone")
        raise ProtocolError(f"{self._where} answered a {type(request).__name__} with a {type(reply).__name__}")

    def _send(self, data: bytes) -> None:
        """Sends bytes. A failure ends the connection for all threads.

        Raises `OSError` if sending failed, and `KeyboardInterrupt` if it was interrupted (Ctrl-C).
        """
        with self._send_lock:
            try:
                self._sock.sendall(data)
            except OSError as error:
                self._end(f"{self._where} is gone: {error}")
                raise
            except BaseException:
                # Ctrl-C: half a request may have been sent, so the store could not parse anything after it.
                self._end(f"{self._where} cannot be used any more: sending a request to it was interrupted")
                raise

    def _read_replies(self) -> None:
        """The reading thread: gives replies to the threads that wait for them, until the connection ends.

        Bytes that are no valid reply end the connection. Then ends all waits, and calls `on_lost` unless `close` was
        called.
        """
        buffer = bytearray()
        why = "it closed the connection"
        try:
            while True:
                try:
                    data = self._sock.recv(_READ_BYTES)
                except TimeoutError:
                    continue  # the socket has a timeout for the sake of sending only
                if not data:
                    break
                buffer += data
                while (frame := take_frame(buffer)) is not None:
                    self._deliver_reply(unpack_reply(frame))
        except OSError as error:  # ProtocolError among them
            why = str(error)
        finally:
            self._end(f"{self._where} is gone: {why}")
            if not self._closing:
                self._on_lost()

    def _deliver_reply(self, reply: Reply) -> None:
        """Gives a reply to the thread that waits for it. Drops it if that thread has given up."""
        with self._lock:
            pending = self._pending.pop(reply.id, None)
        if pending is not None:
            pending.reply = reply
            pending.arrived.set()

    def _end(self, why: str) -> None:
        """Ends all waits and refuses further requests, with `RendezvousError`. Raises nothing.

        `why` is the text of the errors. Of several reasons, the first is kept.
        """
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
    """Returns the error for a request that the store answered with `TimedOut`.

    It names the missing key of a `Get`, or the keys that were there for a `Collect`. A store should answer no other
    request with `TimedOut`; if it does, the error only names the type of the request.
    """
    match request:
        case Get():
            return RendezvousTimeoutError(f"after {round(request.timeout, 2):g} s the store has no key {request.key!r}")
        case Collect():
            there = quoted(", ".join(reply.present), _MAX_REASON_CHARS) or "none"
            return RendezvousTimeoutError(
                f"after {round(request.timeout, 2):g} s the store has {len(reply.present)} of {request.count} keys "
                f"that begin with {request.prefix!r}: {there}",
                reply.present,
            )
    return RendezvousTimeoutError(f"the store answered a {type(request).__name__} with a timeout")

"""Looks for the store until it answers: tries every candidate in turn, with longer and longer pauses.

Nobody there, a broken connection, silence: try again. An answer that is a refusal is tried again for a short while,
for it may come from the remains of an earlier run that are just going; then it is final, unless the store said so at
once. A store of another group, or something that speaks another language, is final only where there is no other
candidate; so is one that knows another secret or encrypts otherwise, unless all candidates have one port (then it is
ours, and final). Where nobody is, and `nobody` is given, it may open the store, which the next round then finds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from farcall.errors import (
    AuthenticationError,
    ConnectionRefusedByPeer,
    ProtocolError,
    RendezvousError,
    RendezvousTimeoutError,
)
from farcall.protocol.handshake import Hello, Welcome
from farcall.rendezvous.addresses import connect, host_port, loopback_text
from farcall.rendezvous.greeting import FinalRefusalError, OpenAndFixedError, OtherGroupError, introduce
from farcall.security import Credentials
from farcall.transports.network import is_loopback, numeric_host

REFUSAL_PATIENCE: Final = 2.0
"""Seconds for which a refusal is not yet believed."""

_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.2
_FIRST_ATTEMPT: Final = 0.5
_LONGEST_ATTEMPT: Final = 2.0


class Candidate(NamedTuple):
    """A place where the store may be, and the group it would serve."""

    host: str
    port: int
    group: str

    def __str__(self) -> str:
        return host_port(self.host, self.port)


@dataclass
class _Tried:
    """What came of it so far, for messages to people."""

    failure: str = ""
    refusal: str = ""
    hosting: str | None = None  # why this worker does not host it; None if it is not to


def find_store(
    candidates: Callable[[], Sequence[Candidate]],
    only_one: bool,
    where: str,
    name: str,
    rank: int,
    timeout: float,
    nobody: Callable[[Sequence[Candidate]], str | None] | None = None,
    credentials: Credentials | None = None,
) -> tuple[socket.socket, Welcome]:
    """A connection that was welcomed. `candidates` is asked anew for each round; `where` is for messages to people.

    In an open group `nobody` is called when a round has found no store, with the candidates where nobody listens. It
    opens the store and gives None, or says why this worker does not.

    Raises `RendezvousError` if the store refuses this worker; `RendezvousTimeoutError` if no store is found in time.
    """
    credentials = credentials or Credentials()
    deadline = time.monotonic() + timeout
    pause, attempt = _FIRST_PAUSE, _FIRST_ATTEMPT
    refused_since: float | None = None
    tried = _Tried(hosting=None if nobody is None else "it did not get to it in time")
    while True:
        refusal: ProtocolError | None = None
        vacant: list[Candidate] = []
        try:
            found = candidates()
        except OSError as error:
            found, tried.failure = [], str(error)
        # In an open group all of them lead to one store: if that is frozen, somebody is to host it before the deadline.
        share = attempt if nobody is None else attempt / max(1, len(found))
        for candidate in found:
            limit = max(0.001, min(share, deadline - time.monotonic()))
            try:
                return try_candidate(candidate, name, rank, limit, credentials)
            except ProtocolError as error:
                tried.refusal = str(error)
                if only_one or _is_meant_for_us(error, found):
                    refusal = error
                if isinstance(error, FinalRefusalError):
                    break
            except OSError as error:
                tried.failure = f"{candidate}: {error}"
                if not isinstance(error, TimeoutError | ConnectionResetError):
                    vacant.append(candidate)
        now = time.monotonic()
        if refusal is None:
            refused_since = None
        else:
            refused_since = refused_since or now
            believed = isinstance(refusal, FinalRefusalError) or now >= refused_since + REFUSAL_PATIENCE
            if believed or now >= deadline:
                raise RendezvousError(f"worker {_who(name, rank)} cannot join at {where}: {refusal}") from refusal
        if now < deadline and refusal is None and nobody is not None:
            tried.hosting = nobody(vacant)
            if tried.hosting is None:
                continue
        if now >= deadline:
            raise RendezvousTimeoutError(_not_found(where, name, rank, timeout, tried))
        time.sleep(min(pause, deadline - now))
        pause, attempt = min(2 * pause, _LONGEST_PAUSE), min(2 * attempt, _LONGEST_ATTEMPT)


def try_candidate(
    candidate: Candidate, name: str, rank: int, timeout: float, credentials: Credentials | None = None
) -> tuple[socket.socket, Welcome]:
    """One attempt. Raises `ProtocolError` if it is not welcome; `OSError` if nobody answers.

    The `credentials` are by default those of this user.
    """
    credentials = credentials or Credentials()
    deadline = time.monotonic() + timeout
    sock = connect(candidate.host, candidate.port, timeout)
    try:
        binding = b""
        peer = sock.getpeername()  # now: who is refused while it is encrypted has none any more
        if credentials.encryption is not None and not is_loopback(numeric_host(peer)):
            from farcall.transports.tls import TlsSocket  # late: it needs ssl

            # The first time a certificate is made, which takes longer than an attempt may: not the store's fault.
            before = time.monotonic()
            sock = encrypted = TlsSocket(sock, credentials.encryption, listens=False)
            deadline += time.monotonic() - before
            encrypted.shake_hands(max(0.001, deadline - time.monotonic()))
            binding = encrypted.binding
        hello = Hello(candidate.group, name, rank, wanted="", dialed=loopback_text(peer))
        remaining = max(0.001, deadline - time.monotonic())
        return sock, introduce(sock, hello, f"the store at {candidate}", remaining, credentials, binding)
    except BaseException:
        sock.close()
        raise


def is_alive(candidate: Candidate, credentials: Credentials | None = None, timeout: float = _FIRST_ATTEMPT) -> bool:
    """Whether a store of the candidate's group answers there. It takes part in nothing: no worker has rank -1."""
    try:
        try_candidate(candidate, "is anybody here", -1, timeout, credentials)[0].close()
    except OpenAndFixedError:
        return True
    except OtherGroupError:
        return False
    except ConnectionRefusedByPeer:
        return True
    except OSError:
        return False
    return True


def _is_meant_for_us(refusal: ProtocolError, found: Sequence[Candidate]) -> bool:
    """Whether it comes from the store at the right place."""
    if isinstance(refusal, AuthenticationError):
        return len({candidate.port for candidate in found}) == 1
    if isinstance(refusal, OpenAndFixedError):
        return True
    return isinstance(refusal, ConnectionRefusedByPeer) and not isinstance(refusal, OtherGroupError)


def _who(name: str, rank: int) -> str:
    return f"{name!r} (rank {rank})" if rank >= 0 else repr(name)


def _not_found(where: str, name: str, rank: int, timeout: float, tried: _Tried) -> str:
    if tried.hosting is not None:
        missing = f"nobody hosts it, and neither does this worker: {tried.hosting}"
        advice = "Start a worker that can host it"
    else:
        missing = (
            "its store does not answer" if rank == 0 else "the worker with rank 0, which hosts the store, has not come"
        )
        advice = "Start rank 0"
    attempts = [f"the last attempt ended with: {tried.failure}"] if tried.failure else []
    attempts += [f"somebody answered: {tried.refusal}"] if tried.refusal else []
    return (
        f"worker {_who(name, rank)} found no store at {where} in {round(timeout, 2):g} s: {missing} "
        f"({'; '.join(attempts) or 'there was nothing to connect to'}). "
        f"{advice}, check that all workers use the same address, or allow more time (init_timeout)"
    )

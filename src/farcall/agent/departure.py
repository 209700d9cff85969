"""When everybody may go: a graceful shutdown must not end while anything is under way anywhere.

A worker that is idle may be called again by one that is not, so being idle once is not enough. Workers go through
rounds: each waits until it is idle, then says how many calls it has ever made, and hears the others. When two rounds in
a row have the same sum, then between the two no call was made by anybody, and at the moment when the first ended
everybody was idle: nothing is under way, and nothing can begin. Usually that is two rounds. Each worker goes on serving
meanwhile.

A group that has lost a worker can never be together again, though the lost one may come back: nobody waits for it, and
all who know of the loss hear an error that names it. The store by which workers meet may be in that very worker, frozen
and silent. So no wait on the store outlasts what the group knows, nor the deadline by more than a second.
A worker that the group has taken for dead has nobody to wait for, however long it has waited by then: it hears so.

What takes long is named: in the log after some seconds, and by the error when the time is over. That others still work
is no reason to worry (a server calls shutdown() first of all, and serves); that they all wait for one is: it warns.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError
from farcall.protocol.ids import WorkerInfo
from farcall.sleeping import FOREVER

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

logger = logging.getLogger("farcall")

SILENCE: Final = 5.0
"""Seconds of waiting after which the log says for what."""
_ANSWER: Final = 1.0
"""Seconds that the store may take to answer when the time is over."""
_FIRST_PAUSE: Final = 0.5e-3
_LONGEST_PAUSE: Final = 20e-3
_WHY_MISSING: Final = "%s has not been called there, or functions still run there"


class Occasion(NamedTuple):
    """Why workers wait for each other: where they meet in the store, and the words for errors."""

    prefix: str
    function: str
    purpose: str
    giving_up: str
    afterwards: str


_DEPARTURE: Final = Occasion("departure/", "shutdown()", "to shut down", "shut down", "everything is closed here now")


class Leaver(Protocol):
    """What is asked of an agent that wants to leave."""

    @property
    def info(self) -> WorkerInfo:
        """Who it is."""

    def is_idle(self) -> bool:
        """Nothing runs here for others, and nothing is awaited from others."""

    def under_way(self) -> str:
        """What keeps this worker from being idle, in words."""

    def calls_started(self) -> int:
        """How many calls this worker has made so far."""

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        """All workers of the group, by rank, and whether each is gone."""

    def lost(self) -> list[str]:
        """The names of those who are gone without a good-bye."""

    def is_expelled(self) -> bool:
        """Whether the group has taken this worker for dead."""


def deadline_of(timeout: float) -> float:
    """The moment so many seconds from now; 0 is without limit."""
    return monotonic() + timeout if timeout else FOREVER


def wait_for_everybody(
    leaver: Leaver, rendezvous: Rendezvous, deadline: float, occasion: Occasion = _DEPARTURE
) -> None:
    """Returns when the whole group is quiet.

    Raises `ShutdownError`, saying who was missing, at the deadline; as soon as nothing is under way here, if a worker
    was lost; and soon after the group took this one for dead.
    """
    before = None
    number = 0
    while True:
        prefix = f"{occasion.prefix}{number}/"
        _wait_until_idle(leaver, rendezvous, prefix, deadline, occasion)
        _refuse_if_lost(leaver, occasion)
        try:
            total = _hear_all(leaver, rendezvous, prefix, deadline, occasion)
        except ShutdownError:
            finish_what_has_begun(leaver, deadline)
            raise
        if total == before:
            return
        before = total
        number += 1


def say_farewell(leaver: Leaver, rendezvous: Rendezvous, deadline: float) -> None:
    """After `wait_for_everybody`: returns when that has returned for all, so that nobody takes those who go for lost.

    Raises `ShutdownError` as it does.
    """
    _hear_all(leaver, rendezvous, "farewell/", deadline)


def meet(leaver: Leaver, rendezvous: Rendezvous, deadline: float, occasion: Occasion) -> None:
    """Returns when all are here for the same occasion, whatever is under way. Raises `ShutdownError` as the others."""
    _refuse_if_lost(leaver, occasion)
    _hear_all(leaver, rendezvous, occasion.prefix, deadline, occasion)


def finish_what_has_begun(leaver: Leaver, deadline: float) -> None:
    """Nobody is to be waited for, as a worker was lost: what others have called here meanwhile ends all the same.

    Raises nothing, whatever comes first, its end or the deadline.
    """
    with suppress(ShutdownError):
        wait_until_idle(leaver, deadline)


def wait_until_idle(leaver: Leaver, deadline: float) -> None:
    """Returns when nothing is under way at this worker, whatever others do.

    Raises `ShutdownError` at the deadline, and when the group has taken this worker for dead.
    """
    _wait_until_idle(leaver, None, "", deadline)


def _wait_until_idle(
    leaver: Leaver, rendezvous: Rendezvous | None, prefix: str, deadline: float, occasion: Occasion = _DEPARTURE
) -> None:
    pause = _FIRST_PAUSE
    never = threading.Event()
    warn_at = monotonic() + SILENCE
    while True:
        _refuse_if_expelled(leaver, occasion)
        if leaver.is_idle():
            return
        now = monotonic()
        if now >= deadline:
            raise ShutdownError(
                f"worker {leaver.info.name!r} {occasion.giving_up} while calls were still under way here: "
                f"{leaver.under_way()}; {occasion.afterwards}. A call counts until its function has ended, though its "
                "caller may have given up. Wait for your futures first, or give shutdown a longer timeout"
            )
        if now >= warn_at:
            warn_at = now + SILENCE
            if rendezvous is None or _all_others_wait(rendezvous, prefix):
                warn_at = FOREVER
                logger.warning("worker %r waits in %s for: %s", leaver.info.name, occasion.function, leaver.under_way())
        never.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _refuse_if_expelled(leaver: Leaver, occasion: Occasion) -> None:
    if leaver.is_expelled():
        raise ShutdownError(
            f"worker {leaver.info.name!r} was taken for dead by its group, and had nobody to wait for; "
            f"{occasion.afterwards}. After its shutdown, init_rpc() joins again"
        )


def _all_others_wait(rendezvous: Rendezvous, prefix: str) -> bool:
    assert rendezvous.world_size is not None  # nobody knows for whom to wait in an open group
    others = rendezvous.world_size - 1
    try:
        with rendezvous.store.within(_ANSWER):
            return not others or len(rendezvous.store.collect(prefix, others, 0.0)) >= others
    except RendezvousError:
        return False


def _refuse_if_lost(leaver: Leaver, occasion: Occasion) -> None:
    if lost := leaver.lost():
        raise _lost_before(leaver, ", ".join(map(repr, lost)), occasion)


def _lost_before(leaver: Leaver, lost: str, occasion: Occasion) -> ShutdownError:
    return ShutdownError(
        f"worker {leaver.info.name!r} waited for the others {occasion.purpose}, but {lost} was lost before it came; "
        f"{occasion.afterwards}"
    )


def _hear_all(
    leaver: Leaver, rendezvous: Rendezvous, prefix: str, deadline: float, occasion: Occasion = _DEPARTURE
) -> int:
    own = f"{prefix}{leaver.info.id}"
    try:
        _say(leaver, rendezvous, own, deadline, occasion)
        heard = _collect(leaver, rendezvous, prefix, deadline, occasion)
    except RendezvousError as error:
        if isinstance(error, RendezvousTimeoutError) and own in error.present:
            raise ShutdownError(
                f"worker {leaver.info.name!r} waited for the others {occasion.purpose}, but "
                f"{_missing(leaver, prefix, error)} did not come in time "
                f"({_WHY_MISSING % occasion.function}); {occasion.afterwards}"
            ) from None
        lost = ", ".join(
            repr(info.name) for info, gone in leaver.everybody() if gone and repr(info.name) not in str(error)
        )
        raise ShutdownError(
            f"worker {leaver.info.name!r} could not wait for the others {occasion.purpose}: {error}; "
            f"{f'lost: {lost}; ' if lost else ''}{occasion.afterwards}"
        ) from None
    return sum(int(value) for value in heard.values())


def _say(leaver: Leaver, rendezvous: Rendezvous, key: str, deadline: float, occasion: Occasion) -> None:
    """Says it again while the store does not answer: its host may be stopped for a while, and that is no loss yet."""
    value = str(leaver.calls_started()).encode()
    has_said_so = False
    while True:
        seconds = max(0.0, deadline - monotonic())
        try:
            with rendezvous.store.within(min(seconds, SILENCE) + _ANSWER):
                rendezvous.store.set(key, value)
            return
        except RendezvousTimeoutError as error:
            if seconds <= SILENCE:
                raise
            if not has_said_so:
                has_said_so = True
                logger.warning("worker %r waits in %s: %s", leaver.info.name, occasion.function, error)


def _collect(
    leaver: Leaver, rendezvous: Rendezvous, prefix: str, deadline: float, occasion: Occasion
) -> Mapping[str, bytes]:
    """What all have said. Looks up now and then: of one who is frozen, only the group knows that it is lost."""
    assert rendezvous.world_size is not None
    has_said_so = False
    while True:
        seconds = max(0.0, deadline - monotonic())
        timeout = min(seconds, SILENCE)
        try:
            with rendezvous.store.within(timeout + _ANSWER):
                return rendezvous.store.collect(prefix, rendezvous.world_size, timeout)
        except RendezvousTimeoutError as error:
            _refuse_if_expelled(leaver, occasion)
            lost = _missing(leaver, prefix, error, only_lost=True)
            if lost:
                raise _lost_before(leaver, lost, occasion) from None
            if seconds <= SILENCE:
                raise
            if not has_said_so:
                has_said_so = True
                name, function = leaver.info.name, occasion.function
                if f"{prefix}{leaver.info.id}" in error.present:
                    missing, why = _missing(leaver, prefix, error), _WHY_MISSING % function
                    logger.info("worker %r waits in %s for %s: %s", name, function, missing, why)
                else:
                    logger.warning("worker %r waits in %s: %s", name, function, error)


def _missing(leaver: Leaver, prefix: str, error: RendezvousTimeoutError, only_lost: bool = False) -> str:
    came = {int(key.removeprefix(prefix)) for key in error.present if key.startswith(prefix)}
    everybody = leaver.everybody()
    return ", ".join(f"{info.name!r}" for info, gone in everybody if info.id not in came and gone >= only_lost)

"""Waits until all workers may leave: a graceful shutdown must not end while a call is running on any worker.

An idle worker can be called again by a busy one, so being idle once is not enough. The workers go through rounds. In
each round a worker waits until it is idle, writes into the store how many calls it has ever made, and waits for the
numbers of all others. If two rounds in a row have the same sum, no worker made a call between them, and all workers
were idle when the first round ended. So no call is running, and none can begin. Usually there are two rounds. Each
worker continues to serve meanwhile.

A lost worker is not waited for, even if it might come back: all workers that know of the loss raise an error that names
it. The host of the store may be the lost worker, and the store may not answer. So waits on the store check regularly
whether a worker was lost, and end at most one second after the deadline. An expelled worker waits for nobody: it raises
an error.

After some seconds, the log says what is being waited for, and when the timeout expires, the error says so. It is normal
to wait for workers that are busy (a server may call shutdown() at its start, and serve). But a worker for which all
others wait logs a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError
from farcall.gate import FOREVER
from farcall.protocol.ids import WorkerInfo

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

logger = logging.getLogger("farcall")

SILENCE: Final = 5.0
"""Seconds after which the log says what is being waited for."""
_ANSWER: Final = 1.0
"""Seconds that the store may take to answer after the deadline."""
_FIRST_PAUSE: Final = 0.5e-3
_LONGEST_PAUSE: Final = 20e-3
"""Seconds between two checks whether this worker is idle: the first pause, doubled up to the longest."""
_WHY_MISSING: Final = "%s has not been called there, or functions still run there"


class Occasion(NamedTuple):
    """Why workers wait for each other: the prefix of their keys in the store, and texts for messages.

    Attributes:
        prefix: The prefix of the workers' keys in the store. All workers use the same.
        function: The name of the function that waits, such as "shutdown()".
        purpose: Completes the error message "waited for the others ...", such as "to shut down".
        giving_up: Completes the error message "worker 'a' ... while calls were still under way", such as "shut down".
        afterwards: The end of an error message: the state of this worker after it, such as "everything is closed here
            now".
    """

    prefix: str
    function: str
    purpose: str
    giving_up: str
    afterwards: str


_SHUTDOWN: Final = Occasion("shutdown/", "shutdown()", "to shut down", "shut down", "everything is closed here now")


class Leaver(Protocol):
    """This worker, for the functions that wait for others, such as `wait_for_everybody`. `Agent` implements it."""

    @property
    def info(self) -> WorkerInfo:
        """The name and id of this worker."""

    def is_idle(self) -> bool:
        """Returns whether no function runs here for others, and no reply or acknowledgement is expected."""

    def busy_report(self) -> str:
        """Returns text that says why this worker is not idle, for messages. Never empty, even if the worker is idle."""

    def calls_started(self) -> int:
        """Returns the number of calls that this worker has made so far."""

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        """Returns all workers of the group, sorted by id.

        Each comes with True if it has left or was lost, otherwise False.
        """

    def lost(self) -> list[str]:
        """Returns the names of the workers that were lost, but not of those that have left; empty if there are none."""

    def is_expelled(self) -> bool:
        """Returns whether the group has declared this worker lost."""


def deadline_of(timeout: float) -> float:
    """Returns when a timeout that begins now expires, as a time of the monotonic clock.

    Args:
        timeout: Seconds; 0 means no timeout, and returns `FOREVER`.
    """
    return monotonic() + timeout if timeout else FOREVER


def wait_for_everybody(leaver: Leaver, rendezvous: Rendezvous, deadline: float, occasion: Occasion = _SHUTDOWN) -> None:
    """Waits until all workers of a group of fixed size have called this, and no call is running on any of them.

    Args:
        leaver: This worker.
        rendezvous: The rendezvous of the group, in whose store the workers exchange how many calls they have made.
        deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.
        occasion: Why the workers wait; a shutdown by default. All workers must give the same occasion. A group may use
            an occasion only once, because its keys stay in the store.

    Raises:
        ShutdownError: The deadline has passed, another worker was lost, the store failed, or the group has declared
            this worker lost. If another worker was lost or the store failed, the error is raised as soon as no call is
            running on this worker, at the latest at the deadline.
    """
    before = None
    number = 0
    while True:
        prefix = f"{occasion.prefix}{number}/"
        _wait_until_idle(leaver, rendezvous, prefix, deadline, occasion)
        _refuse_if_lost(leaver, occasion)
        try:
            total = _sum_call_counts(leaver, rendezvous, prefix, deadline, occasion)
        except ShutdownError:
            finish_what_has_begun(leaver, deadline)
            raise
        if total == before:
            return
        before = total
        number += 1


def confirm_leave(leaver: Leaver, rendezvous: Rendezvous, deadline: float) -> None:
    """Waits until `wait_for_everybody` has returned on all workers. To be called after it, by each worker.

    From then on, no worker takes the end of a connection for the loss of a worker.

    Args:
        leaver: This worker.
        rendezvous: The rendezvous of the group.
        deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.

    Raises:
        ShutdownError: The deadline has passed, another worker was lost, the store failed, or the group has declared
            this worker lost.
    """
    _sum_call_counts(leaver, rendezvous, "farewell/", deadline)


def wait_at_barrier(leaver: Leaver, rendezvous: Rendezvous, deadline: float, occasion: Occasion) -> None:
    """Waits until all workers of a group of fixed size have called this with the same occasion. Calls may be running.

    Args:
        leaver: This worker.
        rendezvous: The rendezvous of the group.
        deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.
        occasion: Why the workers wait. A group may use an occasion only once, because its keys stay in the store.

    Raises:
        ShutdownError: The deadline has passed, another worker was lost, the store failed, or the group has declared
            this worker lost.
    """
    _refuse_if_lost(leaver, occasion)
    _sum_call_counts(leaver, rendezvous, occasion.prefix, deadline, occasion)


def finish_what_has_begun(leaver: Leaver, deadline: float) -> None:
    """Waits until this worker is idle. Raises nothing.

    Idle means that no function runs here for others, and no reply or acknowledgement is expected. Used before a failed
    shutdown closes this worker, so that functions that run here can end.

    Args:
        leaver: This worker.
        deadline: When to return even if this worker is not idle, as a time of the monotonic clock; `FOREVER` for no
            limit. Returns earlier if the group declares this worker lost.
    """
    with suppress(ShutdownError):
        wait_until_idle(leaver, deadline)


def wait_until_idle(leaver: Leaver, deadline: float) -> None:
    """Waits until this worker is idle, whatever the others do. Logs a warning after some seconds.

    Idle means that no function runs here for others, and no reply or acknowledgement is expected.

    Args:
        leaver: This worker.
        deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.

    Raises:
        ShutdownError: The deadline has passed, or the group has declared this worker lost.
    """
    _wait_until_idle(leaver, None, "", deadline)


def _wait_until_idle(
    leaver: Leaver, rendezvous: Rendezvous | None, prefix: str, deadline: float, occasion: Occasion = _SHUTDOWN
) -> None:
    """Waits until this worker is idle. Logs a warning after some seconds.

    Idle means that no function runs here for others, and no reply or acknowledgement is expected.

    Args:
        leaver: This worker.
        rendezvous: If given, the warning is logged only when all other workers wait for this one. Each worker that
            waits has written a key into the store of this rendezvous. None for a warning in any case.
        prefix: The prefix of these keys; not used if `rendezvous` is None.
        deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.
        occasion: Why the workers wait, for messages.

    Raises:
        ShutdownError: The deadline has passed, or the group has declared this worker lost.
    """
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
                f"{leaver.busy_report()}; {occasion.afterwards}. A call counts until its function has ended, though "
                "its caller may have given up. Wait for your futures first, or give shutdown a longer timeout"
            )
        if now >= warn_at:
            warn_at = now + SILENCE
            if rendezvous is None or _all_others_wait(rendezvous, prefix):
                warn_at = FOREVER
                logger.warning(
                    "worker %r waits in %s for: %s", leaver.info.name, occasion.function, leaver.busy_report()
                )
        never.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _refuse_if_expelled(leaver: Leaver, occasion: Occasion) -> None:
    """Raises `ShutdownError` if the group has declared this worker lost; otherwise does nothing.

    `leaver` is this worker. `occasion` has the texts for the error message.
    """
    if leaver.is_expelled():
        raise ShutdownError(
            f"worker {leaver.info.name!r} was declared lost by its group, and had nobody to wait for; "
            f"{occasion.afterwards}. After its shutdown, init_rpc() joins again"
        )


def _all_others_wait(rendezvous: Rendezvous, prefix: str) -> bool:
    """Returns whether all other workers have written a key with `prefix` into the store.

    False if the store does not answer.
    """
    assert rendezvous.world_size is not None  # an open group has no fixed set of workers to wait for
    others = rendezvous.world_size - 1
    try:
        with rendezvous.store.within(_ANSWER):
            return not others or len(rendezvous.store.collect(prefix, others, 0.0)) >= others
    except RendezvousError:
        return False


def _refuse_if_lost(leaver: Leaver, occasion: Occasion) -> None:
    """Raises `ShutdownError` with the names of lost workers; does nothing if none was lost.

    `leaver` is this worker. `occasion` has the texts for the error message.
    """
    if lost := leaver.lost():
        raise _lost_before(leaver, sorted(lost), occasion)


def _lost_before(leaver: Leaver, lost: list[str], occasion: Occasion) -> ShutdownError:
    """Returns the error that says which workers were lost. `lost` has their names, at least one.

    `leaver` is this worker, which waited for them. `occasion` has the texts for the error message.
    """
    happened = "was lost before it came" if len(lost) == 1 else "were lost before they came"
    return ShutdownError(
        f"worker {leaver.info.name!r} waited for the others {occasion.purpose}, but {_listed(lost)} {happened}; "
        f"{occasion.afterwards}"
    )


def _listed(names: list[str]) -> str:
    """Returns the names, quoted and separated by commas; empty text if there are none."""
    return ", ".join(map(repr, names))


def _sum_call_counts(
    leaver: Leaver, rendezvous: Rendezvous, prefix: str, deadline: float, occasion: Occasion = _SHUTDOWN
) -> int:
    """Writes how many calls this worker has made into the store, waits for the numbers of all workers, and adds them.

    Args:
        leaver: This worker: its info, its number of calls, and what it knows of the others.
        rendezvous: The rendezvous of the group, whose store is used.
        prefix: The key of a worker in the store is this prefix and the id of the worker.
        deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.
        occasion: Why the workers wait, as texts for error messages.

    Returns:
        The sum; 0 if no worker has made a call.

    Raises:
        ShutdownError: The deadline has passed, another worker was lost, the store failed, or the group has declared
            this worker lost.
    """
    own = f"{prefix}{leaver.info.id}"
    try:
        _write_call_count(leaver, rendezvous, own, deadline, occasion)
        counts = _collect(leaver, rendezvous, prefix, deadline, occasion)
    except RendezvousError as error:
        if isinstance(error, RendezvousTimeoutError) and own in error.present:
            raise ShutdownError(
                f"worker {leaver.info.name!r} waited for the others {occasion.purpose}, but "
                f"{_listed(_missing(leaver, prefix, error))} did not come in time "
                f"({_WHY_MISSING % occasion.function}); {occasion.afterwards}"
            ) from None
        lost = ", ".join(
            repr(info.name) for info, gone in leaver.everybody() if gone and repr(info.name) not in str(error)
        )
        raise ShutdownError(
            f"worker {leaver.info.name!r} could not wait for the others {occasion.purpose}: {error}; "
            f"{f'lost: {lost}; ' if lost else ''}{occasion.afterwards}"
        ) from None
    return sum(int(value) for value in counts.values())


def _write_call_count(leaver: Leaver, rendezvous: Rendezvous, key: str, deadline: float, occasion: Occasion) -> None:
    """Writes how many calls this worker has made into the store, under `key`.

    If the store does not answer, logs one warning and tries again: the host of the store may be stopped for a while.

    Args:
        leaver: This worker.
        rendezvous: The rendezvous of the group, whose store is used.
        key: The key in the store.
        deadline: Until when to try, as a time of the monotonic clock; `FOREVER` for no limit.
        occasion: Names the function that waits, for the warning.

    Raises:
        RendezvousTimeoutError: The store has not answered, about a second after the deadline at the latest.
        RendezvousError: The store failed.
    """
    value = str(leaver.calls_started()).encode()
    has_logged = False
    while True:
        seconds = max(0.0, deadline - monotonic())
        try:
            with rendezvous.store.within(min(seconds, SILENCE) + _ANSWER):
                rendezvous.store.set(key, value)
            return
        except RendezvousTimeoutError as error:
            if seconds <= SILENCE:
                raise
            if not has_logged:
                has_logged = True
                logger.warning("worker %r waits in %s: %s", leaver.info.name, occasion.function, error)


def _collect(
    leaver: Leaver, rendezvous: Rendezvous, prefix: str, deadline: float, occasion: Occasion
) -> Mapping[str, bytes]:
    """Waits until all workers have written a key with `prefix` into the store. Returns the values by key.

    Checks every few seconds whether a missing worker was lost: if its process is stopped, the store does not notice.
    `leaver` is this worker. `deadline` is a time of the monotonic clock; `FOREVER` for no limit. `occasion` has the
    texts for messages.

    Raises:
        ShutdownError: A missing worker has left or was lost, or the group has declared this worker lost.
        RendezvousTimeoutError: The deadline has passed.
        RendezvousError: The store failed.
    """
    assert rendezvous.world_size is not None
    has_logged = False
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
            if not has_logged:
                has_logged = True
                name, function = leaver.info.name, occasion.function
                if f"{prefix}{leaver.info.id}" in error.present:
                    missing, why = _listed(_missing(leaver, prefix, error)), _WHY_MISSING % function
                    logger.info("worker %r waits in %s for %s: %s", name, function, missing, why)
                else:
                    logger.warning("worker %r waits in %s: %s", name, function, error)


def _missing(leaver: Leaver, prefix: str, error: RendezvousTimeoutError, only_lost: bool = False) -> list[str]:
    """Returns the names of workers whose key with `prefix` was not in the store when `error` was raised.

    With `only_lost`, returns only those of them that have left or were lost. Returns an empty list if there are none.
    """
    came = {int(key.removeprefix(prefix)) for key in error.present if key.startswith(prefix)}
    return [info.name for info, gone in leaver.everybody() if info.id not in came and gone >= only_lost]

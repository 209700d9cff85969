"""When everybody may go: a graceful shutdown must not end while anything is under way anywhere.

A worker that is idle may be called again by one that is not, so being idle once is not enough. Workers go through
rounds: each waits until it is idle, then says how many calls it has ever made, and hears the others. When two rounds in
a row have the same sum, then between the two no call was made by anybody, and at the moment when the first ended
everybody was idle: nothing is under way, and nothing can begin. Usually that is two rounds. Each worker goes on serving
meanwhile.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError
from farcall.protocol.ids import WorkerInfo

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

_FIRST_PAUSE: Final = 0.5e-3
_LONGEST_PAUSE: Final = 20e-3
_A_LONG_TIME: Final = 365 * 86400.0


class Leaver(Protocol):
    """What is asked of an agent that wants to leave."""

    info: WorkerInfo

    def is_idle(self) -> bool:
        """Nothing runs here for others, and nothing is awaited from others."""

    def calls_started(self) -> int:
        """How many calls this worker has made so far."""

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group."""


def wait_for_everybody(leaver: Leaver, rendezvous: Rendezvous, deadline: float) -> None:
    """Returns when the whole group is quiet.

    Raises `ShutdownError`, saying who was missing, at the deadline.
    """
    before = None
    number = 0
    while True:
        _wait_until_idle(leaver, deadline)
        prefix = f"departure/{number}/"
        total = _hear_all(leaver, rendezvous, prefix, deadline)
        if total == before:
            return
        before = total
        number += 1


def say_farewell(leaver: Leaver, rendezvous: Rendezvous, deadline: float) -> None:
    """After `wait_for_everybody`: returns when that has returned for all, so that nobody takes those who go for lost.

    Raises `ShutdownError` as it does.
    """
    _hear_all(leaver, rendezvous, "farewell/", deadline)


def _wait_until_idle(leaver: Leaver, deadline: float) -> None:
    pause = _FIRST_PAUSE
    never = threading.Event()
    while not leaver.is_idle():
        if monotonic() >= deadline:
            raise ShutdownError(
                f"worker {leaver.info.name!r} shut down while calls were still under way here; "
                "everything is closed now. Wait for your futures first, or give shutdown a longer timeout"
            )
        never.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _hear_all(leaver: Leaver, rendezvous: Rendezvous, prefix: str, deadline: float) -> int:
    store = rendezvous.store
    try:
        store.set(f"{prefix}{leaver.info.id}", str(leaver.calls_started()).encode())
        seconds = min(max(0.0, deadline - monotonic()), _A_LONG_TIME)
        heard = store.collect(prefix, rendezvous.world_size, seconds)
    except RendezvousTimeoutError as error:
        came = {int(key.removeprefix(prefix)) for key in error.present if key.startswith(prefix)}
        missing = ", ".join(f"{info.name!r}" for info in leaver.get_worker_infos() if info.id not in came)
        raise ShutdownError(
            f"worker {leaver.info.name!r} waited for the others to shut down, but {missing} did not come in time; "
            "everything is closed here now"
        ) from None
    except RendezvousError as error:
        raise ShutdownError(
            f"worker {leaver.info.name!r} could not wait for the others to shut down: {error}; "
            "everything is closed here now"
        ) from None
    return sum(int(value) for value in heard.values())

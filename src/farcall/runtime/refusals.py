"""Counts the messages and requests about references that a worker has refused, and logs the first for each sender.

A message is refused if it names a reference that does not exist here, or contradicts what is known of its sender
(`protocol.refcount`). Either it was forged, or the value was lost with a worker that died.

Rule: memory and log do not grow with the number of refusals: one number and one log line for each worker.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from farcall.protocol.ids import Worker

logger = logging.getLogger("farcall")

NOBODY_KNOWN: Final = -1
"""The key for workers that are not in the group any more, and for requests whose sender is not known."""


class Refusals:
    """Counts the messages and requests about references that were refused, by the worker that sent them.

    Args:
        me: The number of this worker, for the log.
        name_of: Returns the name of a worker, given its number.
    """

    def __init__(self, me: Worker, name_of: Callable[[Worker], str]) -> None:
        self._me = me
        self._name_of = name_of
        self._lock = threading.RLock()  # a finalizer may call `add` while its thread holds the lock
        self._counts: Counter[Worker] = Counter()
        self._logged: set[Worker] = set()

    def add(self, worker: Worker, why: object) -> None:
        """Counts one refused message or request. Logs a warning if it is the first that came from `worker`.

        Args:
            worker: The number of the worker that sent the message or request; `NOBODY_KNOWN` for an unknown sender.
            why: The reason, for the log.
        """
        with self._lock:
            self._counts[worker] += 1
            if worker in self._logged:
                return
            self._logged.add(worker)
        who = f"worker {self._name_of(worker)!r}" if worker != NOBODY_KNOWN else "another worker"
        logger.warning(
            "worker %r refused what %s said or asked about a reference: %s. It was forged, or passed on by one who "
            "forged it, or its value went with a worker that died. The next ones of that worker are only counted "
            "(references_refused in get_metrics())",
            self._name_of(self._me),
            who,
            why,
        )

    def remove_worker(self, worker: Worker) -> None:
        """Removes a worker that is gone, and adds its number of refusals to that of `NOBODY_KNOWN`.

        Adds 0 if the worker has no refusals.
        """
        with self._lock:
            self._counts[NOBODY_KNOWN] += self._counts.pop(worker, 0)
            self._logged.discard(worker)

    def counts(self) -> dict[Worker, int]:
        """Returns the number of refusals by worker. Workers without refusals are missing.

        `NOBODY_KNOWN` is the key for workers that are gone and for unknown senders. Its number may be 0.
        """
        with self._lock:
            return dict(self._counts)


def no_such_reference(reference: object) -> str:
    """Returns the reason for refusing a message about a reference that this worker does not know, as text."""
    return f"{reference} is not here, or was named with a wrong token"

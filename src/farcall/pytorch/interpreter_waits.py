"""How long threads that serve wait for the interpreter: of Python's threads only one runs at a time.

Measured where a function is run for others: the thread lets the interpreter go for a moment, as it does in every wait,
and looks how long it takes to have it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep


class InterpreterWaits:
    """What was measured at one agent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds = 0.0

    def measure(self) -> None:
        """Waits once for the interpreter."""
        began = perf_counter()
        sleep(0)
        self.note(perf_counter() - began)

    def note(self, seconds: float) -> None:
        """A wait has taken that long."""
        with self._lock:
            self._count += 1
            self._seconds += seconds

    @contextmanager
    def before_function(self) -> Iterator[None]:
        """Measures before what is inside."""
        self.measure()
        yield

    def average(self) -> float:
        """In microseconds; 0 if nothing was measured."""
        with self._lock:
            return self._seconds / self._count * 1e6 if self._count else 0.0

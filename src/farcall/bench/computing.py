"""A thread that computes all the time, as load beside a measurement.

It runs in a process of its own (a *busy program*), or in the caller or the server, where it competes for the
interpreter's lock as well.
"""

from __future__ import annotations

import threading


class ComputingThread:
    """A thread that runs plain Python code without ever waiting, to put load on a process that is measured.

    A new object has no running thread. `start` starts it, and `stop` ends it. It can be started again.
    """

    def __init__(self) -> None:
        self._stopped = True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. Raises `RuntimeError` if it runs already."""
        if self._thread is not None:
            raise RuntimeError("the computing thread runs already")
        self._stopped = False
        # A daemon, so that a process that fails meanwhile can end.
        self._thread = threading.Thread(target=self._compute, name="computing", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits for its end. Does nothing if it does not run."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _compute(self) -> None:
        while not self._stopped:
            sum(range(100))

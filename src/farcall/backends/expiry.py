"""Calls end at their time: for agents that leave it to `RpcAgent.call`. farcall's own agent has a clock of its own.

Rules
- A call is settled by whoever takes it out of the table: its reply, or the clock. So it is settled once.
- One thread for an agent, however many calls there are. It is there while calls are, and ends by itself soon after the
  last one: nobody has to close it.
- The agent's own future is left alone: it may be settled late, and nobody hears of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from farcall.futures import Future

_LONGEST_SLEEP: Final = 0.5
"""Seconds after which the thread looks whether it is needed still."""


class Expiry:
    """The calls of one agent that have a deadline, and the thread that ends those whose time is over."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # reentrant: a signal handler may make a call
        self._open: dict[int, tuple[float, Future[Any], Callable[[], Exception]]] = {}
        self._numbers = itertools.count()
        self._wake_at = 0.0
        self._thread: threading.Thread | None = None

    def limit(self, future: Future[Any], deadline: float, new_error: Callable[[], Exception]) -> Future[Any]:
        """A future that is settled as this one, or at the deadline (of `time.monotonic`) with `new_error()`."""
        limited: Future[Any] = Future()
        number = next(self._numbers)
        with self._condition:
            self._open[number] = deadline, limited, new_error
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="farcall-expiry", daemon=True)
                self._thread.start()
            elif deadline < self._wake_at:
                self._condition.notify()

        def settled(done: Future[Any]) -> None:
            error = done.exception()
            if self._open.pop(number, None) is None:
                return  # its time was over
            if error is None:
                limited.set_result(done.value())
            else:
                limited.set_exception(error)

        future.then(settled)
        return limited

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._open:
                    self._thread = None
                    return
                now = monotonic()
                first = min(deadline for deadline, _, _ in list(self._open.values()))
                if first > now:
                    self._wake_at = min(first, now + _LONGEST_SLEEP)
                    self._condition.wait(self._wake_at - now)
                    continue
            for number, (deadline, limited, new_error) in list(self._open.items()):
                if deadline <= now and self._open.pop(number, None) is not None:
                    limited.set_exception(new_error())

"""The values of references, at their owner: there, still to come, or an error that stands in their place.

Rule: an error is never raised twice as the same object. It would gather a traceback at each use, whose frames hold
handles of the very reference that keeps the error, and nothing would ever go. So it is kept as what makes it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from farcall.futures import DONE, FAILED, PENDING, Future, run_callbacks
from farcall.serialization import decode_failure, describe_failure


class Value(Future[Any]):
    """What a reference stands for."""

    __slots__ = ("_new_error", "failure")

    def __init__(self) -> None:
        # Not super().__init__: one call less for every remote call.
        self._state = PENDING
        self._value = None
        self._watchers = []
        self._source = None
        self._report = None
        self._reply = None
        self.failure = b""
        """The failure of its function, as it travels."""
        self._new_error: Callable[[], BaseException] | None = None

    def give(self, value: Any) -> None:
        """The value is there."""
        callbacks = self.settle(DONE, value)
        if callbacks:
            run_callbacks(self, callbacks)

    def fail(self, failure: bytes) -> None:
        """The function that should have made it has failed, with that encoded failure."""
        self.failure = failure
        self.refuse(partial(decode_failure, failure))

    def refuse(self, new_error: Callable[[], BaseException]) -> None:
        """There is none and never will be: each use raises an error of its own. Does nothing if it is there."""
        if not self._state:
            self._new_error = new_error
            run_callbacks(self, self.settle(FAILED, None))

    def describe(self) -> str:
        """What there is, for people: the type of the value. Empty if it is not there yet. Runs no code of a user's."""
        if not self._state:
            return ""
        if self.failure:
            return f"failed: {describe_failure(self.failure)}"
        return "refused" if self._new_error is not None else type(self._value).__qualname__

    def value(self) -> Any:
        """See `Future`."""
        if self._new_error is not None:
            raise self._new_error()
        return super().value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future`."""
        error = super().exception(timeout)
        return self._new_error() if self._new_error is not None else error


new_value: Final[Callable[[type[Value]], Value]] = Value.__new__
"""`new_value(Value)`: with nothing in it, and without a frame; for who makes one for every remote call."""

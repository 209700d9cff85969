"""`Stream`: items that come one by one, for `for` and for `async for`.

The base class of what `as_completed` and `map` return. A stream is iterated once, by a thread or by a task. It ends and
closes with its last item, with an error, by `close`, at the end of its `with` block, when a task that waits for an item
is cancelled, and with its last reference.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Stream(Iterator[T_co], AsyncIterator[T_co]):
    """Items that come one by one, for `for` and for `async for`. Iterated once."""

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> T_co:
        """Waits for the next item and returns it. Raises `StopIteration` at the end, and the error that ended it."""

    @abstractmethod
    async def __anext__(self) -> T_co:
        """Waits for the next item without blocking the event loop. Raises `StopAsyncIteration` at the end."""

    @abstractmethod
    def close(self) -> None:
        """Ends the stream: what is under way for it is cancelled. Does not wait for that. May be called twice."""

    async def aclose(self) -> None:
        """Does the same as `close`; for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

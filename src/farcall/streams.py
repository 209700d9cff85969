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
    """Items that come one by one, for `for` and for `async for`. It is iterated once, by one thread or task.

    The base class of what `as_completed` and `map` return. It can be a context manager: the end of `with` closes it.
    After its end, and after `close`, there are no more items.
    """

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> T_co:
        """Waits for the next item and returns it. Blocks the thread.

        Raises `StopIteration` at the end and after `close`, and the error if one has ended the stream.
        """

    @abstractmethod
    async def __anext__(self) -> T_co:
        """Waits for the next item and returns it, without blocking the event loop.

        Raises `StopAsyncIteration` at the end and after `close`, and the error if one has ended the stream.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the stream: there are no more items. May be called twice.

        Calls that the stream has made itself are cancelled; this does not wait for that.
        """

    async def aclose(self) -> None:
        """Ends the stream, by calling `close`; for `contextlib.aclosing`. Does not wait. May be called twice."""
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

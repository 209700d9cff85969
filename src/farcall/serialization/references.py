"""Sends the handles of references beside the payload of a message, never in it.

While the sender pickles the arguments or the result of a call, the handles in them are *collected*. The payload
contains only the index of a handle in that collection. The handles themselves go into the header of the message, where
the receiver can count them before it unpickles anything. While the receiver unpickles the payload, the handles of that
message are *offered* to the unpickler.

A handle cannot be pickled outside a call, because no worker would count the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from farcall.errors import SerializationError


class _Thread(threading.local):
    """The references in what the current thread is pickling and unpickling; each thread has values of its own.

    Attributes:
        collected: The handles of references in the message that is being pickled, with their indexes; None while
            nothing is being pickled.
        offered: The handles of references in the message that is being unpickled, in the order of their indexes; empty
            while nothing is being unpickled.
    """

    collected: dict[Any, int] | None = None
    offered: Sequence[Any] = ()


_thread = _Thread()


class collecting:  # noqa: N801 (reads as a word: with collecting() as handles: ...)
    """A context manager in which this thread pickles the payload of one message.

    Yields a dict that pickling fills with the handles of references in the payload, each with its index from 0 on. It
    stays empty if there are none. Contexts can be nested: the inner one collects for itself.

    Example:
        >>> with collecting() as handles:
        ...     payload, buffers = dumps(value)
    """

    __slots__ = ("_before",)

    def __enter__(self) -> dict[Any, int]:
        """Begins to collect the handles that this thread pickles.

        Returns the dict that pickling fills: the handles of references with their indexes.
        """
        self._before = _thread.collected
        handles: dict[Any, int] = {}
        _thread.collected = handles
        return handles

    def __exit__(self, *_: object) -> None:
        """Ends collecting, so that an enclosing context goes on. Lets exceptions pass."""
        _thread.collected = self._before


class offering:  # noqa: N801
    """A context manager in which this thread unpickles the payload of one message.

    Inside, `take_offered(index)` returns the handle with that index. Contexts can be nested: the inner one counts.

    Args:
        handles: The handles of references that came with the message, in the order of their indexes; may be empty.
    """

    __slots__ = ("_before", "_handles")

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def __enter__(self) -> None:
        """Begins to offer the handles to what this thread unpickles."""
        self._before = _thread.offered
        _thread.offered = self._handles

    def __exit__(self, *_: object) -> None:
        """Ends offering; the handles of the enclosing context are offered again. Lets exceptions pass."""
        _thread.offered = self._before


def collect(handle: Any, subject: object) -> int:
    """Adds a handle to the message that this thread is pickling, and returns its index from 0 on.

    `__reduce__` of a reference calls this. The handle is sent in the header of the message, and the pickle has only the
    index.

    Args:
        handle: The handle, which must be hashable. One that the message has already keeps its index.
        subject: The object that is being pickled, for the error message.

    Raises:
        SerializationError: No message is being pickled: the object is pickled outside a call.
    """
    handles = _thread.collected
    if handles is None:
        raise SerializationError(
            f"{subject!r} can be pickled only as an argument or result of a remote call, where the copy is counted; "
            "send it with rpc_sync, rpc_async or remote, or send its value (to_here()) instead"
        )
    return handles.setdefault(handle, len(handles))


def offered() -> Sequence[Any]:
    """Returns the handles of the message that this thread is unpickling; empty if there is none.

    This is for code that unpickles a part of the message later, and must then offer the same handles by `offering`.
    """
    return _thread.offered


def take_offered(place: int) -> Any:
    """Returns the handle with the index `place` in the message that this thread is unpickling.

    Pickles of references call this.

    Raises:
        SerializationError: The message has no handle with that index, `place` is not an int from 0 on, or no message is
            being unpickled.
    """
    try:
        if type(place) is not int or place < 0:
            raise IndexError
        return _thread.offered[place]
    except IndexError:
        raise SerializationError("a pickled reference was unpickled outside the call that it belongs to") from None

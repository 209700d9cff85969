"""How handles of references travel: beside the pickle, never in it.

While a call's arguments or its result are pickled, handles that are met are *collected*, and only their place in that
list goes into the pickle; the list goes into the message's header, where the receiver can count them before anything is
unpickled. While it is unpickled there, the list that came is *offered*.

A handle that is pickled at any other time is refused: nobody would count it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from farcall.errors import SerializationError


class _Thread(threading.local):
    collected: list[Any] | None = None
    offered: Sequence[Any] = ()


_thread = _Thread()


class collecting:  # noqa: N801 (reads as a word: with collecting() as handles: ...)
    """Around the pickling of what goes into a message: gives the list of the handles that were met."""

    __slots__ = ("_before", "_handles")

    def __enter__(self) -> list[Any]:
        self._before = _thread.collected
        self._handles: list[Any] = []
        _thread.collected = self._handles
        return self._handles

    def __exit__(self, *_: object) -> None:
        _thread.collected = self._before


class offering:  # noqa: N801
    """Around the unpickling of what came in a message, with the handles that came beside it."""

    __slots__ = ("_before", "_handles")

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def __enter__(self) -> None:
        self._before = _thread.offered
        _thread.offered = self._handles

    def __exit__(self, *_: object) -> None:
        _thread.offered = self._before


def collect(handle: Any, what: str) -> int:
    """For `__reduce__`: puts a handle into the message; its place there. Raises `SerializationError` outside a call."""
    handles = _thread.collected
    if handles is None:
        raise SerializationError(
            f"{what} can be pickled only as an argument or result of a remote call, where it is counted; "
            "send it with rpc_sync, rpc_async or remote, or send its value (to_here()) instead"
        )
    for place, known in enumerate(handles):
        if known is handle:
            return place
    handles.append(handle)
    return len(handles) - 1


def take_offered(place: int) -> Any:
    """For the unpickler: the handle at that place. Raises `SerializationError` if the message carried none there."""
    try:
        return _thread.offered[place]
    except IndexError:
        raise SerializationError("a pickled reference was read outside the call that it belongs to") from None

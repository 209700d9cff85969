"""How handles of references travel: beside the pickle, never in it.

While a call's arguments or its result are pickled, handles that are met are *collected*, and only their place in that
collection goes into the pickle; the handles go into the message's head, where the receiver can count them before
anything is unpickled. While it is unpickled there, the handles that came are *offered*.

A handle that is pickled at any other time is refused: nobody would count it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from farcall.errors import SerializationError


class _Thread(threading.local):
    collected: dict[Any, int] | None = None
    offered: Sequence[Any] = ()


_thread = _Thread()


class collecting:  # noqa: N801 (reads as a word: with collecting() as handles: ...)
    """Around the pickling of what goes into a message: gives the handles that were met, each with its place."""

    __slots__ = ("_before",)

    def __enter__(self) -> dict[Any, int]:
        self._before = _thread.collected
        handles: dict[Any, int] = {}
        _thread.collected = handles
        return handles

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


def collect(handle: Any, subject: object) -> int:
    """For `__reduce__`: puts the handle of `subject` into the message, once; its place there.

    Raises `SerializationError` outside a call.
    """
    handles = _thread.collected
    if handles is None:
        raise SerializationError(
            f"{subject!r} can be pickled only as an argument or result of a remote call, where it is counted; "
            "send it with rpc_sync, rpc_async or remote, or send its value (to_here()) instead"
        )
    return handles.setdefault(handle, len(handles))


def offered() -> Sequence[Any]:
    """For who will unpickle a part of this message later: the handles to be offered then."""
    return _thread.offered


def take_offered(place: int) -> Any:
    """For the unpickler: the handle at that place. Raises `SerializationError` if the message carried none there."""
    try:
        if place < 0:
            raise IndexError
        return _thread.offered[place]
    except (IndexError, TypeError):  # or it is no place at all
        raise SerializationError("a pickled reference was read outside the call that it belongs to") from None

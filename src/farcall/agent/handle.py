"""One handle of a reference on this worker: what an `RRef` stands on. Its end is noticed by itself."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any

from farcall.errors import RpcError
from farcall.futures import Future
from farcall.protocol.ids import ForkId, RRefId

if TYPE_CHECKING:
    from farcall.agent.book import ReferenceBook


class Handle:
    """What an `RRef` stands on: one handle of a reference on this worker. Its end is noticed by itself."""

    __slots__ = ("__weakref__", "book", "confirmed", "created_at", "error", "fork", "reference", "value")

    def __init__(self, book: ReferenceBook, reference: RRefId, fork: ForkId | None, value: Future[Any] | None) -> None:
        self.book = book
        self.reference = reference
        self.fork = fork
        """None for a handle at the owner."""
        self.value = value
        """At the owner: the future of the value."""
        self.confirmed = fork is None
        self.error: RpcError | None = None
        """Set if the value is gone: what every use must raise."""
        self.created_at = _caller(book.record_stacks)
        """Where the program made or received it: a source line."""

    def __del__(self) -> None:
        self.book.drop_later(self.reference, self.fork)


def _caller(whole_stack: bool) -> str:
    """The line, or the stack, of the program that makes or receives a handle just now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("farcall."):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "threading":
        return "a message"
    if whole_stack:
        return "".join(traceback.format_stack(frame))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

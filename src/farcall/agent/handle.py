"""One handle of a reference on this worker: what an `RRef` stands on. Its end is noticed by itself."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from farcall.agent.values import Value
from farcall.errors import RpcError
from farcall.protocol.ids import ForkId, RRefId
from farcall.serialization import collect, take_offered

if TYPE_CHECKING:
    from farcall.agent.book import ReferenceBook


class Handle:
    """One handle of a reference on this worker."""

    __slots__ = ("__weakref__", "_made", "book", "confirmed", "fork", "new_error", "packed", "reference", "value")

    def __init__(
        self, book: ReferenceBook, reference: RRefId, fork: ForkId | None, value: Value | None, made: Made
    ) -> None:
        self.book = book
        self.reference = reference
        self.fork = fork
        """None for a handle at the owner."""
        self.value = value
        """At the owner."""
        self.confirmed = fork is None
        self.new_error: Callable[[], RpcError] | None = None
        """Set if the value is gone: makes the error that every use must raise, a new one each time."""
        self.packed: bytes | None = None
        """Reference and fork as they stand in messages, once somebody has packed them."""
        self._made = made

    @property
    def made_at(self) -> str:
        """Where the program made it, or from whom it came."""
        return described(self._made)

    def check(self) -> None:
        """Raises `OwnerLost`, `ReferenceRefused` or `UsageError` if it leads nowhere."""
        if self.new_error is not None:
            raise self.new_error()

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return take_offered, (collect(self, self),)  # in a method of a proxy, which may be passed on as well

    def __repr__(self) -> str:
        return f"<handle of {self.reference}>"

    def __del__(self) -> None:
        self.book.drop_later(self.reference, self.fork)


Made = str | tuple[CodeType, int]
"""Where a handle was made: a text, or a place in the code, which is made a text only when somebody asks."""


def made_here(whole_stack: bool) -> Made:
    """The line, or the stack, of the program that makes a handle just now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("farcall."):
        frame = frame.f_back
    if frame is None:
        return "farcall itself"
    if whole_stack:
        return "".join(traceback.format_stack(frame))
    return frame.f_code, frame.f_lineno


def described(made: Made) -> str:
    """Where a handle was made, as text."""
    return made if isinstance(made, str) else f"{made[0].co_filename}:{made[1]}"

"""One handle of a reference on this worker: what an `RRef` stands on. Its end is noticed by itself.

And the errors of handles that lead nowhere.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from farcall.agent.values import Value
from farcall.errors import ExpelledError, OwnerLost, ReferenceRefused, RpcError, SerializationError, UsageError
from farcall.protocol.control import MOST_HANDLES
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.serialization import collect, take_offered

if TYPE_CHECKING:
    from farcall.agent.book import ReferenceBook
    from farcall.agent.calls import ToldCall


class Handle:
    """One handle of a reference on this worker."""

    __slots__ = (
        "__weakref__", "book", "callee", "confirmed", "fork", "made", "new_error", "packed", "reference", "told",
        "value",
    )  # fmt: skip

    def __init__(
        self, book: ReferenceBook, reference: RRefId, fork: ForkId | None, value: Value | None, made: Made = ""
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
        self.callee = b""
        """By whose name it is remembered whether its value is wanted: the function that makes it, if this worker has
        called that, or the one whose call has brought it."""
        self.told: ToldCall | None = None
        """What the owner tells of the value without being asked, until that is used."""
        self.made = made

    @property
    def made_at(self) -> str:
        """Where the program made it, or from whom it came."""
        return described(self.made)

    def check(self) -> None:
        """Raises `OwnerLost`, `ReferenceRefused` or `UsageError` if it leads nowhere."""
        if self.new_error is not None:
            raise self.new_error()

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return take_offered, (collect(self, self),)  # in a method of a proxy, which may be passed on as well

    def __repr__(self) -> str:
        return f"<handle of {self.reference}>"

    def __del__(self) -> None:
        book = self.book
        if self.told is not None:
            book.calling.told_in_vain(self)
        if not book.ended:
            # Takes no lock: garbage collection may run anywhere, in the midst of any.
            dropped = book.dropped
            dropped.append((self.reference, self.fork))
            if len(dropped) == 1:  # else whoever left the first has said so
                book.work_soon()


def handle_here(book: ReferenceBook, reference: RRefId, made: Made) -> Handle:
    """Another handle at the owner, whom somebody has told of the reference who holds one until this one is made.

    So nothing has to be counted, as it has to be for one that is passed on. Raises `ReferenceRefused` if it is not
    there.
    """
    with book._lock:
        book._count_created()
        value = book._values.get(reference)
        owned = book._references.owned.get(reference)
        if value is None or owned is None or owned.refused or not owned.created:
            raise released(reference, book._name_of(book.me))
        owned.handles += 1
    return Handle(book, reference, None, value, made)


class Handles(dict[ForkId, "weakref.ref[Handle]"]):
    """The handles of forks, as long as the program has them."""

    __slots__ = ()

    def find(self, fork: ForkId) -> Handle | None:
        """The handle of a fork; None if it is gone."""
        known = self.get(fork)
        return known() if known is not None else None

    def fail(self, fork: ForkId, new_error: Callable[[], RpcError]) -> None:
        """Every use of the handle of that fork raises from now on."""
        handle = self.find(fork)
        self.pop(fork, None)
        if handle is not None:
            handle.new_error = new_error


def refuse_finalizers(lock: threading.RLock) -> None:
    """Raises `UsageError` if this very thread is in the midst of a change to the tables that this lock guards."""
    if lock._is_owned():  # type: ignore[attr-defined]
        raise UsageError(
            "a finalizer cannot make references or pass them on here: it interrupts their book-keeping; "
            "make the call elsewhere, not in __del__"
        )


def stillborn(book: ReferenceBook, owner: Worker, new_error: Callable[[], RpcError]) -> Handle:
    """A handle of a reference that could not be made at `owner`: every use raises. Nobody else knows of it."""
    if owner == book.me:
        handle = book.own(None)  # which nobody gets to see
    else:  # no reference has the number 0
        handle = Handle(book, RRefId(owner, book.me, 0), ForkId(book.me, 0), None, made_here(False))
    handle.new_error = new_error
    return handle


Made = str | tuple[CodeType, int]
"""Where a handle was made: a text, or a place in the bytecode, which is made a text only when somebody asks."""


def made_here(whole_stack: bool, depth: int = 2) -> Made:
    """The line, or the stack, of the program that makes a handle just now; `depth` frames of ours lie in between."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("farcall.") or name.startswith("farcall.bench."):  # which is a program as any other
            break
        frame = frame.f_back
    if frame is None:
        return "farcall itself"
    if whole_stack:
        return "".join(traceback.format_stack(frame))
    return frame.f_code, frame.f_lasti


def described(made: Made) -> str:
    """Where a handle was made, as text."""
    if isinstance(made, str):
        return made
    code, at = made
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


def check_usable(handles: Sequence[Handle], book: ReferenceBook) -> None:
    """Raises the error of a handle that leads nowhere, and `SerializationError` if they are too many for a message.

    And `UsageError` for a handle of another book, in whose numbers it may be taken for something else.
    """
    if len(handles) > MOST_HANDLES:
        raise SerializationError(
            f"a message with {len(handles)} references cannot be sent; at most {MOST_HANDLES} are allowed: "
            "send them in parts"
        )
    for handle in handles:
        if handle.new_error is not None:
            raise handle.new_error()
        if handle.book is not book:
            raise UsageError(
                f"{handle.reference} is of another group, or of this worker before it was shut down: it cannot be "
                "passed on here. Create it anew"
            )


def owner_lost(reference: RRefId, name: str) -> OwnerLost:
    """For a handle whose owner died."""
    return OwnerLost(f"worker {name!r}, who owned {reference}, was lost, and the value with it", name)


def cut_off(reference: RRefId, name: str) -> ExpelledError:
    """For a handle of a worker that was taken for dead: its owner may live, and has forgotten this worker."""
    return ExpelledError(
        f"worker {name!r} (this one) was taken for dead by its group, and {reference} is gone with all that it held. "
        "Call shutdown(graceful=False), init_rpc() to join again, and create it anew"
    )


def refused(reference: RRefId) -> ReferenceRefused:
    """For a handle that the owner could not count."""
    return ReferenceRefused(
        f"{reference} was passed on by a worker that died before its owner could count it; "
        "its value is gone. Create it anew"
    )


def released(reference: RRefId, owner: str) -> ReferenceRefused:
    """For a use of what is not there any more."""
    return ReferenceRefused(f"worker {owner!r} does not own {reference} any more: its value was released")

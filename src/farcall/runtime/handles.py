"""Handles, on which an `RRef` is built. When a handle is garbage-collected, the reference store is notified.

Also the values of references at their owner, and the errors of handles that cannot be used any more.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from farcall.errors import (
    ExpelledError,
    OwnerLostError,
    ReferenceRefusedError,
    RpcError,
    SerializationError,
    UsageError,
)
from farcall.futures import DONE, FAILED, PENDING, Future, run_callbacks
from farcall.protocol.frames import MAX_REFERENCES
from farcall.protocol.ids import ForkId, RRefId
from farcall.serialization import collect, decode_failure, describe_failure, take_offered

if TYPE_CHECKING:
    from farcall.runtime.calls import PendingCall
    from farcall.runtime.reference_store import ReferenceStore


class Value(Future[Any]):
    """The future of the value of a reference, at its owner.

    If there is an error in place of the value, each use raises a new error object. If all uses raised the same object,
    its traceback would grow with each use, and its stack frames would keep handles of this reference alive, so that the
    value was never released. So a function is stored that creates the error.
    """

    __slots__ = ("_new_error", "failure")

    def __init__(self) -> None:
        # Not super().__init__, which would cost every remote call one function call.
        self._state = PENDING
        self._value = None
        self._watchers = []
        self._source = None
        self._report = None
        self._reply = None
        self.failure = b""
        """The encoded failure, if the function that should have made the value has failed; else empty."""
        self._new_error: Callable[[], BaseException] | None = None

    def give(self, value: Any) -> None:
        """Sets the value and runs callbacks.

        Must be called once, and not after `fail` or `refuse`; this is not checked.
        """
        run_callbacks(self, self.settle(DONE, value))

    def fail(self, failure: bytes) -> None:
        """Sets the encoded failure of the function that should have made the value, and runs callbacks.

        To be called once, in place of `give`.
        """
        self.failure = failure
        self.refuse(partial(decode_failure, failure))

    def refuse(self, new_error: Callable[[], BaseException]) -> None:
        """Has each use of the value raise what `new_error` returns. Runs callbacks.

        Does nothing if a value or error is set already.
        """
        if not self._state:
            self._new_error = new_error
            run_callbacks(self, self.settle(FAILED, None))

    def cancel_alone(self) -> bool:
        """False: a value is not cancelled with one of those who wait for it."""
        return False

    def describe(self) -> str:
        """Returns the name of the type of the value, or text that says why there is none; empty if it is pending."""
        if not self._state:
            return ""
        if self.failure:
            return f"failed: {describe_failure(self.failure)}"
        return "refused" if self._new_error is not None else type(self._value).__qualname__

    def value(self) -> Any:
        """Returns the value. Does not wait.

        Raises:
            RuntimeError: There is no value yet.
            Exception: A new error object at each call, if there is an error in place of the value.
        """
        if self._new_error is not None:
            raise self._new_error()  # what the function raised, or why there is no value
        return super().value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the value. Returns a new error object if there is an error in its place; None if there is a value.

        Args:
            timeout: How many seconds to wait; None means no limit.

        Raises:
            TimeoutError: There is neither a value nor an error after `timeout` seconds.
        """
        error = super().exception(timeout)
        return self._new_error() if self._new_error is not None else error


class Handle:
    """One handle of a reference on this worker. The reference store counts it, and notices when it is dropped."""

    __slots__ = (
        "__weakref__", "confirmed", "creation", "fork", "made", "new_error", "packed", "reference", "reference_store",
        "value",
    )  # fmt: skip

    def __init__(
        self, store: ReferenceStore, reference: RRefId, fork: ForkId | None, value: Value | None, made: Made = ""
    ) -> None:
        """Creates a handle. Only the store does that, because it must count the handle.

        Args:
            store: The references of this worker.
            reference: The id of the reference.
            fork: The id of the fork; None if this worker owns the value.
            value: The value if this worker owns it; else None.
            made: Where the program created the handle, or which worker sent it.
        """
        self.reference_store = store
        self.reference = reference
        self.fork = fork
        self.value = value
        self.confirmed = fork is None
        """Whether the owner has counted the fork."""
        self.new_error: Callable[[], RpcError] | None = None
        """Creates the error that every use raises; None while the handle can be used."""
        self.packed: bytes | None = None
        """The reference and fork as encoded in frames; None before they are needed."""
        self.creation: PendingCall | None = None
        """The remote call that creates the value, if this worker made that call; else None."""
        self.made = made

    @property
    def made_at(self) -> str:
        """Where the program created the handle, or which worker sent it, as text."""
        return describe_place(self.made)

    def check(self) -> None:
        """Does nothing if the handle can be used.

        Raises `OwnerLostError`, `ReferenceRefusedError`, `ExpelledError` or `UsageError` if it cannot.
        """
        if self.new_error is not None:
            raise self.new_error()

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return take_offered, (collect(self, self),)  # a method of a proxy has a handle, and may be an argument

    def __repr__(self) -> str:
        return f"<handle of {self.reference}>"

    def __del__(self) -> None:
        # The `HandleRef` has put itself into the queue `dropped`. This only schedules the work on that queue.
        try:
            store = self.reference_store
        except AttributeError:  # a signal handler raised before `__init__` was done
            return
        store.work_soon()


class HandleRef(weakref.ref[Handle]):
    """A weak reference to a handle that remembers which handle it was.

    Its callback is the `append` of a queue, which runs no Python code. So no exception from a signal handler can come
    between the end of the handle and the entry in the queue.
    """

    __slots__ = ("fork", "reference")

    reference: RRefId
    fork: ForkId | None


def watch_handle(handle: Handle) -> HandleRef:
    """Returns a weak reference that is put into the store's queue `dropped` when the handle is garbage-collected.

    The caller must keep the weak reference, otherwise that does not happen.
    """
    watcher = HandleRef(handle, handle.reference_store.dropped.append)
    watcher.reference, watcher.fork = handle.reference, handle.fork
    return watcher


class HandleTable(dict[ForkId, HandleRef]):
    """The handles of forks, by fork, as weak references."""

    __slots__ = ()

    def find(self, fork: ForkId) -> Handle | None:
        """Returns the handle of a fork; None if it is not known, or the program has dropped it."""
        known = self.get(fork)
        return known() if known is not None else None

    def fail(self, fork: ForkId, new_error: Callable[[], RpcError]) -> None:
        """Has every later use of the handle of a fork raise a new error. Does nothing if there is no handle."""
        handle = self.find(fork)
        self.pop(fork, None)
        if handle is not None:
            handle.new_error = new_error


# -- Where handles were created

Made = str | tuple[CodeType, int]
"""Where a handle was created: text, or a position in bytecode, which `describe_place` converts to text."""


def place_of_caller(whole_stack: bool, depth: int = 2) -> Made:
    """Returns the line of the program that is creating a handle, or its stack as text if `whole_stack` is set.

    Skips `depth` stack frames, and then all that are farcall's own.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("farcall.") or name.startswith("farcall.bench."):  # the benchmarks count as a program
            break
        frame = frame.f_back
    if frame is None:
        return "farcall itself"
    if whole_stack:
        return "".join(traceback.format_stack(frame))
    return frame.f_code, frame.f_lasti


def describe_place(made: Made) -> str:
    """Returns where a handle was created as text: `file:line`, or the text itself; empty if that is not known."""
    if isinstance(made, str):
        return made
    code, at = made
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


# -- Errors


def check_usable(handles: Sequence[Handle], store: ReferenceStore) -> None:
    """Checks that handles can be sent together in one frame.

    Raises:
        SerializationError: There are too many.
        UsageError: One belongs to another group, or to this worker before it was shut down.
        RpcError: One cannot be used any more. See `Handle.check`.
    """
    check_number(len(handles))
    for handle in handles:
        handle.check()
        if handle.reference_store is not store:
            raise UsageError(
                f"{handle.reference} is of another group, or of this worker before it was shut down: it cannot be "
                "passed on here. Create it anew"
            )


def check_number(handles: int) -> None:
    """Raises `SerializationError` if there are too many handles for one message."""
    if handles > MAX_REFERENCES:
        raise SerializationError(
            f"a message with {handles} references cannot be sent; at most {MAX_REFERENCES} are allowed: "
            "send them in parts"
        )


def refuse_in_finalizer(lock: threading.RLock) -> None:
    """Raises `UsageError` if this thread holds the lock: then the caller is a finalizer that interrupts a change."""
    if lock._is_owned():  # type: ignore[attr-defined]
        raise UsageError(
            "a finalizer cannot make references or pass them on here: it interrupts their book-keeping; "
            "make the call elsewhere, not in __del__"
        )


def failed_handle(store: ReferenceStore, owner: int, new_error: Callable[[], RpcError]) -> Handle:
    """Returns a handle for a reference that could not be created at `owner`. Every use raises. Nothing is sent."""
    if owner == store.me:
        handle = store.own(None)
    else:  # no reference has the number 0
        handle = Handle(store, RRefId(owner, store.me, 0), ForkId(store.me, 0), None, place_of_caller(False))
    handle.new_error = new_error
    return handle


def owner_lost(reference: RRefId, owner: str) -> OwnerLostError:
    """Returns the error for uses of a handle whose owner, with that name, was lost."""
    return OwnerLostError(f"worker {owner!r}, who owned {reference}, was lost, and the value with it", owner)


def expelled(reference: RRefId, worker: str) -> ExpelledError:
    """Returns the error of a handle on a worker that was expelled. The owner does not count its forks any more."""
    return ExpelledError(
        f"worker {worker!r} (this one) was declared lost by its group, and {reference} is gone with all that it held. "
        "Call shutdown(graceful=False), init_rpc() to join again, and create it anew"
    )


def refused(reference: RRefId) -> ReferenceRefusedError:
    """Returns the error for uses of a handle whose fork the owner could not count."""
    return ReferenceRefusedError(
        f"{reference} was passed on by a worker that died before its owner could count it; "
        "its value is gone. Create it anew"
    )


def released(reference: RRefId, owner: str) -> ReferenceRefusedError:
    """Returns the error for using a value that its owner, with that name, has released."""
    return ReferenceRefusedError(f"worker {owner!r} does not own {reference} any more: its value was released")


def unknown(reference: RRefId, owner: str) -> ReferenceRefusedError:
    """Returns the error for using a value that does not exist. It must not reveal whether the value ever existed."""
    return ReferenceRefusedError(
        f"worker {owner!r} has no {reference} for this request: its value was released, or the request does not have "
        "its token. Create it anew"
    )

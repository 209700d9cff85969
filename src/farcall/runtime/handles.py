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
    value would never be released. So a function that creates the error is stored.
    """

    __slots__ = ("_new_error", "failure")

    def __init__(self) -> None:
        """Creates a value that does not exist yet. `give`, `fail` or `refuse` settles it."""
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
        """Sets the value, and runs callbacks.

        Must be called at most once, and not after `fail` or `refuse`. This is not checked.
        """
        run_callbacks(self, self.settle(DONE, value))

    def fail(self, failure: bytes) -> None:
        """Sets the failure of the function that should have made the value, and runs callbacks.

        From then on, each use of the value raises the error that `failure` encodes. Must be called at most once, and
        not after `give` or `refuse`. This is not checked.

        Args:
            failure: The failure as `encode_failure` returns it.
        """
        self.failure = failure
        self.refuse(partial(decode_failure, failure))

    def refuse(self, new_error: Callable[[], BaseException]) -> None:
        """Makes each use of the value raise an error, and runs callbacks.

        Does nothing if a value or error is set already.

        Args:
            new_error: Called for each use. Returns the error to raise.
        """
        if not self._state:
            self._new_error = new_error
            run_callbacks(self, self.settle(FAILED, None))

    def cancel_alone(self) -> bool:
        """Does nothing and returns False: nobody who waits for a value can cancel it for the others."""
        return False

    def describe(self) -> str:
        """Returns the name of the type of the value; empty if the value is pending.

        If there is an error in place of the value, returns "refused", or "failed: " and a description of the failure.
        """
        if not self._state:
            return ""
        if self.failure:
            return f"failed: {describe_failure(self.failure)}"
        return "refused" if self._new_error is not None else type(self._value).__qualname__

    def value(self) -> Any:
        """Returns the value. Does not wait.

        Raises:
            RuntimeError: The value is pending.
            Exception: The error that is in place of the value. Each call raises a new object.
        """
        if self._new_error is not None:
            raise self._new_error()  # what the function raised, or why there is no value
        return super().value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until there is a value or an error in its place. Returns a new error object; None if there is a value.

        Args:
            timeout: How many seconds to wait; None means no limit, 0 means not to wait.

        Raises:
            TimeoutError: There is neither a value nor an error after `timeout` seconds.
        """
        error = super().exception(timeout)
        return self._new_error() if self._new_error is not None else error


class Handle:
    """One handle of a reference on this worker. The reference store counts it until it is garbage-collected.

    An `RRef` of the program contains a handle.

    Only the reference store creates handles, because it must count them.

    Args:
        store: The reference store of this worker.
        reference: The id of the reference.
        fork: The id of the fork; None if this worker owns the value.
        value: The future of the value if this worker owns it; else None.
        made: Where the program created the handle, or which worker sent it: text, or a code object and the offset of
            an instruction in it. Empty text if not known.
    """

    __slots__ = (
        "__weakref__", "confirmed", "creation", "fork", "made", "new_error", "packed", "reference", "reference_store",
        "value",
    )  # fmt: skip

    def __init__(
        self, store: ReferenceStore, reference: RRefId, fork: ForkId | None, value: Value | None, made: Made = ""
    ) -> None:
        self.reference_store = store
        self.reference = reference
        self.fork = fork
        self.value = value
        self.confirmed = fork is None
        """Whether the owner has counted the fork."""
        self.new_error: Callable[[], RpcError] | None = None
        """Returns the error that a use of the handle raises, a new one each time; None while the handle can be used."""
        self.packed: bytes | None = None
        """The reference and fork as encoded in frames; None before they are needed."""
        self.creation: PendingCall | None = None
        """The remote call that creates the value, if this worker made that call; else None."""
        self.made = made

    @property
    def made_at(self) -> str:
        """Where the program created the handle, or which worker sent it, as text; empty if not known."""
        return describe_place(self.made)

    def check(self) -> None:
        """Raises an error if the handle cannot be used any more; otherwise does nothing.

        Raises:
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner could not count this fork.
            ExpelledError: The group has expelled this worker.
            UsageError: This worker has given up its handles, because it has left the group.
            RpcError: The reference could not be created.
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
    """A weak reference to a handle. It has the ids of the handle, also after the handle is gone.

    Its callback is the `append` of a queue, which runs no Python code. So no exception from a signal handler can come
    between the end of the handle and the entry in the queue.

    Attributes:
        reference: The id of the reference.
        fork: The id of the fork; None if this worker owns the value.
    """

    __slots__ = ("fork", "reference")

    reference: RRefId
    fork: ForkId | None


def watch_handle(handle: Handle) -> HandleRef:
    """Returns a weak reference that goes into the queue `ReferenceStore.dropped` when the handle is garbage-collected.

    The caller must keep the weak reference. Otherwise it is never put into the queue.
    """
    watcher = HandleRef(handle, handle.reference_store.dropped.append)
    watcher.reference, watcher.fork = handle.reference, handle.fork
    return watcher


class HandleTable(dict[ForkId, HandleRef]):
    """Weak references to the handles of values that other workers own, by fork."""

    __slots__ = ()

    def find(self, fork: ForkId) -> Handle | None:
        """Returns the handle of a fork; None if the fork is not in the table, or the program has dropped the handle."""
        known = self.get(fork)
        return known() if known is not None else None

    def fail(self, fork: ForkId, new_error: Callable[[], RpcError]) -> None:
        """Makes every later use of the handle of a fork raise what `new_error` returns.

        Removes the fork from the table. Does nothing if the fork is not in the table.
        """
        handle = self.find(fork)
        self.pop(fork, None)
        if handle is not None:
            handle.new_error = new_error


# -- Where handles were created

Made = str | tuple[CodeType, int]
"""Where a handle was created: text, or a position in bytecode, which `describe_place` converts to text."""


def place_of_caller(whole_stack: bool, depth: int = 2) -> Made:
    """Returns where the program is creating a handle: the innermost stack frame that is not farcall's own code.

    Args:
        whole_stack: Whether to return the stack up to that stack frame, as text.
        depth: How many stack frames to skip in any case, including that of this function. `ValueError` is raised if the
            stack has fewer.

    Returns:
        With `whole_stack`, the text of a traceback. Otherwise a pair: the code object of that stack frame, and the
        offset of its current instruction. In both cases the text "farcall itself" if all stack frames are farcall's
        own.
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
    """Returns where a handle was created, as text.

    Args:
        made: Text, which is returned unchanged, or a code object and the offset of an instruction in it, for which
            `file:line` is returned.
    """
    if isinstance(made, str):
        return made
    code, at = made
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


# -- Errors


def check_usable(handles: Sequence[Handle], store: ReferenceStore) -> None:
    """Raises an error if the handles cannot be sent in one frame; otherwise does nothing.

    Args:
        handles: The handles; may be empty.
        store: The reference store of this worker, to which all handles must belong.

    Raises:
        SerializationError: There are more than `MAX_REFERENCES`.
        UsageError: A handle belongs to another group, or to this worker before it was shut down.
        RpcError: A handle cannot be used any more. See `Handle.check`.
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
    """Raises `SerializationError` if the number of handles for one message is larger than `MAX_REFERENCES`."""
    if handles > MAX_REFERENCES:
        raise SerializationError(
            f"a message with {handles} references cannot be sent; at most {MAX_REFERENCES} are allowed: "
            "send them in parts"
        )


def refuse_in_finalizer(lock: threading.RLock) -> None:
    """Raises `UsageError` if this thread holds `lock` already; otherwise does nothing.

    A thread holds `lock` while it changes the tables of references. It calls this function meanwhile only if a
    finalizer, such as `__del__`, has interrupted the change.
    """
    if lock._is_owned():  # type: ignore[attr-defined]
        raise UsageError(
            "a finalizer cannot make references or pass them on here: it interrupts their book-keeping; "
            "make the call elsewhere, not in __del__"
        )


def failed_handle(store: ReferenceStore, owner: int, new_error: Callable[[], RpcError]) -> Handle:
    """Returns a handle of a reference that could not be created. Nothing is sent.

    Args:
        store: The reference store of this worker.
        owner: The number of the worker that should have owned the value.
        new_error: Returns the error that each use of the handle raises.
    """
    if owner == store.me:
        handle = store.own(None)
    else:  # no reference has the number 0
        handle = Handle(store, RRefId(owner, store.me, 0), ForkId(store.me, 0), None, place_of_caller(False))
    handle.new_error = new_error
    return handle


def owner_lost(reference: RRefId, owner: str) -> OwnerLostError:
    """Returns the error of a handle whose owner was lost.

    `reference` is the reference of the handle, and `owner` the name of the owner. Both are for the message.
    """
    return OwnerLostError(f"worker {owner!r}, who owned {reference}, was lost, and the value with it", owner)


def expelled(reference: RRefId, worker: str) -> ExpelledError:
    """Returns the error of a handle on this worker after the group has declared this worker lost.

    `reference` is the reference of the handle, and `worker` the name of this worker. Both are for the message.
    """
    return ExpelledError(
        f"worker {worker!r} (this one) was declared lost by its group, and {reference} is gone with all that it held. "
        "Call shutdown(graceful=False), init_rpc() to join again, and create it anew"
    )


def refused(reference: RRefId) -> ReferenceRefusedError:
    """Returns the error of a handle that came from another worker, and whose fork the owner refuses to count.

    The message says that this other worker died too early, and that the value is gone. It contains `reference`.
    """
    return ReferenceRefusedError(
        f"{reference} was passed on by a worker that died before its owner could count it; "
        "its value is gone. Create it anew"
    )


def released(reference: RRefId, owner: str) -> ReferenceRefusedError:
    """Returns the error of a request for a value that its owner has released.

    `reference` is the reference to the value, and `owner` the name of the owner. Both are for the message.
    """
    return ReferenceRefusedError(f"worker {owner!r} does not own {reference} any more: its value was released")


def unknown(reference: RRefId, owner: str) -> ReferenceRefusedError:
    """Returns the error of a request to the worker with the name `owner` for a value that it does not have.

    `reference` is the reference in the request. The message does not reveal whether the value ever existed.
    """
    return ReferenceRefusedError(
        f"worker {owner!r} has no {reference} for this request: its value was released, or the request does not have "
        "its token. Create it anew"
    )

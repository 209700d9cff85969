"""Deadlines and cancellation: `deadline`, `detached`, `remaining` and `cancelled`, and the scopes behind them.

A *scope* is what calls belong to: the function that this thread or task runs for another worker (`runtime.invocation`),
or a block of `deadline` or `detached` in it. `current_scope`, a context variable, leads to the scope of running code,
so a coroutine keeps its scope across awaits, and a new task starts in the scope of the task that made it. Code that
runs for nobody, outside of all blocks, has none, and its calls pay for one look at that variable. To set a context
variable takes longer than all else that a call does for its scope; so a thread that serves calls sets it once, to a
`ServingThread`, which says what the thread runs now.

Rules
- A scope ends no later than the scope around it: `deadline` is the nearest of all limits. Only the time that is left
  is sent to another worker, so clocks need not agree.
- The default timeout applies only where no scope has a deadline.
- To cancel a scope is to cancel all that was added to it: calls under way, inner blocks, tasks. Threads that wait in it
  wake up. What is added later is cancelled at once: `is_cancelled` is set before the members are looked at, and looked
  at after a member was added.
- Code that is itself cancelled gets `asyncio.CancelledError`, at every wait. It is over when its caller is not
  interested any more, or when the time of the function has passed. The end of a `deadline` block is no cancellation
  of the code in it: there a wait raises `RpcTimeoutError`.
- A scope keeps no call alive, and no result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from numbers import Real
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol
from weakref import ref

from farcall.errors import CallCancelledError, RpcTimeoutError, UsageError
from farcall.gate import FOREVER
from farcall.options import UNSET_RPC_TIMEOUT

EXPIRY_GRACE_S: Final = 0.2
"""How long after its deadline a call waits for the callee to say whether the function had started."""
_SLACK_S: Final = EXPIRY_GRACE_S + 0.01
"""Other waits in a `deadline` block end that much later than the block, because the errors of calls say more."""
_ENDED_EARLY: Final = (CallCancelledError, RpcTimeoutError)
"""Errors of calls that may have ended because the code that waits for them is cancelled itself."""
_FIRST_PRUNING: Final = 64
_lock = threading.RLock()  # guards only that the members of a scope are created once


class Member(Protocol):
    """Something that is cancelled together with the scope to which it was added, such as a call.

    If it has a method `done`, the scope forgets it some time after `done` has returned True.
    """

    def cancel(self) -> object:
        """Cancels it. May be called twice, in any thread. Must not run code of the program. The result is not used."""


class _Members(dict[object, None]):
    """The members of a scope, as the keys of a dict: weak references to calls, and other members themselves.

    Empty at first. When there are `prune_at` of them, those that are done are removed.
    """

    __slots__ = ("prune_at",)

    def __init__(self) -> None:
        super().__init__()
        self.prune_at = _FIRST_PRUNING


class Scope:
    """Calls that have one deadline, and are cancelled together.

    A scope is a function that runs for another worker, or a block of `deadline` or `detached`. It is *over* when it was
    cancelled or its deadline has passed.

    Args:
        deadline: A time of the monotonic clock; `FOREVER` for no limit. Not later than that of the scope around this
            one, which is not checked.
    """

    __slots__ = ("_members", "deadline", "is_cancelled")

    ends_function = False
    """Whether the function that runs is over when this scope is; else only a block in it is."""
    has_default = True
    """Whether calls without a timeout get the default one, if this scope has no deadline."""
    outer: Scope | None = None
    """The scope around this one; None around the function that a worker runs for another."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        """A time of the monotonic clock. Never later than that of the scope around this one."""
        self.is_cancelled = False
        """Whether it was cancelled. A deadline that has passed does not set this."""
        self._members: _Members | None = None

    def find(self) -> Scope | None:
        """Returns this scope. So code that has a scope or a `ServingThread` can call `find` on both."""
        return self

    # Deadlines

    def limit(self, timeout: float, default: float) -> float:
        """Returns the seconds that a call in this scope may take; 0 for no limit.

        Args:
            timeout: The timeout of the call in seconds; 0 for no limit, `UNSET_RPC_TIMEOUT` if the program gave none.
            default: The default timeout of the worker; 0 for none.

        Raises:
            CancelledError: The function that runs is cancelled, or its time is over: no new call starts.
            RpcTimeoutError: The time of a `deadline` block is over.
        """
        if self.is_cancelled:
            self.raise_over()
        if self.deadline == FOREVER:
            if timeout != UNSET_RPC_TIMEOUT:
                return timeout
            return default if self.has_default else 0.0
        left = self.deadline - monotonic()
        if left <= 0:
            self.raise_over()
        return min(left, timeout) if timeout > 0 else left

    def limit_wait(self, deadline: float) -> float:
        """Returns until when a wait in this scope may last: `deadline`, or the end of the scope if that is earlier.

        Both are times of the monotonic clock; `FOREVER` for no limit. A `deadline` block ends a little later here, so
        that the errors of its calls come first. Raises `CancelledError` if the function that runs is cancelled or its
        time is over, and `RpcTimeoutError` if the time of a `deadline` block is over.
        """
        if self.is_cancelled:
            self.raise_over()
        end = self.deadline if self.ends_function else self.deadline + _SLACK_S
        if end < deadline and end <= monotonic():
            self.raise_over()
        return min(deadline, end)

    def is_over(self) -> bool:
        """Returns whether the scope is cancelled, or its deadline has passed."""
        return self.is_cancelled or self.deadline <= monotonic()

    def check(self) -> None:
        """Raises an error if the scope is over; otherwise does nothing.

        Raises:
            CancelledError: The function that runs is cancelled, or its time is over.
            RpcTimeoutError: The time of a `deadline` block is over.
        """
        if self.is_over():
            self.raise_over()

    def note_over(self) -> None:
        """Called when the code in the scope learns that the scope is over. Does nothing here.

        A subclass notes it: what a function returns after that is not its result.
        """

    def raise_if_cancelled(self) -> None:
        """Raises `CancelledError` if the function that runs is cancelled, or its time is over; otherwise does nothing.

        Does nothing either if only the time of a `deadline` block is over.
        """
        if self.is_cancelled or (self.ends_function and self.is_over()):
            self.raise_over()

    def raise_over(self) -> NoReturn:
        """Always raises: the error of code whose scope is over. The caller has found that it is.

        Raises:
            RpcTimeoutError: The time of a `deadline` block is over.
            CancelledError: In all other cases: the function that runs is cancelled, or its time is over.
        """
        self.note_over()
        if not self.is_cancelled and not self.ends_function:
            raise RpcTimeoutError(
                "RPC ran for more than set timeout: the time of the `deadline` block around this call is over. Give "
                "the block more seconds",
                None,
            )
        from asyncio import CancelledError  # not at the head: importing it would be half the time of `import farcall`

        raise CancelledError(
            "the call that this function runs for was cancelled, or its time is over; only calls in a block of "
            "farcall.detached() can still be made"
        )

    # Members

    def add_call(self, call: Member) -> None:
        """Adds a call that was sent. It is cancelled together with the scope, or at once if the scope is cancelled.

        The scope does not keep the call alive.
        """
        self.add(ref(call))

    def add(self, member: Member | ref[Any]) -> None:
        """Adds a member, or a weak reference to one. It is cancelled together with the scope.

        If the scope is cancelled already, it is cancelled at once. Adding it twice has no effect.
        """
        members = self._members
        if members is None:
            with _lock:
                members = self._members = self._members or _Members()
        members[member] = None
        if self.is_cancelled:
            self._cancel_members()
        elif len(members) >= members.prune_at:
            for each in list(members):
                found: Any = each() if isinstance(each, ref) else each
                if found is None or (hasattr(found, "done") and found.done()):
                    members.pop(each, None)
            members.prune_at = max(_FIRST_PRUNING, 2 * len(members))

    def discard(self, member: Member) -> None:
        """Removes a member, so that it is not cancelled with the scope. Does nothing if it is not there any more."""
        if self._members is not None:
            self._members.pop(member, None)

    def add_waker(self, wake: Callable[[], object]) -> Waker:
        """Has `wake` called when the scope is cancelled; at once if it is cancelled already.

        Returns the member that was added. The caller must `discard` it after its wait.
        """
        waker = Waker(wake)
        self.add(waker)
        return waker

    def cancel(self) -> None:
        """Cancels all members now, and members that are added later at once. May be called twice, in any thread."""
        self.is_cancelled = True
        self._cancel_members()

    def _cancel_members(self) -> None:
        """Cancels and removes all members: first calls and the like, then wakes the threads that wait in the scope.

        So other workers are told before these threads run. Does nothing if there are no members.
        """
        members = self._members
        if not members:
            return
        wakers = []
        while members:
            try:
                member, _ = members.popitem()
            except KeyError:
                break  # another thread cancels it, too
            found: Any = member() if isinstance(member, ref) else member
            if isinstance(found, Waker):
                wakers.append(found)
            elif found is not None:
                found.cancel()
        for waker in wakers:
            waker.cancel()


class Waker:
    """A member of a scope that wakes a thread when the scope is cancelled.

    Args:
        wake: Wakes the thread that waits in the scope.
    """

    __slots__ = ("wake",)

    def __init__(self, wake: Callable[[], object]) -> None:
        self.wake = wake
        """Wakes the thread. May be changed while it does not sleep."""

    def cancel(self) -> None:
        """Wakes the thread. May be called twice, and in any thread."""
        self.wake()


class ServingThread:
    """A thread that runs functions for other workers, and the scope of the function that it runs now.

    The constructor makes the object of the current thread. It is the value of `current_scope` in that thread, which
    therefore need not be set anew for each function.
    """

    __slots__ = ("_ident", "scope")

    def __init__(self) -> None:
        self._ident = get_ident()
        self.scope: Scope | None = None
        """The scope of the function that the thread runs; None if it runs none."""

    def find(self) -> Scope | None:
        """Returns the scope of the function that the current thread runs; None if it runs none.

        None also in a thread that was only given a copy of this thread's context: it may outlive the function.
        """
        return self.scope if self._ident == get_ident() else None


NO_SCOPE: Final = Scope(FOREVER)
"""A scope that is never over, for waits outside of all scopes."""

current_scope: ContextVar[Scope | ServingThread | None] = ContextVar("farcall_scope", default=None)
"""Leads to the scope of the code that runs, by `find`; None outside of all scopes."""


def find_scope() -> Scope | None:
    """Returns the scope of the code that runs; None outside of all scopes.

    That is the innermost block of `deadline` or `detached` around it, or the function that it runs for another worker.
    """
    found = current_scope.get()
    return found.find() if found is not None else None


def serve_in_thread() -> ServingThread:
    """Returns the object that says which function the current thread runs for another worker.

    The first call in a thread creates the object and sets `current_scope` to it.
    """
    found = current_scope.get()
    if not isinstance(found, ServingThread):
        found = ServingThread()
        current_scope.set(found)
    return found


def grace_end() -> float:
    """Returns until when a call whose deadline passes now waits for the callee, as a time of the monotonic clock.

    In that time the callee may still say whether the function had started.
    """
    return monotonic() + EXPIRY_GRACE_S


def raise_if_cancelled(error: object) -> None:
    """Raises `CancelledError` if the code that runs is cancelled, and may have got `error` for that reason.

    Called after a wait has failed with `error`. Does nothing if `error` is neither a `CallCancelledError` nor an
    `RpcTimeoutError`, or the code runs in no scope or in one that is not cancelled.
    """
    if isinstance(error, _ENDED_EARLY):
        scope = find_scope()
        if scope is not None:
            scope.raise_if_cancelled()


def run_in_scope(scope: Scope | None, function: Callable[[Any], Any], argument: Any) -> Any:
    """Returns `function(argument)`, and raises its errors. While it runs, `scope` is the current one; None for none."""
    token = current_scope.set(scope)
    try:
        return function(argument)
    finally:
        current_scope.reset(token)


# -- Blocks


class _Block(Scope):
    """The context manager of a block of `deadline` or `detached`: a scope that has no deadline at first.

    It is entered once; entering it again raises `UsageError`. A block that is left by an exception is cancelled.
    """

    __slots__ = ("_token", "ends_function", "outer")

    def __init__(self) -> None:
        super().__init__(FOREVER)
        self.outer: Scope | None = None
        self.ends_function = False
        self._token: Token[Scope | ServingThread | None] | None = None

    def __enter__(self) -> None:
        if self._token is not None:
            raise UsageError("a block of deadline or detached is entered once; make a new one")
        self.outer = find_scope()
        self._inherit()
        self._token = current_scope.set(self)

    def note_over(self) -> None:
        """Passes on to the scope around the block that its code has learned that the function is over.

        Does nothing if there is none, or only the block is over.
        """
        if self.outer is not None and self.ends_function:
            self.outer.note_over()

    def _inherit(self) -> None:
        """Takes over the deadline of the scope around this one, and joins it. Does nothing here; a subclass may."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        current_scope.reset(self._token)
        if self.outer is not None:
            self.outer.discard(self)
        if kind is not None:
            self.cancel()


class _Deadline(_Block):
    __slots__ = ("_seconds",)

    has_default = False

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self._seconds = seconds

    def _inherit(self) -> None:
        if self._seconds is not None:
            self.deadline = monotonic() + self._seconds
        outer = self.outer
        if outer is not None:
            if outer.deadline <= self.deadline:
                self.deadline, self.ends_function = outer.deadline, outer.ends_function
            outer.add(self)  # last: if the scope around this one is cancelled, that cancels this one


class _Detached(_Block):
    __slots__ = ()


def deadline(seconds: float | None) -> _Block:
    """Limits all calls that are made in a `with` block, and all that they call, to so many seconds altogether.

    The nearest of nested deadlines counts. Calls in the block that have no timeout of their own get what is left, not
    the default timeout. A block that is left by an exception cancels its calls that are still under way; one that is
    left normally does not. Use a plain `with` in `async def` functions, too.

    Args:
        seconds: The time from the beginning of the block; 0 is over at once. None for no limit but that of a block
            around this one.

    Returns:
        A context manager.

    Raises:
        UsageError: `seconds` is negative or not a number.

    Example:
        >>> with farcall.deadline(2.0):
        ...     total = sum(farcall.rpc_sync(name, part) for name in names)
    """
    if seconds is not None and (not isinstance(seconds, Real) or isinstance(seconds, bool) or not seconds >= 0):
        raise UsageError(f"a deadline is 0 or more seconds from now, or None for no limit, not {seconds!r}")
    return _Deadline(seconds)


def detached() -> _Block:
    """Separates the calls of a `with` block from the function that makes them.

    They do not inherit its deadline (they have the default timeout, unless they say otherwise), and are not cancelled
    with it. For work that must go on, and for calls that clean up after a cancellation. A block of
    `deadline` around this one does not limit them either. Outside of both, this block changes nothing.

    Returns:
        A context manager, for one `with`.

    Example:
        >>> try:
        ...     return work()
        ... finally:
        ...     with farcall.detached():
        ...         farcall.rpc_sync("locks", release, args=(key,))
    """
    return _Detached()


def remaining() -> float | None:
    """Returns the seconds that are left for the code that runs here, at least 0.0; None if it has no deadline.

    That is the time until the deadline of its caller, or of a `deadline` block around it. 0.0 also if its call was
    cancelled.
    """
    scope = find_scope()
    if scope is None or (scope.deadline == FOREVER and not scope.is_cancelled):
        return None
    return 0.0 if scope.is_cancelled else max(0.0, scope.deadline - monotonic())


def cancelled() -> bool:
    """Returns whether nobody wants the result of the code that runs here any more.

    That is so if its call was cancelled, its time is over, or its caller was lost. False for code that runs for no
    other worker and in no `deadline` block. A function that computes for long without a call of its own should ask now
    and then, and return or raise.
    """
    scope = find_scope()
    while scope is not None:
        if scope.is_over():
            scope.note_over()
            return True
        scope = scope.outer  # a detached block is never over; the function that it is in may be
    return False

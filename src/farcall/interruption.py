"""`interruptible`: synchronous functions that are interrupted when their call is cancelled.

The interpreter can raise an exception in another thread (`PyThreadState_SetAsyncExc`). The thread gets it at one of its
next bytecodes, whatever it runs then: in the middle of farcall's own code that would lose frames, and after the end of
the function it would hit the next request. Two rules keep that from happening.

- *Only in the function.* A run is in `_armed` while its function runs. The exception is sent in the same step in which
  the run is found there, and the innermost Python frame of its thread is found to be neither farcall's nor the standard
  library's (which farcall may have called). One step is one call of a function in C that calls back no Python code:
  the interpreter's lock is not given up in it, so the thread cannot move meanwhile. Afterwards the thread gets the
  exception before it runs more than the rest of a line, or at the entry of the next function, where it does no harm.
- *Not after its end.* The thread first removes its run from `_armed`, by a statement without a call, so that nothing is
  sent from then on. It then lets an exception come that was sent and has not come yet (`_receive_exception`). The
  interpreter could also be told to forget the exception, but CPython 3.11 then goes on looking for one at every
  function call of the process, and a function that is being traced never begins.

If the thread is elsewhere when the call is cancelled, the canceller tries again, every few milliseconds, until it has
sent the exception once or the function has ended. Waits in farcall raise by themselves.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import operator
import os
import re
import sysconfig
import threading
from collections.abc import Callable
from sys import _current_frames
from threading import get_ident
from time import sleep
from typing import Any, Final, TypeVar, cast

from farcall.deadlines import Scope, find_scope

F = TypeVar("F", bound=Callable[..., Any])

RETRY_S: Final = 0.003
"""How long the canceller waits before it tries again."""

_sending = threading.Lock()  # one thread at a time turns garbage collection off and on again


class _Run:
    """One run of an interruptible function in the current thread. It is cancelled together with its scope."""

    __slots__ = ("_is_cancelled", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self._is_cancelled = False

    def cancel(self) -> None:
        """Interrupts the function: has `CancelledError` raised in its thread. May be called twice, in any thread.

        If the thread is in code that must not be interrupted, another thread tries again until the exception was sent
        or the function has ended.
        """
        if not self._is_cancelled:
            self._is_cancelled = True
            if not _send(self):
                threading.Thread(target=self._try_again, name="farcall-interruption", daemon=True).start()

    def _try_again(self) -> None:
        while not _send(self):
            sleep(RETRY_S)


_armed: dict[_Run, int] = {}
"""The threads of the functions that may be interrupted."""


def interruptible(function: F) -> F:
    """Marks a synchronous function that may be interrupted at any bytecode when its call is cancelled.

    `asyncio.CancelledError` is raised in it, at a point that the function cannot foresee, as with Ctrl-C. So it must
    not leave anything half done that others see: it is for functions that compute. A function in C that it has called,
    such as `time.sleep`, returns first. Within one run the exception comes at most once.

    Only calls of other workers are interrupted. Called in the same process, the function runs as without the mark.

    Args:
        function: The function. Put the decorator below `staticmethod` and `classmethod`. Whether it can be called is
            not checked.

    Returns:
        A wrapper with the same signature, name and documentation.

    Raises:
        TypeError: `function` is an `async def` function. These get `CancelledError` at their next await.

    Example:
        >>> @farcall.interruptible
        ... def simulate(steps):
        ...     return sum(step(n) for n in range(steps))
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"`{function.__qualname__}` is an `async def` function, which is cancelled at its next await: leave "
            "interruptible out"
        )

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        scope = _function_scope()
        if scope is None:
            return function(*args, **kwargs)
        run = _Run()
        scope.add(run)  # if it is cancelled before it is armed, nothing is sent: the check below sees it
        try:
            _armed[run] = run.thread
            try:
                scope.raise_if_cancelled()
                return function(*args, **kwargs)
            finally:
                del _armed[run]  # no call: nothing can come before it
                _receive_exception()
        finally:
            scope.discard(run)

    return cast(F, wrapper)


def _function_scope() -> Scope | None:
    """Returns the scope of the function that this thread runs for another worker; None if it runs none."""
    scope = find_scope()
    while scope is not None and scope.outer is not None:
        scope = scope.outer
    return scope if scope is not None and scope.ends_function else None


def _send(run: _Run) -> bool:
    """Has `CancelledError` raised in the thread of a run, if that thread is in code that may be interrupted.

    Returns True if the exception was sent, or the function has ended. Returns False if the thread was in code of
    farcall or of the standard library: nothing was sent, and the caller should try again.
    """
    from asyncio import CancelledError

    # Each stage is a function in C, to which `map` gives what the stage before it has found. Nothing runs before
    # `next`, which runs all of them in one step.
    send = functools.partial(_exception_setter(), run.thread, CancelledError)
    threads = map(_armed.__getitem__, (run,))
    frames = map(operator.getitem, itertools.starmap(_current_frames, ((),)), threads)
    files = map(operator.attrgetter("f_code.co_filename"), frames)
    sent = map(send, itertools.filterfalse(_protected_files().match, files))  # the name of the file is not used
    with _sending:
        was_enabled = gc.isenabled()
        gc.disable()  # finalizers of garbage are Python code, and would give the interpreter's lock up
        try:
            return bool(next(sent, False))
        except KeyError:
            return True  # the function has ended
        finally:
            if was_enabled:
                gc.enable()


@functools.cache
def _protected_files() -> re.Pattern[str]:
    """Returns a pattern of the files in whose code a thread is not interrupted: farcall and the standard library."""
    own = re.escape(os.path.dirname(os.path.abspath(__file__)) + os.sep)
    standard = {sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")}
    library = "|".join(map(re.escape, sorted(standard)))
    return re.compile(rf"{own}|<frozen|(?:{library})(?!(?:.*/)?(?:site|dist)-packages/)")


def _receive_exception() -> None:
    """Lets a `CancelledError` come that `_send` has sent to this thread and that was not raised yet, and ignores it.

    Does nothing if there is none.
    """
    from asyncio import CancelledError

    try:
        for _ in range(3):  # the interpreter looks for such an exception whenever a loop starts over
            pass
    except CancelledError:
        pass


@functools.cache
def _exception_setter() -> Callable[..., int]:
    """Returns the function of CPython that has an exception raised in another thread. It keeps the interpreter's lock.

    It takes the id of the thread, the type of the exception, and anything else, which it ignores. It returns 1, or 0 if
    there is no such thread.
    """
    import ctypes  # not at the head: most programs have no interruptible functions

    set_exception = ctypes.PyDLL(None).PyThreadState_SetAsyncExc
    set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
    return set_exception

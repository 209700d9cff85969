"""Handles Ctrl-C while the main thread runs code of farcall.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. In the middle of farcall's own code that
would leave a frame half sent, a table half changed, or a lock held. So while a worker runs, a handler of farcall
replaces Python's default one:

- If the main thread runs the program's code, `KeyboardInterrupt` is raised at once, as without farcall.
- If it runs code of farcall, the interrupt is *deferred*. Waits check for a deferred interrupt at points where an
  exception does no harm (`raise_deferred`), so Ctrl-C ends every wait at once. If no such point is reached, the signal
  is sent again a moment later, until the main thread runs the program's own code.

Program code that farcall calls (a callback, `__reduce__` of an argument) counts as the program's: farcall handles all
errors that it raises. A program that has a SIGINT handler of its own keeps it. If that handler raises in
the middle of farcall, the link that was in use is closed, and its calls fail.
"""

from __future__ import annotations

import os
import signal
import sysconfig
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Final

RETRY_S: Final = 0.005
"""Seconds after which a deferred SIGINT is sent again."""

_OWN_CODE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PROGRAMS: Final = tuple(os.path.join(_OWN_CODE, name) + os.sep for name in ("bench", "cli", "launcher", "rendezvous"))
"""Parts of the package that may be interrupted anywhere, like programs."""
_SLEEPS: Final = (os.path.join(_OWN_CODE, "gate.py"),)
"""Modules in which threads only sleep: an interrupt does no harm there, and must end the sleep."""
_STANDARD_LIBRARY: Final = tuple(
    path + os.sep for path in {sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]}
)
_SITE_PACKAGES: Final = f"{os.sep}site-packages{os.sep}"

_is_deferred = False
_is_sent_again = False  # the next signal may be a deferred one that was raised meanwhile
_users = 0  # the number of agents that need the handler
_lock = threading.Lock()
_schedule: Callable[[float, Callable[[], None]], None] | None = None


def install(schedule: Callable[[float, Callable[[], None]], None]) -> None:
    """Replaces Python's default SIGINT handler by `handle`, which protects farcall's code from `KeyboardInterrupt`.

    To be called once for each agent. Leaves the handler unchanged if this is not the main thread, or the program has a
    handler of its own.

    Args:
        schedule: `handle` calls `schedule(when, function)` to have `function` called in another thread. `when` is a
            time of the monotonic clock. Replaces the `schedule` of an earlier `install`.
    """
    global _users, _schedule
    with _lock:
        _users += 1
        _schedule = schedule
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def uninstall() -> None:
    """Restores Python's default SIGINT handler if no other agent needs that of farcall.

    To be called once for each `install`. Leaves the handler unchanged if this is not the main thread, or the program
    has installed another handler.
    """
    global _users
    with _lock:
        _users = max(0, _users - 1)
        if _users:
            return
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_deferred() -> None:
    """Raises `KeyboardInterrupt` if one was deferred and this is the main thread; otherwise does nothing."""
    global _is_deferred
    if _is_deferred and threading.current_thread() is threading.main_thread():
        _is_deferred = False
        raise KeyboardInterrupt


def forget() -> None:
    """Called in a forked child: resets this module, because the child has no agents. Leaves the handler installed."""
    global _users, _schedule, _lock, _is_deferred, _is_sent_again
    _lock = threading.Lock()  # another thread of the parent may have held it
    _users, _schedule, _is_deferred, _is_sent_again = 0, None, False, False


def handle(number: int, frame: FrameType | None) -> None:
    """The SIGINT handler: raises `KeyboardInterrupt`, or defers it if the main thread runs code of farcall.

    A deferred interrupt is raised by the next `raise_deferred`. If that is not called within `RETRY_S` seconds,
    `send_again` sends the signal again.

    Args:
        number: The number of the signal. Not used.
        frame: The stack frame that was interrupted. If None, the interrupt is not deferred.
    """
    global _is_deferred, _is_sent_again
    was_sent_again, _is_sent_again = _is_sent_again, False
    if was_sent_again and not _is_deferred:
        return  # `raise_deferred` was faster
    if not _is_inside(frame):
        _is_deferred = False
        raise KeyboardInterrupt
    _is_deferred = True
    if _schedule is not None:
        _schedule(monotonic() + RETRY_S, send_again)


def send_again() -> None:
    """Sends SIGINT to the main thread again if an interrupt is deferred. Called by the timers.

    Does nothing if the deferred interrupt was raised meanwhile, or the main thread has ended.
    """
    global _is_sent_again
    main = threading.main_thread()
    if _is_deferred and main.ident is not None and main.is_alive():
        _is_sent_again = True
        signal.pthread_kill(main.ident, signal.SIGINT)


def _is_inside(frame: FrameType | None) -> bool:
    """Returns whether an interrupt in this stack frame must be deferred; False if `frame` is None.

    Finds the innermost stack frame outside of the standard library. Returns True if that is code of farcall. Returns
    False for those parts of farcall where an interrupt does no harm (`_PROGRAMS` and `_SLEEPS`), and for other code.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OWN_CODE):
            return not path.startswith(_PROGRAMS) and path not in _SLEEPS
        if not _is_standard_library(path):
            return False
        frame = frame.f_back
    return False


def _is_standard_library(path: str) -> bool:
    """Returns whether the source file `path` belongs to Python's standard library, not to an installed package."""
    return path.startswith("<frozen") or (path.startswith(_STANDARD_LIBRARY) and _SITE_PACKAGES not in path)

"""The first thing a worker's process does: it ties its life to the launcher's, then becomes the worker's Python.

Run as a file, `python -I -S bootstrap.py LAUNCHER_PID PROGRAM ARGUMENT...`, so it imports nothing of farcall. The
worker itself starts by exec, so `__main__`, `sys.argv`, `sys.path` and `__file__` are what they are without a launcher.
The tie survives the exec; it does not reach the worker's own children, which `keeper` looks after.

It is not a `preexec_fn`: that runs Python between fork and exec, which is not safe where there are threads.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent` ends; ends it now if `parent` has ended already."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        # A Python without ctypes, a libc without prctl: the keeper still watches.
        pass
    # The launcher may have died before the kernel was told: then we have another parent, and no signal would come.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Replaces this process by the program in `argv[2:]`. Ends it with status 1 if there is no such program."""
    # A Ctrl-C that comes this early ends us without a traceback of ours; Python sets its own handler after the exec.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(int(argv[1]))
    try:
        os.execv(argv[2], argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv)

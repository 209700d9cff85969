"""The first code of a worker's process: makes the kernel end the worker with the launcher, then runs the program.

Run as a file, `python -I -S bootstrap.py LAUNCHER_PID PROGRAM ARGUMENT...`, so it imports nothing of farcall. The
program replaces this process by exec, so its `__main__`, `sys.argv`, `sys.path` and `__file__` are the same as without
a launcher. The kernel keeps the parent-death signal over the exec. It does not apply to the worker's own children;
those are the job of `keeper`.

A `preexec_fn` could do the same, but runs Python code between fork and exec, which is unsafe in a process with threads.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and returns. Never raises.

    Kills this process at once if `parent`, a process id, is no longer its parent. Without ctypes or `prctl` the kernel
    cannot be asked, and the process lives on.
    """
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        # A Python without ctypes or a libc without prctl. `keeper` still kills this process.
        pass
    # If the launcher died before the call above, this process has another parent and gets no signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Replaces this process by the program `argv[2]`, with the arguments `argv[3:]`; does not return.

    `argv[1]` is the process id of the launcher, and `argv[0]` is ignored. Exits with status 1 and a message if the
    program cannot be run. Raises `IndexError` or `ValueError` if an argument is missing or `argv[1]` is not a number.
    """
    # A Ctrl-C this early must not print a traceback of this file. After the exec Python installs its own handler.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(int(argv[1]))
    try:
        os.execv(argv[2], argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv)

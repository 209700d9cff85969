"""Turns signals into bytes on a pipe, so that the launcher handles them in its event loop and not in signal handlers.

Each signal that is forwarded to the workers, and SIGCHLD, arrives as one byte: its number.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

KEYBOARD_SIGNALS: Final = (signal.SIGINT, signal.SIGQUIT)
r"""Signals that a terminal sends to the whole process group: Ctrl-C and Ctrl-\."""
END_SIGNALS: Final = (*KEYBOARD_SIGNALS, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
FORWARDED_SIGNALS: Final = (*END_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the launcher forwards to the workers."""


@contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Context manager: yields the descriptor of a pipe on which signals arrive, each as one byte: its number.

    These are `FORWARDED_SIGNALS` and SIGCHLD. Signals that were ignored before stay ignored, except SIGCHLD. Bytes that
    do not fit into a full pipe are lost. Restores the earlier signal handlers and closes the pipe at the end of the
    block. Raises `ValueError` outside of the main thread.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # A signal that was ignored at the start (`nohup`, a background job of a shell) stays ignored, also in the workers.
    caught = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in (*caught, signal.SIGCHLD)}
    try:
        yield read_end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(read_end)
        os.close(write_end)

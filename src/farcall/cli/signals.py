"""Signals as bytes: for the launcher a signal is an event in its loop, not an interruption.

Each signal that is passed on to the workers, and SIGCHLD, arrives as one byte (its number) at the end of a pipe.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FROM_A_KEYBOARD: Final = (signal.SIGINT, signal.SIGQUIT)
ASKING_TO_END: Final = (*FROM_A_KEYBOARD, signal.SIGTERM, signal.SIGHUP)
PASSED_ON: Final = (*ASKING_TO_END, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Gives the end of the pipe to read; all is as it was before when the block ends. For the main thread."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # What we were told to ignore (`nohup`, a shell's background job) stays ignored, here and in the workers.
    caught = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in (*caught, signal.SIGCHLD)}
    try:
        yield read_end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(read_end)
        os.close(write_end)

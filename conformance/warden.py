"""One test in processes of its own: its time limit is kept, and none of its processes outlives it.

Who calls `watch` gives a whole process away for it: a child of the nursery that does nothing else. From there on

- the test runs in a child, the head of a session of its own, whose output goes to a file;
- all that the test starts, and orphans too, are descendants of this process (it is a subreaper), whatever sessions and
  groups they have made for themselves. That is how they are found, and why none escapes;
- at the time limit each of them is asked for its stacks; then, and also after a test that ended by itself, all that are
  still there are killed and waited for;
- if whoever started this process is gone, or it is told to end (SIGTERM), the test ends with it.

Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from conformance.outcomes import Outcome, failed, reason_in

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ASK_FOR_STACKS: Final = signal.SIGUSR1
_STACKS_TAKE: Final = 1.0
"""Seconds that a process has to begin to write its stacks down, before the next is asked: they share a file."""
KILLING_TAKES: Final = 10.0
"""Seconds after which processes that do not even end when killed are left to the system."""


def watch(test: Callable[[], Outcome], limit: float, directory: Path) -> Outcome:
    """Run a test, which tells how it ended, for so many seconds at most. Its files are put into the directory.

    Leaves this process without children.
    """
    adopt_orphans()
    output, answer = directory / "output", directory / "answer"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(test, output, answer)
    try:
        in_time = _has_ended(child, limit)
        if not in_time:
            _write_stacks(output)
        seconds = time.monotonic() - began
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends soon in any case, and must not end halfway
        gone = end_descendants()
    if not in_time:
        outcome = failed(f"did not end within {limit:g} s")
    elif answer.exists():
        outcome = Outcome.from_json(answer.read_bytes())
    else:
        outcome = failed("its process died before it could say how the test ended")
    if not gone:
        outcome = failed(f"left processes that cannot be killed; {outcome.status} {outcome.reason}", outcome.details)
    printed = output.read_text(errors="replace") if output.exists() else ""
    return replace(outcome.with_output(printed), seconds=seconds)


def adopt_orphans() -> None:
    """From now on, what a descendant leaves behind becomes a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """End this process when its parent ends. Raises SystemExit if it has already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs, from the outside in."""
    with suppress(OSError):  # it may be gone by now
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                for child in map(int, children.read_text().split()):
                    yield child
                    yield from descendants(child)


def end_descendants() -> bool:
    """Kill all that this process has started, and wait for it. False if something is still there after a while."""
    deadline = time.monotonic() + KILLING_TAKES
    while True:
        # Again and again: while one is killed, another may start a third.
        for pid in list(descendants(os.getpid())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def _has_ended(child: int, limit: float) -> bool:
    with os.fdopen(os.pidfd_open(child), "rb", buffering=0) as handle:
        return bool(select.select([handle], [], [], limit)[0])


def _run(test: Callable[[], Outcome], output: Path, answer: Path) -> NoReturn:
    """In the child: the test and nothing else. What the nursery would do at its end is none of its business."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect(output)
        faulthandler.register(_ASK_FOR_STACKS, file=2, all_threads=True)
        try:
            outcome = test()
        except BaseException:
            details = traceback.format_exc()
            outcome = failed(reason_in(details), details)
        unfinished = answer.with_suffix(".unfinished")
        unfinished.write_text(outcome.to_json())
        unfinished.rename(answer)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _redirect(output: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for ours, usual in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(ours, usual)
        os.set_inheritable(usual, True)
    os.close(nothing)
    os.close(file)


def _write_stacks(output: Path) -> None:
    for pid in list(descendants(os.getpid())):
        with suppress(OSError):  # it may be gone by now
            if not Path(f"/proc/{pid}/cmdline").read_bytes():
                continue  # a zombie
            with output.open("a") as file:
                file.write(f"\n--- stacks of process {pid} at the time limit ---\n")
            before = output.stat().st_size
            os.kill(pid, _ASK_FOR_STACKS)
            _wait_for_more(output, before)


def _wait_for_more(output: Path, before: int) -> None:
    """Until something was added to the file and nothing more comes; for a while only, as it may never come."""
    deadline = time.monotonic() + _STACKS_TAKE
    last = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        size = output.stat().st_size
        if size == last > before:
            return
        last = size


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

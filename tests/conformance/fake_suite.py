"""A suite for the nursery without torch: tests that pass, fail, hang, die and leave processes behind.

Those that start processes, or that hang, write the numbers of their processes into $FAKE_SUITE, one file each.
"""

from __future__ import annotations

import os
import signal
import threading
import unittest
from pathlib import Path

from conformance.nursery import Loaded
from conformance.outcomes import Outcome, of_result

current_note: Path | None = None


def load(implementation: str) -> Loaded:
    if implementation == "refuse":
        raise RuntimeError("this implementation cannot be loaded")
    if implementation == "die":
        os._exit(1)
    tests = [f"Fake.{name}" for name in unittest.TestLoader().getTestCaseNames(Fake)]
    return Loaded("fake 1.0", tests, {"Broken": "Broken has no install"}, ["something runs that should not"])


def run(test: str, note: Path) -> Outcome:
    global current_note
    current_note = note
    result = unittest.TestResult()
    Fake(test.partition(".")[2]).run(result)
    return of_result(result)


def a_place_to_hang() -> None:
    place = Path(os.environ["FAKE_SUITE"])
    unfinished = place / f"unfinished-{os.getpid()}"
    unfinished.touch()
    unfinished.rename(place / str(os.getpid()))
    while True:
        signal.pause()


def start_escapee() -> None:
    """A grandchild with a session of its own, whose parent is gone, and that does not end when asked to."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            a_place_to_hang()
        os._exit(0)
    os.waitpid(child, 0)


def wait_for(count: int) -> None:
    place = Path(os.environ["FAKE_SUITE"])
    while len([name for name in os.listdir(place) if name.isdigit()]) < count:
        threading.Event().wait(0.005)


class Fake(unittest.TestCase):
    def test_passes(self) -> None:
        pass

    def test_fails(self) -> None:
        print("seen on the way")
        self.fail("1 is not 2")

    @unittest.skip("there is no reason")
    def test_skipped(self) -> None:
        pass

    def test_dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def test_exits(self) -> None:
        raise SystemExit(3)

    def test_hangs(self) -> None:
        start_escapee()
        a_place_to_hang()

    def test_leaves_a_process(self) -> None:
        start_escapee()
        wait_for(1)

    def test_native(self) -> None:
        assert current_note is not None
        current_note.touch()

    def test_temporary_files(self) -> None:
        Path(os.environ["TMPDIR"], "left").touch()

    def test_together_1(self) -> None:
        Path(os.environ["FAKE_SUITE"], "1").touch()
        wait_for(2)

    def test_together_2(self) -> None:
        Path(os.environ["FAKE_SUITE"], "2").touch()
        wait_for(2)

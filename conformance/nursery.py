"""The process in which torch, the implementation and the tests are loaded once, and which forks for every test.

    python -m conformance.nursery SUITE IMPLEMENTATION DIRECTORY

It says in a line of JSON what it has loaded (`Loaded`), reads tests from its standard input, one a line (`Task`), and
answers each with a line, its number and outcome, when it has ended. How many run at once is up to whoever asks. When
there is no more input, it ends what still runs, and goes, with the directory.

It starts no thread and runs no test itself, so that every fork is as the first one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, NoReturn, Protocol, TextIO, cast

from conformance.outcomes import Outcome, failed
from conformance.warden import KILLING_TAKES, adopt_orphans, end_descendants, end_with, watch

NATIVE: Final = "ran on torch's own C++ agent, not on the implementation"


@dataclass(frozen=True)
class Loaded:
    """What a nursery has found."""

    about: str = ""
    """What is tested, with its version."""
    tests: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    """Classes whose tests cannot even be listed, and why."""
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    """Why nothing could be loaded, if so."""


@dataclass(frozen=True)
class Task:
    """A test to run."""

    number: int
    test: str
    limit: float


class Suite(Protocol):
    """A module with tests."""

    def load(self, implementation: str) -> Loaded:
        """Make ready. Raises whatever stands in the way."""

    def run(self, test: str, note: Path) -> Outcome:
        """Run one test, in a process of its own. Makes the file `note` if torch's own agent is started meanwhile."""


class Lines:
    """The lines that come through a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def take(self) -> list[bytes]:
        """The lines that have come; blocks if nothing has. Raises EOFError at the end."""
        got = os.read(self._descriptor, 1 << 16)
        if not got:
            raise EOFError
        *lines, self._rest = (self._rest + got).split(b"\n")
        return lines


class Nursery:
    """The tests that are running, each below a warden."""

    def __init__(self, suite: Suite, directory: Path, answers: TextIO) -> None:
        self._suite = suite
        self._directory = directory
        self._answers = answers
        self._poll = select.poll()
        self._wardens: dict[int, tuple[Task, int]] = {}
        """By the descriptor of the process: what it runs, and its number."""

    def serve(self, source: int) -> None:
        """Run what is asked for until there is no more input."""
        lines = Lines(source)
        self._poll.register(source, select.POLLIN)
        with suppress(EOFError):
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor == source:
                        for line in lines.take():
                            self._start(Task(**json.loads(line)))
                    else:
                        self._ended(descriptor)

    def end(self) -> None:
        """End the wardens, and so what they watch over."""
        for _, pid in self._wardens.values():
            os.kill(pid, signal.SIGTERM)  # not waited for yet, so the number is still its own
        deadline = time.monotonic() + KILLING_TAKES + 2
        for descriptor in self._wardens:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        end_descendants()

    def _start(self, task: Task) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_warden(task, nursery)
        descriptor = os.pidfd_open(pid)
        self._wardens[descriptor] = task, pid
        self._poll.register(descriptor, select.POLLIN)

    def _ended(self, descriptor: int) -> None:
        task, pid = self._wardens.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        os.waitpid(pid, 0)
        place = self._place(task)
        try:
            outcome = Outcome.from_json((place / "outcome").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            outcome = failed(f"whoever watched over the test is gone: {error}")
        shutil.rmtree(place, ignore_errors=True)
        self._answers.write(f"{task.number} {outcome.to_json()}\n")
        self._answers.flush()

    def _place(self, task: Task) -> Path:
        return self._directory / str(task.number)

    def _become_warden(self, task: Task, nursery: int) -> NoReturn:
        try:
            os.setsid()
            end_with(nursery)
            self._answers.close()
            place = self._place(task)
            temporary = place / "tmp"
            temporary.mkdir(parents=True)
            os.environ["TMPDIR"] = str(temporary)
            tempfile.tempdir = None
            note = place / "native"
            outcome = watch(lambda: self._suite.run(task.test, note), task.limit, place)
            if outcome.status == "passed" and note.exists():
                outcome = replace(failed(NATIVE), seconds=outcome.seconds)
            (place / "outcome").write_text(outcome.to_json())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)


def main(suite_name: str, implementation: str, directory: str) -> None:
    """Serve standard input and output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed on the way must not be taken for an answer

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    adopt_orphans()
    suite = cast(Suite, importlib.import_module(suite_name))
    nursery = Nursery(suite, Path(directory), answers)
    try:
        try:
            loaded = suite.load(implementation)
        except Exception:
            loaded = Loaded(error=traceback.format_exc())
        # A collection in a child would touch, and so copy, every page that it has from here.
        gc.collect()
        gc.freeze()
        answers.write(json.dumps(asdict(loaded)) + "\n")
        answers.flush()
        nursery.serve(0)
    finally:
        nursery.end()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

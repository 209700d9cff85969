"""Our end of a nursery: it is started, handed tests, so many at once, and ended.

Every wait ends. A nursery that says nothing for longer than any test may take is given up, and so is one that dies;
the tests that it had not answered for are not run.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from conformance.nursery import Lines, Loaded, Task
from conformance.outcomes import Outcome

_ROOT: Final = Path(__file__).parents[1]
LOADING_TAKES: Final = 180.0
"""Seconds that a nursery has to import torch and the tests."""
_ENDING_TAKES: Final = 30.0
"""Seconds that a test has to end after its time limit, and a nursery when it is told."""


class NurseryFailed(Exception):
    """There is no nursery, or no longer: what it has printed is in the message."""


class Runner:
    """A nursery. Use it as a context manager: it is started at the beginning of the block, and gone at its end.

    Entering raises NurseryFailed if the tests cannot be loaded on the implementation.
    """

    def __init__(self, implementation: str, jobs: int, limit: float, suite: str = "conformance.suite") -> None:
        self.loaded: Loaded = Loaded()
        self._implementation = implementation
        self._jobs = jobs
        self._limit = limit
        self._suite = suite
        self._numbers = 0

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="fc-"))  # short: sockets are made below it
        self._printed = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "conformance.nursery", self._suite, self._implementation, self._directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env=_environment(os.environ, self._limit),
                bufsize=0,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        except BaseException:
            self._printed.close()
            self._directory.rmdir()
            raise
        try:
            assert self._process.stdout is not None
            self._source = self._process.stdout.fileno()
            self._lines = Lines(self._source)
            self.loaded = Loaded(**json.loads(self._answers(LOADING_TAKES)[0]))
            if self.loaded.error:
                raise NurseryFailed(f"{self.loaded.error.strip()}\n(on {self._implementation})")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, tests: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
        """Run tests, and give each with its outcome as it ends. Raises NurseryFailed."""
        waiting, running = deque(tests), dict[int, str]()
        while waiting or running:
            while waiting and len(running) < self._jobs:
                self._numbers += 1
                running[self._numbers] = waiting.popleft()
                self._tell(Task(self._numbers, running[self._numbers], self._limit))
            for line in self._answers(self._limit + _ENDING_TAKES):
                number, _, outcome = line.partition(b" ")
                yield running.pop(int(number)), Outcome.from_json(outcome)

    def _tell(self, task: Task) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(vars(task)).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure("ended before its time") from None

    def _answers(self, limit: float) -> list[bytes]:
        """The next lines that the nursery writes, at least one."""
        deadline = time.monotonic() + limit
        while select.select([self._source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                lines = self._lines.take()
            except EOFError:
                raise self._failure("ended before its time") from None
            if lines:
                return lines
        raise self._failure(f"has said nothing for {limit:g} s")

    def _failure(self, what: str) -> NurseryFailed:
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace").strip()
        return NurseryFailed(f"the process that has torch loaded {what}. It printed:\n{printed[-5000:] or '(nothing)'}")

    def _end(self) -> None:
        """Without input it ends all tests and goes; it is killed only if it does not."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(_ENDING_TAKES)
        except subprocess.TimeoutExpired:
            # The wardens end with their nursery, and the tests with them.
            process.send_signal(signal.SIGKILL)
            process.wait()
        finally:
            process.stdout.close()
            self._printed.close()
            shutil.rmtree(self._directory, ignore_errors=True)  # a nursery that was killed has left it


def _environment(usual: Mapping[str, str], limit: float) -> dict[str, str]:
    return {
        **usual,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), usual.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",  # a pool of threads does not survive the forks
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(2 * limit) + 1),  # torch's limit for a test: ours comes first
        "TORCH_DISABLE_ADDR2LINE": "1",  # names in C++ stacks, which take seconds
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",  # the command it shows is not how these tests are run
    }

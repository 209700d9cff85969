"""A worker process of the chaos test, as the one who started it sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

_TESTS: Final = str(Path(__file__).parents[1])
"""Where the children import this package from."""


class Files(NamedTuple):
    """Where a worker's files are."""

    directory: Path
    stem: str

    @property
    def notes(self) -> Path:
        """What it has called and run."""
        return self.directory / f"{self.stem}.notes"

    @property
    def errors(self) -> Path:
        """Its standard error."""
        return self.directory / f"{self.stem}.errors"


class Child:
    """One process. It is told things, and says things; both are lines."""

    def __init__(self, name: str, token: str, arguments: tuple[str, ...], more: tuple[str, ...], files: Files) -> None:
        self.name = name
        self.token = token
        """Its own, unlike the name."""
        self.files = files
        self.fate = ""
        """What is being done to it: `killed`, `stopped`, `frozen`, `leaves`."""
        self.is_over = False
        self._said: dict[str, Any] = {}
        self._unread = b""
        with files.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "simulation.chaos_worker", name, *arguments, str(files.notes), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": _TESTS},
                bufsize=0,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def __str__(self) -> str:
        number = "not up" if self.number is None else f"number {self.number}"
        return f"{self.name} ({number}, pid {self._process.pid}{', ' if self.fate else ''}{self.fate})"

    @property
    def number(self) -> int | None:
        """In its group; None until it is in."""
        return self._said.get("up")

    @property
    def is_up(self) -> bool:
        """Whether it has joined."""
        return self.number is not None

    def tell(self, what: str) -> None:
        """Gives a command. It may be gone by now."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(what.encode() + b"\n")

    def listen(self) -> None:
        """Reads what it has said."""
        assert self._process.stdout is not None
        while data := self._process.stdout.read(1 << 16):  # None if there is nothing, empty at the end
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._said.update(json.loads(line))

    def said(self, what: str) -> Any:
        """What it has said under that name; None if nothing."""
        return self._said.get(what)

    def forget(self, what: str) -> None:
        """It is to be said again."""
        self._said.pop(what, None)

    def status(self) -> int | None:
        """Its exit status, once it has ended and all it said is read."""
        status = self._process.poll()
        if status is not None:
            self.listen()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def last_words(self) -> str:
        """The end of its standard error."""
        return self.files.errors.read_text(errors="replace")[-1500:].strip() or "it said nothing"

    def listens_at(self, port: int) -> bool:
        """Whether it is the one who listens at that TCP port."""
        listening = "0A"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        wanted = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == listening}
        directory = f"/proc/{self._process.pid}/fd"
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{directory}/{entry}") in wanted:
                        return True
        return False

    def end(self) -> None:
        """Kills it, if it still runs. It is gone afterwards."""
        if self._process.poll() is None:
            self.fate = "killed"
            self._process.send_signal(signal.SIGABRT)  # faulthandler writes where each thread stands
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Lets go of it: it is gone."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

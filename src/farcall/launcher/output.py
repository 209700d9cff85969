"""Copies the workers' output to the launcher's own streams, with the worker's name before each line.

Works on bytes: nothing is decoded, so output in any encoding passes. Only whole lines are written, so lines of
different workers never mix. An unfinished line is held back until it ends, its worker ends, or it exceeds
`MAX_LINE_BYTES`.

No threads and no waiting: a `Sink` writes what its stream accepts now, and the event loop of `supervisor` polls.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping
from typing import IO, Final

MAX_LINE_BYTES: Final = 1 << 20
"""The longest unfinished line that is held back. A longer one is broken here, so that memory stays bounded."""

SINK_FULL_BYTES: Final = 1 << 18
"""When a sink holds this many bytes, no more output should be read for it."""

_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
"""ANSI colour codes of the names, in the order of the workers."""


def wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    """Returns True if lines written to the descriptor `fd` should be coloured, else False.

    They are if `fd` is a terminal (other than TERM=dumb). NO_COLOR turns colour off and FORCE_COLOR on, if not empty;
    NO_COLOR takes precedence. A closed descriptor is not a terminal. `environ` has the environment variables.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def make_prefix(name: str, width: int, index: int, coloured: bool) -> bytes:
    """Returns what to write before each line of a worker: its name, padded to a width, and a bar, as in "worker1 | ".

    Args:
        name: The name of the worker.
        width: The least number of characters for the name, 0 or more. A longer name is not cut.
        index: The number of the worker, from 0 on, which decides its colour.
        coloured: Whether the name gets a colour.
    """
    text = f"{name:<{width}} | "
    if coloured:
        text = f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m"
    return text.encode(errors="surrogateescape")


class LinePrefixer:
    """Splits the output of one worker into lines, and puts a prefix before each. Pass the output to `feed`.

    Args:
        prefix: What is put before each line; may be empty.
    """

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        """What is put before each line; may be changed."""
        self._unfinished = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the output, and returns the lines that they complete, with prefixes; empty if none.

        An unfinished line is kept for the next call. If it is longer than `MAX_LINE_BYTES`, it is returned with a line
        break. Empty data returns nothing new.
        """
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = (self._unfinished + whole).split(b"\n")
            self._unfinished = bytearray(rest)
            return b"".join(self.prefix + line + b"\n" for line in lines)
        self._unfinished += data
        return self.finish() if len(self._unfinished) > MAX_LINE_BYTES else b""

    def finish(self) -> bytes:
        """Returns the unfinished line with prefix and line break, and forgets it; empty if there is none."""
        if not self._unfinished:
            return b""
        line = self.prefix + self._unfinished + b"\n"
        self._unfinished.clear()
        return line


class Sink:
    """Bytes on their way to one of the launcher's own streams. `put` queues them and `write_some` writes them.

    Args:
        fd: The descriptor of the stream. It is not checked, and stays open.

    Attributes:
        fd: The descriptor of the stream.
        pending: The bytes that are queued and not written yet.
        broken: True if writing has failed, for example because the stream has no reader any more.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pending = bytearray()
        self.broken = False
        """True if the stream has no reader any more. Further bytes are dropped."""

    def put(self, data: bytes) -> None:
        """Queues bytes, which must be whole lines. Drops them if a write has failed (`broken`). Never waits."""
        if not self.broken:
            self.pending += data

    def write_some(self) -> None:
        """Writes as many queued bytes as the stream accepts now; does nothing if none are queued.

        Never waits or raises. An error drops the queued bytes and sets `broken`.
        """
        # Other processes share the stream, so it must not be made non-blocking. But a pipe or terminal that polls as
        # writable accepts PIPE_BUF bytes without blocking.
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self.pending and poll.poll(0):
            try:
                written = os.write(self.fd, self.pending[: select.PIPE_BUF])
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                self.pending.clear()
                return
            del self.pending[:written]


def open_sinks(stdout: int = 1, stderr: int = 2) -> tuple[Sink, Sink]:
    """Returns the sinks for the workers' standard output and standard error.

    If both descriptors lead to the same place (a terminal, `2>&1`) the two are one sink, because otherwise a line of
    one could be written into the middle of a line of the other.

    Args:
        stdout: The descriptor of the launcher's standard output.
        stderr: The descriptor of its standard error.

    Raises:
        OSError: A descriptor is closed.
    """
    out = Sink(stdout)
    same = os.path.sameopenfile(stdout, stderr)
    return out, out if same else Sink(stderr)


class WorkerStream:
    """Standard output or standard error of one worker, on its way to a sink: whole lines, each with a prefix.

    Args:
        file: The read end of the worker's pipe. It becomes non-blocking. A closed file raises `ValueError`.
        prefix: What to put before each line; may be empty.
        sink: Where the lines go.
        before_copy: Called when bytes were read and before they are copied. It may call `set_prefix`.

    Attributes:
        file: The read end of the worker's pipe.
        sink: Where the lines go.
        watched: True while the event loop polls the file; the event loop sets it.
    """

    def __init__(
        self, file: IO[bytes], prefix: bytes, sink: Sink, before_copy: Callable[[], None] = lambda: None
    ) -> None:
        """Prepares to copy a worker's output, and makes the file non-blocking; reads nothing yet.

        Args:
            file: The read end of the worker's pipe. A closed file raises `ValueError`.
            prefix: What to put before each line; may be empty.
            sink: Where the lines go.
            before_copy: Called when bytes were read and before they are copied. It may call `set_prefix`. By default it
                does nothing.
        """
        self.file = file
        self.sink = sink
        self.watched = False
        """True while the event loop polls the file."""
        self._before_copy = before_copy
        self._lines = LinePrefixer(prefix)
        os.set_blocking(file.fileno(), False)

    def read(self) -> bool:
        """Copies the available bytes of the worker to the sink, 64 KiB at most, without waiting.

        Returns True if bytes were copied; False at the end of the file, or if no bytes are available. An unfinished
        line waits for the next call. Raises `ValueError` after `close`.
        """
        try:
            data = os.read(self.file.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        self._before_copy()
        self.sink.put(self._lines.feed(data))
        return bool(data)

    def set_prefix(self, prefix: bytes) -> None:
        """Changes what is put before each line from now on, an unfinished line included."""
        self._lines.prefix = prefix

    def drain(self) -> None:
        """Copies the available bytes to the sink, about a megabyte at most, and ends an unfinished line.

        If no bytes are available, only ends the unfinished line, if there is one. Does not wait. Raises `ValueError`
        after `close`.
        """
        for _ in range(16):  # bounded, because a child of the worker may go on writing for ever
            if not self.read():
                break
        self.sink.put(self._lines.finish())

    def close(self) -> None:
        """Copies the available bytes to the sink, about a megabyte at most, and closes the file.

        Ends an unfinished line. Call it once: a second call raises `ValueError`.
        """
        self.drain()
        self.file.close()

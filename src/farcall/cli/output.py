"""Puts each worker's name before its lines, and brings them to the launcher's own streams.

Bytes in, bytes out: nothing is decoded, so nothing can be undecodable. What goes out is whole lines, one after the
other, so lines of different workers never mix. A line that has not ended yet is held back until it does, until its
worker is gone, or until it is longer than `LONGEST_LINE`.

No threads and no waiting: a `Sink` writes what fits now. Whoever owns it polls.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from typing import IO, Final

LONGEST_LINE: Final = 1 << 20
"""Bytes of an unfinished line that are held; a longer one is broken here, so that memory stays bounded."""

SINK_IS_FULL: Final = 1 << 18
"""Bytes on the way to a stream beyond which nothing more should be read for it."""

_COLOURS: Final = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


def wants_colour(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether lines written to `fd` should be coloured: if it is a terminal, unless NO_COLOR or FORCE_COLOR says so."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def make_prefixes(names: Sequence[str], coloured: bool) -> list[bytes]:
    """What stands before each line of each of these workers: the name, in a column of one width."""
    width = max(map(len, names))
    prefixes = []
    for index, name in enumerate(names):
        text = f"{name:<{width}} | "
        if coloured:
            text = f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m"
        prefixes.append(text.encode(errors="surrogateescape"))
    return prefixes


class LinePrefixer:
    """Turns one worker's bytes, as they come, into whole lines with a prefix."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._unfinished = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes; gives the lines that they complete."""
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = (self._unfinished + whole).split(b"\n")
            self._unfinished = bytearray(rest)
            return b"".join(self._prefix + line + b"\n" for line in lines)
        self._unfinished += data
        return self.finish() if len(self._unfinished) > LONGEST_LINE else b""

    def finish(self) -> bytes:
        """Gives the unfinished line, if there is one, as a line."""
        if not self._unfinished:
            return b""
        line = self._prefix + self._unfinished + b"\n"
        self._unfinished.clear()
        return line


class Sink:
    """Bytes on their way to one of the launcher's own streams."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pending = bytearray()
        self.broken = False
        """Whether nobody can read the stream any more. What is put then is dropped."""

    def put(self, data: bytes) -> None:
        """Queues whole lines."""
        if not self.broken:
            self.pending += data

    def write_some(self) -> None:
        """Writes what the stream takes now, without waiting."""
        # The stream belongs to others as well, so it cannot be made non-blocking. But a pipe or terminal that polls
        # writable takes PIPE_BUF bytes at once.
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
    """The sinks for the workers' standard output and standard error.

    Where both lead to the same place (a terminal, `2>&1`) they are one, lest a line of one falls into one of the other.
    """
    out = Sink(stdout)
    same = os.path.sameopenfile(stdout, stderr)
    return out, out if same else Sink(stderr)


class WorkerStream:
    """One output of one worker, on its way to a sink."""

    def __init__(self, file: IO[bytes], prefix: bytes, sink: Sink) -> None:
        self.file = file
        self.sink = sink
        self.watched = False
        """Whether its owner polls it just now."""
        self._lines = LinePrefixer(prefix)
        os.set_blocking(file.fileno(), False)

    def read(self) -> bool:
        """Takes what is there; False if there is nothing (more)."""
        try:
            data = os.read(self.file.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        self.sink.put(self._lines.feed(data))
        return bool(data)

    def drain(self) -> None:
        """Takes all that is there; a line that has begun goes out as it is."""
        for _ in range(16):  # bounded: a process that nobody waits for may go on writing for ever
            if not self.read():
                break
        self.sink.put(self._lines.finish())

    def close(self) -> None:
        """Takes all that is there, for the last time."""
        self.drain()
        self.file.close()

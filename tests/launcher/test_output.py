from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.launcher.output import (
    MAX_LINE_BYTES,
    LinePrefixer,
    Sink,
    WorkerStream,
    make_prefix,
    open_sinks,
    wants_colour,
)


class Pipe:
    """Both ends of a pipe, as numbers; closing an end twice is no harm."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._open = {self.read_end, self.write_end}

    def close(self, *ends: int) -> None:
        for end in self._open & set(ends or self._open):
            os.close(end)
            self._open.remove(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


# -- lines


@given(st.lists(st.binary(max_size=8).map(lambda some: some.replace(b"a", b"\n"))))
def test_however_the_bytes_come_the_lines_are_the_same(chunks: list[bytes]) -> None:
    lines = LinePrefixer(b"> ")
    out = b"".join(lines.feed(chunk) for chunk in chunks) + lines.finish()
    whole = b"".join(chunks)
    if whole and not whole.endswith(b"\n"):
        whole += b"\n"
    assert out == b"".join(b"> %b\n" % line for line in whole.split(b"\n")[:-1])


def test_an_unfinished_line_is_held_back() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"one\ntw") == b"> one\n"
    assert lines.feed(b"o") == b""
    assert lines.feed(b"\n") == b"> two\n"
    assert lines.finish() == b""


def test_what_is_held_back_comes_at_the_end_as_a_line() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"last words") == b""
    assert lines.finish() == b"> last words\n"
    assert lines.finish() == b""


def test_an_endless_line_is_broken_so_that_memory_stays_bounded() -> None:
    lines = LinePrefixer(b"> ")
    assert lines.feed(b"x" * MAX_LINE_BYTES) == b""
    assert lines.feed(b"x") == b"> " + b"x" * (MAX_LINE_BYTES + 1) + b"\n"
    assert lines.finish() == b""


def test_undecodable_bytes_pass_through() -> None:
    assert LinePrefixer(b"> ").feed(b"\xff\xfe\0\n") == b"> \xff\xfe\0\n"


# -- names and colours


def test_prefixes_make_one_column() -> None:
    assert [make_prefix(name, 3, 0, coloured=False) for name in ("w9", "w10")] == [b"w9  | ", b"w10 | "]
    assert make_prefix("parameters", 3, 0, coloured=False) == b"parameters | "


def test_coloured_prefixes_end_their_colour_and_differ() -> None:
    one, two = (make_prefix("w", 1, index, coloured=True) for index in range(2))
    assert one == b"\x1b[36mw | \x1b[0m"
    assert one != two


def test_there_are_colours_for_any_number_of_workers() -> None:
    assert make_prefix("w", 1, 100, coloured=True).endswith(b"mw | \x1b[0m")


@pytest.mark.parametrize(
    ("environ", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colour_is_for_terminals_unless_the_environment_says_otherwise(
    environ: dict[str, str], on_terminal: bool, elsewhere: bool, pipe: Pipe
) -> None:
    with ExitStack() as stack:
        ends = os.openpty()
        for end in ends:
            stack.callback(os.close, end)
        assert wants_colour(ends[1], environ) is on_terminal
    assert wants_colour(pipe.write_end, environ) is elsewhere


# -- sinks


def test_a_sink_writes_what_fits_and_keeps_the_rest(pipe: Pipe) -> None:
    data = bytes(range(256)) * 2048
    sink = Sink(pipe.write_end)
    sink.put(data)
    sink.write_some()  # would never return if it waited: nobody reads
    assert 0 < len(sink.pending) < len(data)
    received = b""
    while sink.pending:
        received += os.read(pipe.read_end, 1 << 20)
        sink.write_some()
    received += os.read(pipe.read_end, 1 << 20)
    assert received == data


def test_a_sink_that_nobody_reads_any_more_is_broken_and_drops(pipe: Pipe) -> None:
    pipe.close(pipe.read_end)
    sink = Sink(pipe.write_end)
    sink.put(b"unheard\n")
    sink.write_some()
    assert sink.broken
    sink.put(b"unheard, too\n")
    assert not sink.pending


def test_a_sink_keeps_what_another_writer_was_faster_to_take_the_room_for(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(fd: int, data: bytes) -> int:
        raise BlockingIOError

    sink = Sink(pipe.write_end)
    sink.put(b"later\n")
    monkeypatch.setattr(os, "write", write)
    sink.write_some()
    assert not sink.broken
    assert bytes(sink.pending) == b"later\n"


def test_two_streams_to_one_place_are_one_sink(pipe: Pipe) -> None:
    other = os.dup(pipe.write_end)
    try:
        out, err = open_sinks(pipe.write_end, other)
    finally:
        os.close(other)
    assert out is err


def test_two_streams_to_two_places_are_two_sinks(pipe: Pipe) -> None:
    elsewhere = Pipe()
    try:
        out, err = open_sinks(pipe.write_end, elsewhere.write_end)
    finally:
        elsewhere.close()
    assert (out.fd, err.fd) == (pipe.write_end, elsewhere.write_end)


# -- a worker's stream


def test_a_name_that_was_told_before_a_line_stands_before_it(pipe: Pipe) -> None:
    sink = Sink(-1)
    with os.fdopen(os.dup(pipe.read_end), "rb", buffering=0) as file:
        stream = WorkerStream(file, b"w0 | ", sink, lambda: stream.set_prefix(b"trainer | "))
        os.write(pipe.write_end, b"joined\n")
        assert stream.read()
    assert sink.pending == b"trainer | joined\n"


def test_a_stream_brings_what_is_there_and_says_when_there_is_no_more(pipe: Pipe) -> None:
    sink = Sink(-1)
    with os.fdopen(os.dup(pipe.read_end), "rb", buffering=0) as file:
        stream = WorkerStream(file, b"> ", sink)
        assert not stream.read()  # nothing there, and it does not wait
        os.write(pipe.write_end, b"one\ntwo")
        assert stream.read()
        assert bytes(sink.pending) == b"> one\n"
        pipe.close(pipe.write_end)
        assert not stream.read()
        stream.close()
        assert file.closed
    assert bytes(sink.pending) == b"> one\n> two\n"


def test_draining_takes_all_that_is_there(pipe: Pipe) -> None:
    sink = Sink(-1)
    with os.fdopen(os.dup(pipe.read_end), "rb", buffering=0) as file:
        stream = WorkerStream(file, b"", sink)
        os.write(pipe.write_end, b"x\n" * 30_000)
        stream.drain()
    assert bytes(sink.pending) == b"x\n" * 30_000

"""Rings: what is put in comes out, whoever is awake and whatever the other side writes."""

from __future__ import annotations

import mmap
import multiprocessing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.transports import rings
from farcall.transports.rings import (
    AWAKE,
    CAPACITY,
    HEAD,
    MOST,
    PAIR_SIZE,
    READ,
    RING_SIZE,
    TAIL,
    RingReader,
    RingWriter,
    found,
    rest,
)


def ends(behind: int = 0) -> tuple[RingWriter, RingReader]:
    """Both ends of a ring, with the reader awake."""
    memory = memoryview(bytearray(RING_SIZE))
    writer, reader = RingWriter(memory, behind), RingReader(memory, "it")
    reader.words[AWAKE] = 1
    return writer, reader


def test_what_is_put_in_comes_out_once() -> None:
    writer, reader = ends()
    assert reader.take() == b""
    assert not reader.has_some()
    assert writer.put(b"one", 0)
    assert writer.put(b"two", 3)
    assert reader.has_some()
    assert found([reader]) == ["it"]
    assert reader.take() == b"onetwo"
    assert reader.take() == b""
    assert found([reader]) == []


def test_nothing_is_put_in_while_the_reader_sleeps() -> None:
    writer, reader = ends()
    assert rest([reader]) == []
    assert not writer.put(b"message", 0)
    assert not reader.has_some()


def test_who_goes_to_sleep_is_told_what_is_there() -> None:
    writer, reader = ends()
    other, _ = ends()[1], writer.put(b"message", 0)
    assert rest([other, reader]) == ["it"]
    assert not reader.words[AWAKE]
    assert not other.words[AWAKE]


def test_a_knock_is_needed_only_where_somebody_sleeps_beside_something() -> None:
    writer, reader = ends()
    writer.put(b"message", 0)
    assert not writer.is_unseen(), "the reader is awake"
    rest([reader])
    assert writer.is_unseen()
    reader.take()
    assert not writer.is_unseen()


def test_nothing_is_put_in_before_the_reader_has_had_what_went_through_the_socket() -> None:
    writer, reader = ends(behind=100)  # the greeting's, which the reader does not count
    assert writer.put(b"first", 100)
    assert not writer.put(b"third", 100 + 5 + 7), "7 bytes are in the socket"
    assert reader.take() == b"first"
    reader.had(5 + 7)
    assert writer.put(b"third", 100 + 5 + 7)
    assert reader.take() == b"third"
    reader.had(5 + 7 + 5)
    assert reader.words[READ] == 7


def test_a_message_that_is_large_or_does_not_fit_is_not_put_in() -> None:
    writer, reader = ends()
    assert not writer.put(bytes(MOST + 1), 0)
    for number in range(CAPACITY // MOST):
        assert writer.put(bytes([number]) * MOST, number * MOST)
    assert not writer.put(b"x", CAPACITY)
    assert len(reader.take()) == CAPACITY
    assert writer.put(b"x", CAPACITY)
    assert reader.take() == b"x"


@given(st.lists(st.one_of(st.none(), st.integers(1, MOST)), max_size=60), st.integers(0, CAPACITY - 1))
def test_any_sequence_of_puts_and_takes_is_one_stream(steps: list[int | None], start: int) -> None:
    writer, reader = ends()
    for size in [min(start, MOST)] * (start // MOST + 1) if start else []:
        writer.put(bytes(size), writer.head)
        reader.take()
    expected = b""
    for number, size in enumerate(steps):
        if size is None:
            assert reader.take() == expected
            expected = b""
        else:
            message = bytes([number]) * size
            taken = writer.put(message, writer.head)
            assert taken == (len(expected) + size <= CAPACITY)
            expected += message if taken else b""
    assert reader.take() == expected


@pytest.mark.parametrize("head", [CAPACITY + 1, 1 << 40, (1 << 64) - 1])
def test_a_head_that_cannot_be_is_refused(head: int) -> None:
    _, reader = ends()
    reader.words[HEAD] = head
    assert reader.has_some()
    with pytest.raises(ProtocolError, match="was said to hold"):
        reader.take()


def test_a_head_that_goes_back_is_refused() -> None:
    writer, reader = ends()
    writer.put(b"message", 0)
    reader.take()
    reader.words[HEAD] = 1
    with pytest.raises(ProtocolError, match="was said to hold -6"):
        reader.take()


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=4, max_size=4), st.lists(st.binary(max_size=99), max_size=9))
def test_whatever_the_other_side_writes_nothing_outside_of_the_ring_is_touched(
    words: list[int], messages: list[bytes]
) -> None:
    memory = memoryview(bytearray(64 + RING_SIZE + 64))
    writer, reader = RingWriter(memory[64:-64], 0), RingReader(memory[64:-64])
    for message in messages:
        for at, value in zip((HEAD, TAIL, AWAKE, READ), words, strict=True):
            writer.words[at] = value
        writer.put(message, writer.head + words[3])
        writer.is_unseen()
        try:
            assert len(reader.take()) <= CAPACITY
        except ProtocolError:
            pass
        rest([reader])
    assert bytes(memory[:64]) == bytes(memory[-64:]) == bytes(64)


def test_a_machine_that_may_reorder_what_it_writes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        machine = "x86_64"

    monkeypatch.setattr(rings.os, "uname", Named)
    assert rings.is_possible()
    Named.machine = "aarch64"
    assert not rings.is_possible()


MANY = 20_000


def count_up(memory: mmap.mmap) -> None:
    writer = RingWriter(memoryview(memory)[:RING_SIZE], 0)
    number = 0
    while number < MANY:
        number += writer.put(number.to_bytes(4, "little") * (1 + number % 50), writer.head)


def test_another_process_sees_all_of_it_in_order() -> None:
    with mmap.mmap(-1, PAIR_SIZE) as memory:
        process: Any = multiprocessing.get_context("fork").Process(target=count_up, args=(memory,))
        process.start()
        try:
            reader = RingReader(memoryview(memory)[:RING_SIZE])
            reader.words[AWAKE] = 1
            expected = b"".join([number.to_bytes(4, "little") * (1 + number % 50) for number in range(MANY)])
            at = 0
            while at < len(expected) and (process.is_alive() or reader.has_some()):
                data = reader.take()
                assert expected.startswith(data, at)
                at += len(data)
            assert at == len(expected)
        finally:
            process.kill()
            process.join()
            reader.words.release()
            reader._data.release()
            del reader


class Forking(bytes):
    """As its length is asked for, a signal handler forks; this process is the child."""

    writer: RingWriter

    def __len__(self) -> int:
        self.writer.abandon()
        return super().__len__()


def test_a_child_that_is_made_in_the_midst_of_a_put_leaves_the_ring_be() -> None:
    writer, reader = ends()
    message = Forking(b"the parent's to say")
    message.writer = writer
    assert not writer.put(message, 0)
    assert reader.words[HEAD] == 0

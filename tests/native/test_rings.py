"""`RingPair` and `Waiter`, the Python interface of the C extension. `ring_test.c` tests the memory below them."""

from __future__ import annotations

import array
import errno
import fcntl
import gc
import itertools
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from farcall._native import rings
from farcall.transports.unix import RING_BYTES, _is_ring_memory, _new_ring_memory
from native.ring_link import (
    CORE_BLOCKED,
    HEAD,
    POLLER,
    READER_SLEEPS,
    TAIL,
    WRITER_CORE,
    Events,
    RingLink,
    RingPair,
    Waiter,
    child_process,
    mapping_size,
    receive_frames,
    refuse_internal,
    send_frame,
)

SPIN_S = 50e-6
LATE_S = 0.7
"""A thread that is woken goes on sooner than that, even on a busy machine, and one that was forgotten later: it looks
for itself once a second."""


@pytest.fixture
def link() -> Iterator[RingLink]:
    with RingLink(4096) as link:
        yield link


def seconds_of(function: Callable[..., object], *arguments: object) -> float:
    start = time.monotonic()
    function(*arguments)
    return time.monotonic() - start


# Sending and receiving


def test_frames_arrive_in_order(link: RingLink) -> None:
    for number in range(50):
        assert link.a.send(b"a%d" % number) is True
        assert link.b.send(b"b%d" % number) is True
    assert link.b.receive() == [(b"a%d" % number, ()) for number in range(50)]
    assert link.a.receive() == [(b"b%d" % number, ()) for number in range(50)]
    assert link.a.receive() == link.b.receive() == []


def test_parts_of_all_kinds_make_one_frame(link: RingLink) -> None:
    parts = (b"bytes", bytearray(b"array"), memoryview(b"__view__")[2:-2], array.array("H", [1, 2]), b"")
    assert link.a.send(*parts)
    assert link.b.receive() == [(b"bytesarrayview" + bytes(parts[3]), ())]
    assert link.a.send(*[b"%x" % number for number in range(16)])
    assert link.b.receive() == [(b"0123456789abcdef", ())]


@pytest.mark.parametrize("capacity", [4096, 1 << 16, 1 << 24])
def test_smallest_and_largest_frames(capacity: int) -> None:
    with RingLink(capacity) as link:
        assert link.a.send()
        assert link.a.send(b"")
        assert link.b.receive() == [(b"", ()), (b"", ())]
        largest = random.Random(capacity).randbytes(min(capacity, 1 << 20)) * (capacity >> 20 or 1)
        largest = largest[: capacity - 4]
        assert link.a.send(largest)
        assert not link.a.send(b"")
        assert link.b.receive() == [(largest, ())]
        assert link.a.send(b"")


def test_full_ring_takes_no_frame_until_frames_were_received(link: RingLink) -> None:
    sent = 0
    while link.a.send(b"x" * 100):
        sent += 1
    assert sent == 4096 // 104
    assert link.a.send(b"x" * 100) is False
    assert len(link.b.receive()) == sent
    assert link.a.send(b"x" * 100) is True
    assert link.b.receive() == [(b"x" * 100, ())]


def test_counters(link: RingLink) -> None:
    def counts(pair: Any) -> tuple[int, int, int, int]:
        return pair.frames_out, pair.bytes_out, pair.frames_in, pair.bytes_in

    assert counts(link.a) == (0, 0, 0, 0)
    link.a.send(b"abc", b"de")
    link.a.send(b"")
    link.b.send(b"x" * 4092)
    assert not link.b.send(b"does not fit")
    assert counts(link.a) == (2, 5, 0, 0)
    link.b.receive()
    link.a.receive()
    assert counts(link.a) == (2, 5, 1, 4092)
    assert counts(link.b) == (1, 4092, 2, 5)
    with pytest.raises(AttributeError):
        link.a.frames_in = 3


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((b"x" * 4093,), ValueError),
        ((b"x" * 2000, b"x" * 2093), ValueError),
        ((b"x" * 4096,) * 16, ValueError),
        ((b"",) * 17, ValueError),
        (("text",), TypeError),
        ((b"bytes", 3), TypeError),
        ((b"bytes", None), TypeError),
        ((memoryview(b"abcdef")[::2],), BufferError),
    ],
)
def test_frames_that_cannot_be_sent_change_nothing(link: RingLink, parts: tuple[Any, ...], error: type) -> None:
    array_part = bytearray(b"before")
    for send in (link.a.send, link.a.send_internal):
        with pytest.raises(error):
            send(array_part, *parts)
    array_part.append(0)  # it is not exported any more
    assert not link.b.is_readable()
    assert link.a.frames_out == link.a.bytes_out == 0
    assert link.a.send(b"next")
    assert link.b.receive() == [(b"next", ())]


def test_methods_check_their_arguments(link: RingLink) -> None:
    for call in (
        lambda: link.a.send(frame=b"x"),
        lambda: link.a.wait(),
        lambda: link.a.wait("1"),
        lambda: link.a.wait_for_room(1),
        lambda: link.a.wait_for_room("1", 1),
        lambda: link.a.wait_for_room(1, "1"),
        lambda: link.a.receive(1),
        lambda: link.a.close(1),
        lambda: mapping_size("4096"),
        lambda: mapping_size(),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(OverflowError):
        link.a.wait_for_room(-1, 0)
    with pytest.raises(OverflowError):
        link.a.wait_for_room(1 << 64, 0)
    with pytest.raises(TypeError):
        type("Derived", (RingPair,), {})


@pytest.mark.parametrize("capacity", [0, 1, 4095, 4097, 12288, 1 << 29, 1 << 62, -4096, 1 << 63, (1 << 64) + 4096])
def test_wrong_capacities_are_refused(capacity: int) -> None:
    descriptor = os.memfd_create("ring-test")
    os.ftruncate(descriptor, mapping_size(4096))
    try:
        with pytest.raises((ValueError, OverflowError)):
            RingPair(descriptor, capacity, 0, -1, -1, 0.0, refuse_internal)
        with pytest.raises((ValueError, OverflowError)):
            mapping_size(capacity)
    finally:
        os.close(descriptor)


def test_wrong_arguments_of_a_pair_are_refused() -> None:
    descriptor = os.memfd_create("ring-test")
    os.ftruncate(descriptor, mapping_size(4096))
    try:
        for side in (-1, 2):
            with pytest.raises(ValueError, match="side 0 or 1"):
                RingPair(descriptor, 4096, side, -1, -1, 0.0, refuse_internal)
        with pytest.raises(OSError, match="Bad file descriptor"):
            RingPair(-1, 4096, 0, -1, -1, 0.0, refuse_internal)
        for arguments in (
            (),
            (descriptor, 4096, 0, -1, -1, 0.0),
            ("fd", 4096, 0, -1, -1, 0.0, refuse_internal),
            (descriptor, 4096.5, 0, -1, -1, 0.0, refuse_internal),
            (descriptor, 4096, 0, None, -1, 0.0, refuse_internal),
            (descriptor, 4096, 0, -1, -1, "spin", refuse_internal),
        ):
            with pytest.raises(TypeError):
                RingPair(*arguments)
        read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        try:
            with pytest.raises(PermissionError):
                RingPair(read_only, 4096, 0, -1, -1, 0.0, refuse_internal)
        finally:
            os.close(read_only)
    finally:
        os.close(descriptor)


# Internal frames


def test_internal_frames_go_to_their_handler() -> None:
    seen: list[bytes] = []
    with RingLink(on_internal=seen.append) as link:
        assert link.a.send_internal(b"one", b"+") is True
        assert link.a.send(b"two")
        assert link.a.send_internal()
        assert link.b.receive() == [(b"two", ())]
        assert seen == [b"one+", b""]
        assert (link.a.frames_out, link.b.frames_in, link.b.bytes_in) == (3, 3, 7)


def test_what_the_handler_returns_stands_in_the_result() -> None:
    marker = object()
    with RingLink(on_internal=lambda frame: marker if frame == b"give" else None) as link:
        link.a.send(b"first")
        link.a.send_internal(b"give")
        link.a.send_internal(b"drop")
        link.a.send(b"last")
        assert link.b.receive() == [(b"first", ()), marker, (b"last", ())]


def test_error_of_the_handler_is_raised_and_its_frame_is_gone() -> None:
    def fail(frame: bytes) -> None:
        raise LookupError(frame.decode())

    with RingLink(4096, on_internal=fail) as link:
        link.a.send_internal(b"wrong")
        link.a.send(b"behind it")
        link.a.ask_for_room()
        with pytest.raises(LookupError, match="wrong"):
            link.b.receive()
        assert link.events_a.signals() == (1, 1)  # the room was given back
        assert link.b.receive() == [(b"behind it", ())]


def test_handler_that_cannot_be_called_is_an_error() -> None:
    with RingLink(on_internal=None) as link:  # type: ignore[arg-type]
        link.a.send_internal(b"x")
        with pytest.raises(TypeError, match="not callable"):
            link.b.receive()


def test_handler_may_receive_from_the_same_ring() -> None:
    received: list[Any] = []

    def receive_the_rest(frame: bytes) -> None:
        ends.a.send(b"sent meanwhile")
        received.extend(ends.b.receive())

    with RingLink(4096, on_internal=receive_the_rest) as ends:
        for _ in range(100):
            ends.a.send_internal(b"internal")
            ends.a.send(b"behind")
            assert ends.b.receive() == []
        assert received == [(b"behind", ()), (b"sent meanwhile", ())] * 100


# Waiting


def test_wait_returns_whether_something_can_be_read(link: RingLink) -> None:
    for seconds in (0, 0.0, -1, float("nan"), 1e-9):
        assert link.b.wait(seconds) is False
    assert 0.1 <= seconds_of(link.b.wait, 0.1) < LATE_S
    assert link.b.is_readable() is False
    link.a.send(b"x")
    assert link.b.is_readable() is True
    for wait_s in (0, 5, None, float("inf"), 1e12):
        assert link.b.wait(wait_s) is True
    link.b.receive()
    assert link.b.is_readable() is False


@pytest.mark.parametrize("spin_s", [0.0, SPIN_S, 1e9, -1.0])
def test_wait_ends_with_a_frame_of_another_thread(spin_s: float, background: ThreadPoolExecutor) -> None:
    with RingLink(spin_s=spin_s) as link:
        for _ in range(5):
            waiting = background.submit(link.b.wait, None)
            time.sleep(0.01)
            start = time.monotonic()
            link.a.send(b"x")
            assert waiting.result(10) is True
            assert time.monotonic() - start < LATE_S
            link.b.receive()


def test_wait_leaves_the_interpreter_to_other_threads(link: RingLink, background: ThreadPoolExecutor) -> None:
    stop = threading.Event()

    def compute() -> int:
        for count in itertools.count():
            if stop.is_set():
                return count
        raise AssertionError

    def answer() -> None:
        receive_frames(link.b, 1)
        time.sleep(0.05)
        link.b.send(b"pong")

    computing = background.submit(compute)
    with child_process(answer):
        for _ in range(3):  # a child computes, and another thread computes here: the wait still ends when it should
            assert link.a.wait(0.01) is False
        link.a.send(b"ping")
        assert receive_frames(link.a, 1) == [b"pong"]
    stop.set()
    assert computing.result(10) > 1000


@contextmanager
def signal_soon(act: Callable[[], object], after_s: float = 0.1) -> Iterator[None]:
    """Sends this thread a signal whose handler calls `act`."""
    before = signal.signal(signal.SIGUSR1, lambda *_: act())
    timer = threading.Timer(after_s, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupt() -> None:
    raise Interrupt


@contextmanager
def leader(*pairs: Any, spin_s: float = 0.0, events: Events | None = None) -> Iterator[tuple[Any, select.epoll]]:
    """A Waiter for these pairs, and its epoll. It has the events, or some that nobody signals."""
    own = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)] if events is None else []
    with select.epoll() as epoll:
        waiter = Waiter(epoll.fileno(), *(own if events is None else events), spin_s)
        waiter.watch(pairs)
        yield waiter, epoll
    for event in own:
        os.close(event)


def fill(pair: Any) -> None:
    while pair.send(b"x" * 60):
        pass


@pytest.mark.parametrize("spin_s", [0.0, SPIN_S])
def test_signal_handler_can_end_a_wait_by_raising(spin_s: float) -> None:
    with RingLink(4096, spin_s) as link, leader(link.b, spin_s=spin_s) as (waiter, _):
        fill(link.a)
        for wait, arguments in (
            (link.a.wait, (None,)),
            (link.a.wait, (10.0,)),
            (link.a.wait_for_room, (100, None)),
            (link.a.wait_for_room, (100, 10.0)),
        ):
            start = time.monotonic()
            with signal_soon(interrupt), pytest.raises(Interrupt):
                wait(*arguments)
            assert time.monotonic() - start < LATE_S
        link.b.receive()
        pairs = (link.b,)
        waiter.watch(pairs)
        references = sys.getrefcount(pairs)
        for seconds in (None, 10.0):
            start = time.monotonic()
            with signal_soon(interrupt), pytest.raises(Interrupt):
                waiter.wait(seconds)
            assert time.monotonic() - start < LATE_S
            waiter.watch(())
            assert sys.getrefcount(pairs) == references - 1  # what is watched does not outlive the wait
            waiter.watch(pairs)
        link.a.send(b"after")
        assert waiter.wait(0) == [link.b]
        assert link.b.receive() == [(b"after", ())]


def test_wait_goes_on_after_a_signal_handler_that_returns(link: RingLink) -> None:
    with leader(link.b) as (waiter, _):
        fill(link.b)
        for wait in (waiter.wait, lambda seconds: link.b.wait_for_room(100, seconds)):
            handled: list[None] = []
            with signal_soon(lambda: handled.append(None), 0.05):  # noqa: B023
                assert 0.2 <= seconds_of(wait, 0.2) < 0.2 + LATE_S
            assert handled


def test_wait_for_a_ring_ends_after_a_signal_handler_that_returns(link: RingLink) -> None:
    """The handler may have received what its thread waits for."""
    received: list[object] = []

    def receive_in_handler() -> None:
        link.a.send(b"x")
        received.extend(link.b.receive())

    with signal_soon(receive_in_handler):
        assert link.b.wait(None) is False
    assert received == [(b"x", ())]


def test_signal_handler_whose_system_calls_fail_does_no_harm(link: RingLink) -> None:
    def fail_to_open() -> None:
        with pytest.raises(FileNotFoundError):
            os.stat("/nowhere")

    with leader(link.b) as (waiter, _), signal_soon(fail_to_open, 0.05):
        assert waiter.wait(0.2) == []


@pytest.mark.parametrize("method", ["close", "hang_up"])
def test_close_and_hang_up_end_waits(method: str, background: ThreadPoolExecutor) -> None:
    for spin_s in (0.0, SPIN_S):
        with RingLink(4096, spin_s) as link:
            fill(link.b)
            waits = [
                background.submit(link.b.wait, None),
                background.submit(link.b.wait_for_room, 100, None),
            ]
            time.sleep(0.05)
            start = time.monotonic()
            getattr(link.b, method)()
            assert [wait.result(10) for wait in waits] == [False, None]
            assert link.b.wait(None) is False  # from now on
            link.b.wait_for_room(100, None)
            assert time.monotonic() - start < LATE_S


def test_close_ends_the_wait_for_a_peer_that_was_killed_while_it_woke_us(background: ThreadPoolExecutor) -> None:
    with RingLink() as link:
        waiting = background.submit(link.b.wait, None)
        eventually(lambda: link.read_word(0, READER_SLEEPS) == 1)
        time.sleep(0.01)
        link.write_word(0, READER_SLEEPS, 0)  # what a writer does before it wakes the sleeper
        start = time.monotonic()
        link.b.close()
        assert waiting.result(10) is False
        assert time.monotonic() - start < LATE_S


def test_closed_end_wakes_nobody_and_does_not_wait(link: RingLink) -> None:
    with leader(link.b, events=link.events_b) as (waiter, _):
        waiter.run(False, False)
        link.events_b.signals()
        link.a.close()
        link.a.close()
        assert link.a.wait(None) is False
        link.a.wait_for_room(4000, None)
        assert link.a.send(b"too late") is True  # the memory is still there, and the other end may read it
        assert link.events_b.signals() == (0, 0)  # the descriptors may be somebody else's by now
        assert link.b.receive() == [(b"too late", ())]
        assert link.a.receive() == []
        link.b.send(b"to the closed end")
        assert link.a.is_readable()
        assert link.a.receive() == [(b"to the closed end", ())]


def test_frames_can_be_received_after_a_hang_up(link: RingLink) -> None:
    link.a.send(b"the last words")
    link.b.hang_up()
    assert link.b.wait(None) is True
    assert link.b.receive() == [(b"the last words", ())]
    assert link.b.wait(None) is False
    fill(link.a)
    assert link.a.ask_for_room() is False
    link.b.receive()
    assert link.events_a.signals() == (1, 1)  # unlike `close`, it does not take the events away


# Room


def test_room_is_signalled_when_half_of_the_ring_is_free(link: RingLink) -> None:
    assert link.a.ask_for_room() is True
    fill(link.a)
    assert link.a.ask_for_room() is False
    assert link.events_a.signals() == (0, 0)
    link.b.receive()
    assert link.events_a.signals() == (1, 1)
    assert link.events_b.signals() == (0, 0)
    fill(link.a)
    link.b.receive()
    assert link.events_a.signals() == (0, 0)  # nobody asked


def test_wait_for_room(link: RingLink, background: ThreadPoolExecutor) -> None:
    assert link.a.wait_for_room(4092, None) is None
    fill(link.a)
    assert 0.1 <= seconds_of(link.a.wait_for_room, 1, 0.1) < LATE_S
    assert seconds_of(link.a.wait_for_room, 1, 0) < LATE_S
    waiting = background.submit(link.a.wait_for_room, 4092, None)
    time.sleep(0.02)
    assert not waiting.done()
    link.b.receive()
    waiting.result(10)
    assert link.a.send(b"x" * 4092)


@pytest.mark.parametrize("size", [4093, 4096, 1 << 32, (1 << 64) - 1, (1 << 64) - 5])
def test_room_that_there_never_is_cannot_be_waited_for(link: RingLink, size: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        link.a.wait_for_room(size, None)


# Waiter


def test_waiter_returns_the_pairs_that_can_be_read() -> None:
    with RingLink() as one, RingLink() as two, leader(one.b, two.b) as (waiter, _):
        assert waiter.wait(0) == []
        assert 0.1 <= seconds_of(waiter.wait, 0.1) < LATE_S
        two.a.send(b"x")
        assert waiter.wait(None) == [two.b]
        one.a.send(b"x")
        assert waiter.wait(1) == [one.b, two.b]
        two.b.receive()
        assert waiter.wait(float("inf")) == [one.b]


def test_waiter_returns_descriptors_of_its_epoll() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, RingLink() as link, leader(link.b, events=link.events_b) as (waiter, epoll):
        epoll.register(ours.fileno(), select.EPOLLIN)
        assert waiter.wait(0) == []
        theirs.send(b"x")
        event = (ours.fileno(), select.EPOLLIN)
        assert waiter.wait(None) == [event]
        link.a.send(b"x")
        time.sleep(0.002)  # while rings are busy the leader looks at descriptors once in a millisecond
        assert waiter.wait(None) == [link.b, event]
        link.b.receive()
        ours.recv(1)
        epoll.modify(ours.fileno(), select.EPOLLRDHUP)
        theirs.close()
        assert waiter.wait(None) == [(ours.fileno(), select.EPOLLRDHUP | select.EPOLLHUP)]
        epoll.unregister(ours.fileno())
        os.eventfd_write(link.events_b.leader, 1)  # somebody wants the leader to look around
        assert seconds_of(waiter.wait, 5.0) < LATE_S
        assert waiter.wait(0) == []


@pytest.mark.parametrize("spin_s", [0.0, SPIN_S])
def test_frame_wakes_the_leader(spin_s: float, background: ThreadPoolExecutor) -> None:
    with RingLink(spin_s=spin_s) as link, leader(link.b, spin_s=spin_s, events=link.events_b) as (waiter, _):
        for _ in range(5):
            waiting = background.submit(waiter.wait, None)
            eventually(lambda: link.read_word(0, POLLER) == 1)
            start = time.monotonic()
            link.a.send(b"x")
            assert waiting.result(10) == [link.b]
            assert time.monotonic() - start < LATE_S
            assert link.read_word(0, POLLER) == 0
            link.b.receive()


def test_pair_can_be_watched_while_the_leader_waits(background: ThreadPoolExecutor) -> None:
    with RingLink() as one, RingLink() as two, leader(one.b, events=one.events_b) as (waiter, _):
        waiting = background.submit(waiter.wait, None)
        eventually(lambda: one.read_word(0, POLLER) == 1)
        waiter.watch((two.b,))
        two.a.send(b"x")
        os.eventfd_write(one.events_b.leader, 1)
        assert waiting.result(10) == []  # it returns what it was waiting for when it began
        assert waiter.wait(None) == [two.b]
        one.a.send(b"x")
        assert waiter.wait(0) == [two.b]


def test_pair_that_is_dropped_while_the_leader_waits_stays_alive(background: ThreadPoolExecutor) -> None:
    with RingLink() as one, leader(events=one.events_b) as (waiter, _):
        others = [RingLink()]
        waiter.watch((others[0].b,))
        waiting = background.submit(waiter.wait, None)
        eventually(lambda: others[0].read_word(0, POLLER) == 1)
        waiter.watch(())
        others.pop().close()
        gc.collect()
        os.eventfd_write(one.events_b.leader, 1)
        assert waiting.result(10) == []


def test_unwatched_pair_wakes_nobody(link: RingLink) -> None:
    with leader(link.b, events=link.events_b) as (waiter, _):
        waiter.run(False, False)
        waiter.watch(())
        link.b.unwatch()
        link.a.send(b"x")
        assert link.events_b.signals() == (0, 0)
        assert waiter.wait(0) == []


def test_busy_leader_has_the_standby_thread_woken(link: RingLink) -> None:
    with leader(link.b, events=link.events_b) as (waiter, _):
        waiter.run(False, False)
        assert link.events_b.signals() == (0, 0)
        link.a.send(b"x")
        link.a.send(b"x")
        assert link.events_b.signals() == (0, 1)  # once
        assert waiter.wait(None) == [link.b]
        link.b.receive()
        link.a.send(b"x")
        assert link.events_b.signals() == (0, 0)  # the leader looks again, and needs no help


def test_standby_thread_is_alerted_once_until_it_looks(link: RingLink) -> None:
    with leader(link.b, events=link.events_b) as (waiter, _):
        waiter.run(True, False)  # requests are queued that nobody runs
        waiter.run(True, False)
        assert link.events_b.signals() == (0, 1)
        waiter.clear_alert()
        waiter.run(False, False)
        assert link.events_b.signals() == (0, 0)
        waiter.run(True, True)
        assert link.events_b.signals() == (0, 1)
        waiter.clear_alert()
        waiter.wait(0)
        link.a.send(b"unread")  # came before the leader ran: the leader has to say so
        waiter.run(False, False)
        waiter.run(False, False)
        assert link.events_b.signals() == (0, 1)
        waiter.clear_alert()
        waiter.run(False, False)
        assert link.events_b.signals() == (0, 1)


def test_blocked_leader_says_so_to_its_peers() -> None:
    with RingLink(spin_s=SPIN_S) as link, leader(link.b) as (waiter, _):
        waiter.run(False, False)
        assert link.read_word(1, WRITER_CORE) != CORE_BLOCKED
        waiter.run(False, True)
        assert link.read_word(1, WRITER_CORE) == CORE_BLOCKED
        assert link.a.wait(0) is False
        link.b.send(b"x")
        assert 0 < link.read_word(1, WRITER_CORE) <= (os.cpu_count() or 1)


def test_busy_rings_do_not_hide_descriptors() -> None:
    """Frames come so that the leader finds each while it spins: with the interpreter's lock, and then without."""

    def answer_late(pair: Any) -> None:
        while (delay := receive_frames(pair, 1)[0]) != b"end":
            stop = time.perf_counter() + int(delay) * 1e-6
            while time.perf_counter() < stop:
                pass
            pair.send(delay)

    reading, writing = os.pipe()
    with (
        RingLink(spin_s=SPIN_S) as link,
        leader(link.a, spin_s=SPIN_S, events=link.events_a) as (waiter, epoll),
        child_process(answer_late, link.b),
    ):
        epoll.register(reading, select.EPOLLIN)
        for delay in (0, 10, 30, 35, 40, 45, 50) * 15:
            os.write(writing, b"x")
            written, seen = time.monotonic(), set()
            event = (reading, select.EPOLLIN)
            while event not in seen:
                link.a.send(b"%d" % delay)
                while not link.a.is_readable() or link.a not in seen:
                    start = time.monotonic()
                    seen.update(waiter.wait(5.0))
                    # The leader looks at descriptors if it has not done so for a millisecond.
                    assert event in seen or start - written < 0.0015
                link.a.receive()
                seen.discard(link.a)
            os.read(reading, 1)
        link.a.send(b"end")
    os.close(reading)
    os.close(writing)


def test_another_peer_can_delay_a_wakeup_by_a_second_at_most(background: ThreadPoolExecutor) -> None:
    """All peers of a process have the same event, so one that fills its counter keeps the others from signalling."""
    with RingLink() as link, leader(link.b, events=link.events_b) as (waiter, _):
        os.eventfd_write(link.events_b.leader, 2**64 - 2)
        waiter.wait(0)
        waiting = background.submit(waiter.wait, None)
        eventually(lambda: link.read_word(0, POLLER) == 1)
        start = time.monotonic()
        link.a.send(b"x")
        assert waiting.result(10) == [link.b]
        assert time.monotonic() - start < 1.0 + LATE_S


def test_wrong_arguments_of_a_waiter_are_refused(link: RingLink) -> None:
    with select.epoll() as epoll:
        arguments = (epoll.fileno(), *link.events_b, 0.0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            Waiter(-1, *arguments[1:])
        with pytest.raises(OSError, match="Bad file descriptor"):
            Waiter(epoll.fileno(), -1, -1, 0.0)
        for wrong in ((), arguments[:3], (*arguments, 1), (*arguments[:3], "spin"), ("epoll", *arguments[1:])):
            with pytest.raises(TypeError):
                Waiter(*wrong)
        with pytest.raises(TypeError):
            Waiter(*arguments, unknown=1)
        waiter = Waiter(*arguments[:3], spin_s=0.0)
        for pairs in ([link.a], None, link.a, (link.a, None), (waiter,)):
            with pytest.raises(TypeError, match="tuple of RingPairs"):
                waiter.watch(pairs)
        for call in (
            lambda: waiter.wait(),
            lambda: waiter.wait("1"),
            lambda: waiter.run(),
            lambda: waiter.run(True),
            lambda: waiter.clear_alert(1),
        ):
            with pytest.raises(TypeError):
                call()
        link.a.send(b"x")
        waiter.watch((link.b,))
        with pytest.raises(TypeError, match="tuple of RingPairs"):
            waiter.watch((None,))
        assert waiter.wait(0) == [link.b]  # what was watched before is still watched
        link.b.receive()
    for _ in range(2):  # in the sleep, and when rings are busy
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            waiter.wait(0.01)
        assert caught.value.errno == errno.EBADF
        link.a.send(b"x")
        time.sleep(0.002)


def test_truth_that_cannot_be_told_is_an_error(link: RingLink) -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise LookupError

    with leader(link.b, events=link.events_b) as (waiter, _):
        for arguments in ((Undecided(), False), (False, Undecided())):
            with pytest.raises(LookupError):
                waiter.run(*arguments)


# Peers that do not keep to the rules


@pytest.mark.parametrize("value", [4097, 1 << 32, 1 << 63, (1 << 64) - 4097])
def test_wrong_positions_are_an_error(link: RingLink, value: int) -> None:
    with leader(link.a) as (waiter, _):
        link.write_word(1, HEAD, value, 8)
        assert link.a.wait(None) is True
        assert waiter.wait(None) == [link.a]
        with pytest.raises(ConnectionAbortedError, match="damaged"):
            link.a.receive()
        link.write_word(0, TAIL, value, 8)
        for call in (lambda: link.a.send(b"x"), lambda: link.a.send_internal(b"x"), link.a.ask_for_room):
            with pytest.raises(ConnectionAbortedError, match="damaged"):
                call()
        link.a.wait_for_room(4000, None)  # does not wait for what cannot come


def test_wrong_frame_word_is_an_error(link: RingLink) -> None:
    for size in (12, 0x7FFFFFFF, 0xFFFFFFFF):
        link.write_word(1, HEAD, 12, 8)
        link.memory[4096 + 4096 : 4096 + 4096 + 4] = size.to_bytes(4, "little")
        with pytest.raises(ConnectionAbortedError, match="damaged"):
            link.a.receive()
    link.memory[4096 + 4096 : 4096 + 4096 + 4] = (2).to_bytes(4, "little")
    with pytest.raises(ConnectionAbortedError, match="damaged"):
        link.a.receive()  # a frame of 2 bytes, one of none, and then 2 bytes that cannot be one
    assert link.a.frames_in == 2


def test_garbage_from_another_process_does_no_harm() -> None:
    def damage(link: RingLink) -> None:
        chance = random.Random(3)
        while True:
            at = chance.choice((HEAD, WRITER_CORE, TAIL, READER_SLEEPS, POLLER)) + chance.choice((0, 256))
            link.memory[at : at + 8] = chance.randbytes(8) if chance.random() < 0.3 else chance.randbytes(1) + bytes(7)
            at = 4096 + chance.randrange(8192 - 4)
            link.memory[at : at + 4] = chance.choice((chance.randbytes(4), bytes((chance.randrange(99), 0, 0, 0))))

    outcomes = set()
    with (
        RingLink(4096, SPIN_S, on_internal=lambda frame: None) as link,
        leader(link.a, spin_s=SPIN_S, events=link.events_a) as (waiter, _),
        child_process(damage, link) as child,
    ):
        actions: tuple[Callable[[], object], ...] = (
            link.a.receive,
            link.a.ask_for_room,
            lambda: link.a.send(b"x" * 50),
            lambda: link.a.wait(0.0002),
            lambda: link.a.wait_for_room(50, 0.0002),
            lambda: waiter.wait(0.0002),
            lambda: waiter.run(False, False),
        )
        stop = time.monotonic() + 0.5
        while time.monotonic() < stop:
            for act in actions:
                try:
                    outcomes.add(type(act()))
                except ConnectionAbortedError as error:
                    outcomes.add(type(error))
        os.kill(child, signal.SIGKILL)
    assert outcomes == {list, bool, type(None), rings.DamagedError}


# Two processes


def echo(pair: Any, count: int) -> None:
    while count:
        assert pair.wait(10.0)
        for frame, _ in pair.receive():
            send_frame(pair, frame)
            count -= 1


@pytest.mark.parametrize("spin_s", [0.0, SPIN_S])
def test_each_frame_is_answered_by_another_process(spin_s: float) -> None:
    with RingLink(4096, spin_s) as link, child_process(echo, link.b, 3000):
        for number in range(3000):
            frame = b"%d" % number * (number % 200)
            assert link.a.send(frame)
            assert receive_frames(link.a, 1) == [frame]


@pytest.mark.parametrize("leader_spin_s", [0.0, SPIN_S])
def test_leader_of_another_process_answers(leader_spin_s: float) -> None:
    count = 10_000

    def lead(link: RingLink) -> None:
        with leader(link.b, spin_s=leader_spin_s, events=link.events_b) as (waiter, _):
            left = count
            while left:
                ready = waiter.wait(10.0)
                for _ in ready:
                    for frame, _ in link.b.receive():
                        waiter.run(False, False)
                        send_frame(link.b, frame)
                        left -= 1
                for _ in range(chance.randrange(400)):  # so that the next frame comes while it falls asleep
                    pass

    chance = random.Random(5)
    with RingLink(4096, SPIN_S) as link, child_process(lead, link):
        for number in range(count):
            start = time.monotonic()
            assert link.a.send(b"%d" % number)
            assert receive_frames(link.a, 1) == [b"%d" % number]
            assert time.monotonic() - start < LATE_S, "a wake-up was lost"


def test_a_million_frames_between_two_processes() -> None:
    count = 1_000_000

    def send_all(link: RingLink) -> None:
        checksum = 0
        for number in range(count):
            frame = number.to_bytes(4, "little") + b"abcdefghijkl"[: number % 13]
            checksum = zlib.crc32(frame, checksum)
            if not link.b.send(frame):
                send_frame(link.b, frame)
        send_frame(link.b, checksum.to_bytes(4, "little"), b"checksum of all frames")

    start = time.monotonic()
    with RingLink(spin_s=SPIN_S) as link, child_process(send_all, link):
        checksum, received, last = 0, 0, b""
        while received <= count:
            assert link.a.wait(10.0)
            for frame, _ in link.a.receive():
                received += 1
                if received <= count:
                    checksum = zlib.crc32(frame, checksum)
                last = frame
        assert last == checksum.to_bytes(4, "little") + b"checksum of all frames"
        assert (link.a.frames_in, link.a.is_readable()) == (count + 1, False)
    assert time.monotonic() - start < 10


def test_frames_of_a_killed_process_are_whole() -> None:
    """Whatever it was doing: the survivor gets whole frames in order up to some frame, and no more."""

    def send_for_ever(link: RingLink) -> None:
        for number in itertools.count():
            send_frame(link.b, number.to_bytes(4, "little"), bytes([number % 256]) * (number * 37 % 3000))

    chance = random.Random(11)
    total = 0
    for _ in range(25):
        with RingLink(4096, spin_s=chance.choice((0.0, SPIN_S))) as link:
            with child_process(send_for_ever, link) as child:
                expected = itertools.count()
                stop = time.monotonic() + chance.random() * 0.02
                is_killed = False
                while not is_killed or link.a.is_readable():
                    if not is_killed and time.monotonic() > stop:
                        os.kill(child, signal.SIGKILL)
                        is_killed = True
                        time.sleep(0.002)
                    link.a.wait(0.001)
                    for frame, _ in link.a.receive():
                        number = next(expected)
                        assert frame[:4] == number.to_bytes(4, "little")
                        assert frame[4:] == bytes([number % 256]) * (number * 37 % 3000)
            total += link.a.frames_in
            assert link.a.wait(0.01) is False
            assert link.a.receive() == []
            assert link.a.send(b"nobody reads this")
    assert total > 1000


def test_child_that_inherits_the_ends_and_exits_does_no_harm(background: ThreadPoolExecutor) -> None:
    with RingLink(4096) as link, leader(link.b, events=link.events_b) as (waiter, _):
        waiting = background.submit(link.a.wait, None)
        link.a.send(b"before")

        def exit_normally() -> None:
            nonlocal link, waiter
            del link, waiter
            gc.collect()

        for _ in range(3):
            with child_process(exit_normally):
                pass
        link.a.send(b"after")
        assert waiter.wait(None) == [link.b]
        assert link.b.receive() == [(b"before", ()), (b"after", ())]
        link.b.send(b"reply")
        assert waiting.result(10) is True


# Memory


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python


def new_memory(size: int = mapping_size(RING_BYTES), seals: int = SEALS) -> int:
    descriptor = os.memfd_create("ring-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def is_refused(descriptor: int) -> bool:
    """Whether a link would not use this memory. Closes the descriptor."""
    try:
        return not _is_ring_memory(descriptor)
    finally:
        os.close(descriptor)


def test_memory_that_a_link_makes_is_what_a_link_takes() -> None:
    descriptor = _new_ring_memory()
    assert _is_ring_memory(descriptor)
    pair = RingPair(descriptor, RING_BYTES, 0, -1, -1, 0.0, refuse_internal)
    os.close(descriptor)
    assert pair.send(b"x" * (RING_BYTES - 4))
    assert not is_refused(new_memory())


def test_memory_of_the_wrong_size_is_refused() -> None:
    for size in (0, 1, mapping_size(RING_BYTES) - 1, mapping_size(RING_BYTES) + 1, mapping_size(RING_BYTES // 2)):
        assert is_refused(new_memory(size))


def test_memory_that_could_shrink_is_refused() -> None:
    for seals in (0, SEALS & ~fcntl.F_SEAL_SHRINK, SEALS & ~fcntl.F_SEAL_SEAL):
        assert is_refused(new_memory(seals=seals))


def test_memory_that_cannot_be_written_is_refused() -> None:
    assert is_refused(new_memory(seals=SEALS | fcntl.F_SEAL_WRITE))
    assert is_refused(new_memory(seals=SEALS | F_SEAL_FUTURE_WRITE))
    descriptor = new_memory()
    assert is_refused(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
    os.close(descriptor)


def test_descriptor_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    assert is_refused(os.eventfd(0))
    reading, writing = os.pipe()
    assert is_refused(reading)
    assert is_refused(writing)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, mapping_size(RING_BYTES))
    assert is_refused(file)
    assert not _is_ring_memory(file)  # closed


def test_pair_in_a_cycle_is_collected() -> None:
    class Owner:
        pair: Any = None

        def receive(self, frame: bytes) -> None:
            pass

    descriptor = os.memfd_create("ring-test-cycle")
    os.ftruncate(descriptor, mapping_size(4096))
    owner = Owner()
    owner.pair = RingPair(descriptor, 4096, 0, -1, -1, 0.0, owner.receive)
    os.close(descriptor)
    assert is_mapped("ring-test-cycle")
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert not is_mapped("ring-test-cycle")


def test_waiter_in_a_cycle_is_collected(link: RingLink) -> None:
    class Owner:
        pair: Any = None
        waiter: Any = None

        def receive(self, frame: bytes) -> None:
            pass

    descriptor = os.memfd_create("ring-test-cycle")
    os.ftruncate(descriptor, mapping_size(4096))
    with select.epoll() as epoll:
        owner = Owner()
        owner.pair = RingPair(descriptor, 4096, 0, -1, -1, 0.0, owner.receive)
        owner.waiter = Waiter(epoll.fileno(), *link.events_a, 0.0)
        owner.waiter.watch((owner.pair,))
        os.close(descriptor)
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None
        assert not is_mapped("ring-test-cycle")


def is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(f"memfd:{name}" in line for line in maps)


class Leaky:
    """Runs operations many times, and sees whether anything grew."""

    def __init__(self, link: RingLink, waiter: Any, descriptor: int) -> None:
        self.link, self.waiter, self.descriptor = link, waiter, descriptor
        self.frame, self.array, self.text, self.pairs = b"frame" * 20, bytearray(99), "text" * 9, (link.b,)

    def references(self) -> list[int]:
        objects = (
            self.link.a, self.link.b, self.waiter, self.frame, self.array, self.text, self.pairs, RingPair, Waiter,
            refuse_internal, answer_internal, INTERNAL_ANSWER, (),
        )  # fmt: skip
        return [sys.getrefcount(item) for item in objects]

    def send_and_receive(self) -> None:
        link = self.link
        link.a.send(self.frame, self.array)
        link.a.send_internal(b"x")
        link.b.receive()

    def fail_to_send(self) -> None:
        for parts in ((self.frame, self.array, self.text), (self.frame,) * 17, (self.frame,) * 15):
            try:
                self.link.a.send(*parts)
            except (TypeError, ValueError):
                pass

    def fail_in_the_handler(self) -> None:
        self.link.a.send(self.frame)
        self.link.a.send_internal(b"raise")
        try:
            self.link.b.receive()
        except LookupError:
            pass

    def wait(self) -> None:
        link, waiter = self.link, self.waiter
        link.a.wait(0)
        link.a.wait_for_room(1, 0)
        link.a.ask_for_room()
        link.a.send(self.frame)
        waiter.watch(self.pairs)
        waiter.wait(0)
        link.b.receive()
        os.eventfd_write(self.descriptor, 1)
        waiter.wait(0)
        os.eventfd_read(self.descriptor)
        waiter.run(False, True)
        waiter.watch(())
        waiter.clear_alert()
        link.b.unwatch()

    def fail_to_watch(self) -> None:
        for call, argument in ((self.waiter.watch, (self.pairs, self.text)), (self.waiter.wait, self.text)):
            try:
                call(argument)
            except TypeError:
                pass

    def find_damage(self) -> None:
        link = self.link
        link.a.send(self.frame)
        head = link.memory[HEAD : HEAD + 8]
        link.memory[HEAD : HEAD + 8] = b"\xff" * 8
        try:
            link.b.receive()
        except ConnectionAbortedError:
            pass
        link.memory[HEAD : HEAD + 8] = head
        link.b.receive()

    def create(self) -> None:
        with RingLink(4096) as link:
            link.a.send(self.frame)
        try:
            RingPair(-1, 4096, 0, -1, -1, 0.0, refuse_internal)
        except OSError:
            pass


INTERNAL_ANSWER = object()


def answer_internal(frame: bytes) -> object:
    if frame == b"raise":
        raise LookupError
    return INTERNAL_ANSWER


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.parametrize(
    ("operation", "count"),
    [
        ("send_and_receive", 100_000),
        ("fail_to_send", 50_000),
        ("fail_in_the_handler", 50_000),
        ("wait", 30_000),
        ("fail_to_watch", 50_000),
        ("find_damage", 50_000),
        ("create", 3_000),
    ],
)
def test_nothing_leaks(operation: str, count: int) -> None:
    with RingLink(4096, on_internal=answer_internal) as link, leader(events=link.events_b) as (waiter, epoll):
        descriptor = fcntl.fcntl(link.events_a.leader, fcntl.F_DUPFD_CLOEXEC, 500)  # Python keeps small numbers anyway
        epoll.register(descriptor, select.EPOLLIN)
        leaky = Leaky(link, waiter, descriptor)
        operate = getattr(leaky, operation)
        for _ in range(200):
            operate()
        gc.collect()
        references, blocks, resident = leaky.references(), sys.getallocatedblocks(), resident_bytes()
        for _ in range(count):
            operate()
        gc.collect()
        os.close(descriptor)
        growth = [after - before for before, after in zip(references, leaky.references(), strict=True)]
        assert max(growth) < 100, growth
        assert sys.getallocatedblocks() - blocks < 500
        assert resident_bytes() - resident < 4 << 20
        del leaky, operate

"""The poller: which descriptors have something, who is told, and that removing is final."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from farcall.agent.poller import HUNG_UP, READABLE, WRITABLE, Poller
from interruption import At, Interrupt, interrupt


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


class Handler:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.events: list[int] = []

    def __call__(self, events: int) -> None:
        self.events.append(events)


def turn(poller: Poller) -> None:
    """One turn of the thread that serves, without waiting."""
    for descriptor, events in poller.poll(0):
        poller.handlers[descriptor](events)


def test_a_handler_is_called_when_there_is_something_to_read(poller: Poller, pair: Pair) -> None:
    ours, theirs = pair
    handler = Handler()
    poller.add(ours.fileno(), handler, READABLE)
    turn(poller)
    assert handler.events == []
    theirs.send(b"x")
    turn(poller)
    turn(poller)
    assert handler.events == [READABLE, READABLE], "as long as it is not read"
    ours.recv(1)
    turn(poller)
    assert len(handler.events) == 2


def test_what_is_wanted_can_be_added_and_taken_back(poller: Poller, pair: Pair) -> None:
    ours, theirs = pair
    handler = Handler()
    poller.add(ours.fileno(), handler, READABLE)
    theirs.send(b"x")
    poller.want(ours.fileno(), WRITABLE, True)
    poller.want(ours.fileno(), WRITABLE, True)
    turn(poller)
    poller.want(ours.fileno(), READABLE, False)
    turn(poller)
    poller.want(ours.fileno(), WRITABLE, False)
    turn(poller)
    poller.want(ours.fileno(), READABLE, True)
    turn(poller)
    assert handler.events == [READABLE | WRITABLE, WRITABLE, READABLE]


def test_a_descriptor_of_which_nothing_is_wanted_says_nothing_not_even_its_end(poller: Poller, pair: Pair) -> None:
    ours, theirs = pair
    handler = Handler()
    poller.add(ours.fileno(), handler, 0)
    theirs.close()
    turn(poller)
    assert handler.events == []
    poller.want(ours.fileno(), READABLE, True)
    turn(poller)
    assert handler.events[0] & READABLE


def test_a_handler_that_was_removed_is_not_called(poller: Poller, pair: Pair) -> None:
    ours, theirs = pair
    handler = Handler()
    poller.add(ours.fileno(), handler, READABLE)
    theirs.send(b"x")
    poller.remove(ours.fileno())
    poller.remove(ours.fileno())
    poller.want(ours.fileno(), READABLE, True)
    assert poller.poll(0) == []
    assert ours.fileno() not in poller.handlers


def test_a_number_may_be_used_again(poller: Poller, pair: Pair) -> None:
    ours, theirs = pair
    first, second = Handler(), Handler()
    theirs.send(b"x")
    poller.add(ours.fileno(), first, READABLE)
    poller.remove(ours.fileno())
    poller.add(ours.fileno(), second, READABLE)
    turn(poller)
    assert (first.events, second.events) == ([], [READABLE])


def test_the_bell_ends_a_wait_and_rings_once(poller: Poller) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(poller.poll, 60)
        poller.ring()
        ((descriptor, events),) = waiting.result()
    poller.ring()
    poller.ring()
    poller.handlers[descriptor](events)
    assert poller.poll(0) == []
    poller.handlers[descriptor](events)  # somebody else has answered it already


def test_descriptors_come_and_go_while_a_thread_waits(poller: Poller, pair: Pair) -> None:
    ours, theirs = pair
    handler = Handler()
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for descriptor, events in poller.poll(60):
                known = poller.handlers.get(descriptor)
                if known is not None:
                    known(events)
                    if known is handler:
                        ours.recv(10)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            poller.add(ours.fileno(), handler, READABLE)
            theirs.send(b"x")
            while not handler.events:
                os.sched_yield()
        finally:
            stop.set()
            poller.ring()
        serving.result()
    assert handler.events[0] == READABLE


def test_after_close_everything_is_quiet() -> None:
    poller = Poller()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poller.add(ours.fileno(), Handler(), READABLE)
        poller.close()
        poller.close()
        poller.ring()
        poller.want(ours.fileno(), WRITABLE, True)
        poller.remove(ours.fileno())
        with pytest.raises(ValueError, match="closed"):
            poller.poll(0)


def test_in_a_forked_child_the_descriptors_are_given_back_and_the_parent_is_not_disturbed() -> None:
    # Without a fork: a child has the same objects, and descriptors of its own for the same open files.
    poller = Poller()
    bell, epoll = poller._bell, poller._epoll.fileno()
    kept = [os.dup(bell), os.dup(epoll)]
    poller.abandon()
    try:
        for closed in (bell, epoll):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(closed)
        os.eventfd_write(kept[0], 1)
        assert os.eventfd_read(kept[0]) == 1
    finally:
        for descriptor in kept:
            os.close(descriptor)


@pytest.mark.parametrize(
    "end",
    [
        Poller.close,
        Poller.abandon,
    ],
)
def test_after_its_end_it_rings_nobody_elses_bell(end: Callable[[Poller], None]) -> None:
    poller = Poller()
    bell = poller._bell
    end(poller)
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
    try:
        assert bell in others, "the system gives the lowest free number"
        poller.ring()
        assert not select.select(others, [], [], 0)[0]
    finally:
        for descriptor in others:
            os.close(descriptor)


# Signal handlers and finalizers that come in between


@pytest.mark.parametrize(
    "change",
    [
        lambda poller, end: poller.want(end, WRITABLE, True),
        lambda poller, end: poller.want(end, READABLE, False),
        lambda poller, end: poller.remove(end),
    ],
    ids=["want", "want no more", "remove"],
)
@pytest.mark.parametrize("handler", ["interrupts", "wants something else"])
def test_epoll_knows_what_is_wanted_whatever_comes_in_between(
    change: Callable[[Poller, int], None], handler: str
) -> None:
    for point in itertools.count():
        left, right = socket.socketpair()
        with contextlib.closing(Poller()) as poller, left, right:
            end = left.fileno()
            poller.add(end, lambda _: None, READABLE)
            act = interrupt if handler == "interrupts" else partial(poller.want, end, HUNG_UP, True)
            with contextlib.suppress(Interrupt), At(("agent/poller.py",), (point,), act) as at:
                change(poller, end)
            if handler == "interrupts":
                change(poller, end)  # by who was interrupted
            assert known_to_epoll(poller, end) == poller._wanted.get(end, 0), at.places
            if not at.has_acted:
                assert point > 2
                return


def known_to_epoll(poller: Poller, descriptor: int) -> int:
    """What epoll watches a descriptor for, as the system tells; 0 if it does not."""
    always = select.EPOLLERR | select.EPOLLHUP
    for line in Path(f"/proc/self/fdinfo/{poller._epoll.fileno()}").read_text().splitlines():
        words = line.split()
        if words[:2] == ["tfd:", str(descriptor)]:
            return int(words[3], 16) & ~always
    return 0

"""Frames that the socket did not take at once go out as soon as it takes them, whatever the poller does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import pytest

from farcall.transports.base import LinkOptions
from farcall.transports.poller import Poller
from farcall.transports.stream import StreamLink

FRAME = b"x" * 1000
SOON_S = 20.0
NewPair = Callable[[], tuple[StreamLink, StreamLink]]
Watch = Callable[[Poller, StreamLink], None]


def do_nothing() -> None:
    """Handles an event of no interest."""


def watch(poller: Poller, link: StreamLink) -> None:
    poller.watch(link, do_nothing)


def watch_hang_up(poller: Poller, link: StreamLink) -> None:
    poller.watch_hang_up(link, do_nothing)


def unwatch(poller: Poller, link: StreamLink) -> None:
    poller.unwatch(link)


@pytest.fixture
def pair(new_pair: NewPair, options: LinkOptions) -> tuple[StreamLink, StreamLink]:
    one, other = new_pair()
    one.establish(options)
    other.establish(options)
    return one, other


def fill(link: StreamLink) -> int:
    """Sends until frames are queued. Returns how many were sent."""
    sent = 0
    while not link.unsent_bytes():
        link.send(FRAME)
        sent += 1
    link.send(FRAME)
    return sent + 1


@pytest.mark.parametrize(
    ("before", "after"),
    [(watch_hang_up, watch), (watch, watch_hang_up), (unwatch, watch), (unwatch, watch_hang_up)],
)
def test_unsent_frames_go_out_after_the_link_is_watched_for_something_else(
    pair: tuple[StreamLink, StreamLink], poller: Poller, before: Watch, after: Watch
) -> None:
    one, other = pair
    before(poller, one)
    sent = fill(one)
    after(poller, one)
    received, deadline = 0, monotonic() + SOON_S
    while received < sent and monotonic() < deadline:
        received += len(other.receive())
        for handler in poller.wait(0.0):
            handler()
    assert received == sent
    assert not one.unsent_bytes()
    assert not poller.wait(0.0)  # a socket that takes frames is no event when there are none


@pytest.mark.parametrize("is_watched_for", [watch, watch_hang_up])
def test_the_standby_thread_wakes_up_for_unsent_frames_while_the_leader_is_busy(
    pair: tuple[StreamLink, StreamLink], poller: Poller, is_watched_for: Watch
) -> None:
    one, other = pair
    is_watched_for(poller, one)
    fill(one)
    poller.wait(0.0)
    poller.run(False)
    standby = threading.Thread(target=poller.stand_by, daemon=True)
    standby.start()
    standby.join(0.05)
    assert standby.is_alive()
    while other.receive():
        pass
    standby.join(SOON_S)
    is_awake = not standby.is_alive()
    poller.wake_standby()
    assert is_awake

"""Links and listeners that are closed while the poller watches them."""

from __future__ import annotations

import os
import socket

from farcall.transports.poller import Poller


class ClosedWhileUnwatched:
    """Something to watch whose descriptor another thread closes right after `unwatch` has asked for it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self.is_closing = False

    def fileno(self) -> int:
        if self.is_closing:
            os.close(self.descriptor)
        return self.descriptor


def do_nothing() -> None:
    """Handles an event of no interest."""


def test_a_descriptor_that_was_closed_meanwhile_can_be_unwatched(poller: Poller) -> None:
    source = ClosedWhileUnwatched()
    poller.watch_listener(source, do_nothing)
    source.is_closing = True
    poller.unwatch(source)
    one, other = socket.socketpair()  # one of them gets the number of the closed descriptor
    with one, other:
        assert source.descriptor in (one.fileno(), other.fileno())
        for each in (one, other):
            poller.watch_listener(each, do_nothing)
        one.send(b"x")
        assert poller.wait(10) == [do_nothing]
        for each in (one, other):
            poller.unwatch(each)

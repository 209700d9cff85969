"""A link that another thread closes in the middle of a wait ends that wait, and touches no other descriptor."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

import pytest

from farcall.transports.base import LinkOptions
from farcall.transports.stream import StreamLink

NewPair = Callable[[], tuple[StreamLink, StreamLink]]


@pytest.fixture
def new_descriptors() -> Iterator[Callable[[], None]]:
    """Opens descriptors, which get the lowest free numbers. None of them ever becomes readable."""
    opened: list[int] = []
    yield lambda: opened.extend(os.eventfd(0) for _ in range(20))
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize("method", ["wait", "has_hung_up"])
def test_a_wait_during_which_the_link_is_closed_ends(
    new_pair: NewPair,
    options: LinkOptions,
    new_descriptors: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    link, _ = new_pair()
    link.establish(options)
    new_poll = select.poll

    class ClosingPoll:
        """Another thread closes the link right before the system call, and other descriptors are opened."""

        def __init__(self) -> None:
            self._poll = new_poll()
            self.register = self._poll.register

        def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
            link.close()
            new_descriptors()
            return self._poll.poll(0)

    monkeypatch.setattr(select, "poll", ClosingPoll)
    assert link.wait(None) if method == "wait" else link.has_hung_up()

"""The shortcut on a processor that reads before what it has written is there: nobody sleeps for ever all the same.

Over every order of the steps of a sender, a reader and the buffers of two cores; and each thing that is needed for it,
left out, is seen to be missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from x86_stage import FENCE, AsleepForEver, Model, OutOfOrder, Side, x86

from farcall.agent import spinning
from farcall.agent.sending import Sender
from farcall.protocol.wire import CALL, encode
from farcall.transports import rings
from farcall.transports.rings import READ, RingReader, RingWriter, rest

__all__ = ["x86"]


def message(number: int) -> bytes:
    return encode(CALL, number, b"", b"")


def send_one(sender: Sender) -> None:
    sender.send(message(0))


def send_two(sender: Sender) -> None:
    sender.send(message(0))
    sender.send(message(1))


def flush_between(sender: Sender) -> None:
    sender.send_all([message(0)])
    sender.queue(message(1))
    sender.flush()


def test_one_message(x86: object) -> None:
    assert Model(send_one, 1).explore() > 400


@pytest.mark.parametrize("send", [send_two, flush_between])
def test_two_messages_by_the_ring_or_the_socket(send: Any, x86: object) -> None:
    assert Model(send, 2).explore() > 4000


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_without_a_fence_somebody_would_sleep_for_ever(side: str, x86: pytest.MonkeyPatch) -> None:
    x86.setattr(rings, "fence", lambda: None if Side.now.name == side else Side.now.do(*FENCE))
    with pytest.raises(AsleepForEver):
        Model(send_two, 2).explore()


def test_without_the_knock_somebody_would_sleep_for_ever(x86: pytest.MonkeyPatch) -> None:
    x86.setattr(Sender, "_knock", lambda self, ring: None)
    with pytest.raises(AsleepForEver):
        Model(send_two, 2).explore()


def test_without_the_last_look_somebody_would_sleep_for_ever(x86: pytest.MonkeyPatch) -> None:
    def careless(rings: Sequence[RingReader]) -> list[Any]:
        rest(rings)
        return []

    x86.setattr(spinning, "rest", careless)
    with pytest.raises(AsleepForEver):
        Model(send_two, 2).explore()


def test_without_a_count_of_what_was_read_they_would_come_out_of_order(x86: pytest.MonkeyPatch) -> None:
    put = RingWriter.put

    def careless(self: RingWriter, data: bytes, sent: int) -> bool:
        return put(self, data, self.words[READ] + self.head + self._behind)

    x86.setattr(RingWriter, "put", careless)
    with pytest.raises(OutOfOrder):
        Model(flush_between, 2).explore()


def test_a_fence_takes_a_lock_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is taken is seen to be by a plain read, and that is no fence."""
    taken: list[bool] = []

    class Lock:
        held = False

        def acquire(self, blocking: bool) -> None:
            assert not blocking
            taken.append(self.held)
            self.held = True

    monkeypatch.setattr(rings, "allocate_lock", Lock)
    rings.fence()
    rings.fence()
    assert taken == [False, False]

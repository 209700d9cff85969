"""Large arguments of remote calls: copied once, into shared memory, and kept there until they have arrived."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from lanes_stage import NewPair

from eventually import eventually
from farcall.agent.outgoing import Outgoing
from farcall.agent.sending import Sender
from farcall.errors import WorkerLost
from farcall.testing import LocalGroup
from farcall.transports.shared_memory import Lender
from group_stage import echo
from reference_stage import expect_nothing_left, remote

pytestmark = pytest.mark.timeout(60)

SIZE = 3 << 20


def connection(group: LocalGroup) -> Outgoing:
    found = group[0]._peers[1].connection
    assert found is not None
    return found


def lender(group: LocalGroup) -> Lender:
    found = connection(group).lane._lender
    assert found is not None
    return found


def pattern(seed: int) -> np.ndarray[Any, Any]:
    return (np.arange(SIZE, dtype=np.uint8) * 7) + np.uint8(seed)


def test_they_go_through_shared_memory_and_the_caller_may_change_its_own_at_once(new_pair: NewPair) -> None:
    group = new_pair()
    sent_before = connection(group).traffic.counted()["bytes_out"]
    array = pattern(1)
    reference = remote(group[0], 1, echo, array)
    array[:] = 0
    assert lender(group).lent == SIZE
    assert connection(group).traffic.counted()["bytes_out"] - sent_before < 1000
    assert np.array_equal(reference.to_here(), pattern(1))
    del reference
    expect_nothing_left(group)


def test_they_are_kept_until_they_have_arrived_and_no_longer(new_pair: NewPair) -> None:
    group = new_pair()
    reference = remote(group[0], 1, len, pattern(2))
    (segment,) = lender(group)._segments
    assert reference.to_here() == SIZE
    eventually(lambda: segment.is_free())
    assert remote(group[0], 1, len, pattern(3)).to_here() == SIZE
    assert lender(group)._segments == [segment], "it is used again"


def test_what_is_lost_with_its_connection_is_sent_again_as_it_was(
    new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = new_pair()
    lost: list[Outgoing] = []
    send_control = Outgoing.send_control

    def lose_once(self: Outgoing, *args: Any) -> None:
        if not lost:
            lost.append(self)
            self.lose("it was cut before the message was sent")
        send_control(self, *args)

    monkeypatch.setattr(Outgoing, "send_control", lose_once)
    array = pattern(4)
    reference = remote(group[0], 1, echo, array)
    array[:] = 0
    assert lost
    assert np.array_equal(reference.to_here(), pattern(4))
    del reference
    expect_nothing_left(group)


def test_what_arrived_though_nobody_knows_is_not_run_twice(new_pair: NewPair) -> None:
    group = new_pair()
    old = connection(group)
    references = [remote(group[0], 1, spoiled, pattern(seed)) for seed in range(3)]
    values = [reference.to_here() for reference in references]
    old.lose("it was cut")
    eventually(lambda: group[0]._peers[1].connection not in (None, old))
    assert [value[0] for value in values] == [0, 1, 2]
    assert [reference.to_here()[0] for reference in references] == [0, 1, 2]


def spoiled(array: Any) -> Any:
    """The first of it; and writes into it."""
    first = array[:1].copy()
    array[:] = 99
    return first


def test_a_call_that_is_refused_gives_the_memory_back(new_pair: NewPair, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_pair()

    def refuse(*_: Any) -> Any:
        raise WorkerLost("it is gone", "worker1")

    monkeypatch.setattr(group[0].book, "call_remote", refuse)
    with pytest.raises(WorkerLost):
        remote(group[0], 1, len, pattern(5))
    gc.collect()
    (segment,) = lender(group)._segments
    assert segment.is_free()


@pytest.mark.parametrize("options", [{"shared_memory": 0}, {}], ids=["without shared memory", "too small for it"])
def test_otherwise_they_go_through_the_socket_with_one_copy(
    new_pair: NewPair, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    group = new_pair(**options)
    sent: list[Any] = []
    send_all = Sender.send_all
    monkeypatch.setattr(Sender, "send_all", lambda self, pieces: (sent.append(pieces), send_all(self, pieces))[1])
    array = pattern(6) if options else pattern(6)[:40_000].copy()
    reference = remote(group[0], 1, echo, array)
    expected = array.copy()
    array[:] = 0
    (pieces,) = [pieces for pieces in sent if len(pieces) == 2]
    assert type(pieces[1].obj) is bytes, "what nobody can change is not copied again, however slow the channel is"
    assert np.array_equal(reference.to_here(), expected)

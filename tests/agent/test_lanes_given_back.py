"""Large buffers in shared memory go back: when they are let go of, when nobody uses them, and at the end."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from lanes_stage import NewPair, copied, memfds, segments

from eventually import eventually
from farcall import RpcError
from farcall.agent import lanes
from farcall.agent.lanes import IDLE, LEAST
from farcall.agent.sending import InParts
from farcall.agent.shortcuts import AFTER
from farcall.protocol.wire import RESULT, Decoder
from farcall.transports.shared_memory import Lender
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memfds_from_here")]


def make(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.full(size, seed, np.uint8)


def copied_at(name: str, value: Any) -> Any:
    return copied(wait_at(name, value))


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# Nothing stays


def test_idle_memory_is_given_back(new_pair: NewPair) -> None:
    group = new_pair()
    call(group[0], 1, copied, np.zeros(1 << 20))
    assert len(segments(group)) == 2
    before = memfds()
    for lane in [lane for one in group for lane in one._lanes()]:
        lane.sweep(monotonic() + IDLE - 5)
    assert len(segments(group)) == 2
    for lane in [lane for one in group for lane in one._lanes()]:
        lane.sweep(monotonic() + 2 * IDLE + 1)
    assert segments(group) == []
    assert memfds() == before - 6, "two for each segment at its lender, one at its borrower"
    large = np.arange(1 << 18)
    assert np.array_equal(call(group[0], 1, echo, large), large)


def test_the_supervisor_sees_to_that(new_pair: NewPair, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_pair(heartbeat_interval=0.05, heartbeat_patience=5)
    call(group[0], 1, echo, np.zeros(1 << 20))
    monkeypatch.setattr(lanes, "IDLE", 0.0)
    eventually(lambda: segments(group) == [])


def test_a_thousand_large_messages_leave_nothing(new_pair: NewPair) -> None:
    group = new_pair()
    sent = np.ones(1 << 20, np.uint8)
    for _ in range(AFTER):
        call(group[0], 1, echo, 0)  # the rings have a segment of their own, which is there from now on
    for _ in range(20):
        call(group[0], 1, copied, sent)
    before, memory, count = memfds(), resident(), len(segments(group))
    for seed in range(1000):
        sent[:10] = seed % 256
        assert call(group[0], 1, echo if seed % 2 else copied, sent)[5] == seed % 256
    assert (memfds(), len(segments(group))) == (before, count)
    assert resident() - memory < 32 << 20


@pytest.mark.slow
def test_very_many_small_messages_leave_nothing(new_pair: NewPair) -> None:
    group = new_pair()
    sent = np.ones(LEAST, np.uint8)
    for _ in range(500):
        call(group[0], 1, echo, sent)
    gc.collect()
    before, memory = memfds(), resident()
    deadline = monotonic() + 15
    rounds = 0
    while monotonic() < deadline and rounds < 50_000:
        assert call(group[0], 1, echo, sent)[-1] == 1
        assert call(group[0], 1, echo, rounds) == rounds
        rounds += 1
    gc.collect()
    assert memfds() == before
    assert resident() - memory < 16 << 20, f"in {rounds} rounds"


def test_a_reply_that_came_too_late_goes_back(new_pair: NewPair) -> None:
    group = new_pair()
    gate = new_gate("late")
    with pytest.raises(RpcError, match=r"0\.2"):
        call(group[0], 1, copied_at, "late", np.zeros(1 << 20), timeout=0.2)
    gate.set()
    eventually(lambda: len(segments(group)) == 2 and all(segment.state() == 0 for segment in segments(group)))


def test_an_error_in_the_callee_lets_go_of_its_arguments(new_pair: NewPair) -> None:
    group = new_pair()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            call(group[0], 1, divide, np.zeros(1 << 20))
        gc.collect()
        eventually(lambda: all(segment.state() == 0 for segment in segments(group)))


def divide(value: Any) -> float:
    return 1 / 0


def test_an_interrupted_call_gives_its_memory_back(new_pair: NewPair, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_pair()
    lend = Lender.lend

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("farcall.transports.shared_memory.copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(group[0], 1, echo, np.zeros(1 << 20))
    assert Lender.lend is lend
    assert [segment.state() for segment in segments(group)] == [0]
    assert call(group[0], 1, echo, np.ones(1 << 20))[0] == 1


# The end


def test_what_was_received_outlives_its_sender(new_pair: NewPair) -> None:
    group = new_pair()
    result = call(group[0], 1, make, 1 << 20, 9)
    group.shutdown()
    assert memfds() == 1, "that of the array's mapping"
    assert (result == 9).all()
    result[:] = 1


def test_a_reply_is_still_read_though_the_callee_leaves_right_after(new_pair: NewPair) -> None:
    group = new_pair()
    gate = new_gate("last")
    future = start(group[0], 1, wait_at, "last", np.full(1 << 20, 5, np.uint8))
    assert arrived["last"].wait(SOON)
    leaving = threading.Thread(target=group.shutdown)
    leaving.start()
    gate.set()
    assert (future.wait() == 5).all()
    leaving.join(SOON)
    assert not leaving.is_alive()


def test_a_connection_that_has_ended_has_nothing_mapped_though_somebody_keeps_it(new_pair: NewPair) -> None:
    group = new_pair()
    call(group[0], 1, echo, np.zeros(1 << 20))
    ended = [lane for one in group for lane in one._lanes()]
    group.shutdown()
    assert len(ended) == 2
    assert memfds() == 0


def test_who_leaves_waits_until_its_reply_was_opened(new_pair: NewPair) -> None:
    group = new_pair()
    (incoming,), (connection,) = group[1]._incoming, group[0]._connections
    assert not incoming.has_unsent()
    pieces = incoming.lane.pieces(RESULT, 1, b"", b"", [memoryview(bytes(LEAST))])
    assert incoming.has_unsent()
    decoder = Decoder()
    decoder.shared = connection.lane.take
    assert not isinstance(pieces, InParts)
    messages = decoder.feed(b"".join(pieces))
    assert not incoming.has_unsent(), "it has it now, for as long as it likes"
    assert bytes(messages[0][4][0]) == bytes(LEAST)

"""Memory in which results went back to their caller: it is used again and does not run out; bad replies are refused."""

from __future__ import annotations

import gc
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from lanes_stage import (
    SIZE,
    NewPair,
    all_free,
    changed,
    kept,
    lenders,
    memfds,
    pattern,
    returned_to,
    segments,
    sent_by,
)

from eventually import eventually
from farcall import RpcError, WorkerLost
from farcall.agent import returning
from farcall.agent.lanes import LEAST
from farcall.errors import SerializationError
from farcall.protocol.wire import CALL, RESULT, encode_returned
from farcall.transports.segments import ALIGNMENT
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memfds_from_here")]


# Little memory


def test_who_keeps_many_results_can_still_lend(new_pair: NewPair) -> None:
    group = new_pair()
    results = [call(group[0], 1, changed, pattern(seed=seed)) for seed in range(40)]
    assert all(np.array_equal(each, changed(pattern(seed=seed))) for seed, each in enumerate(results))
    assert (sent_by(group), returned_to(group)) == ([40 * SIZE, 0], 40 * SIZE)
    ours = lenders(group)[0]
    assert ours is not None
    assert sum(segment.is_kept() for segment in ours._segments) == 8, "the others were copied"
    assert all(each.flags.writeable for each in results)
    del results
    assert all_free(group)


def test_a_small_pool_is_left_to_calls(new_pair: NewPair) -> None:
    group = new_pair(shared_memory=3 * LEAST * 4)
    results = [call(group[0], 1, changed, pattern(seed=seed)) for seed in range(10)]
    assert all(np.array_equal(each, changed(pattern(seed=seed))) for seed, each in enumerate(results))
    assert sent_by(group)[0] == 10 * SIZE


# Nothing stays


def test_many_results_leave_nothing(new_pair: NewPair) -> None:
    group = new_pair()
    value = pattern()
    for _ in range(5):
        value = call(group[0], 1, changed, value)
    before, count = memfds(), len(segments(group))
    for _ in range(200):  # fewer than the calls after which the rings have a segment, too
        value = call(group[0], 1, changed, value)
    assert (memfds(), len(segments(group))) == (before, count)
    assert count == 2
    del value
    assert all_free(group)
    group.shutdown()
    assert memfds() == 0


def test_a_reply_that_came_too_late_gives_its_memory_back(new_pair: NewPair) -> None:
    group = new_pair()
    gate = new_gate("too late")
    with pytest.raises(RpcError, match=r"0\.2"):
        call(group[0], 1, wait_at, "too late", pattern(), timeout=0.2)
    gate.set()
    eventually(lambda: returned_to(group) == SIZE)
    eventually(lambda: all_free(group))


def test_a_caller_that_is_gone_when_the_result_is_there(new_pair: NewPair) -> None:
    group = new_pair()
    gate = new_gate("gone")
    future = start(group[0], 1, wait_at, "gone", pattern())
    assert arrived["gone"].wait(SOON)
    (connection,), (incoming,) = group[0]._connections, group[1]._incoming
    connection.lose("the test wants it")
    with pytest.raises(WorkerLost):
        future.wait()
    eventually(incoming.is_lost)
    gate.set()
    assert np.array_equal(call(group[0], 1, echo, pattern()), pattern())
    del connection, incoming
    group.shutdown()
    gc.collect()
    assert memfds() == 0


def test_what_came_back_outlives_the_group(new_pair: NewPair) -> None:
    group = new_pair()
    result = call(group[0], 1, changed, pattern())
    group.shutdown()
    assert memfds() == 1, "that of the array's mapping"
    assert np.array_equal(result, changed(pattern()))
    result[:] = 1


def test_a_reply_that_cannot_be_made_is_a_failure_and_gives_the_memory_back(
    new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError("none left")

    group = new_pair()
    with monkeypatch.context() as patch:
        patch.setattr(returning, "encode_returned", fail)
        with pytest.raises(MemoryError, match="none left"):
            call(group[0], 1, echo, pattern())
    eventually(lambda: all_free(group))
    assert np.array_equal(call(group[0], 1, echo, pattern()), pattern())


def unpicklable(value: Any) -> Any:
    return value, threading.Lock()


def test_a_result_that_cannot_be_pickled_gives_the_memory_back(new_pair: NewPair) -> None:
    group = new_pair()
    with pytest.raises(SerializationError):
        call(group[0], 1, unpicklable, pattern())
    eventually(lambda: all_free(group))


def some_kept(value: Any) -> Any:
    """Keeps every third for a while."""
    if value[1] % 3 == 0:
        kept.append(value)
        del kept[:-5]
    value[0] = 0
    return value


def test_many_threads_at_once(new_pair: NewPair, background: ThreadPoolExecutor) -> None:
    group = new_pair(shared_memory=16 << 20)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[int, Any]] = []
        for _ in range(40):
            sent = rng.integers(0, 256, int(rng.integers(LEAST, 8 * LEAST)), np.uint8)
            got = call(group[0], 1, some_kept, sent)
            sent[0] = 0
            held.append((zlib.crc32(sent), got))
            if len(held) > 2:
                crc, value = held.pop(0)
                assert zlib.crc32(value) == crc
        assert all(zlib.crc32(value) == crc for crc, value in held)

    for future in [background.submit(work, seed) for seed in range(6)]:
        future.result(SOON * 4)
    del future
    kept.clear()
    assert returned_to(group) > 0
    eventually(lambda: all_free(group))


# What cannot be


@pytest.mark.parametrize(
    ("number", "offsets", "sizes", "reason"),
    [
        (77, [0], [SIZE], "number 77 is not lent to it"),
        (2, [0], [SIZE], "number 2 is not lent to it"),
        (1, [SIZE], [SIZE], "was said to hold"),
        (1, [0], [1 << 39], "was said to hold"),
        (1, [(1 << 64) - ALIGNMENT], [ALIGNMENT], "was said to hold"),
        (1, [8], [SIZE - 8], "was said to hold"),
        (1, [0, ALIGNMENT], [SIZE // 2, SIZE // 2], "was said to hold"),
    ],
    ids=["unknown", "not lent", "behind", "long", "far", "crooked", "overlapping"],
)
def test_a_reply_in_memory_that_was_not_lent_so_ends_the_connection(
    new_pair: NewPair, number: int, offsets: list[int], sizes: list[int], reason: str
) -> None:
    group = new_pair()
    for _ in [call(group[0], 1, echo, pattern()), call(group[0], 1, echo, pattern())]:
        pass  # both segments are free again
    gate = new_gate("bad return")
    future = start(group[0], 1, wait_at, "bad return", pattern())
    assert arrived["bad return"].wait(SOON)
    ours = lenders(group)[0]
    assert ours is not None
    free, lent = sorted(ours._segments, key=lambda segment: segment.state())
    numbers = {1: lent.number, 2: free.number}
    (incoming,) = group[1]._incoming
    incoming._sender.send(encode_returned(RESULT, 99, b"", b"", sizes, numbers.get(number, number), offsets))
    with pytest.raises(WorkerLost, match=reason.replace("number 2", f"number {free.number}")):
        future.wait()
    gate.set()
    assert call(group[0], 1, echo, 3) == 3, "the next call connects anew"


def test_where_nothing_was_lent_nothing_can_come_back(new_pair: NewPair) -> None:
    group = new_pair(shared_memory=0)
    gate = new_gate("nothing lent")
    future = start(group[0], 1, wait_at, "nothing lent")
    assert arrived["nothing lent"].wait(SOON)
    (incoming,) = group[1]._incoming
    incoming._sender.send(encode_returned(RESULT, 99, b"", b"", [SIZE], 1, [0]))
    with pytest.raises(WorkerLost, match="of this side, which has lent none"):
        future.wait()
    gate.set()


def test_a_call_in_returned_memory_closes_the_connection_with_a_line(
    new_pair: NewPair, caplog: pytest.LogCaptureFixture
) -> None:
    group = new_pair()
    (connection,) = group[0]._connections
    connection._sender.send(encode_returned(CALL, 99, b"builtins\0len", b"", [SIZE], 1, [0]))
    eventually(lambda: "connection from worker 'worker0' closed" in caplog.text)
    assert "said to be in shared memory of this side" in caplog.text
    eventually(lambda: not group[0]._connections)
    assert call(group[0], 1, echo, 3) == 3

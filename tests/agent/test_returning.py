"""Results in memory that the caller has lent: they go back without a copy, if nothing at the callee can reach them."""

from __future__ import annotations

import gc
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from lane_stage import NewPair, lenders, open_segments, returned_to, segments, sent_by

from eventually import eventually
from farcall import RpcError, WorkerLost
from farcall.agent import agent, returning
from farcall.agent.lanes import LEAST, pool_for
from farcall.errors import SerializationError
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.protocol.wire import CALL, RESULT, encode_returned
from farcall.testing import LocalGroup
from farcall.transports.segments import ALIGNMENT
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start
from reference_stage import remote

pytestmark = pytest.mark.timeout(60)

SIZE = 4 * LEAST
kept: list[Any] = []
"""What a worker holds on to."""


@pytest.fixture(autouse=True)
def _nothing_kept(new_pair: NewPair) -> Iterator[None]:
    before = open_segments()
    yield
    kept.clear()
    gc.collect()
    assert before == 0, "the test before left something"


def where(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def pattern(size: int = SIZE, seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.arange(size) * 7 + seed).astype(np.uint8)


def all_free(group: LocalGroup) -> bool:
    gc.collect()
    return all(segment.is_free() for segment in segments(group))


# What goes back


def changed(value: Any) -> Any:
    value[::2] = 1
    return value


def flat(value: Any) -> Any:
    return value.reshape(-1, 4).view(np.uint32)


def turned(value: Any) -> Any:
    return value.reshape(4, -1).T


def guarded(value: Any) -> Any:
    value.flags.writeable = False
    return value


def most(value: Any) -> Any:
    return value[ALIGNMENT:-5]


def nested(value: Any) -> Any:
    return {"data": [value, 3], "again": value}


@pytest.mark.parametrize("function", [echo, changed, flat, turned, guarded, most])
@pytest.mark.parametrize("size", [2 * LEAST, 1 << 20, 1 << 22])
def test_what_nobody_has_any_more_goes_back_where_it_lies(
    new_pair: NewPair, function: Callable[[Any], Any], size: int
) -> None:
    group = new_pair()
    sent = pattern(size)
    result = call(group[0], 1, function, sent)
    expected = function(sent.copy())
    assert np.array_equal(result, expected)
    assert (result.dtype, result.shape, result.strides) == (expected.dtype, expected.shape, expected.strides)
    assert result.flags.writeable == expected.flags.writeable
    assert sent_by(group) == [size, 0]
    assert returned_to(group) == expected.nbytes
    assert np.array_equal(sent, pattern(size)), "the caller's own is not what was lent"


def test_it_goes_back_from_inside_of_something(new_pair: NewPair) -> None:
    group = new_pair()
    result = call(group[0], 1, nested, pattern())
    assert np.array_equal(result["data"][0], pattern())
    assert result["again"] is result["data"][0]
    assert (sent_by(group)[1], returned_to(group)) == (0, SIZE)


def swapped(first: Any, second: Any) -> tuple[Any, Any]:
    return second, first


def test_several_go_back_in_any_order(new_pair: NewPair) -> None:
    group = new_pair()
    second, first = call(group[0], 1, swapped, pattern(SIZE + 5), pattern(SIZE, 3))
    assert np.array_equal(first, pattern(SIZE + 5))
    assert np.array_equal(second, pattern(SIZE, 3))
    assert (sent_by(group)[1], returned_to(group)) == (0, 2 * SIZE + 5)
    second[:] = 0
    assert np.array_equal(first, pattern(SIZE + 5))
    del first
    assert not all_free(group), "the other one is in the same segment"
    del second
    assert all_free(group)


def test_a_memoryview_goes_back_too(new_pair: NewPair) -> None:
    group = new_pair()
    result = call(group[0], 1, echo, memoryview(bytearray(pattern())))
    assert bytes(result) == bytes(pattern())
    assert not result.readonly
    assert returned_to(group) == SIZE
    assert call(group[0], 1, echo, bytes(pattern())) == bytes(pattern())
    assert (sent_by(group)[1], returned_to(group)) == (SIZE, SIZE), "bytes are made anew wherever they arrive"


class Shop:
    def paint(self, value: Any) -> Any:
        return changed(value)


def test_methods_and_asynchronous_calls(new_pair: NewPair) -> None:
    group = new_pair()
    shop = remote(group[0], 1, Shop)
    assert np.array_equal(shop.rpc_sync().paint(pattern()), changed(pattern()))
    assert returned_to(group) == SIZE
    future = start(group[0], 1, changed, pattern())
    assert np.array_equal(future.wait(), changed(pattern()))
    assert returned_to(group) == 2 * SIZE


def test_at_a_worker_that_restricts_what_it_runs(new_pair: NewPair) -> None:
    group = new_pair(allow=["test_returning.*", "group_stage.*"])
    assert np.array_equal(call(group[0], 1, changed, pattern()), changed(pattern()))
    assert (sent_by(group)[1], returned_to(group)) == (0, SIZE)


def test_what_came_back_is_the_callers_own_and_its_memory_is_used_again_when_that_is_gone(new_pair: NewPair) -> None:
    group = new_pair()
    first = call(group[0], 1, echo, pattern(seed=1))
    second = call(group[0], 1, echo, pattern(seed=2))
    assert where(first) != where(second)
    first[:] = 9
    assert np.array_equal(second, pattern(seed=2))
    at = where(first)
    part = first[5:10]
    del first
    gc.collect()
    third = call(group[0], 1, echo, pattern(seed=3))
    assert where(third) not in (at, where(second))
    del part
    gc.collect()
    assert where(call(group[0], 1, echo, pattern(seed=4))) == at
    assert len(segments(group)) == 3


# What stays, and is copied


def keep(value: Any) -> Any:
    kept.append(value)
    return value


def keep_a_view(value: Any) -> Any:
    kept.append(value[10:20])
    return value


def keep_its_memory(value: Any) -> Any:
    kept.append(memoryview(value))
    return value


def keep_in_a_closure(value: Any) -> Any:
    kept.append(lambda: value)
    return value


def keep_in_a_generator(value: Any) -> Any:
    def go() -> Iterator[Any]:
        yield
        value[:] = 0

    generator = go()
    next(generator)
    kept.append(generator)
    return value


def keep_in_a_traceback(value: Any) -> Any:
    try:
        raise ValueError
    except ValueError as error:
        kept.append(error)
    return value


def keep_in_a_cycle(value: Any) -> Any:
    cycle: list[Any] = [value]
    cycle.append(cycle)
    return value


KEEPERS = [
    keep,
    keep_a_view,
    keep_its_memory,
    keep_in_a_closure,
    keep_in_a_generator,
    keep_in_a_traceback,
    keep_in_a_cycle,
]


@pytest.mark.parametrize("function", KEEPERS)
@pytest.mark.parametrize("size", [LEAST, 1 << 21])
def test_what_somebody_there_still_has_is_copied(new_pair: NewPair, function: Callable[[Any], Any], size: int) -> None:
    group = new_pair()
    gc.collect()
    gc.disable()
    try:
        result = call(group[0], 1, function, pattern(size))
    finally:
        gc.enable()
    assert (sent_by(group), returned_to(group)) == ([size, size], 0)
    assert np.array_equal(result, pattern(size))
    result[:] = 0
    if function is keep:
        assert np.array_equal(kept[0], pattern(size)), "what the caller does with its own is not seen there"
        kept[0][:] = 5
        assert not result.any()
    kept.clear()
    del result
    eventually(lambda: all_free(group))
    assert np.array_equal(call(group[0], 1, echo, pattern(size)), pattern(size))
    assert returned_to(group) == size, "the next one goes back"


def give_up(position: int) -> Any:
    return kept.pop(position)


def test_what_was_kept_goes_back_with_the_call_that_gives_it_up(new_pair: NewPair) -> None:
    group = new_pair()
    call(group[0], 1, keep, pattern(seed=1))
    call(group[0], 1, keep, pattern(seed=2))
    before = sent_by(group)
    assert np.array_equal(call(group[0], 1, give_up, 0), pattern(seed=1))
    assert (sent_by(group), returned_to(group)) == (before, SIZE)
    assert np.array_equal(kept[0], pattern(seed=2))


def test_the_value_of_a_reference_is_copied(new_pair: NewPair) -> None:
    group = new_pair()
    reference = remote(group[0], 1, changed, pattern())
    for _ in range(2):
        result = reference.to_here()
        assert np.array_equal(result, changed(pattern()))
        result[:] = 0
    assert returned_to(group) == 0


def twice(value: Any) -> Any:
    return value, value[:]


def overlapping(value: Any) -> Any:
    return value[: -10 * ALIGNMENT], value[10 * ALIGNMENT :]


@pytest.mark.parametrize("function", [twice, overlapping])
def test_what_would_share_its_memory_is_copied(new_pair: NewPair, function: Callable[[Any], Any]) -> None:
    group = new_pair()
    first, second = call(group[0], 1, function, pattern())
    assert returned_to(group) == 0
    expected = function(pattern())
    first[:] = 0
    assert np.array_equal(second, expected[1]), "two arrays that shared memory arrive as two"


def little(value: Any) -> Any:
    return value[: len(value) // 2 - ALIGNMENT]


def shifted(value: Any) -> Any:
    return value[1:]


def with_another(value: Any) -> Any:
    return value, value + np.uint8(1)


@pytest.mark.parametrize("function", [little, shifted, with_another])
def test_a_small_part_and_a_crooked_one_and_one_among_others_are_copied(
    new_pair: NewPair, function: Callable[[Any], Any]
) -> None:
    group = new_pair()
    result = call(group[0], 1, function, pattern())
    for got, expected in zip(np.atleast_1d(result), np.atleast_1d(function(pattern())), strict=True):
        assert np.array_equal(got, expected)
    assert returned_to(group) == 0
    assert sent_by(group)[1] > 0
    eventually(lambda: sum(not segment.is_free() for segment in segments(group)) == 1)


async def later(value: Any) -> Any:
    return changed(value)


@async_execution
def settled(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(changed(value))
    return future


@pytest.mark.parametrize("function", [later, settled])
def test_what_is_answered_later_arrives_whatever_way_it_takes(new_pair: NewPair, function: Any) -> None:
    group = new_pair()
    assert np.array_equal(call(group[0], 1, function, pattern()), changed(pattern()))
    eventually(lambda: all_free(group))


@pytest.mark.parametrize("size", [LEAST, 1 << 22])
def test_what_is_kept_where_nothing_can_be_lent_goes_through_the_socket(
    new_pair: NewPair, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(agent, "pool_for", lambda name, limit: pool_for(name, 0 if name == "worker1" else None))
    group = new_pair()
    results = [call(group[0], 1, keep, pattern(size, seed)) for seed in range(3)]
    kept.clear()
    results += [call(group[0], 1, echo, pattern(size, seed)) for seed in range(3, 6)]
    assert all(np.array_equal(each, pattern(size, seed)) for seed, each in enumerate(results))
    assert (sent_by(group), returned_to(group)) == ([6 * size, -1], 3 * size)


# Any array

dtypes = arrays.scalar_dtypes().filter(lambda dtype: dtype.kind not in "mM" or dtype.isnative)
uses: list[Callable[[Any], Any]] = [
    echo,
    keep,
    lambda value: value.T,
    lambda value: value[::-1],
    lambda value: value[1:],
    lambda value: value[:, :1],
    lambda value: np.asfortranarray(value),
    lambda value: [value[:1], value[1:]],
    lambda value: [value, value[::-1]],
]


def use(number: int, value: Any) -> Any:
    return uses[number](value)


def test_any_array_and_any_use_of_it_arrives_as_it_would_without(new_pair: NewPair) -> None:
    group = new_pair()

    @given(
        dtypes,
        st.integers(0, len(uses) - 1),
        st.sampled_from([(2, 40_000), (40_000, 2), (300, 300)]),
        st.sampled_from("CF"),
    )
    @settings(deadline=None, max_examples=80)
    def check(dtype: Any, number: int, shape: tuple[int, int], order: Any) -> None:
        raw = np.frombuffer(bytes(range(1, 128)) * (shape[0] * shape[1] * max(dtype.itemsize, 1) // 127 + 1), np.uint8)
        value = np.zeros(shape, dtype)
        if dtype.kind in "biufc":
            value = raw[: value.nbytes].view(dtype).reshape(shape)
        value = np.array(value, order=order)
        # numpy's own pickle makes some arrays of another byte order native: those that are not contiguous.
        expected = pickle.loads(pickle.dumps(use(number, pickle.loads(pickle.dumps(value, 5))), 5))
        result = call(group[0], 1, use, number, value)
        for want, got in zip(*[each if type(each) is list else [each] for each in (expected, result)], strict=True):
            assert (got.dtype, got.shape, got.flags.writeable) == (want.dtype, want.shape, True)
            assert got.tobytes() == want.tobytes()
            got[...] = np.zeros((), got.dtype)
        if number == uses.index(keep):
            assert kept[-1].tobytes() == value.tobytes()
        kept.clear()

    check()
    assert returned_to(group) > 0
    eventually(lambda: all_free(group))


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
    before, count = open_segments(), len(segments(group))
    for _ in range(500):
        value = call(group[0], 1, changed, value)
    assert (open_segments(), len(segments(group))) == (before, count)
    assert count == 2
    del value
    assert all_free(group)
    group.shutdown()
    assert open_segments() == 0


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
    assert open_segments() == 0


def test_what_came_back_outlives_the_group(new_pair: NewPair) -> None:
    group = new_pair()
    result = call(group[0], 1, changed, pattern())
    group.shutdown()
    assert open_segments() == 1, "that of the array's mapping"
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

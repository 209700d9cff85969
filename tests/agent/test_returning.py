"""Results in memory that the caller has lent: they go back without a copy, if nothing at the callee can reach them."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from lanes_stage import SIZE, NewPair, all_free, changed, keep, kept, pattern, returned_to, segments, sent_by

from eventually import eventually
from farcall.agent import agent
from farcall.agent.lanes import LEAST, pool_for
from farcall.agent.returning import Returning
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.protocol.wire import RESULT
from farcall.transports.borrowed_memory import Borrower
from farcall.transports.segments import ALIGNMENT
from farcall.transports.shared_memory import Lender, Pool
from group_stage import call, echo, start
from reference_stage import remote

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memfds_from_here")]


def where(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# What goes back


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
    group = new_pair(allow=["lanes_stage.*", "group_stage.*"])
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


def test_what_waits_to_be_sent_is_no_view_of_what_may_be_handed_back() -> None:
    pool = Pool(1 << 24, 4, str)
    lender, borrower = Lender(pool), Borrower(os.getpid(), pool.token)
    place = lender.lend([memoryview(pattern())])
    assert place is not None
    views = borrower.take(place, [SIZE])
    kept.append(views[0])
    loan = borrower.loan_of(views)
    assert loan is not None
    reply = Returning(loan, RESULT, 1, b"", b"body", views, lambda *start: (b"start", *start[-1]))
    pieces = reply.made()
    assert pieces is not None
    kept[0][:] = bytes(SIZE)
    assert [type(piece) for piece in pieces] == [bytes, bytes]
    assert pieces[1] == pattern().tobytes()
    kept.clear()
    lender.close()
    pool.close()


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

"""References passed anywhere in anything, before their value exists or after, and what pickling outside a call says."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall import RpcTimeoutError, RRef, SerializationError, UsageError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start
from reference_stage import expect_nothing_left, here, remote
from reference_values import Box, Shelf, fetch, fetch_all, keep, kept, references_in

pytestmark = pytest.mark.timeout(30)


def carry(rref: RRef[Any], way: str) -> Any:
    """The reference in something."""
    return {
        "itself": rref,
        "list": [rref],
        "nested": {"a": [(1, (rref,))]},
        "object": Box(Box(rref)),
        "key": {rref: "value"},
        "set": {rref},
        "twice": [rref, rref, copy.copy(rref)],
    }[way]


WAYS = ["itself", "list", "nested", "object", "key", "set", "twice"]


@pytest.mark.parametrize(
    ("to", "owner"),
    [(to, owner) for to in range(3) for owner in range(3)],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_reference_goes_anywhere_in_anything(group: LocalGroup, way: str, to: int, owner: int) -> None:
    rref = remote(group.agents[0], owner, echo, "tea")
    values = call(group.agents[0], to, fetch_all, carry(rref, way))
    assert values == ["tea"] * (3 if way == "twice" else 1)
    back = call(group.agents[0], to, echo, carry(rref, way))
    assert references_in(back) == references_in(carry(rref, way))
    assert fetch_all(back) == values
    assert rref.to_here() == "tea"
    del rref, back
    expect_nothing_left(group.agents)


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_reference_in_a_remote_call_and_in_its_value(group: LocalGroup, to: int) -> None:
    inner = remote(group.agents[0], 1, echo, "tea")
    outer = remote(group.agents[0], to, Box, inner)
    assert outer.to_here().content == inner
    assert outer.to_here().content.to_here() == "tea"
    del inner
    gc.collect()
    assert outer.to_here().content.to_here() == "tea", "the box at its owner holds it"
    del outer
    expect_nothing_left(group.agents)


def test_twice_in_one_message_is_one_handle(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, echo, "tea")
    assert call(group.agents[0], 2, are_one_handle, [rref, rref]) is True
    assert call(group.agents[0], 1, are_one_handle, [rref, copy.copy(rref)]) is True


def are_one_handle(rrefs: list[RRef[Any]]) -> bool:
    return rrefs[0]._handle is rrefs[1]._handle


def test_an_argument_before_its_value_exists(group: LocalGroup) -> None:
    gate = new_gate("argument")
    rref = remote(group.agents[0], 1, wait_at, "argument", "tea")
    futures = [start(group.agents[0], to, fetch, rref) for to in (0, 1, 2)]
    sums = remote(group.agents[0], 2, fetch_all, [rref, rref])
    assert arrived["argument"].wait(SOON)
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.wait() for future in futures] == ["tea"] * 3
    assert sums.to_here() == ["tea", "tea"]


def test_an_argument_before_the_owner_has_heard_of_it(group: LocalGroup) -> None:
    """The creator's message is still on its way, a large one, say; a third worker is faster."""
    call(group.agents[0], 1, echo, 0)
    connection = group.agents[0].calling.numbered[1].connection
    assert connection is not None
    held_back: list[Any] = []
    send_call = connection.send_call
    connection.send_call = lambda *call: held_back.append(call)  # type: ignore[method-assign]
    rref = remote(group.agents[0], 1, echo, "tea")
    connection.send_call = send_call  # type: ignore[method-assign]
    fetched = start(group.agents[0], 2, fetch, rref)
    eventually(lambda: group.agents[1].reference_store.table_sizes()["values"])
    call(group.agents[2], 1, echo, 0)
    assert not fetched.done(), fetched
    for held in held_back:
        send_call(*held)
    assert fetched.wait() == "tea"
    del rref
    expect_nothing_left(group.agents)


def test_a_result_that_nobody_takes_is_given_back(group: LocalGroup) -> None:
    gate = new_gate("late")
    future = start(group.agents[0], 1, reference_at, group, "late", timeout=0.05)
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()
    call(group.agents[0], 1, echo, 0)
    expect_nothing_left(group.agents)


def reference_at(group: LocalGroup, gate: str) -> Any:
    """Runs on worker 1: a reference to a value of its own, after a while."""
    wait_at(gate)
    return here(group.agents[1], "tea")


def test_a_result_that_nobody_reads_is_given_back(group: LocalGroup) -> None:
    gate = new_gate("unread")
    gate.set()
    future = start(group.agents[0], 1, reference_at, group, "unread")
    eventually(future.done)
    assert group.agents[1].reference_store.table_sizes()["owned"]
    del future
    expect_nothing_left(group.agents)


def test_a_value_lives_as_long_as_anybody_holds_it(group: LocalGroup) -> None:
    shelf = Shelf()
    value = weakref.ref(shelf)
    first = here(group.agents[1], shelf)
    del shelf
    second = call(group.agents[1], 0, echo, first)  # to worker 0 and back
    del first
    gc.collect()
    third = pass_and_keep(group.agents[1], 2, second)
    del second
    gc.collect()
    call(group.agents[2], 1, echo, 0)
    assert value() is not None
    assert third.to_here().items == []
    del third
    kept.clear()
    expect_nothing_left(group.agents)
    eventually(lambda: value() is None)


def pass_and_keep(caller: Any, to: int, rref: RRef[Any]) -> RRef[Any]:
    call(caller, to, keep, rref)
    rref_there: RRef[Any] = kept[-1]
    return rref_there


def test_pickling_outside_a_call_is_refused(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, echo, 5)
    for dump in (lambda: pickle.dumps(rref), lambda: pickle.dumps([1, {2: rref}]), rref._serialize):
        with pytest.raises(SerializationError, match=r"RRef 0:1 .*only as an argument or result of a remote call"):
            dump()
    with pytest.raises(UsageError, match=r"cannot be deep-copied; copy its value"):
        copy.deepcopy([rref])
    assert copy.copy(rref) == rref


def test_what_stands_for_it_in_a_pickle(group: LocalGroup) -> None:
    rref = here(group.agents[0], "tea")
    assert call(group.agents[0], 1, deserialized_value, Serialized(rref)) == "tea"
    with pytest.raises(SerializationError, match="outside the call that it belongs to"):
        RRef._deserialize((0,))


class Serialized:
    """Travels by way of `_serialize` and `_deserialize`."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref

    def __reduce__(self) -> Any:
        return deserialize, (self.rref._serialize(),)


def deserialize(place: tuple[int]) -> Serialized:
    return Serialized(RRef._deserialize(place))


def deserialized_value(serialized: Serialized) -> Any:
    return serialized.rref.to_here(timeout=SOON)


def test_a_pickle_of_a_call_read_after_it_is_refused(group: LocalGroup) -> None:
    assert call(group.agents[0], 1, load_later, Stored(here(group.agents[0], 1))) == "SerializationError"


class Stored:
    """Pickles by itself, and is read by itself, too late."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref

    def __reduce__(self) -> Any:
        return bytes, (pickle.dumps(self.rref),)


def load_later(data: bytes) -> str:
    try:
        pickle.loads(data)
    except SerializationError as error:
        return type(error).__name__
    return "loaded"


# -- Threads


@pytest.mark.slow
def test_many_threads_make_share_and_drop_references(group: LocalGroup) -> None:
    stop = threading.Event()
    timer = threading.Timer(3.0, stop.set)
    timer.start()
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda number: make_and_share(group, number, stop), range(8)))
    timer.join()
    assert min(counts) > 20, counts
    expect_nothing_left(group.agents)


def make_and_share(group: LocalGroup, number: int, stop: threading.Event) -> int:
    """One thread: makes references everywhere, has others fetch them, drops them; how many."""
    mine = []
    count = 0
    while not stop.is_set():
        count += 1
        maker = group.agents[(number + count) % 3]
        rref = remote(maker, (number + 2 * count) % 3, echo, (number, count))
        mine.append(rref)
        assert call(maker, count % 3, fetch_all, [rref, {1: rref}]) == [(number, count)] * 2
        back = call(maker, (count + 1) % 3, echo, rref)
        assert back.to_here(timeout=SOON) == (number, count)
        assert here(maker, count).remote().bit_length().to_here(timeout=SOON) == count.bit_length()
        if len(mine) > 5:
            assert mine.pop(count % 5).to_here(timeout=SOON)[0] == number
    return count

"""`registry`: types that are pickled in their own way in our messages, and nowhere else."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from farcall.serialization import dumps, dumps_inline, loads, register_family_reducer, register_reducer, registry
from farcall.serialization.by_value import dumps_by_value
from farcall.serialization.registry import REDUCERS, family_reducer


class Parcel:
    def __init__(self, content: Any, way: str = "its own") -> None:
        self.content = content
        self.way = way


class Gift(Parcel):
    pass


def _unpack(content: Any, way: str = "registered") -> Parcel:
    return Parcel(content, way)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before, families_before = dict(REDUCERS), dict(registry._families)  # of torch's edge, if it was imported
    REDUCERS.clear()
    registry._families.clear()
    register_reducer(Parcel, lambda parcel: (_unpack, (parcel.content,)))
    yield
    REDUCERS.clear()
    REDUCERS.update(before)
    registry._families.clear()
    registry._families.update(families_before)


def test_it_is_used_wherever_the_object_is() -> None:
    found = loads(*dumps({"a": [Parcel(1)]}))
    assert (found["a"][0].content, found["a"][0].way) == (1, "registered")
    assert pickle.loads(dumps_inline(Parcel(2))).way == "registered"
    assert pickle.loads(dumps_by_value((Parcel(3), lambda: 0), None))[0].way == "registered"


def test_other_pickles_know_nothing_of_it() -> None:
    assert pickle.loads(pickle.dumps(Parcel(1))).way == "its own"
    assert Parcel not in copyreg.dispatch_table


def test_subclasses_are_not_meant() -> None:
    assert loads(*dumps(Gift(1))).way == "its own"


def test_a_family_is_a_type_and_its_subclasses() -> None:
    register_family_reducer(Parcel, lambda parcel: (_unpack, (parcel.content, "the family's")))
    assert loads(*dumps(Gift(1))).way == "the family's"
    assert pickle.loads(dumps_by_value((Gift(1), lambda: 0), None))[0].way == "the family's"
    assert loads(*dumps(Parcel(1))).way == "registered", "that of the very type comes first"
    assert family_reducer(int) is None


def test_of_two_families_the_nearer_one_counts() -> None:
    register_family_reducer(object, lambda parcel: (_unpack, (parcel.content, "far")))
    register_family_reducer(Gift, lambda parcel: (_unpack, (parcel.content, "near")))
    assert loads(*dumps(Gift(1))).way == "near"


def test_what_is_registered_for_all_picklers_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, Gift, lambda gift: (_unpack, (gift.content, "copyreg")))
    assert loads(*dumps(Gift(1))).way == "copyreg"


def test_large_buffers_travel_beside_the_pickle() -> None:
    memory = bytearray(100_000)
    register_reducer(Parcel, lambda parcel: (_unpack, (pickle.PickleBuffer(parcel.content),)))
    payload, buffers = dumps(Parcel(memory))
    assert len(payload) < 1000
    assert [len(buffer) for buffer in buffers] == [100_000]
    assert len(loads(payload, buffers).content) == 100_000

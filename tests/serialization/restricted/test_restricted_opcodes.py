"""Pickles that must not be unpickled are refused by their opcodes, and all others pass."""

from __future__ import annotations

import copyreg
import datetime
import os
import pickle
import pickletools
import tracemalloc
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farcall.errors import NotAllowedError, SerializationError
from farcall.security.allowed import AllowList
from farcall.serialization.restricted.opcodes import MAX_DEPTH
from farcall.serialization.restricted.unpickler import loads_plain, loads_restricted

NOTHING = AllowList([])
START = b"\x80\x05"


def refused(payload: bytes, match: str) -> None:
    for load in (loads_plain, lambda payload: loads_restricted(payload, (), NOTHING)):
        with pytest.raises(NotAllowedError, match=match):
            load(payload)


# Depth

NESTING = {
    "tuples": (b"", b")", b"\x85"),
    "tuples in the memo": (b"", b")", b"\x85\x94"),
    "tuples of two": (b"", b")", b"N\x86"),
    "tuples by mark": (b"(", b")", b"t"),
    "lists": (b"]", b"N", b"a"),
    "lists by mark": (b"](", b"N", b"e"),
    "dicts": (b"}N", b"N", b"s"),
    "frozensets": (b"(", b")", b"\x91"),
}
"""What is written before the innermost value, the value, and what is written after it; each once for a level."""


def nested(kind: str, levels: int) -> bytes:
    before, innermost, after = NESTING[kind]
    return START + before * levels + innermost + after * levels + b"."


@pytest.mark.parametrize("kind", NESTING)
def test_what_is_nested_too_deeply_is_refused(kind: str) -> None:
    loads_restricted(nested(kind, 990), (), NOTHING)
    refused(nested(kind, 1010), "nested more than 1000 deep")
    refused(nested(kind, 400_000), "nested more than 1000 deep")


def test_depth_is_that_of_the_value_and_not_of_the_pickle() -> None:
    flat: Any = [((),)] * 5000 + [[[]] for _ in range(5000)]
    assert loads_restricted(pickle.dumps(flat), (), NOTHING) == flat


def test_a_list_gets_deeper_in_the_memo_too() -> None:
    """It is filled after it was put there, and fetched again."""
    deep = b"]\x94" + b"]" * 600 + b"a" * 600
    refused(START + deep + b"0" + b"]" * 600 + b"h\0" + b"a" * 600 + b".", "nested more")
    loads_plain(START + deep + b"0" + b"]" * 300 + b"h\0" + b"a" * 300 + b".")


def test_a_deque_in_a_deque_is_full() -> None:
    """They are freed recursively, so their depth has to be known when they are put into each other."""
    made = b"\x8c\x0bcollections\x8c\x05deque\x93)R\x94"
    payload = START + made + made + b"h\x00h\x01a0h\x01Na0h\x00."
    with pytest.raises(NotAllowedError, match="tries to change a deque"):
        loads_restricted(payload, (), NOTHING)
    inside: Any = deque([deque([deque()])])
    assert loads_restricted(pickle.dumps(inside), (), NOTHING) == inside


# Sharing


def shared(levels: int) -> bytes:
    return b"K\x00\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(levels))


@pytest.mark.parametrize("hashing", [b"\x8f(%b\x90.", b"(%b\x91.", b"}%bNs.", b"}(%bNu.", b"%b."])
def test_what_takes_for_ever_to_hash_is_refused(hashing: bytes) -> None:
    refused(START + hashing % shared(100), "hash")


def test_many_keys_that_take_long_are_refused() -> None:
    many = b"\x8f(" + shared(20) + b"h\x14" * 1000 + b"\x90."
    refused(START + many, "take too long to hash")


def test_usual_sharing_passes() -> None:
    row = tuple(range(1000))
    value = [row] * 1000, (row,) * 1000, {row: row, (row, row): 1}
    assert loads_restricted(pickle.dumps(value), (), NOTHING) == value


# Memory

HUGE = {
    "BINBYTES8": b"\x8e" + (1 << 40).to_bytes(8, "little"),
    "BYTEARRAY8": b"\x96" + (1 << 33).to_bytes(8, "little"),
    "BINUNICODE8": b"\x8d" + (1 << 62).to_bytes(8, "little"),
    "BINBYTES": b"B" + (1 << 31).to_bytes(4, "little"),
    "BINUNICODE": b"X" + (1 << 31).to_bytes(4, "little"),
    "LONG4": b"\x8b" + (1 << 30).to_bytes(4, "little"),
    "FRAME": b"\x95" + (1 << 62).to_bytes(8, "little"),
    "LONG_BINPUT": b"Nr\xff\xff\xff\x07",
    "LONG_BINPUT of a list": b"]r\xff\xff\xff\x07",
    "PUT": b"Np100000000\n",
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("before", [b"", b"\x8c\x08builtins\x8c\x03set\x93)R0"])
def test_a_few_bytes_reserve_no_memory(name: str, before: bytes) -> None:
    payload = START + before + HUGE[name] + b"."
    for load in (loads_plain, lambda payload: loads_restricted(payload, (), NOTHING)):
        tracemalloc.start()
        try:
            with pytest.raises((NotAllowedError, SerializationError, pickle.UnpicklingError)):
                load(payload)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_an_array_of_elements_without_contents_has_few() -> None:
    def array(count: int) -> bytes:
        return pickle.dumps(np.lib.stride_tricks.as_strided(np.ndarray((1,), "V0"), (count,), (0,)), 4)

    assert loads_restricted(array(1000), (), NOTHING).shape == (1000,)
    with pytest.raises(SerializationError, match="without contents"):
        loads_restricted(array(1 << 40), (), NOTHING)


# Old opcodes


@pytest.mark.parametrize("code", [b"\x82\x4d", b"\x83\x4d\x00", b"\x84\x4d\x00\x00\x00"])
def test_extension_codes_are_refused(code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg._extension_cache, 77, os.system)  # type: ignore[attr-defined]
    monkeypatch.setitem(copyreg._inverted_registry, 77, ("os", "system"))  # type: ignore[attr-defined]
    refused(START + code + b".", "old protocol")
    refused(START + code + b"\x85.", "old protocol")


@pytest.mark.parametrize("payload", [b"I1\n.", b"S'a'\n.", b"(l.", b"(d.", b"(ios\nsystem\n.", b"g0\n.", b"N2."])
def test_opcodes_of_old_protocols_are_refused(payload: bytes) -> None:
    refused(payload, "old protocol")


# Everything else passes

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1 << 300, 1 << 3000)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=600),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.text(), max_size=1)
        | st.frozensets(st.integers(), max_size=1)
    ),
    max_leaves=30,
)
OTHERS = [
    OrderedDict(a=[1]),
    Counter("aab"),
    deque([1], 3),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    ValueError("v", [1]),
    bytearray(b"x" * 300),
    np.arange(6).reshape(2, 3),
    "x" * 300,
    b"x" * 300,
]


@given(value=PLAIN, protocol=st.integers(3, 5))
@example(value=OTHERS, protocol=5)
@settings(max_examples=200, deadline=None)
def test_what_pickle_writes_passes(value: Any, protocol: int) -> None:
    shared_twice = [value, {"again": value, "list": [value]}]
    written = pickle.dumps(shared_twice, protocol)
    for payload in (written, pickletools.optimize(written)):
        assert repr(loads_restricted(payload, (), NOTHING)) == repr(shared_twice)


def depth_of(value: Any) -> int:
    """How deep it really is, as hashing and freeing see it: through what cannot be changed."""
    deepest, waiting = 0, [(value, 1)]
    while waiting and deepest < 10 * MAX_DEPTH:
        value, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(value, (tuple, frozenset)):
            waiting += [(part, depth + 1) for part in value]
    return deepest


@given(
    st.lists(
        st.sampled_from(
            [b"N", b"K\1", b")", b"]", b"}", b"(", b"\x85", b"\x86", b"t", b"a", b"e", b"s", b"u", b"\x94", b"0", b"1"]
            + [b"h" + bytes([place]) for place in range(5)]
            + [b"\x85" * 400, b"\x85\x94" * 300, b"N\x86" * 300]
            + [b"q\0", b"r\1\0\0\0", b"\x8c\1a", b"\x95" + bytes(8), b"\x8f", b"\x90", b"\x91"]
        ),
        max_size=40,
    )
)
@settings(max_examples=1000, deadline=None)
def test_what_passes_is_as_deep_as_was_counted(opcodes: list[bytes]) -> None:
    payload = START + b"".join(opcodes) + b"."
    try:
        value = loads_plain(payload)
    except Exception:
        return
    assert depth_of(value) <= MAX_DEPTH + 1

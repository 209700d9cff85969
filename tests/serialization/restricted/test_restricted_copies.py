"""What a short pickle cannot make large: by items of sequences, and by calls and states that copy one value often."""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest

from farcall.errors import NotAllowedError, SerializationError
from farcall.security.allowed import AllowList
from farcall.serialization.restricted.unpickler import loads_restricted

NOTHING = AllowList([])
SIZE = 100_000
TIMES = 400


def named(module: str, name: str) -> bytes:
    """The opcodes that push the object of that name."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


def memoized(*pushes: bytes) -> bytes:
    """The opcodes that put a value each into the memo, at the indexes 0, 1 ..., and leave nothing on the stack."""
    return b"".join(push + b"q" + bytes([index]) + b"0" for index, push in enumerate(pushes))


def text(size: int) -> bytes:
    """The opcode that pushes a text of so many digits."""
    return b"X" + struct.pack("<I", size) + b"1" * size


class Names(list[Any]):
    """A list that is pickled with items by key, as no list of Python is."""

    def __reduce__(self) -> Any:
        return Names, (), None, None, iter([(0, "x")])


# Items

SLICE = named("builtins", "slice") + b"K\0K\0\x86R"
SEQUENCES = {
    "list": b"]Na",
    "bytearray": b"\x96" + struct.pack("<Q", 1) + b"a",
    "deque": named("collections", "deque") + b"]Na\x85R",
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("store", [b"h\0h\1h\2s", b"h\0(h\1h\2u"], ids=["SETITEM", "SETITEMS"])
@pytest.mark.parametrize("key", [b"K\0", SLICE], ids=["index", "slice"])
@pytest.mark.parametrize("value", [b"K\1", named("builtins", "range") + b"K\5\x85R"], ids=["int", "range"])
def test_items_of_sequences_are_not_set(sequence: bytes, store: bytes, key: bytes, value: bytes) -> None:
    first = named("builtins", "slice") + b"0"  # so that pickle's C code leaves the pickle to the checks
    with pytest.raises(NotAllowedError, match="tries to set items of a"):
        loads_restricted(b"\x80\5" + first + memoized(sequence, key, value) + store + b".", (), NOTHING)


def test_items_of_a_list_of_a_class_of_its_own_are_not_set() -> None:
    with pytest.raises(NotAllowedError, match="tries to set items of a Names"):
        loads_restricted(pickle.dumps(Names(["a"])), (), AllowList([f"{__name__}.Names"]))


def test_items_of_dicts_are_set() -> None:
    value = [OrderedDict(a=1, b=2), Counter("aab"), {"a": slice(1)}]
    assert loads_restricted(pickle.dumps(value), (), NOTHING) == value


# Copies

BY_KEYWORD = b"h\0)}\x8c\5valueh\1s\x92"


@pytest.mark.parametrize(
    ("called", "given", "call"),
    [
        pytest.param(named("decimal", "Decimal"), text(SIZE), BY_KEYWORD, id="a text by keyword"),
        pytest.param(named("decimal", "Decimal"), text(SIZE), b"h\0h\1\x85\x81", id="a text"),
        pytest.param(named("builtins", "Exception"), b"(" + b"N" * SIZE + b"t", b"h\0h\1\x81", id="arguments"),
        pytest.param(
            named("farcall.errors", "RpcError"), b"(" + b"N" * SIZE + b"t", b"h\0h\1\x81", id="arguments of our errors"
        ),
        pytest.param(named("collections", "deque"), b"](" + b"N" * SIZE + b"e", b"h\0h\1\x85R", id="elements"),
        pytest.param(
            named("builtins", "Exception"),
            b"}(" + b"".join(b"\x8c\6%06dN" % number for number in range(SIZE)) + b"u",
            b"h\0)Rh\1b",
            id="attributes",
        ),
    ],
)
def test_one_value_is_not_copied_again_and_again(called: bytes, given: bytes, call: bytes) -> None:
    start = b"\x80\5" + memoized(called, given) + b"]"
    with pytest.raises(NotAllowedError, match="copies the same values again and again"):
        loads_restricted(start + (call + b"a") * TIMES + b".", (), NOTHING)
    assert len(loads_restricted(start + (call + b"a") + b".", (), NOTHING)) == 1


class Attributes:
    """Gets its attributes by a state."""


def test_what_is_sent_once_is_not_too_much() -> None:
    holder = Attributes()
    vars(holder).update({str(number): None for number in range(SIZE)})
    values: list[Any] = [Counter(range(2_000_000)), np.array([None] * 4_000_000), holder]
    counted, objects, held = loads_restricted(pickle.dumps(values), (), AllowList([f"{__name__}.Attributes"]))
    assert len(counted) == 2_000_000
    assert len(objects) == 4_000_000
    assert len(vars(held)) == SIZE


# What exceptions print


def test_an_exception_does_not_print_arrays_of_arrays() -> None:
    value: Any = "x" * 1000
    for _ in range(4):
        outer = np.empty(100, object)
        outer.fill(value)
        value = outer
    with pytest.raises(NotAllowedError, match="cannot be printed safely"):
        loads_restricted(pickle.dumps(ValueError(value)), (), NOTHING)
    record = np.zeros(1, [("a", object)])
    record["a"][0] = value
    with pytest.raises(NotAllowedError, match="cannot be printed safely"):
        loads_restricted(pickle.dumps(ValueError(record[0])), (), NOTHING)
    short = np.array(["x" * 1000] * 100, object)
    assert len(loads_restricted(pickle.dumps(ValueError(short)), (), NOTHING).args[0]) == 100


# How deep exceptions are nested


class OwnState(StopIteration):
    """Sets its state itself."""

    def __reduce__(self) -> Any:
        return OwnState, (), self.value

    def __setstate__(self, state: Any) -> None:
        self.value = state


def test_exceptions_that_set_their_state_are_not_nested_deeply() -> None:
    allowed = AllowList([f"{__name__}.OwnState"])
    error = OwnState()
    for _ in range(20):
        error, inner = OwnState(), error
        error.value = inner
    assert type(loads_restricted(pickle.dumps(error), (), allowed).value) is OwnState
    for _ in range(20):
        error, inner = OwnState(), error
        error.value = inner
    with pytest.raises(NotAllowedError, match="nested more than 30 deep"):
        loads_restricted(pickle.dumps(error), (), allowed)


# Records of records


def test_a_record_has_few_fields_in_all() -> None:
    made: Any = np.dtype("i1")
    for _ in range(9):
        inner, made = made, np.dtype({"names": ["a", "b", "c"], "formats": [made] * 3, "offsets": [0, 0, 0]})
    with pytest.raises(SerializationError, match="more than 10000 fields, those of the records in it included"):
        loads_restricted(pickle.dumps(np.zeros(1, made)), (), NOTHING)
    assert loads_restricted(pickle.dumps(np.zeros(1, inner)), (), NOTHING).dtype == inner


# Deques with lists in between


def test_few_deques_contain_another_one() -> None:
    flat: deque[Any] = deque([deque() for _ in range(6000)])
    nested: list[Any] = [deque([deque()]) for _ in range(4999)]
    assert len(loads_restricted(pickle.dumps([flat, nested]), (), NOTHING)[1]) == 4999
    with pytest.raises(NotAllowedError, match="more than 5000 deques"):
        loads_restricted(pickle.dumps([flat, nested, nested[0].copy()]), (), NOTHING)

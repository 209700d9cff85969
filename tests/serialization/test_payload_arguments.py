"""Arguments and results as they are pickled for a call, and the refusal of what cannot be."""

from __future__ import annotations

import pickle
import socket
import threading
from collections import deque
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from payload_stage import Holder, plain_data, train

from farcall.errors import SerializationError, UsageError
from farcall.serialization import (
    OUT_OF_BAND_MIN_BYTES,
    dumps,
    dumps_arguments,
    dumps_plain_arguments,
    dumps_plain_result,
    dumps_result,
    loads,
    loads_arguments,
)


class Slotted:
    __slots__ = ("lock", "name")

    def __init__(self) -> None:
        self.name = "x"
        self.lock = threading.Lock()


class RaisesOnPickling:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class RaisesOnLoading:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


# Arguments


@pytest.mark.parametrize("args", [0, "", b"", set(), {}, None])
@pytest.mark.parametrize("by_value", [False, True])
def test_an_empty_value_of_a_wrong_type_is_no_list_of_arguments(args: Any, by_value: bool) -> None:
    with pytest.raises(UsageError, match="args must be a tuple or list of arguments, not "):
        dumps_arguments(train, args, {"lr": 1}, by_value=by_value)
    with pytest.raises(UsageError, match="args must be a tuple or list of arguments, not "):
        dumps_arguments(train, args, by_value=by_value)


@pytest.mark.parametrize("kwargs", [0, "", (), [], set()])
def test_an_empty_value_of_a_wrong_type_is_no_dict_of_arguments(kwargs: Any) -> None:
    for args in ((), (1,)):
        with pytest.raises(UsageError, match="kwargs must be a dict from names to arguments, not "):
            dumps_arguments(train, args, kwargs)


@pytest.mark.parametrize("sent", [7, None, "ab", [1, 2], [(1,), {}, 3], {"a": 1, "b": 2}, [[1], {}], [(), []]])
def test_a_pickle_without_arguments_cannot_be_rebuilt(sent: Any) -> None:
    with pytest.raises(SerializationError, match="where the arguments of a call are expected") as caught:
        loads_arguments(pickle.dumps(sent))
    assert isinstance(caught.value.__cause__, ValueError)


@given(st.lists(plain_data, max_size=3), st.dictionaries(st.text(max_size=5), plain_data, max_size=3))
def test_arguments_come_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    payload, buffers = dumps_arguments(train, tuple(args), kwargs)
    assert loads_arguments(payload, buffers) == (tuple(args), kwargs)


class Number(int):
    pass


ATOMIC = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.complex_numbers(allow_nan=False)
)


@given(st.lists(ATOMIC, min_size=1, max_size=4))
def test_plain_arguments_and_results_are_the_same_in_fewer_steps(args: list[Any]) -> None:
    packed = dumps_plain_arguments(tuple(args))
    assert packed is not None
    assert loads_arguments(*packed) == (tuple(args), {})
    for value in args:
        found = dumps_plain_result(value)
        if value is None:
            assert found is None
        else:
            assert found is not None
            assert loads(*found) == value
            assert type(loads(*found)) is type(value)


def test_plain_arrays_too() -> None:
    array = np.arange(4)
    dumps(array)  # the first array that is pickled makes numpy's type known
    packed = dumps_plain_arguments((array, np.ones(2)))
    assert packed == dumps_arguments(train, (array, np.ones(2)))
    assert dumps_plain_result(array) == dumps_result(train, array)


@pytest.mark.parametrize(
    "args",
    [
        (),
        [1],
        None,
        ([1],),
        (1, (2,)),
        (Number(3),),
        (b"x" * 16384,),
        (np.arange(2), 1),
        (1, np.arange(2)),
        (np.int64(1),),
    ],
)
def test_what_is_not_plain_goes_the_long_way(args: Any) -> None:
    assert dumps_plain_arguments(args) is None
    for value in args or ():
        if type(value) not in (int, np.ndarray):
            assert dumps_plain_result(value) is None


def test_no_arguments_are_the_empty_payload() -> None:
    assert dumps_arguments(train, (), {}) == (b"", [])
    assert dumps_arguments(train, ()) == (b"", [])
    assert loads_arguments(b"") == ((), {})


def test_each_call_gets_keywords_of_its_own() -> None:
    loads_arguments(b"")[1]["changed"] = True
    assert loads_arguments(b"") == ((), {})


@pytest.mark.parametrize("args", [[1, {"a": 2}], range(2), deque([1, 2])])
def test_arguments_in_another_sequence_are_the_same_arguments(args: Any) -> None:
    payload, _ = dumps_arguments(train, args, {})
    assert loads_arguments(payload) == (tuple(args), {})


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (3, r"not 3: for one argument, \(x,\)"),
        ("bob", r"not 'bob': for one argument, \(x,\)"),
        (b"bob", "not b'bob': for one"),
        (bytearray(b"bob"), ".*: for one"),
        ({1, 2}, r"not \{1, 2\}: for one"),
        ({"x": 1}, r"not \{'x': 1\}: did you mean kwargs\?"),
    ],
)
def test_what_is_no_list_of_arguments_is_refused(args: Any, hint: str, by_value: bool) -> None:
    with pytest.raises(UsageError, match=rf"args must be a tuple or list of arguments, {hint}"):
        dumps_arguments(print, args, by_value=by_value)


@pytest.mark.parametrize("kwargs", [[("x", 1)], {"x"}, "x", 3])
def test_keywords_that_are_no_mapping_are_refused(kwargs: Any) -> None:
    with pytest.raises(UsageError, match="kwargs must be a dict from names to arguments, not "):
        dumps_arguments(print, (), kwargs)


def test_keywords_may_be_any_mapping() -> None:
    payload, _ = dumps_arguments(print, (), MappingProxyType({"x": 1}))  # which cannot be pickled itself
    assert loads_arguments(payload) == ((), {"x": 1})


def test_a_function_by_value_stands_in_front_and_shares_with_its_arguments() -> None:
    shared: list[int] = []
    payload, _ = dumps_arguments(lambda x: x is shared, (shared,), {"y": 1}, by_value=True)
    (function, *args), kwargs = loads_arguments(payload)
    assert function(*args)
    assert kwargs == {"y": 1}
    payload, _ = dumps_arguments(lambda: 3, (), by_value=True)
    (function,), kwargs = loads_arguments(payload)
    assert function() == 3
    assert kwargs == {}


def test_large_arguments_travel_beside_the_payload() -> None:
    payload, buffers = dumps_arguments(
        train, (np.zeros(OUT_OF_BAND_MIN_BYTES),), {"rate": np.ones(OUT_OF_BAND_MIN_BYTES)}
    )
    assert len(buffers) == 2
    (model,), kwargs = loads_arguments(payload, buffers)
    assert model.sum() == 0
    assert kwargs["rate"].sum() == OUT_OF_BAND_MIN_BYTES


# Refusals


def refusal(*args: Any, function: Any = train, worker: str = "worker1", by_value: bool = False, **kwargs: Any) -> str:
    with pytest.raises(SerializationError) as caught:
        dumps_arguments(function, args, kwargs, worker, by_value)
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_a_refused_argument_is_named_by_position_and_parameter() -> None:
    assert refusal(1, threading.Lock()) == (
        "argument 2 ('lock') of worker1's `train` cannot be pickled: it is a `_thread.lock` "
        "(TypeError: cannot pickle '_thread.lock' object). Pass plain data instead, or create it on worker1"
    )


def test_a_refused_argument_without_a_parameter_is_named_by_position() -> None:
    assert refusal(1, 2, threading.Lock()).startswith("argument 3 of worker1's `train` ")
    assert refusal(threading.Lock(), function="train").startswith("argument 1 of worker1's `train` ")
    assert refusal(threading.Lock(), function=max, worker="").startswith("argument 1 of `max` ")


def test_a_refused_keyword_is_named() -> None:
    assert refusal(1, rate=threading.Lock()).startswith("argument 'rate' of worker1's `train` ")


def test_the_part_to_blame_is_named_with_the_way_to_it() -> None:
    lock = threading.Lock()
    assert "model.parts['a'][1] is a `_thread.lock`" in refusal(Holder(parts={"a": [0, lock]}))
    assert "model.lock is a `_thread.lock`" in refusal(Slotted())


def test_a_refused_function_is_named_with_its_variable() -> None:
    lock = threading.Lock()
    text = refusal(1, function=lambda x: lock, by_value=True)
    assert text.startswith("the function `<lambda>` for worker1 cannot be pickled: ")
    assert "<lambda> → variable 'lock' is a `_thread.lock`" in text
    assert refusal(1, lock, function=lambda x, y: 0, by_value=True).startswith(
        "argument 2 ('y') of worker1's `<lambda>`"
    )


def test_a_refused_socket_generator_and_file() -> None:
    with socket.socket() as connection, Path(__file__).open("rb") as file:
        assert "`socket.socket`" in refusal(connection)
        assert "`_io.BufferedReader`" in refusal(file)
    assert "`generator`" in refusal(number for number in [1])


def test_a_refused_result_names_function_and_type() -> None:
    with pytest.raises(SerializationError) as caught:
        dumps_result(train, {"x": threading.Lock()}, "worker1")
    text = str(caught.value)
    assert text.startswith("the result of worker1's `train` cannot be pickled: the result['x'] is a `_thread.lock` (")
    with pytest.raises(SerializationError, match=r"^the result of `train` cannot be pickled: it is a `generator` "):
        dumps_result("train", (number for number in [1]))


def test_a_result_comes_back() -> None:
    assert dumps_result(train, None) == (b"", [])
    payload, buffers = dumps_result(train, np.zeros(OUT_OF_BAND_MIN_BYTES))
    assert loads(payload, buffers).shape == (OUT_OF_BAND_MIN_BYTES,)


def test_a_refused_value() -> None:
    with pytest.raises(SerializationError, match=r"^the value cannot be pickled: it is a `_thread.lock`"):
        dumps(threading.Lock())


@pytest.mark.parametrize("beside", [0, lambda: 0], ids=["plain", "by value"])
def test_what_is_nested_too_deeply_is_refused(beside: Any) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        assert refusal([beside, deep]) == (
            "argument 1 ('model') of worker1's `train` cannot be pickled: this `list` is nested too deeply. "
            "Send it flattened"
        )
    finally:
        while deep:  # lest its end recurses as deeply
            deep = deep.pop()


def test_no_memory_is_a_refusal_too() -> None:
    assert "not enough memory" in refusal(RaisesOnPickling(MemoryError()))


def test_any_error_while_pickling_is_a_refusal() -> None:
    assert "(ZeroDivisionError: odd)" in refusal(RaisesOnPickling(ZeroDivisionError("odd")))


@pytest.mark.parametrize("dump", [dumps, partial(dumps_result, train), lambda value: dumps_arguments(train, (value,))])
def test_an_interrupt_passes_through(dump: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        dump(RaisesOnPickling(KeyboardInterrupt()))


def test_what_cannot_be_rebuilt_says_so() -> None:
    payload = pickle.dumps(RaisesOnLoading())
    with pytest.raises(SerializationError, match=r"cannot be rebuilt here \(ValueError: .*is the same code installed"):
        loads(payload)
    missing = pickle.dumps(Holder()).replace(b"Holder", b"Absent")
    with pytest.raises(SerializationError, match="Absent"):
        loads_arguments(missing)
    with pytest.raises(SerializationError):
        loads(b"garbage")


def test_a_missing_buffer_is_an_error() -> None:
    payload, _ = dumps(np.zeros(OUT_OF_BAND_MIN_BYTES))
    with pytest.raises(SerializationError):
        loads(payload)


def test_a_class_that_this_script_has_not_comes_with_advice() -> None:
    with pytest.raises(
        SerializationError, match=r"Absent.*; define it at the top level of the script, before init_rpc, on"
    ):
        loads(b"c__main__\nAbsent\n.")

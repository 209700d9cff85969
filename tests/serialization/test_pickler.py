from __future__ import annotations

import pickle
import socket
import subprocess
import sys
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

from farcall.errors import SerializationError, UsageError
from farcall.serialization import (
    OUT_OF_BAND_SIZE,
    dumps,
    dumps_arguments,
    dumps_inline,
    dumps_result,
    loads,
    loads_arguments,
)

SCRIPT = """
state = "sender's"
def read(): return state
class Box:
    def __init__(self, value): self.value = value
def make():
    def inner(): return read()
    return inner
call_read = lambda: read()
"""

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers()
)
plain_data = st.recursive(
    scalars.filter(lambda value: value == value),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def train(model: Any, lock: Any = None, *rest: Any, rate: float = 0.1) -> None: ...


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


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


def round_trip(value: Any) -> Any:
    payload, buffers = dumps(value)
    return loads(payload, [bytearray(buffer) for buffer in buffers])


# Plain data


@given(plain_data)
def test_plain_data_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    got = round_trip(value)
    assert got == value
    assert type(got) is type(value)


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_comes_back_surrogates_included(text: str) -> None:
    assert round_trip(text) == text
    assert round_trip({text: [text]}) == {text: [text]}


def test_none_is_the_empty_payload() -> None:
    assert dumps(None) == (b"", [])
    assert loads(b"") is None
    assert loads(memoryview(b"")) is None


@pytest.mark.parametrize("value", [False, 0, "", b"", (), [], {}])
def test_other_empty_values_are_not_none(value: Any) -> None:
    payload, _ = dumps(value)
    assert payload
    assert loads(payload) == value


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_payload_may_be_any_buffer(wrap: Any) -> None:
    payload, _ = dumps({"a": [1, 2]})
    assert loads(wrap(payload)) == {"a": [1, 2]}


def test_what_is_shared_stays_shared() -> None:
    inner: list[Any] = []
    inner.append(inner)
    first, second = round_trip((inner, inner))
    assert first is second
    assert first[0] is first


# Buffers


def test_a_large_array_travels_beside_the_payload_as_a_view_of_its_own_memory() -> None:
    array = np.arange(OUT_OF_BAND_SIZE, dtype=np.uint8)
    payload, buffers = dumps({"x": array})
    assert len(payload) < 1000
    (view,) = buffers
    assert isinstance(view, memoryview)
    assert (view.nbytes, view.format, view.ndim, view.contiguous) == (array.nbytes, "B", 1, True)
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)


def test_a_small_array_stays_in_the_payload_and_is_writable_there() -> None:
    array = np.arange(OUT_OF_BAND_SIZE - 1, dtype=np.uint8)
    payload, buffers = dumps(array)
    assert buffers == []
    got = loads(payload)
    np.testing.assert_array_equal(got, array)
    got[0] = 7


def test_a_received_array_uses_the_received_memory() -> None:
    payload, buffers = dumps(np.zeros(OUT_OF_BAND_SIZE))
    memory = bytearray(buffers[0])
    got = loads(payload, [memory])
    got[0] = 1.0
    assert memory[:8] == np.float64(1.0).tobytes()


def test_a_read_only_array_arrives_read_only() -> None:
    array = np.zeros(OUT_OF_BAND_SIZE)
    array.flags.writeable = False
    payload, buffers = dumps(array)
    assert buffers[0].readonly
    assert not loads(payload, [bytearray(buffers[0])]).flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(40_000.0).reshape(200, 200)),
        np.arange(80_000.0)[::2],
        np.arange(40_000.0).reshape(200, 200)[:, 3:90],
        np.zeros((0, 5)),
        np.array(3.5),
        np.array(["a", None, 3], dtype=object),
        np.zeros(9000, dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["fortran", "strided", "block", "empty", "scalar", "objects", "records"],
)
def test_arrays_of_every_layout_come_back(array: Any) -> None:
    got = round_trip(array)
    np.testing.assert_array_equal(got, array)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)


def test_buffers_keep_their_order_and_shared_arrays_travel_once() -> None:
    arrays = [np.full(OUT_OF_BAND_SIZE, fill, np.uint8) for fill in (1, 2, 3)]
    payload, buffers = dumps([*arrays, arrays[0], np.ones(3)])
    assert [buffer[0] for buffer in buffers] == [1, 2, 3]
    got = loads(payload, buffers)
    assert [int(array[0]) for array in got] == [1, 2, 3, 1, 1]
    assert got[0] is got[3]


def test_buffers_of_a_value_that_goes_by_value_travel_once() -> None:
    array = np.zeros(OUT_OF_BAND_SIZE)
    payload, buffers = dumps([array, lambda: 5])
    assert len(buffers) == 1
    got, function = loads(payload, buffers)
    assert got.shape == array.shape
    assert function() == 5


def test_inline_keeps_all_in_the_payload() -> None:
    array = np.arange(OUT_OF_BAND_SIZE)
    np.testing.assert_array_equal(loads(dumps_inline(array)), array)


# By name, by value


def test_lambdas_closures_and_local_classes_go_by_value() -> None:
    offset = 10

    class Local:
        def double(self, x: int) -> int:
            return 2 * x + offset

    assert round_trip(lambda x: x + offset)(1) == 11
    assert round_trip(partial(lambda x, y: x - y, 10))(3) == 7
    got = round_trip(Local())
    assert got.double(1) == 12
    assert type(got) is Local  # within one process it stays the very class


def test_named_functions_and_classes_go_by_name_even_beside_lambdas() -> None:
    function, cls, _ = round_trip([train, Holder, lambda: 0])
    assert function is train
    assert cls is Holder


@pytest.mark.parametrize("beside", [0, lambda: 0], ids=["plain", "by value"])
def test_what_a_script_names_is_the_receivers_own(become: Any, beside: Any) -> None:
    sender = become(SCRIPT)
    payload, _ = dumps([sender.read, sender.Box, sender.Box(3), beside])
    receiver = become(SCRIPT.replace("sender's", "receiver's"))
    read, box, instance, _ = loads(payload)
    assert read is receiver.read
    assert read() == "receiver's"
    assert box is receiver.Box
    assert type(instance) is receiver.Box
    assert instance.value == 3


def test_a_scripts_lambda_goes_by_value_but_calls_the_receivers_functions(become: Any) -> None:
    sender = become(SCRIPT)
    payload, _ = dumps([sender.call_read, sender.make()])
    become(SCRIPT.replace("sender's", "receiver's"))
    assert [function() for function in loads(payload)] == ["receiver's", "receiver's"]


def test_what_an_interactive_main_defines_goes_by_value(become: Any) -> None:
    sender = become(SCRIPT, interactive=True)
    payload, _ = dumps([sender.read, sender.Box(3), sender.Box])
    become("")
    read, instance, box = loads(payload)
    assert read() == "sender's"
    assert instance.value == 3
    assert isinstance(instance, box)


def test_an_interactive_process_sends_arrays_beside_the_payload_too(become: Any) -> None:
    become("", interactive=True)
    payload, buffers = dumps(np.ones(OUT_OF_BAND_SIZE))
    assert len(buffers) == 1
    assert loads(payload, buffers).sum() == OUT_OF_BAND_SIZE


@pytest.mark.parametrize("beside", [0, lambda: 0], ids=["plain", "by value"])
def test_a_spawned_childs_script_and_its_parents_are_the_same(become: Any, beside: Any) -> None:
    child = become(SCRIPT, spawned=True)
    from_child, _ = dumps([child.read, child.Box(3), beside])
    assert b"__mp_main__" in from_child
    parent = become(SCRIPT)
    for _ in range(2):  # the second time by the name that the first has made known
        read, box, _ = loads(from_child)
        assert read is parent.read
        assert type(box) is parent.Box
    from_parent, _ = dumps([parent.read, parent.Box(4), beside])
    child = become(SCRIPT, spawned=True)
    read, box, _ = loads(from_parent)
    assert read is child.read
    assert type(box) is child.Box


def test_a_missing_name_in_a_childs_script_ends_in_an_error(become: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child = become(SCRIPT, spawned=True)
    payload, _ = dumps(child.read)
    become("")
    with pytest.raises(SerializationError, match="read"):
        loads(payload)
    monkeypatch.setitem(sys.modules, "__mp_main__", None)  # an import that is blocked must not be tried for ever
    with pytest.raises(SerializationError, match="__mp_main__"):
        loads(payload)


def test_parent_and_spawned_child_of_a_real_script_understand_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from farcall.serialization import dumps, encode_function, loads, resolve_function\n"
        "class Box: pass\n"
        "def work(pipe):\n"
        "    box, blob = loads(pipe.recv_bytes()), pipe.recv_bytes()\n"
        "    assert type(box) is Box and resolve_function(blob) is work\n"
        "    pipe.send_bytes(dumps(box)[0])\n"
        "    pipe.send_bytes(encode_function(work))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    here, there = context.Pipe()\n"
        "    child = context.Process(target=work, args=(there,))\n"
        "    child.start()\n"
        "    there.close()\n"
        "    here.send_bytes(dumps(Box())[0])\n"
        "    here.send_bytes(encode_function(work))\n"
        "    assert type(loads(here.recv_bytes())) is Box\n"
        "    assert resolve_function(here.recv_bytes()) is work\n"
        "    child.join()\n"
        "    print('understood', child.exitcode)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.stderr) == ("understood 0\n", "")


# Arguments


@given(st.lists(plain_data, max_size=3), st.dictionaries(st.text(max_size=5), plain_data, max_size=3))
def test_arguments_come_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    payload, buffers = dumps_arguments(train, tuple(args), kwargs)
    assert loads_arguments(payload, buffers) == (tuple(args), kwargs)


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
    with pytest.raises(UsageError, match="kwargs must be a dict of arguments by their names, not "):
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
    payload, buffers = dumps_arguments(train, (np.zeros(OUT_OF_BAND_SIZE),), {"rate": np.ones(OUT_OF_BAND_SIZE)})
    assert len(buffers) == 2
    (model,), kwargs = loads_arguments(payload, buffers)
    assert model.sum() == 0
    assert kwargs["rate"].sum() == OUT_OF_BAND_SIZE


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
        "(TypeError: cannot pickle '_thread.lock' object). Pass plain data instead, or make it on worker1"
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
    payload, buffers = dumps_result(train, np.zeros(OUT_OF_BAND_SIZE))
    assert loads(payload, buffers).shape == (OUT_OF_BAND_SIZE,)


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
    payload, _ = dumps(np.zeros(OUT_OF_BAND_SIZE))
    with pytest.raises(SerializationError):
        loads(payload)


def test_a_class_that_this_script_has_not_comes_with_advice() -> None:
    with pytest.raises(
        SerializationError, match=r"Absent.*; define it at the top level of the script, before init_rpc, on"
    ):
        loads(b"c__main__\nAbsent\n.")

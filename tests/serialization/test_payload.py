"""Values as they are pickled: plain data, buffers beside the payload, and functions by name or by value."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from payload_stage import Holder, plain_data, train

from farcall.errors import SerializationError
from farcall.serialization import ATOMS, OUT_OF_BAND_MIN_BYTES, dumps, dumps_atom, dumps_inline, loads

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
    array = np.arange(OUT_OF_BAND_MIN_BYTES, dtype=np.uint8)
    payload, buffers = dumps({"x": array})
    assert len(payload) < 1000
    (view,) = buffers
    assert isinstance(view, memoryview)
    assert (view.nbytes, view.format, view.ndim, view.contiguous) == (array.nbytes, "B", 1, True)
    assert np.shares_memory(np.frombuffer(view, np.uint8), array)


def test_a_small_array_stays_in_the_payload_and_is_writable_there() -> None:
    array = np.arange(OUT_OF_BAND_MIN_BYTES - 1, dtype=np.uint8)
    payload, buffers = dumps(array)
    assert buffers == []
    got = loads(payload)
    np.testing.assert_array_equal(got, array)
    got[0] = 7


def test_a_received_array_uses_the_received_memory() -> None:
    payload, buffers = dumps(np.zeros(OUT_OF_BAND_MIN_BYTES))
    memory = bytearray(buffers[0])
    got = loads(payload, [memory])
    got[0] = 1.0
    assert memory[:8] == np.float64(1.0).tobytes()


def test_a_read_only_array_arrives_read_only() -> None:
    array = np.zeros(OUT_OF_BAND_MIN_BYTES)
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
    arrays = [np.full(OUT_OF_BAND_MIN_BYTES, fill, np.uint8) for fill in (1, 2, 3)]
    payload, buffers = dumps([*arrays, arrays[0], np.ones(3)])
    assert [buffer[0] for buffer in buffers] == [1, 2, 3]
    got = loads(payload, buffers)
    assert [int(array[0]) for array in got] == [1, 2, 3, 1, 1]
    assert got[0] is got[3]


def test_buffers_of_a_value_that_goes_by_value_travel_once() -> None:
    array = np.zeros(OUT_OF_BAND_MIN_BYTES)
    payload, buffers = dumps([array, lambda: 5])
    assert len(buffers) == 1
    got, function = loads(payload, buffers)
    assert got.shape == array.shape
    assert function() == 5


def test_inline_keeps_all_in_the_payload() -> None:
    array = np.arange(OUT_OF_BAND_MIN_BYTES)
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
    payload, buffers = dumps(np.ones(OUT_OF_BAND_MIN_BYTES))
    assert len(buffers) == 1
    assert loads(payload, buffers).sum() == OUT_OF_BAND_MIN_BYTES


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


@pytest.mark.parametrize("value", [0, -(2**200), 0.5, float("inf"), 1j, True, "", "tea \ud800"], ids=repr)
def test_an_atom_is_pickled_as_any_value_is(value: Any) -> None:
    assert type(value) in ATOMS
    assert (dumps_atom(value), []) == dumps(value)
    assert loads(dumps_atom(value)) == value

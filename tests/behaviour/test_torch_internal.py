"""The functions of `rpc.internal` that run and pickle calls, beside torch's own, and in real calls."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

import torch
import torch.distributed.rpc.internal as theirs

import farcall.pytorch as rpc
from farcall.pytorch import api, autograd
from farcall.pytorch import internal as ours
from farcall.pytorch.api import _barrier, _use_rpc_pickler
from farcall.pytorch.internal import _InternalRPCPickler
from farcall.pytorch.internal import _run_function as our_run_function
from torch_stage import add, echo, one_worker, run_group

BOTH = pytest.mark.parametrize("module", [theirs, ours], ids=["torch", "farcall"])
METHODS = [
    "_tensor_reducer",
    "_tensor_receiver",
    "_py_rref_reducer",
    "_py_rref_receiver",
    "_rref_reducer",
    "_script_module_reducer",
    "_script_module_receiver",
    "_register_reducer",
    "serialize",
    "deserialize",
]


class Uncopied(Exception):
    """Not made of a text alone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


class Picky(Exception):
    def __init__(self, text: str) -> None:
        raise LookupError("not with me")


def fail(error: BaseException) -> None:
    raise error


def fail_uncopied() -> None:
    raise Uncopied(3, "because")


def fail_with(text: str) -> None:
    raise KeyError(text)


def outcome(function: Any, *args: Any) -> Any:
    """What a call returns; or the type, the text and the cause's type of what it raises."""
    try:
        return function(*args)
    except BaseException as error:
        return type(error), str(error), type(error.__cause__)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", ["_run_function", "_handle_exception", *METHODS])
def test_signatures(name: str) -> None:
    if name in METHODS:
        got, expected = (getattr(module._InternalRPCPickler, name) for module in (ours, theirs))
    else:
        got, expected = getattr(ours, name), getattr(theirs, name)
    assert got is not expected
    assert parameters(got) == parameters(expected)


# Running


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is a worker; torch's functions believe that they have that agent."""
    with one_worker(tmp_path):
        monkeypatch.setattr(theirs, "_get_current_rpc_agent", api._get_current_rpc_agent)
        yield


def without_frames(text: str) -> str:
    """A traceback names the files of the function that called; nothing else differs."""
    return re.sub(r'  File ".*internal\.py", line \d+, in _run_function\n(    .*\n)+', "", text)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    "udf",
    [
        (add, (1, 2), {}),
        (add, (1,), {"right": 2}),
        (echo, (), {"value": None}),
        (add, (1, "2"), {}),
        (add, (), {}),
        (fail_uncopied, (), {}),
        (fail_with, ("C:\\users",), {}),
        (fail_with, ("häh\\n",), {}),
        AttributeError("not defined here"),
    ],
)
def test_a_function_is_run_as_torch_runs_it(udf: Any, capsys: pytest.CaptureFixture[str]) -> None:
    results, printed = [], []
    for module in (theirs, ours):
        call = udf if isinstance(udf, AttributeError) else module.PythonUDF(*udf)
        results.append(outcome(module._run_function, call))
        printed.append(without_frames(capsys.readouterr().err))
    expected, got = results
    assert type(got).__name__ == type(expected).__name__
    if isinstance(expected, theirs.RemoteException):
        assert (without_frames(got.msg), got.exception_type) == (without_frames(expected.msg), expected.exception_type)
        assert got.msg.startswith("On WorkerInfo(id=0, name=alone):\n")
        assert printed[1] == printed[0] == without_frames(got.msg) + "\n"
    else:
        assert got == expected
        assert printed == ["", ""]


@BOTH
@pytest.mark.usefixtures("worker")
def test_what_ends_the_process_is_not_caught(module: Any) -> None:
    assert outcome(module._run_function, module.PythonUDF(fail, (KeyboardInterrupt(),), {}))[0] is KeyboardInterrupt


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("plain", ValueError),
        ("two\nlines \\n", KeyError),
        ("ümlaut", RuntimeError),
        ("C:\\users", ValueError),  # torch cannot decode it
        ("text", Uncopied),
        ("text", Picky),
        ("text", KeyboardInterrupt),
        ("text", lambda text: None),
        ("text", int),
    ],
)
def test_an_exception_is_raised_again_as_torch_raises_it(text: str, kind: Any) -> None:
    expected, got = (outcome(module._handle_exception, module.RemoteException(text, kind)) for module in (theirs, ours))
    assert got == expected


@BOTH
@pytest.mark.parametrize("result", [None, 3, ("msg", ValueError), ValueError("returned")])
def test_any_other_result_is_left_alone(module: Any, result: Any) -> None:
    assert module._handle_exception(result) is None


def test_real_calls_print_and_raise_by_these_functions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        return [outcome(rpc.rpc_sync, "worker1", *call) for call in [(fail_uncopied,), (fail_with, ("C:\\users",))]]

    (uncopied, keyed), _ = run_group(tmp_path, body)
    assert uncopied[0] is RuntimeError
    assert "Failed to create original exception type. Error msg was " in uncopied[1]
    assert (
        "Original exception on remote side was On WorkerInfo(id=1, name=worker1):\nUncopied(3, 'because')"
        in uncopied[1]
    )
    assert uncopied[2] is Uncopied
    assert keyed[0] is KeyError
    assert "C:\\\\users" in keyed[1]
    assert "On WorkerInfo(id=1, name=worker1):\nUncopied(3, 'because')\nTraceback" in capfd.readouterr().err


def test_replacing_what_handles_exceptions_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(result: Any) -> None:
        raise RuntimeError(f"somebody else says: {result.exception_type.__name__}")

    monkeypatch.setattr(ours, "_handle_exception", refuse)
    with one_worker(tmp_path), pytest.raises(RuntimeError, match="somebody else says: KeyError"):
        rpc.rpc_sync("alone", fail_with, ("x",))


class Shelf:
    """A value whose methods are called by reference."""

    def __init__(self, value: int) -> None:
        self.value = value

    def plus(self, number: int) -> int:
        return self.value + number

    @rpc.functions.async_execution
    def plus_later(self, number: int) -> Any:
        return done_future(self.value + number)

    @staticmethod
    @rpc.functions.async_execution
    def double_later(number: int) -> Any:
        return done_future(2 * number)


def done_future(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


@rpc.functions.async_execution
def add_later(left: Any, right: Any) -> Any:
    return done_future(left + right)


@torch.jit.script
def scripted_add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def profiled(function: Any, *args: Any) -> Any:
    with torch.autograd.profiler_legacy.profile():
        return rpc.rpc_sync("alone", function, args)


def in_context(function: Any, *args: Any) -> Any:
    with autograd.context():
        return rpc.rpc_sync("alone", function, args)


def pickled(function: Any, *args: Any) -> Any:
    with _use_rpc_pickler(_InternalRPCPickler()):
        return rpc.rpc_sync("alone", function, args)


def on_shelf(how: str, method: str, *args: Any) -> Any:
    proxy = getattr(rpc.remote("alone", Shelf, (40,)), how)()
    result = getattr(proxy, method)(*args)
    return {"rpc_sync": lambda: result, "rpc_async": lambda: result.wait(), "remote": lambda: result.to_here()}[how]()


CALLS: dict[str, tuple[Any, list[str], Any]] = {
    "rpc_sync": (lambda: rpc.rpc_sync("alone", add, (40, 2)), ["add"], 42),
    "no arguments": (lambda: rpc.rpc_sync("alone", echo), ["echo"], None),
    "keywords": (lambda: rpc.rpc_sync("alone", add, (40,), {"right": 2}), ["add"], 42),
    "by value": (lambda: rpc.rpc_sync("alone", lambda: 42), ["<lambda>"], 42),
    "rpc_async": (lambda: rpc.rpc_async("alone", add, (40, 2)).wait(), ["add"], 42),
    "remote": (lambda: rpc.remote("alone", add, (40, 2)).to_here(), ["add"], 42),
    "async_execution": (lambda: rpc.rpc_sync("alone", add_later, (40, 2)), ["add_later"], 42),
    "remote async_execution": (lambda: rpc.remote("alone", add_later, (40, 2)).to_here(), ["add_later"], 42),
    "static async_execution": (lambda: rpc.rpc_sync("alone", Shelf.double_later, (21,)), ["double_later"], 42),
    "proxy rpc_sync": (lambda: on_shelf("rpc_sync", "plus", 2), ["Shelf", "plus"], 42),
    "proxy rpc_async": (lambda: on_shelf("rpc_async", "plus", 2), ["Shelf", "plus"], 42),
    "proxy remote": (lambda: on_shelf("remote", "plus", 2), ["Shelf", "plus"], 42),
    "proxy async_execution": (lambda: on_shelf("rpc_sync", "plus_later", 2), ["Shelf", "plus_later"], 42),
    "profiler": (lambda: profiled(add, 40, 2), ["add"], 42),
    "profiler, async_execution": (lambda: profiled(add_later, 40, 2), ["add_later"], 42),
    "autograd": (lambda: in_context(add, 40, 2), ["add"], 42),
    "autograd, flat": (lambda: in_context(add, torch.tensor(40.0), torch.tensor(2.0)).item(), ["add"], 42),
    "autograd, nested": (lambda: in_context(echo, {"a": [torch.tensor(42.0)]})["a"][0].item(), ["echo"], 42),
    "autograd, async_execution": (lambda: in_context(add_later, 40, 2), ["add_later"], 42),
    "pickler": (lambda: pickled(add, 40, 2), ["add"], 42),
    # torch sends these as messages of other kinds, which are not Python functions
    "operator": (lambda: rpc.rpc_sync("alone", torch.add, (torch.tensor(40), 2)).item(), [], 42),
    "script": (
        lambda: rpc.rpc_sync("alone", scripted_add, (torch.tensor(40), torch.tensor(2))).item(),
        [],
        42,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_replaced_run_function_runs_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    make_call, expected_names, expected = CALLS[call]
    ran: list[str] = []

    def run(python_udf: Any) -> Any:
        assert isinstance(python_udf, ours.PythonUDF)
        ran.append(python_udf.func.__name__)
        return our_run_function(python_udf)

    with one_worker(tmp_path):
        assert make_call() == expected  # before it is replaced
        with monkeypatch.context() as replaced:
            replaced.setattr(ours, "_run_function", run)
            assert make_call() == expected
        assert ran == expected_names
        assert make_call() == expected  # and after
        assert ran == expected_names


def test_a_replaced_run_function_of_the_callee_runs_the_calls(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            replaced = mock.patch.object(
                ours, "_run_function", lambda udf: ("replaced", udf.func(*udf.args, **udf.kwargs))
            )
            replaced.start()  # until the process ends
        _barrier({"worker0", "worker1"})
        return None if rank else rpc.rpc_sync("worker1", add, (40, 2))

    # The barrier's own functions return nothing that anybody reads.
    assert run_group(tmp_path, body)[0] == ("replaced", 42)


@pytest.mark.parametrize("run", [rpc.rpc_sync, in_context, profiled], ids=["plain", "autograd", "profiler"])
def test_a_replaced_run_function_describes_exceptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Any
) -> None:
    monkeypatch.setattr(ours, "_run_function", lambda udf: our_run_function(udf))
    with one_worker(tmp_path):
        found = [
            outcome(rpc.rpc_sync, "alone", *call) if run is rpc.rpc_sync else outcome(run, call[0], *call[1])
            for call in [(fail_with, ("C:\\users",)), (fail_uncopied, ())]
        ]
        monkeypatch.setattr(ours, "_run_function", lambda udf: ours.RemoteException("told so", LookupError))
        described = outcome(rpc.rpc_sync, "alone", add, (1, 2))
    (keyed, uncopied), printed = found, capfd.readouterr().err
    assert keyed[0] is KeyError
    assert "On WorkerInfo(id=0, name=alone):" in keyed[1]
    assert "C:" in keyed[1]
    assert uncopied[0] is RuntimeError
    assert "Failed to create original exception type. Error msg was " in uncopied[1]
    assert described[:2] == (LookupError, "told so")
    assert printed.count("On WorkerInfo(id=0, name=alone):\n") == 2  # once for each, by what ran it


# Tensors


def table_of(module: Any, *tensors: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
    """What the reducer returns for each, and the table."""
    tables = module._thread_local_tensor_tables
    tables.send_tables = []
    try:
        return [module._internal_rpc_pickler._tensor_reducer(tensor) for tensor in tensors], tables.send_tables
    finally:
        del tables.send_tables


@BOTH
def test_a_tensor_becomes_its_place_in_a_table(module: Any) -> None:
    first, second = torch.ones(2), torch.zeros(1)
    receiver = module._InternalRPCPickler._tensor_receiver
    reduced, table = table_of(module, first, second, first)
    assert [(function == receiver, args) for function, args in reduced] == [(True, (0,)), (True, (1,)), (True, (2,))]
    assert [id(tensor) for tensor in table] == [id(first), id(second), id(first)]
    module._thread_local_tensor_tables.recv_tables = table
    assert receiver(1) is second
    del module._thread_local_tensor_tables.recv_tables


def test_without_a_table_they_raise_what_torch_raises() -> None:
    for name, argument in (("_tensor_reducer", torch.ones(1)), ("_tensor_receiver", 0)):
        expected, got = (outcome(getattr(module._internal_rpc_pickler, name), argument) for module in (theirs, ours))
        assert got == expected
        assert got[0] is AttributeError


@BOTH
def test_values_with_tensors(module: Any) -> None:
    first, second = torch.ones(2), torch.nn.Parameter(torch.zeros(3))
    value = {"a": first, "b": [second, first], "c": (1, "text", slice(1, 2))}
    data, tensors = module.serialize(value)
    assert isinstance(data, bytes)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    got = module.deserialize(data, [tensor + 1 for tensor in tensors])
    assert got["a"] is got["b"][1]
    assert got["a"].tolist() == [2.0, 2.0]
    assert got["b"][0].tolist() == [1.0, 1.0, 1.0]
    assert got["c"] == value["c"]


def test_what_is_not_defined_here() -> None:
    data = f"c{__name__}\nnowhere\n.".encode()
    expected, got = (module.deserialize(data, []) for module in (theirs, ours))
    assert type(got) is type(expected) is AttributeError
    assert str(got) == str(expected)
    assert str(got.__cause__) == str(expected.__cause__)


@BOTH
def test_tables_of_nested_pickles_are_kept_apart(module: Any) -> None:
    class Nested:
        def __reduce__(self) -> Any:
            return pickle.loads, (pickle.dumps(module.serialize([torch.zeros(5)])[1][0].shape),)

    _, tensors = module.serialize([torch.ones(1), Nested(), torch.ones(2)])
    assert [tensor.numel() for tensor in tensors] == [1, 2]
    assert not hasattr(module._thread_local_tensor_tables, "send_tables")


@BOTH
def test_a_pickler_of_a_programs_own(module: Any) -> None:
    class Doubling(module._InternalRPCPickler):  # type: ignore[misc,name-defined]
        def _tensor_reducer(self, tensor: torch.Tensor) -> Any:
            return super()._tensor_reducer(tensor * 2)

    pickler = Doubling()
    pickler._register_reducer(complex, lambda number: (str, (f"first {number}",)))
    pickler._register_reducer(complex, lambda number: (str, (f"second {number}",)))
    data, tensors = pickler.serialize((torch.ones(1), 1j))
    assert [tensor.item() for tensor in tensors] == [2.0]
    assert pickler.deserialize(data, tensors)[1] == "first 1j"
    data, tensors = module.serialize((torch.ones(1), 1j))
    assert tensors[0].item() == 1.0
    assert module.deserialize(data, tensors)[1] == 1j


@BOTH
def test_another_pickler_and_unpickler(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Pickler(pickle.Pickler):
        def dump(self, obj: Any) -> None:
            used.append("pickler")
            super().dump(obj)

    class Unpickler(pickle.Unpickler):
        def load(self) -> Any:
            used.append("unpickler")
            return super().load()

    monkeypatch.setattr(module, "_pickler", Pickler)
    monkeypatch.setattr(module, "_unpickler", Unpickler)
    assert module.deserialize(*module.serialize([torch.ones(1)]))[0].item() == 1.0
    assert used == ["pickler", "unpickler"]


def test_functions_by_value_have_their_tensors_apart_once() -> None:
    tensor = torch.ones(3)
    data, tensors = ours.serialize((tensor, lambda: tensor.sum().item()))
    assert len(tensors) == 1
    _, function = ours.deserialize(data, [tensor * 2])
    assert function() == 6.0


class Doubled:
    """Pickled by a reducer only."""

    def __init__(self, value: int) -> None:
        self.value = value


def reduce_doubled(doubled: Doubled) -> Any:
    return Doubled, (doubled.value * 2,)


def value_of(doubled: Doubled) -> int:
    return doubled.value


def test_a_reducer_of_the_default_pickler_counts_for_calls(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        ours._internal_rpc_pickler._register_reducer(Doubled, reduce_doubled)
        return rpc.rpc_sync(f"worker{1 - rank}", value_of, (Doubled(21),))

    assert run_group(tmp_path, body) == [42, 42]


# References


def owner_of(rref: Any) -> str:
    return str(rref.owner().name)


class Counting(ours._InternalRPCPickler):
    seen: list[str] = []  # noqa: RUF012 (of one test)

    def _rref_reducer(self, rref: Any) -> Any:
        self.seen.append("rref")
        return super()._rref_reducer(rref)

    def _py_rref_reducer(self, py_rref: Any) -> Any:
        self.seen.append("py_rref")
        return super()._py_rref_reducer(py_rref)


def test_a_reference_is_pickled_by_its_reducer(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        rref = rpc.RRef(rank)
        before = owner_of(rref), rpc.rpc_sync(f"worker{1 - rank}", owner_of, (rref,))
        with api._use_rpc_pickler(Counting()):
            inside = rpc.rpc_sync(f"worker{1 - rank}", owner_of, (rref,))
        return before, inside, Counting.seen[:2]

    for rank, found in enumerate(run_group(tmp_path, body)):
        me = f"worker{rank}"
        assert found == ((me, me), me, ["rref", "py_rref"])


def test_replacing_the_reducer_of_references_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = ours._internal_rpc_pickler._py_rref_reducer
    seen = []
    monkeypatch.setattr(ours._internal_rpc_pickler, "_py_rref_reducer", lambda rref: seen.append(rref) or reduce(rref))
    with one_worker(tmp_path):
        rref = rpc.RRef(1)
        assert rpc.rpc_sync("alone", owner_of, (rref,)) == "alone"
        assert seen == [rref]
        reducer, receiver = ours._internal_rpc_pickler._rref_reducer, ours._InternalRPCPickler._py_rref_receiver
        with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
            reducer(rref)
        monkeypatch.setattr(rpc.RRef, "_serialize", lambda self: ("fork", "data"))
        monkeypatch.setattr(rpc.PyRRef, "_deserialize", staticmethod(lambda data: ("made of", data)))
        assert reducer(rref) == (receiver, (("fork", "data"),))
        assert receiver(("fork", "data")) == ("made of", ("fork", "data"))
        monkeypatch.undo()


# Script modules


@BOTH
def test_a_script_module(module: Any) -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 1))
    receiver, (saved,) = module._internal_rpc_pickler._script_module_reducer(scripted)
    assert receiver == module._InternalRPCPickler._script_module_receiver
    assert isinstance(saved, bytes)
    for again in (receiver(saved), module.deserialize(*module.serialize(scripted))):
        assert isinstance(again, torch.jit.ScriptModule)
        assert torch.equal(again(torch.ones(2)), scripted(torch.ones(2)))

"""`callees`: operators, script functions and calls that a program pickles itself, on another worker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from script_stage import script

from farcall.pytorch import api, functions
from farcall.pytorch.callees import make_call, run_builtin, run_script
from farcall.pytorch.internal import PythonUDF, _InternalRPCPickler
from farcall.testing.local import LocalGroup


@script
def scaled(x, factor: int = 2, shift: float = 0.0):  # type: ignore[no-untyped-def]
    return x * factor + shift


@script
def refused(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 2:
        raise ValueError("not two of them")
    return x


@functions.async_execution
@script
def later(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.jit._fork(refused, x)


@functions.async_execution
@script
def never_later() -> int:
    return 3


def described(x: Any, *, y: int = 0) -> str:
    return f"{x} {y}"


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with LocalGroup(2) as group:
        yield group


@pytest.mark.usefixtures("group")
class TestOnAnotherWorker:
    def test_an_operator(self) -> None:
        assert torch.equal(api.rpc_sync("worker1", torch.add, (torch.ones(2), 1), {"alpha": 3}), torch.full((2,), 4.0))

    def test_a_script_function_with_arguments_by_place_and_by_name(self) -> None:
        assert torch.equal(api.rpc_sync("worker1", scaled, (torch.ones(2),)), torch.full((2,), 2.0))
        assert torch.equal(
            api.rpc_async("worker1", scaled, (torch.ones(2), 3), {"shift": 0.5}).wait(), torch.full((2,), 3.5)
        )
        assert api.remote("worker1", scaled, (torch.ones(2),)).owner_name() == "worker1"

    def test_what_a_script_function_raises(self) -> None:
        with pytest.raises(RuntimeError, match=r"not two of them"):
            api.rpc_sync("worker1", refused, (torch.ones(2),))

    def test_of_a_marked_one_the_caller_gets_what_its_future_gives(self) -> None:
        assert torch.equal(api.rpc_sync("worker1", later, (torch.ones(3),)), torch.ones(3))
        with pytest.raises(Exception, match="not two of them"):
            api.rpc_sync("worker1", later, (torch.ones(2),))

    def test_a_marked_one_without_a_future(self) -> None:
        with pytest.raises(RuntimeError, match="must return an IValue of Future type, but got Int"):
            api.rpc_sync("worker1", never_later)

    def test_a_type_that_does_not_fit_is_the_callees_to_tell(self) -> None:
        with pytest.raises(RuntimeError, match=r"scaled\(\) Expected a value of type 'int' for argument 'factor'"):
            api.rpc_sync("worker1", scaled, (torch.ones(1), "three"))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1, 2, 3, 4), {}, r"scaled\(\) expected at most 3 argument\(s\) but received 4 argument\(s\)\. Declaration: "),
        ((), {"shift": 1.0}, r"scaled\(\) is missing value for argument 'x'\. Declaration: "),
        ((1,), {"shfit": 1.0}, r"Unknown keyword argument 'shfit' for operator 'scaled'\. Schema: "),
        ((1,), {"x": 1}, r"scaled\(\) got argument 'x' twice"),
    ],
)
def test_the_wrong_arguments_are_refused_before_anything_is_sent(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make_call(scaled, args, kwargs)


def test_a_python_function_is_called_itself() -> None:
    args, kwargs = (1,), {"y": 2}
    assert make_call(described, args, kwargs) == (described, args, kwargs)


def test_a_script_function_that_is_not_here() -> None:
    with pytest.raises(
        RuntimeError, match=r"no script function `__torch__.some.where.f` on this worker: import some\.where"
    ):
        run_script("__torch__.some.where.f", (), {})


def test_an_operator_that_has_no_version_for_such_arguments() -> None:
    with pytest.raises(RuntimeError, match="aten::add"):
        run_builtin("aten::add", (object(),), {})


class CountingPickler(_InternalRPCPickler):
    def __init__(self) -> None:
        self.calls: list[PythonUDF] = []

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        self.calls.append(obj)
        return super().serialize(obj)


class NamingPickler:
    """Sends no arguments but names, in a pickle of its own."""

    def serialize(self, obj: PythonUDF) -> tuple[bytes, list[torch.Tensor]]:
        return pickle.dumps(PythonUDF(obj.func, tuple(map(repr, obj.args)), obj.kwargs)), []


class LosingPickler:
    """Names what is nowhere."""

    def serialize(self, obj: PythonUDF) -> tuple[bytes, list[torch.Tensor]]:
        return b"c%b\nnowhere\n." % __name__.encode(), []


@pytest.mark.usefixtures("group")
class TestOwnPicklers:
    def test_the_call_goes_through_it(self) -> None:
        pickler = CountingPickler()
        with api._use_rpc_pickler(pickler):
            assert api.rpc_sync("worker1", described, (torch.ones(1),), {"y": 2}) == "tensor([1.]) 2"
            assert api.remote("worker1", described, ("x",)).to_here() == "x 0"
        assert {call.func for call in pickler.calls} == {described}
        pickled = len(pickler.calls)
        api.rpc_sync("worker1", described, (1,))
        assert len(pickler.calls) == pickled

    def test_with_a_format_of_its_own(self) -> None:
        with api._use_rpc_pickler(NamingPickler()):
            assert api.rpc_sync("worker1", described, ("x",), {"y": 1}) == "'x' 1"

    def test_what_is_not_defined_at_the_other_end(self) -> None:
        with (
            api._use_rpc_pickler(LosingPickler()),
            pytest.raises(AttributeError, match=r"(?s)nowhere.*UDFs are defined"),
        ):
            api.rpc_sync("worker1", described, (1,))

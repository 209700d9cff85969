"""`farcall.pytorch.allow_list`: what the option `allow` means for what is inside of calls at the torch edge."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from eventually import eventually
from farcall.api import current_agent
from farcall.errors import NotAllowedError
from farcall.pytorch import allow_list, api, autograd, callees, envelopes, internal, rref, tensors
from farcall.pytorch.api import _gather_to_leader
from farcall.pytorch.autograd import post, riding, short_calls
from farcall.pytorch.worker_info import WorkerInfo
from torch_stage import one_worker, options, run_group

ME = "alone"
HERE = __name__
THEIRS = (1 << 48) + 5
"""A context of another worker."""
touched: list[str] = []


def double(x: Any) -> Any:
    return x * 2


def private(x: Any) -> Any:
    touched.append("private")
    return x


def touch(what: str) -> str:
    touched.append(what)
    return what


class Touching:
    """Calls a function that is not allowed when it is unpickled."""

    def __reduce__(self) -> Any:
        return touch, ("touched",)


class By:
    """A pickle that calls what it is told."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.how = function, args

    def __reduce__(self) -> Any:
        return self.how


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def call(function: Callable[..., Any], *args: Any) -> Any:
    """As a worker that keeps to nothing would: no callee of ours in between."""
    agent: Any = current_agent()
    return agent.call(agent.get_worker_info(ME), function, args, None, 10, False).wait()


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    touched.clear()
    yield
    touched.clear()


@pytest.fixture(params=[(), ("farcall.pytorch",), ("farcall.*",)], ids=["own", "edge", "pattern"])
def restricted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    with one_worker(tmp_path, allow=(f"{HERE}.double", *request.param)):
        yield


@pytest.mark.usefixtures("restricted")
class TestPickles:
    """Inside of calls: loaded by the list."""

    def test_a_pickled_call_loads_what_is_allowed_only(self) -> None:
        with pytest.raises(NotAllowedError):
            call(callees.run_bytes, pickle.dumps(Touching()), [])
        assert not touched

    def test_deserialize_in_an_argument_is_no_way_around(self) -> None:
        with pytest.raises(NotAllowedError):
            call(double, By(internal.deserialize, pickle.dumps(Touching()), []))
        assert not touched

    @pytest.mark.parametrize("function", [double, envelopes.run, envelopes.run_remotely])
    def test_an_envelope_is_no_way_around(self, function: Any) -> None:
        body = pickle.dumps((double, (Touching(),), {}))
        with pytest.raises(NotAllowedError, match="touch"):
            call(function, By(envelopes._Opened, WorkerInfo(ME, 0), body, [], {}))
        assert not touched

    @pytest.mark.parametrize("function", [private, bytearray, operator.add])
    def test_the_function_of_an_envelope_is_judged(self, function: Any) -> None:
        body = pickle.dumps((function, (b"", []), {}))
        opened = By(envelopes._Opened, WorkerInfo(ME, 0), body, [], {})
        with pytest.raises(NotAllowedError, match="not allowed"):
            call(envelopes.run, opened)
        assert not touched

    @pytest.mark.parametrize(
        "parts",
        [
            ("alone", b"", [], {}),
            (WorkerInfo(ME, 0), "body", [], {}),
            (WorkerInfo(ME, 0), b"", [1], {}),
            (WorkerInfo(ME, 0), b"", (), {}),
            (WorkerInfo("nobody", 7), b"", [], {}),
            (WorkerInfo(ME, 0), b"", [], {"profiler": (1, ())}),
            (WorkerInfo(ME, 0), b"", [], {"autograd": riding.Ticket("x", 1, 1, [], True)}),  # type: ignore[arg-type]
            (WorkerInfo(ME, 0), b"", [], {"autograd": (1, 1, 1, [])}),
        ],
    )
    def test_what_is_no_envelope_is_refused(self, parts: Any) -> None:
        before = post.contexts().counts()
        with pytest.raises(RuntimeError):
            call(envelopes.run, By(envelopes._Opened, *parts))
        assert post.contexts().counts() == before

    def test_only_envelopes_are_run(self) -> None:
        with pytest.raises(TypeError, match="in place of a _Opened"):
            call(envelopes.run, [])
        with pytest.raises(TypeError, match="in place of a _Opened"):
            call(envelopes.run_remotely, [])

    def test_a_function_in_a_context_is_judged_and_runs_if_it_is_allowed(self) -> None:
        x = torch.ones(2, requires_grad=True)
        with autograd.context(), pytest.raises(NotAllowedError, match="private"):
            rpc.rpc_sync(ME, private, (x,))
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(ME, double, (x,)).sum()
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]
        assert not touched


def test_a_pickled_call_is_judged_by_its_function(tmp_path: Path) -> None:
    with one_worker(tmp_path, allow=(f"{HERE}.double", "farcall.pytorch")):
        udf = internal.PythonUDF(double, (2,), {})
        assert call(callees.run_bytes, *internal.serialize(udf)) == 4
        with pytest.raises(NotAllowedError, match="bytearray"):
            call(callees.run_bytes, *internal.serialize(udf._replace(func=bytearray)))
        with pytest.raises(NotAllowedError, match="bytearray"):
            call(callees.run_pickled, udf._replace(func=bytearray))


def test_a_worker_without_a_list_loads_anything(tmp_path: Path) -> None:
    with one_worker(tmp_path):
        assert allow_list.current_allow_list() is None
        assert call(double, By(internal.deserialize, pickle.dumps(Touching()), [])) == "touchedtouched"


def test_who_serves_for_a_worker_that_has_ended_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envelopes.loads_apart(pickle.dumps(1), []) == 1
    monkeypatch.setattr(allow_list, "on_serving_thread", lambda: True)
    with pytest.raises(RuntimeError, match="init_rpc"):
        envelopes.loads_apart(pickle.dumps(1), [])


class TestOperators:
    """By their own names."""

    @pytest.mark.parametrize("name", ["import_module::__call__", "load_library::__call__", "aten::__class__", "aten::"])
    def test_only_operators_are_operators(self, name: str) -> None:
        with pytest.raises(RuntimeError, match="there is no operator"):
            callees.run_builtin(name, (HERE,), {})

    @pytest.mark.parametrize("entries", [(), ("farcall.pytorch.callees.run_builtin",), ("torch.ops.aten.mul",)])
    def test_refused_by_name(self, tmp_path: Path, entries: tuple[str, ...]) -> None:
        with (
            one_worker(tmp_path, allow=("unused", *entries)),
            pytest.raises(NotAllowedError, match=r"torch\.ops\.aten\.add"),
        ):
            rpc.rpc_sync(ME, torch.add, (torch.ones(2), 1))

    @pytest.mark.parametrize("entry", ["torch.ops.aten.add", "torch.ops.aten", "torch.ops.*"])
    def test_allowed_by_name(self, tmp_path: Path, entry: str) -> None:
        with one_worker(tmp_path, allow=(entry,)):
            assert rpc.rpc_sync(ME, torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
            with autograd.context():
                assert rpc.rpc_sync(ME, torch.add, (torch.ones(2), 1)).tolist() == [2, 2]

    def test_files_are_opened_only_by_operators_that_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(b"1234")
        args = (str(tmp_path / "data"), False, 1)
        with one_worker(tmp_path, allow=("torch.ops.*", "torch")):
            with pytest.raises(NotAllowedError, match="opens files"):
                call(callees.run_builtin, "aten::from_file", args, {})
            with pytest.raises(NotAllowedError, match="opens files"):
                call(callees.run_builtin, "aten::save", (1, str(tmp_path / "new")), {})
        (tmp_path / "again").mkdir()
        with one_worker(tmp_path / "again", allow=("torch.ops.aten.from_file",)):
            assert call(callees.run_builtin, "aten::from_file", args, {}).shape == (1,)

    def test_scripts_by_their_own_names(self, tmp_path: Path) -> None:
        name = torch._jit_internal._qualified_name(scripted)
        with one_worker(tmp_path, allow=("farcall.pytorch",)), pytest.raises(NotAllowedError, match="scripted"):
            call(callees.run_script, name, (torch.ones(1),), {})
        (tmp_path / "again").mkdir()
        with one_worker(tmp_path / "again", allow=(name.removeprefix("__torch__."),)):
            assert rpc.rpc_sync(ME, scripted, (torch.ones(1),)).tolist() == [2]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (post._release, ("x",)),
        (post._abandon, (1, (1, 1), b"no text")),
        (post._abandon, (1, ("x", 1), "reason")),
        (post._propagate, (1, (0, 0), 1, [1], False, False)),
        (post._propagate, (1, (0, 0), "x", [], False, False)),
        (post._propagate, (1, (0, 0), 1, [], False, 1)),
        (post._await_end, ("x", (0, 0))),
        (post._release, (1 << 64,)),
        (post._forget, (1, -1)),
        (post._join, (1 << 80, WorkerInfo(ME, 0))),
        (post._propagate_flat, (1 << 64, 0, 0, 1, False, False)),
        (short_calls.run_flat, (0, THEIRS, 1 << 64, 1, 0, True, None, b"m\0f")),
        (short_calls.run_flat, (0, THEIRS, 1, 1 << 64, 0, True, None, b"m\0f")),
        (short_calls.run_flat, (0, 1 << 80, 1, 1, 0, True, None, b"m\0f")),
        (_gather_to_leader, ("x", ME, None, range(1_000_000))),
        (callees.run_builtin, ("aten::add", range(1_000_000), {})),
        (callees.run_script, ("__torch__.unused.f", range(1_000_000), {})),
    ],
)
def test_the_edge_looks_at_what_others_tell_it(tmp_path: Path, function: Any, args: Any) -> None:
    with one_worker(tmp_path, allow=("unused",)), pytest.raises(TypeError, match="came from another worker"):
        call(function, *args)


def test_no_view_is_made_whose_elements_overlap() -> None:
    many = torch.zeros(1, dtype=torch.uint8).expand(300, 300, 300)
    with pytest.raises(ValueError, match="strides"):
        tensors.rebuild_with_gaps(many, (1, 1, 1), False)
    view = tensors.rebuild_with_gaps(torch.ones(2, 2), (8, 2), False)
    assert view.stride() == (8, 2)
    assert view.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("which", [0, 1])
def test_a_restricted_worker_takes_part_in_contexts_and_in_the_end(tmp_path: Path, which: int) -> None:
    def body(rank: int) -> Any:
        allow = {"allow": (f"{HERE}.double",)} if rank == which else {}
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options(tmp_path, **allow))
        gathered = api._all_gather(rank)
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(f"worker{1 - rank}", double, (x,)).sum()
            autograd.backward(context_id, [loss])
            gradient = autograd.get_gradients(context_id)[x].tolist()
        rpc.shutdown()
        return gathered, gradient

    assert run_group(tmp_path, body, init=False) == [({"worker0": 0, "worker1": 1}, [2, 2])] * 2


@pytest.mark.parametrize(
    ("receive", "args"),
    [
        (rref._receive_here_checked, ((1, 1, "x", bytes(16)), 1)),
        (rref._receive_here_checked, ((1, 1, 1, 1), 1)),
        (rref._receive_here_checked, ((), 1)),
        (rref._receive_here_checked, ("abc", 1)),
        (rref._receive_here_checked, ((1, 1, 1, bytes(16)), "x")),
        (rref._receive_checked, ("x", 1)),
    ],
)
def test_what_is_no_reference_is_not_made_one(receive: Callable[..., Any], args: Any) -> None:
    with pytest.raises(TypeError, match="came from another worker"):
        receive(*args)


def first_of(values: Any) -> Any:
    return values[0].local_value()


def fetched(rref: Any) -> Any:
    return rref.local_value()


def test_a_restricted_worker_takes_references_in_every_form(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        allow = {"allow": tuple(f"{HERE}.{name}" for name in ("double", "first_of", "fetched"))} if rank == 0 else {}
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options(tmp_path, **allow))
        found = []
        if rank == 1:
            mine = rpc.remote("worker0", double, (21,))
            mine.to_here()
            eventually(mine.confirmed_by_owner)
            for around in (autograd.context(), nullcontext()):
                with around:
                    found.append(rpc.rpc_sync("worker0", fetched, (mine,)))
                    found.append(rpc.rpc_sync("worker0", fetched, kwargs={"rref": mine}))
                    found.append(rpc.rpc_sync("worker0", first_of, ([mine],)))
            del mine
        rpc.shutdown()
        return found

    assert run_group(tmp_path, body, init=False)[1] == [42] * 6

"""Calls in a context without an envelope: what can be seen through, what arrives, and what goes along."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import farcall.pytorch as rpc
from farcall.api import current_reference_store
from farcall.pytorch import api, autograd
from farcall.pytorch import rref as rref_module
from farcall.pytorch.autograd import engine, post, short_calls
from farcall.pytorch.autograd.short_calls import Glance, replaced
from farcall.pytorch.envelopes import Request
from torch_stage import SOON, run_group


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is a worker. At the end no context is left."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield
    assert autograd._get_debug_info() == {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
    rpc.shutdown()


@pytest.fixture
def enveloped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of the calls that went in envelopes."""
    functions = []

    class Noting(Request):
        def __init__(self, agent: Any, function: Any, *more: Any) -> None:
            functions.append(function)
            super().__init__(agent, function, *more)

    monkeypatch.setattr(api, "Request", Noting)
    return functions


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def mixed(first: torch.Tensor, others: dict[str, Any], *, scale: float) -> Any:
    return {"sum": first * scale + others["more"][0], "name": others["name"]}


def boxed(value: torch.Tensor) -> Box:
    return Box(value * 2)


def unboxed(box: Box) -> torch.Tensor:
    return box.value * 2


def product(pair: Any) -> torch.Tensor:
    return pair[0] * pair[1]


def both(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = value * 2
    return doubled, doubled


async def doubled_later(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def echo(value: Any) -> Any:
    return value


def are_one(first: Any, second: Any) -> bool:
    return first is second


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


async def asks_another(value: torch.Tensor) -> torch.Tensor:
    before = autograd._current_context()._context_id()
    await asyncio.sleep(0)  # others run in this thread meanwhile
    assert autograd._current_context()._context_id() == before
    with pytest.raises(ZeroDivisionError):
        await fails_later()
    again: torch.Tensor = rpc.rpc_sync("worker2", doubled, args=(value,))
    return again * 3


async def fails_later() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError


class Special(torch.Tensor):
    pass


def refusing(value: torch.Tensor) -> None:
    raise ValueError("the function refuses")


def value_of(rref: Any) -> Any:
    return rref.local_value()


kept: list[Any] = []


def keep(rref: Any) -> None:
    kept.append(rref)


def kept_value() -> Any:
    return kept[0].local_value()


def let_go() -> None:
    kept.clear()


def owned_here() -> int:
    return len(current_reference_store().inventory().owned)


def made() -> dict[str, int]:
    return {"made": 1}


# At a glance


def test_tensors_that_require_gradients_are_found_where_they_are() -> None:
    x, y = leaf(), torch.nn.Parameter(torch.ones(1))
    values: tuple[Any, Any] = ((x, 3, torch.ones(1)), {"key": [None, {"inner": y}]})
    glance = Glance(values)
    assert glance.is_clear
    assert glance.places == [(0, 0), (1, "key", 1, "inner")]
    assert glance.tensors[0] is x
    assert glance.tensors[1] is y
    put = replaced(values, glance.places, [torch.zeros(1), torch.zeros(2)])
    assert put[0][0].tolist() == [0]
    assert put[1]["key"][1]["inner"].tolist() == [0, 0]
    assert values[0][0] is x  # and the values are as they were
    assert values[1]["key"][1]["inner"] is y


@pytest.mark.parametrize("value", [Pair(leaf(), leaf()), Box(leaf()), {1: 2}, object(), lambda: None, {leaf()}])
def test_some_things_cannot_be_seen_through(value: Any) -> None:
    assert not Glance(value).is_clear
    assert not Glance([1, (value,)]).is_clear


def test_a_tensor_that_is_there_twice_is_left_to_envelopes() -> None:
    x = leaf()
    assert not Glance((x, [x])).is_clear


@pytest.mark.parametrize("place", [("x",), (0, "x"), (5,)])
def test_there_must_be_such_a_place(place: Any) -> None:
    with pytest.raises((TypeError, IndexError)):
        replaced(((1,),), [place], [torch.ones(1)])


# Calls


@pytest.mark.usefixtures("alone")
class TestCalls:
    def test_tensors_in_containers_both_ways(self, enveloped: list[Any]) -> None:
        x, y = leaf(), leaf()
        with autograd.context() as context_id:
            found = rpc.rpc_sync("alone", mixed, (x, {"more": [y * 1], "name": "n"}), {"scale": 3.0})
            assert found["name"] == "n"
            autograd.backward(context_id, [found["sum"].sum()])
            gradients = autograd.get_gradients(context_id)
            assert gradients[x].tolist() == [3, 3]
            assert gradients[y].tolist() == [1, 1]
        assert enveloped == []

    @pytest.mark.parametrize(
        ("function", "make", "expected"),
        [
            (unboxed, lambda x: Box(x), 2),
            (product, lambda x: Pair(x, x), 2),
            (product, lambda x: (x, x), 2),
        ],
    )
    def test_what_cannot_be_seen_through_goes_in_an_envelope(
        self, enveloped: list[Any], function: Any, make: Any, expected: int
    ) -> None:
        x = leaf()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("alone", function, (make(x),)).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [expected] * 2
        assert enveloped == [function]

    @pytest.mark.parametrize("is_sync", [True, False])
    def test_so_does_a_reply(self, enveloped: list[Any], is_sync: bool) -> None:
        x = leaf()
        with autograd.context() as context_id:
            call = rpc.rpc_sync if is_sync else lambda *given: rpc.rpc_async(*given).wait()
            box, pair = call("alone", boxed, (x,)), call("alone", both, (x,))
            assert pair[0] is pair[1]
            autograd.backward(context_id, [(box.value + pair[0]).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [4, 4]
        assert enveloped == []

    def test_a_coroutine(self) -> None:
        x = leaf()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("alone", doubled_later, (x,)).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]

    def test_a_failure_is_that_of_the_function_and_leaves_nothing(self) -> None:
        with autograd.context() as context_id:
            for call in (rpc.rpc_sync, lambda *given: rpc.rpc_async(*given).wait()):
                with pytest.raises(ValueError, match="the function refuses"):
                    call("alone", refusing, (leaf(),))
            assert autograd._retrieve_context(context_id)._send_functions() == {}

    @pytest.mark.parametrize(
        "request_",
        [
            ("0", (1, 1, 1, [], True), [], [], len, (), {}),
            (0, [1, 1, 1, [], True], [], [], len, (), {}),
            (0, (1, 1, 1, ["x"], True), [], [], len, (), {}),
            (0, (1, 1, 1, [], True), [], ["x"], len, (), {}),
            (0, (1 << 48, 1, 1, [0], True), [(0, 0)], [], len, (1,), {}),
            (0, (1 << 48, 1, 1, [0], True), [(0, 0, 0)], [], len, (1,), {}),
        ],
    )
    def test_the_callee_looks_at_what_comes(self, request_: Any) -> None:
        with autograd.context(), pytest.raises(TypeError):
            short_calls.run_in_context(*request_)
        post.contexts().release_if_present(1 << 48)

    def test_releases_go_along_with_the_next_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(post.AgentPost, "_has_untold", lambda self: False)  # nobody else tells of them
        contexts = post.contexts()
        other = rpc.WorkerInfo("alone", 0)
        with autograd.context():
            contexts.retrieve_or_make(1 << 48)
            contexts.post.release(other, 1 << 48)
            assert contexts.counts()[1] == 2
            rpc.rpc_sync("alone", value_of, (rpc.RRef(1),))
            assert contexts.counts()[1] == 1

    def test_or_some_milliseconds_later(self) -> None:
        contexts = post.contexts()
        contexts.retrieve_or_make(1 << 48)
        contexts.post.release(rpc.WorkerInfo("alone", 0), 1 << 48)
        deadline = monotonic() + SOON
        while contexts.counts()[1]:
            assert monotonic() < deadline
            rpc.rpc_sync("alone", value_of, (rpc.RRef(1),))


# Flat rows


def test_small_arguments_go_in_a_row_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        rows: list[int] = []
        call_flat = short_calls._call_flat

        def noting(agent: Any, to: Any, named: bytes, row: Any, *more: Any) -> Any:
            rows.append(row.mask)
            return call_flat(agent, to, named, row, *more)

        monkeypatch.setattr(short_calls, "_call_flat", noting)
        factor = rpc.remote("worker1", made_factor)
        assert factor.confirmed_by_owner()
        x, y = leaf(), torch.ones(5000, requires_grad=True)
        with autograd.context() as context_id:
            total = rpc.rpc_sync("worker1", times, (factor, x, 3)).sum()
            assert rows == [0b10]
            total = total + rpc.rpc_sync("worker1", times, (factor, x), {"by": 3}).sum()
            total = total + rpc.rpc_async("worker1", times, (factor, y, 3)).wait().sum()
            with torch.no_grad():
                assert rpc.rpc_sync("worker1", times, (factor, x, 3)).tolist() == [6, 6]
            assert rows == [0b10]
            autograd.backward(context_id, [total])
            found = autograd.get_gradients(context_id)
            assert found[x].tolist() == [12, 12]
            assert found[y].tolist() == [6] * 5000
        return True

    assert run_group(tmp_path, body)[0]


def made_factor() -> torch.Tensor:
    return torch.tensor(2.0)


def times(factor: Any, tensor: torch.Tensor, by: int) -> torch.Tensor:
    return factor.local_value() * tensor * by


# References


def test_a_reference_that_goes_to_its_owner_is_told_of_and_not_counted(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        rref = rpc.remote("worker1", made)
        assert rref.to_here() == {"made": 1}
        assert rref.confirmed_by_owner()
        store: Any = current_reference_store()
        before = store.messages_sent()
        with autograd.context():
            for _ in range(3):
                assert rpc.rpc_sync("worker1", value_of, (rref,)) == {"made": 1}
                assert rpc.rpc_async("worker1", value_of, (rref,)).wait() == {"made": 1}
            counted = store.messages_sent() - before
            rpc.rpc_sync("worker1", keep, (rref,))
        del rref
        deadline = monotonic() + SOON
        while store.inventory().held:
            assert monotonic() < deadline
        assert rpc.rpc_sync("worker1", kept_value) == {"made": 1}  # its owner has a handle of its own
        rpc.rpc_sync("worker1", let_go)
        while rpc.rpc_sync("worker1", owned_here):
            assert monotonic() < deadline
        return counted

    assert run_group(tmp_path, body)[0] == 0


def test_one_that_is_gone_is_refused_by_its_owner(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        rref = rpc.remote("worker1", made)
        assert rref.confirmed_by_owner()
        reference = tuple(rref._handle.reference)
        del rref
        deadline = monotonic() + SOON
        while rpc.rpc_sync("worker1", owned_here):
            assert monotonic() < deadline
        with pytest.raises(RuntimeError, match="its value was released"):
            rpc.rpc_sync("worker1", rref_here, (reference,))
        return True

    assert run_group(tmp_path, body)[0]


def rref_here(reference: tuple[int, int, int, bytes]) -> None:
    rref_module._receive_here(reference, 0)


# What is no plain data


def test_arrays_and_other_kinds_of_tensors_travel_in_a_context_as_they_do_elsewhere(alone: None) -> None:
    array, special = numpy.arange(3.0), torch.ones(3).as_subclass(Special)
    with autograd.context():
        assert numpy.array_equal(rpc.rpc_sync("alone", echo, args=(array,)), array)
        assert numpy.array_equal(rpc.rpc_sync("alone", echo, args=([array, leaf()],))[0], array)
        assert numpy.array_equal(rpc.rpc_async("alone", echo, args=({"a": array},)).wait()["a"], array)
        assert numpy.array_equal(rpc.remote("alone", echo, args=(array,)).to_here(), array)
        assert torch.equal(rpc.rpc_sync("alone", echo, args=(special,)), special)


def test_nobody_asks_whether_an_object_is_true() -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise AssertionError

    assert not Glance([Undecided()]).is_clear


def test_what_contains_itself_or_is_there_twice_arrives_so(alone: None) -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    twice = [leaf()]
    with autograd.context():
        returned = rpc.rpc_sync("alone", echo, args=(cycle,))
        assert returned[1] is returned
        assert rpc.rpc_sync("alone", are_one, args=(twice, twice))
        owned = [rpc.RRef(1)]
        assert rpc.rpc_sync("alone", are_one, args=(owned, owned))
        del owned


def test_a_coroutine_works_in_the_context_of_its_caller_and_so_do_its_calls(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        value = leaf()
        with autograd.context() as context_id:
            result = rpc.rpc_sync("worker1", asks_another, args=(value,))
            autograd.backward(context_id, [result.sum()])
            return autograd.get_gradients(context_id)[value].tolist()

    assert run_group(tmp_path, body, 3)[0] == [6.0, 6.0]


held: list[Any] = []


@rpc.functions.async_execution
def tripled_later(value: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()
    held.append((future, value * 3))
    return future


def finish_and_change() -> None:
    future, result = held.pop()
    future.set_result(result)
    result.mul_(2)


def is_kept() -> bool:
    return bool(held)


def test_a_result_may_be_changed_in_place_right_after_a_future_was_told_it(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        with autograd.context() as context_id:
            variable = leaf()
            pending = rpc.rpc_async("worker1", tripled_later, args=(variable,))
            while not rpc.rpc_sync("worker1", is_kept):
                pass
            rpc.rpc_sync("worker1", finish_and_change)
            result = pending.wait()
            autograd.backward(context_id, [result.sum()])
            return result.tolist(), autograd.get_gradients(context_id)[variable].tolist()

    assert run_group(tmp_path, body)[0] == ([3, 3], [3, 3])


def change_kept(value: torch.Tensor) -> torch.Tensor:
    held[0].mul_(2)
    return value * 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapped", [False, True])
def test_who_is_called_may_change_in_place_what_was_sent(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_prepare(context: Any) -> None:  # as if another thread had got the interpreter
        sleep(0.05)
        prepare(context)

    prepare = engine.prepare
    monkeypatch.setattr(short_calls, "prepare", slow_prepare)
    with autograd.context() as context_id:
        variable = leaf()
        sent = variable * 3
        held[:] = [sent]
        if wrapped:  # not flat
            result = rpc.rpc_sync("alone", change_kept, kwargs={"value": sent})
        else:
            result = rpc.rpc_sync("alone", change_kept, args=(sent,))
        held.clear()
        autograd.backward(context_id, [result.sum()])
        assert autograd.get_gradients(context_id)[variable].tolist() == [3, 3]

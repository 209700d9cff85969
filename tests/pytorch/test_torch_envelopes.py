"""`farcall.pytorch.envelopes`: what rides along with calls, shown by riders of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.errors import RpcError, SerializationError, WorkerLostError
from farcall.pytorch import envelopes
from farcall.pytorch.envelopes import Departure, Tensors, Trip, Visit, dumps_apart, loads_apart
from farcall.pytorch.functions import async_execution
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.rref import PyRRef
from farcall.pytorch.tensors import receiving_apart
from farcall.security.allowed import AllowList
from farcall.serialization import loads
from farcall.serialization.restricted.unpickler import loads_restricted
from torch_stage import add, echo, fail, one_worker, run_group

ME = "alone"
log: list[Any] = []


class Shift(Trip):
    """Adds a number to all tensors on their way there, and takes it away from those that come back."""

    def __init__(self, rider: Shifter, departure: Departure) -> None:
        self.rider = rider
        log.append((rider.key, "board", departure.function, departure.mode.value))

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        log.append((self.rider.key, "pack", len(tensors)))
        if self.rider.breaks == "pack":
            raise ValueError("packing broke")
        return self.rider.changed(tensors), {"there": self.rider.key}

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        log.append((self.rider.key, "unpack", words))
        if self.rider.breaks == "unpack":
            raise ValueError("unpacking broke")
        return self.rider.restored(tensors)

    def failed(self, error: BaseException) -> None:
        log.append((self.rider.key, "failed", type(error).__name__))

    def awaited(self, future: Any) -> Any:
        return RpcFuture(future) if self.rider.breaks == "awaited" else future

    def referenced(self, rref: Any) -> None:
        log.append((self.rider.key, "referenced", isinstance(rref, PyRRef)))


class Arrival(Visit):
    def __init__(self, rider: Shifter, words: Any) -> None:
        self.rider = rider
        log.append((rider.key, "visit", words))

    def unpack(self, tensors: Tensors) -> Tensors:
        log.append((self.rider.key, "arrived"))
        if self.rider.breaks == "visit":
            raise ValueError("visiting broke")
        return self.rider.restored(tensors)

    @contextmanager
    def around(self) -> Iterator[None]:
        log.append((self.rider.key, "enter"))
        try:
            yield
        finally:
            log.append((self.rider.key, "leave"))

    def finished(self) -> None:
        log.append((self.rider.key, "finished"))

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        log.append((self.rider.key, "answer"))
        return self.rider.changed(tensors), {"back": self.rider.key}


class Shifter:
    """A rider. Each of them changes all tensors in a way of its own, so that their order can be seen."""

    def __init__(self, key: str, factor: float, offset: float) -> None:
        self.key = key
        self.factor = factor
        self.offset = offset
        self.rides = True
        self.breaks = ""

    def changed(self, tensors: Tensors) -> Tensors:
        return [tensor * self.factor + self.offset for tensor in tensors]

    def restored(self, tensors: Tensors) -> Tensors:
        return [(tensor - self.offset) / self.factor for tensor in tensors]

    def concerns(self, agent: Any, to: Any) -> bool:
        return self.rides

    def board(self, agent: Any, departure: Departure) -> Trip:
        return Shift(self, departure)

    def visit(self, agent: Any, caller: Any, words: Any) -> Visit:
        assert caller == rpc.get_worker_info(caller.name)
        return Arrival(self, words)


@pytest.fixture(autouse=True)
def riders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Shifter]]:
    """Two of them. Their changes do not commute."""
    ours = [Shifter("first", 2.0, 1.0), Shifter("second", 4.0, 3.0)]
    monkeypatch.setattr(envelopes, "RIDERS", ours)
    log.clear()
    yield ours
    log.clear()


@pytest.fixture
def me(tmp_path: Path, riders: list[Shifter]) -> Iterator[None]:
    for rider in riders:
        rider.rides = False
    with one_worker(tmp_path):
        for rider in riders:
            rider.rides = True
        log.clear()
        yield
        for rider in riders:
            rider.rides = False


@async_execution
def add_later(to: str, left: Any, right: Any) -> Any:
    return rpc.rpc_async(to, add, (left, right))


async def add_in_coroutine(left: Any, right: Any) -> Any:
    return left + right


def twice(tensor: torch.Tensor) -> Any:
    return {"same": [tensor, tensor], "other": tensor + 1, "text": "no tensor"}


def value_of(rref: Any) -> Any:
    return rref.to_here()


def new_reference(value: Any) -> Any:
    return rpc.RRef(value)


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def get(self) -> Any:
        return self.content

    @async_execution
    def later(self, to: str) -> Any:
        return rpc.rpc_async(to, echo, (self.content,))

    def fails(self) -> None:
        raise ValueError("in the box")


def steps() -> list[tuple[str, str]]:
    return [entry[:2] for entry in log]


@pytest.mark.usefixtures("me")
def test_whom_nothing_concerns_goes_without_an_envelope(riders: list[Shifter]) -> None:
    for rider in riders:
        rider.rides = False
    assert torch.equal(rpc.rpc_sync(ME, add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert log == []


@pytest.mark.usefixtures("me")
def test_riders_see_a_call_in_order_and_in_reverse_at_the_other_end() -> None:
    assert torch.equal(rpc.rpc_sync(ME, add, (torch.ones(2), 1)), torch.full((2,), 2.0))
    assert log == [
        ("first", "board", add, "sync"),
        ("second", "board", add, "sync"),
        ("first", "pack", 1),
        ("second", "pack", 1),
        ("first", "visit", {"there": "first"}),
        ("second", "visit", {"there": "second"}),
        ("second", "arrived"),
        ("first", "arrived"),
        ("first", "enter"),
        ("second", "enter"),
        ("second", "leave"),
        ("first", "leave"),
        ("first", "finished"),
        ("second", "finished"),
        ("first", "answer"),
        ("second", "answer"),
        ("second", "unpack", {"back": "second"}),
        ("first", "unpack", {"back": "first"}),
    ]


@pytest.mark.usefixtures("me")
def test_only_those_who_are_concerned_ride(riders: list[Shifter]) -> None:
    riders[0].rides = False
    assert rpc.rpc_async(ME, add, (torch.ones(1), 1)).wait().item() == 2
    assert {entry[0] for entry in log} == {"second"}
    assert log[0][3] == "async"


@pytest.mark.usefixtures("me")
def test_a_tensor_that_is_there_twice_travels_once() -> None:
    result = rpc.rpc_sync(ME, twice, (torch.ones(2),))
    assert ("first", "pack", 1) in log
    assert result["same"][0] is result["same"][1]
    assert torch.equal(result["other"], torch.full((2,), 2.0))
    assert result["text"] == "no tensor"


@pytest.mark.usefixtures("me")
def test_calls_without_tensors_and_builtin_operators() -> None:
    assert rpc.rpc_sync(ME, add, (1, 2)) == 3
    assert rpc.rpc_sync(ME, echo, kwargs={"value": 4}) == 4
    assert rpc.rpc_sync(ME, echo) is None
    assert torch.equal(rpc.rpc_sync(ME, torch.add, (torch.ones(2), torch.ones(2))), torch.full((2,), 2.0))


@pytest.mark.usefixtures("me")
def test_what_the_function_raised_is_known_to_the_trips() -> None:
    for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
        log.clear()
        with pytest.raises(ValueError, match="far"):
            call(ME, fail, ("far",))
        assert [entry for entry in log if entry[1] == "failed"] == [
            ("first", "failed", "ValueError"),
            ("second", "failed", "ValueError"),
        ]
        assert ("second", "finished") in log


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_trips_hear_of_a_call_that_could_not_be_sent(call: Any) -> None:
    with pytest.raises((RuntimeError, TypeError), match="lock"):
        call(ME, echo, (threading.Lock(),))
    assert steps() == [("first", "board"), ("second", "board"), ("first", "failed"), ("second", "failed")]


@pytest.mark.usefixtures("me")
def test_trips_hear_of_a_worker_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(*_: Any) -> Any:
        raise WorkerLostError("out of reach", ME)

    agent = rpc.api._get_current_rpc_agent()
    monkeypatch.setattr(agent, "call", out_of_reach)
    monkeypatch.setattr(agent, "remote", out_of_reach)
    with pytest.raises(RuntimeError, match="out of reach"):
        rpc.rpc_async(ME, echo).wait()
    assert [entry[2] for entry in log if entry[1] == "failed"] == ["WorkerLostError"] * 2
    with pytest.raises(RuntimeError, match="out of reach"):
        rpc.remote(ME, echo)
    assert [entry[2] for entry in log if entry[1] == "failed"] == ["WorkerLostError"] * 4


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("where", ["pack", "visit", "unpack"])
def test_a_rider_that_breaks_breaks_the_call(riders: list[Shifter], where: str) -> None:
    riders[1].breaks = where
    with pytest.raises((RpcError, ValueError), match="broke"):
        rpc.rpc_sync(ME, add, (torch.ones(1), 1))
    riders[1].breaks = ""
    assert rpc.rpc_sync(ME, add, (torch.ones(1), 1)).item() == 2


@pytest.mark.usefixtures("me")
def test_a_trip_may_hand_out_another_future(riders: list[Shifter]) -> None:
    riders[0].breaks = "awaited"
    future = rpc.rpc_async(ME, add, (torch.ones(1), 1))
    assert type(future) is RpcFuture
    assert future.wait().item() == 2
    assert rpc.rpc_sync(ME, add, (torch.ones(1), 2)).item() == 3


@pytest.mark.usefixtures("me")
def test_functions_that_end_later() -> None:
    assert rpc.rpc_sync(ME, add_later, (ME, torch.ones(1), 1)).item() == 2
    own = [entry for entry in steps() if entry[0] == "first"]
    assert own.index(("first", "finished")) > own.index(("first", "leave"))
    assert rpc.rpc_sync(ME, add_in_coroutine, (torch.ones(1), 2)).item() == 3


@pytest.mark.usefixtures("me")
def test_remote_calls() -> None:
    rref = rpc.remote(ME, add, (torch.ones(1), 1))
    assert log[0] == ("first", "board", add, "remote")
    assert ("second", "referenced", True) in log
    assert rref.to_here().item() == 2  # it is here
    assert "answer" not in {entry[1] for entry in log}
    assert rpc.remote(ME, add_later, (ME, torch.ones(1), 1)).to_here().item() == 2
    with pytest.raises(ValueError, match="far"):
        rpc.remote(ME, fail, ("far",)).to_here()


@pytest.mark.usefixtures("me")
def test_references_inside() -> None:
    rref = rpc.RRef(torch.ones(2))
    assert torch.equal(rpc.rpc_sync(ME, value_of, (rref,)), torch.ones(2))
    back = rpc.rpc_sync(ME, echo, ([rref, torch.ones(1)],))
    assert back[0] == rref
    made = rpc.rpc_sync(ME, new_reference, (torch.ones(3),))
    assert torch.equal(made.to_here(), torch.ones(3))


@pytest.mark.usefixtures("me")
def test_what_goes_by_value_is_packed_once() -> None:
    base, rref = torch.ones(2), rpc.RRef(5)
    result = rpc.rpc_sync(ME, lambda tensor, far: tensor + base + far.to_here(), (torch.ones(2), rref))
    assert torch.equal(result, torch.full((2,), 7.0))
    assert steps().count(("first", "pack")) == 1
    assert rpc.remote(ME, lambda far: far.to_here() + base.sum(), (rref,)).to_here().item() == 7
    give = rpc.rpc_sync(ME, echo, (lambda: base + 1,))
    assert torch.equal(give(), torch.full((2,), 2.0))


@pytest.mark.usefixtures("me")
def test_methods_of_references() -> None:
    box = rpc.remote(ME, Box, (torch.ones(2),))
    assert torch.equal(box.rpc_sync().get(), torch.ones(2))
    assert torch.equal(box.rpc_async().get().wait(), torch.ones(2))
    assert torch.equal(box.remote().get().to_here(), torch.ones(2))
    assert torch.equal(box.rpc_sync().later(ME), torch.ones(2))
    for use in (box.rpc_sync().fails, lambda: box.rpc_async().fails().wait(), lambda: box.remote().fails().to_here()):
        with pytest.raises(ValueError, match="in the box"):
            use()
    with pytest.raises(AttributeError, match="nothing"):
        box.rpc_sync().nothing()


def test_workers_of_several_processes(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        log.clear()
        rref = rpc.remote("worker1", add, (torch.ones(2), 1))
        assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
        assert ("first", "unpack", {"back": "first"}) in log  # the value came in an envelope
        assert rref._get_type() is torch.Tensor
        assert rref._get_type(blocking=False).wait() is torch.Tensor
        assert rref._get_future().wait() is None
        box = rpc.remote("worker1", Box, (torch.ones(2),))
        assert torch.equal(box.rpc_sync().get(), torch.ones(2))
        assert torch.equal(box.remote().later("worker0").to_here(), torch.ones(2))
        own = rpc.RRef(torch.ones(1))
        assert rpc.rpc_sync("worker1", value_of, (own,)).item() == 1
        made = rpc.rpc_sync("worker1", new_reference, (torch.ones(3),))
        assert torch.equal(made.to_here(), torch.ones(3))
        with pytest.raises(ValueError, match="far"):
            rpc.remote("worker1", fail, ("far",)).to_here()
        with pytest.raises(ValueError, match="far"):
            rpc.remote("worker1", fail, ("far",))._get_type()
        return None

    run_group(tmp_path, body)


def test_a_pickle_with_its_tensors_beside_it() -> None:
    tensors = [torch.ones(2), torch.zeros(1, dtype=torch.int64)]
    body, apart = dumps_apart({"first": tensors[0], "second": [tensors[1], tensors[0]]})
    assert len(apart) == 2
    assert all(one is other for one, other in zip(apart, tensors, strict=True))
    value = loads_apart(body, [tensor + 1 for tensor in apart])
    assert torch.equal(value["first"], torch.full((2,), 2.0))
    assert value["second"][1] is value["first"]
    assert value["second"][0].item() == 1
    with pytest.raises(RpcError, match="recv_tables"):
        loads(body)


def test_a_negative_index_of_a_tensor_is_refused() -> None:
    body, apart = dumps_apart([torch.ones(2)])
    assert b"K\0\x85" in body
    with receiving_apart(apart):
        assert torch.equal(loads_restricted(body, (), AllowList([]))[0], apart[0])
        with pytest.raises(SerializationError, match="negative index of a tensor"):
            loads_restricted(body.replace(b"K\0\x85", b"J\xff\xff\xff\xff\x85"), (), AllowList([]))

"""`optim`: one optimizer on each worker, whose steps apply the gradients of a context."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.optim.utils import functional_optim_map

from farcall.pytorch import autograd
from farcall.pytorch.optim import DistributedOptimizer, optimizer
from farcall.pytorch.rref import RRef
from farcall.pytorch.worker_info import WorkerInfo
from farcall.testing.local import LocalGroup


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The only worker there is."""
    with LocalGroup(1):
        autograd._init(0)
        yield
        autograd.close()


def step(optimizer: DistributedOptimizer, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
    """One with these gradients."""
    with autograd.context() as context_id:
        loss = torch.stack([(parameter * gradient).sum() for parameter, gradient in gradients.items()]).sum()
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)


class Halving(torch.optim.Optimizer):  # type: ignore[misc]
    """Halves what it has a gradient for; it has no compiled version."""

    def __init__(self, params: Any, refused: bool = False) -> None:
        super().__init__(params, {})
        if refused:
            raise ValueError("none is made")

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                if parameter.grad.isnan().any():
                    raise ValueError("not a number")
                with torch.no_grad():
                    parameter.mul_(0.5)


@torch.jit.script
class Descent:
    def __init__(self, parameters: list[torch.Tensor], rate: float):
        self.parameters = parameters
        self.rate = rate

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients):  # noqa: B905 (TorchScript has no strict)
                if gradient is not None:
                    parameter.sub_(gradient * self.rate)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_steps_are_those_of_the_optimizer(kind: Any, settings: dict[str, Any]) -> None:
    here = torch.ones(3, requires_grad=True)
    there = torch.ones(3, requires_grad=True)
    alone, distributed = kind([here], **settings), DistributedOptimizer(kind, [RRef(there)], **settings)
    assert distributed.is_functional_optim
    for number in range(3):
        here.grad = torch.full((3,), float(number + 1))
        alone.step()
        step(distributed, {there: torch.full((3,), float(number + 1))})
    assert torch.allclose(here, there)
    assert not torch.allclose(there, torch.ones(3))
    assert there.grad is None  # it belongs to whoever trains here without contexts


def test_nobody_is_told_that_torchscript_is_deprecated() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("error", DeprecationWarning)
        DistributedOptimizer(torch.optim.SGD, [RRef(torch.ones(1, requires_grad=True))], lr=0.1)
        with optimizer._compiling():
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else"]


def test_parameters_without_a_gradient_are_let_be() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    distributed = DistributedOptimizer(torch.optim.SGD, [RRef(used), RRef(unused)], lr=1.0)
    step(distributed, {used: torch.ones(2)})
    assert (used.tolist(), unused.tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_any_optimizer_will_do_and_one_that_is_not_compiled_is_told(caplog: pytest.LogCaptureFixture) -> None:
    parameter = torch.ones(2, requires_grad=True)
    distributed = DistributedOptimizer(Halving, [RRef(parameter)])
    assert not distributed.is_functional_optim
    assert "Halving'> without TorchScript support" in caplog.text
    step(distributed, {parameter: torch.ones(2)})
    assert parameter.tolist() == [0.5, 0.5]


def test_without_torchscript_none_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.jit._state._enabled, "enabled", False)
    parameter = torch.ones(2, requires_grad=True)
    distributed = DistributedOptimizer(torch.optim.SGD, [RRef(parameter)], lr=1.0)
    assert not distributed.is_functional_optim
    step(distributed, {parameter: torch.ones(2)})
    assert parameter.tolist() == [0.0, 0.0]


def test_parameters_themselves_are_refused() -> None:
    with pytest.raises(TypeError, match=r"references to parameters, not a Parameter: give it rpc.RRef\(parameter\)"):
        DistributedOptimizer(torch.optim.SGD, [torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_what_goes_wrong_reaches_the_caller() -> None:
    parameter = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="none is made"):
        DistributedOptimizer(Halving, [RRef(parameter)], refused=True)
    distributed = DistributedOptimizer(Halving, [RRef(parameter)])
    with pytest.raises(ValueError, match="not a number"):
        step(distributed, {parameter: torch.full((2,), torch.nan)})
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 8"):
        distributed.step(8)


def test_a_functional_optimizer_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functional_optim_map, "descent", Descent)
    parameter = torch.ones(2, requires_grad=True)
    distributed = DistributedOptimizer("descent", [RRef(parameter)], rate=0.5)  # type: ignore[arg-type]
    assert distributed.is_functional_optim
    step(distributed, {parameter: torch.ones(2)})
    assert parameter.tolist() == [0.5, 0.5]


class Settled:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.waited = False

    def wait(self) -> str:
        self.waited = True
        if self.error is not None:
            raise self.error
        return "done"


def test_of_several_errors_the_last_is_raised_with_the_others_as_notes_when_all_have_ended() -> None:
    calls = [Settled(), Settled(ValueError("one")), Settled(KeyError("two")), Settled()]
    with pytest.raises(KeyError, match="two") as caught:
        optimizer._wait_for_all(calls, [WorkerInfo(f"worker{number}", number) for number in range(4)])
    assert caught.value.__notes__ == ["worker 'worker1' failed as well: ValueError: one"]
    assert all(call.waited for call in calls)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_sgd_is_torchs_to_the_last_bit_also_where_gradients_are_missing(options: dict[str, float]) -> None:
    torch.manual_seed(3)
    ours = [torch.randn(7, 5, requires_grad=True) for _ in range(3)]
    theirs = [each.detach().clone().requires_grad_() for each in ours]
    made = DistributedOptimizer(torch.optim.SGD, [RRef(each) for each in ours], lr=0.07, **options)
    torchs = torch.optim.SGD(theirs, lr=0.07, foreach=False, **options)
    for count in (3, 3, 2):
        gradients = [torch.randn(7, 5) for _ in range(count)]
        step(made, dict(zip(ours, gradients, strict=False)))
        for place, each in enumerate(theirs):
            each.grad = gradients[place].clone() if place < count else None
        torchs.step()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_plain_sgd_takes_sparse_gradients() -> None:
    table = torch.ones(4, 2, requires_grad=True)
    made = DistributedOptimizer(torch.optim.SGD, [RRef(table)], lr=0.5)
    with autograd.context() as context_id:
        rows = torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
        autograd.backward(context_id, [rows.sum()])
        made.step(context_id)
    assert table.tolist() == [[1, 1], [0, 0], [1, 1], [1, 1]]

"""Gradients add up in a context as torch adds them to `.grad`: what is copied and what is not, and how it lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from autograd_stage import Workers
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge


class Passes(Function):
    """Notes the gradient that it passes on."""

    pointer = 0
    kept: torch.Tensor | None = None
    is_kept = False

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.width = len(values)
        return torch.stack([value.detach() for value in values]).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient * 1.0
        Passes.pointer = gradient.data_ptr()
        Passes.kept = gradient if Passes.is_kept else None
        return (gradient,) * ctx.width


def gathered(loss: torch.Tensor, retain_graph: bool = False, times: int = 1) -> Mapping[torch.Tensor, torch.Tensor]:
    workers = Workers(1)
    context_id = workers.new_context()
    for _ in range(times):
        workers.backward(context_id, 0, [loss], retain_graph)
    return workers.gradients(context_id, 0)


def test_a_gradient_that_nobody_else_has_is_taken_as_it_is() -> None:
    x = torch.ones(3, requires_grad=True)
    assert gathered(Passes.apply(x).sum())[x].data_ptr() == Passes.pointer


def test_one_that_the_program_keeps_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    monkeypatch.setattr(Passes, "is_kept", True)
    assert gathered(Passes.apply(x).sum())[x].data_ptr() != Passes.pointer
    Passes.kept = None


def test_one_that_is_of_two_variables_is_copied_for_both() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    gradients = gathered(Passes.apply(x, y).sum())
    assert len({gradients[x].data_ptr(), gradients[y].data_ptr(), Passes.pointer}) == 3


def test_a_dense_gradient_lies_as_its_variable_does() -> None:
    x = torch.ones(3, 4).t().requires_grad_()
    gradient = gathered((x * 1.0).sum())[x]
    assert gradient.stride() == x.stride()


def test_an_expanded_gradient_is_written_out() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    gradient = gathered(x.sum())[x]
    assert gradient.stride() == (4, 1)


def test_of_a_variable_with_overlaps_it_lies_row_by_row() -> None:
    x = torch.ones(1, 4).expand(3, 4).requires_grad_()
    assert gathered((x * 2).sum())[x].stride() == (4, 1)


def test_later_ones_are_added_in_place() -> None:
    x = torch.ones(3, requires_grad=True)
    workers = Workers(1)
    context_id = workers.new_context()
    loss = (x * 2).sum()
    workers.backward(context_id, 0, [loss], retain_graph=True)
    first = workers.gradients(context_id, 0)[x]
    workers.backward(context_id, 0, [loss])
    assert workers.gradients(context_id, 0)[x] is first
    assert first.tolist() == [4, 4, 4]
    assert not first.requires_grad


def rows(table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor([0, 2]), table, sparse=True)


def test_sparse_ones_stay_sparse_and_add_up() -> None:
    table = torch.zeros(3, 2, requires_grad=True)
    gradient = gathered(rows(table).sum(), retain_graph=True, times=3)[table]
    assert gradient.is_sparse
    assert gradient.to_dense().tolist() == [[3, 3], [0, 0], [3, 3]]


@pytest.mark.parametrize("is_sparse_first", [True, False])
def test_sparse_and_dense_ones_make_a_dense_one(is_sparse_first: bool) -> None:
    table = torch.zeros(3, 2, requires_grad=True)
    losses = [rows(table).sum(), (table * 5).sum()]
    workers = Workers(1)
    context_id = workers.new_context()
    for loss in losses if is_sparse_first else reversed(losses):
        workers.backward(context_id, 0, [loss])
    gradient = workers.gradients(context_id, 0)[table]
    assert not gradient.is_sparse
    assert gradient.tolist() == [[6, 6], [5, 5], [6, 6]]


def test_the_type_is_that_of_the_variable() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = torch.ones(3, dtype=torch.float32, requires_grad=True)
    gradients = gathered((x * y).sum())
    assert (gradients[x].dtype, gradients[y].dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("is_apart", [True, False])
def test_gradients_that_show_the_same_memory_add_up_each_for_itself(shape: tuple[int, ...], is_apart: bool) -> None:
    with Workers(1) as workers:
        context_id = workers.new_context()
        x, y = torch.ones(shape, requires_grad=True), torch.ones(shape, requires_grad=True)
        node = None if is_apart else get_gradient_edge(x).node  # a node that is held is not taken apart
        loss = x.sum() + y.sum()
        for retain_graph in (True, False):
            workers.backward(context_id, 0, [loss], retain_graph)
        gradients = workers.gradients(context_id, 0)
        assert (gradients[x].item(), gradients[y].item()) == (2, 2)
        del node

"""`data_parallel`: torch's reducer averages what a backward pass without `.grad` has found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from farcall.pytorch import data_parallel
from farcall.pytorch.data_parallel import HeldBack

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo process groups")


@pytest.fixture(autouse=True)
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "Reducer", data_parallel.Reducer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced_by_ten(module: DistributedDataParallel) -> None:
    """Has the reducer do something that shows, though there is nobody to average with."""

    def tenth(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at what is said of them
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / 10)
        return future

    module.register_comm_hook(None, tenth)


def backward(module: Any, inputs: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    """As a context of distributed autograd does it: nothing is in `.grad` after it."""
    parameters = list(module.parameters())
    return dict(zip(parameters, torch.autograd.grad(module(inputs).norm(), parameters), strict=True))


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}])
def test_gradients_come_out_reduced_and_grad_is_as_before(settings: dict[str, Any]) -> None:
    module = DistributedDataParallel(torch.nn.Linear(3, 2), **settings)
    reduced_by_ten(module)
    kept = []
    for _ in range(3):
        weight = module.module.weight
        weight.grad = torch.full((2, 3), 7.0)
        found = backward(module, torch.rand(5, 3))
        held = HeldBack()
        assert all(held.take(parameter, gradient) for parameter, gradient in found.items())
        reduced = dict(held.release_complete())
        kept.append((found, reduced))
        assert held.release_all() == []
        assert torch.equal(weight.grad, torch.full((2, 3), 7.0))
    for found, reduced in kept:  # and they stay what they were when the reducer works again
        assert len(reduced) == 2
        for parameter, gradient in found.items():
            assert torch.allclose(reduced[parameter], gradient / 10)


def test_what_comes_in_parts_waits_for_the_rest() -> None:
    module = DistributedDataParallel(torch.nn.Linear(3, 2))
    reduced_by_ten(module)
    found = backward(module, torch.rand(5, 3))
    held = HeldBack()
    weight, bias = module.module.weight, module.module.bias
    held.take(weight, found[weight] / 2)
    assert held.release_complete() == []
    held.take(weight, found[weight] / 2)
    held.take(bias, found[bias])
    reduced = dict(held.release_complete())
    assert torch.allclose(reduced[weight], found[weight] / 10)


def test_parameters_that_were_not_used() -> None:
    class Either(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.one(inputs)

    module = DistributedDataParallel(Either(), find_unused_parameters=True)
    reduced_by_ten(module)
    weight = module.module.one.weight
    (gradient,) = torch.autograd.grad(module(torch.ones(1, 2)).norm(), [weight])
    held = HeldBack()
    held.take(weight, gradient)
    assert held.release_complete() == []
    ((parameter, reduced),) = held.release_all()
    assert parameter is weight
    assert torch.allclose(reduced, gradient / 10)


def test_sparse_gradients() -> None:
    module = DistributedDataParallel(torch.nn.EmbeddingBag(10, 3, sparse=True))
    (gradient,) = torch.autograd.grad(module(torch.tensor([[1, 2], [2, 3]])).sum(), [module.module.weight])
    held = HeldBack()
    held.take(module.module.weight, gradient)
    ((_, reduced),) = held.release_complete()
    assert reduced.is_sparse
    assert torch.equal(reduced.to_dense(), gradient.to_dense())


def test_modules_have_their_turns_in_the_order_in_which_they_were_made() -> None:
    first, second = (DistributedDataParallel(torch.nn.Linear(1, 1, bias=False)) for _ in range(2))
    held = HeldBack()
    for module in (second, first):
        for parameter, gradient in backward(module, torch.ones(1, 1)).items():
            held.take(parameter, gradient)
    assert [parameter for parameter, _ in held.release_complete()] == [first.module.weight, second.module.weight]


def test_other_parameters_are_not_held_back() -> None:
    module = torch.nn.Linear(2, 2)
    parallel = DistributedDataParallel(torch.nn.Linear(1, 1))
    held = HeldBack()
    assert not held.take(module.weight, torch.ones(2, 2))
    weight = parallel.module.weight
    del parallel  # and with the module, its reducer
    assert not held.take(weight, torch.ones(1, 1))

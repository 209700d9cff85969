"""Backward passes over several workers: each node runs once, with the whole gradient, whatever comes when."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import torch
from autograd_stage import Workers, info
from torch.autograd import Function

from farcall.errors import WorkerLostError
from farcall.pytorch.autograd import passes, trouble
from farcall.pytorch.autograd.engine import take_part
from farcall.pytorch.autograd.nodes import record_received, running
from farcall.pytorch.autograd.telling import PassId


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(3) as workers:
        yield workers
    assert not running


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_gradients_come_back_from_another_worker(workers: Workers) -> None:
    x, y = leaf(1, 2), leaf(3, 4)
    context_id = workers.new_context()
    there = workers.move(context_id, 0, 1, [x, y])
    (product,) = workers.move(context_id, 1, 0, [there[0] * there[1]])
    workers.backward(context_id, 0, [product.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [3, 4]
    assert workers.gradients(context_id, 0)[y].tolist() == [1, 2]
    assert x.grad is None
    assert workers.gradients(context_id, 1) == {}


def test_each_worker_gathers_the_gradients_of_its_own_variables(workers: Workers) -> None:
    x, weight = leaf(1, 2), leaf(5, 6)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    (back,) = workers.move(context_id, 1, 0, [there * weight])
    workers.backward(context_id, 0, [back.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [5, 6]
    assert workers.gradients(context_id, 1)[weight].tolist() == [1, 2]


def test_a_variable_that_is_reached_from_a_root_and_from_another_worker_has_one_sum(workers: Workers) -> None:
    x = leaf(1, 2)
    seen: list[list[float]] = []
    x.register_hook(lambda gradient: seen.append(gradient.tolist()))
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    (back,) = workers.move(context_id, 1, 0, [there * 10])
    workers.backward(context_id, 0, [(back + x).sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [11, 11]
    assert seen == [[11, 11]]


def test_a_node_that_is_reached_from_two_messages_runs_once_with_the_sum(workers: Workers) -> None:
    x = leaf(1, 2)
    shared = x * 3
    seen: list[list[float]] = []
    shared.register_hook(lambda gradient: seen.append(gradient.tolist()))
    runs: list[Any] = []
    shared.grad_fn.register_hook(lambda *gradients: runs.append(gradients))
    context_id = workers.new_context()
    (first,) = workers.move(context_id, 0, 1, [shared])
    (second,) = workers.move(context_id, 0, 2, [shared])
    (one,) = workers.move(context_id, 1, 0, [first * 2])
    (two,) = workers.move(context_id, 2, 0, [second * 5])
    workers.backward(context_id, 0, [(one + two).sum()])
    assert seen == [[7, 7]]
    assert len(runs) == 1
    assert workers.gradients(context_id, 0)[x].tolist() == [21, 21]


def test_a_chain_through_all_workers_and_back(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    value = x
    for step in range(9):
        (value,) = workers.move(context_id, step % 3, (step + 1) % 3, [value * 2])
    workers.backward(context_id, 0, [value.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [2**9, 2**9]


def test_a_worker_may_call_itself(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 0, [x])
    (back,) = workers.move(context_id, 0, 0, [there * 4])
    workers.backward(context_id, 0, [(back * x).sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [8, 16]


def test_nodes_made_in_new_threads_come_before_the_gates(workers: Workers) -> None:
    """Each thread counts its nodes from 0, the number of gates: what a new thread makes first must not wait behind."""
    x = leaf(1, 2)
    context_id = workers.new_context()
    value = x
    for _ in range(6):
        (there,) = workers.in_thread(workers.send(context_id, 0, 0, [value])).wait()
        value = workers.in_thread(lambda there=there: there * 2).wait()
    workers.backward(context_id, 0, [value.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [64, 64]


def test_what_is_received_and_not_used_gets_zeros(workers: Workers) -> None:
    x, y = leaf(1, 2), leaf(3, 4)
    context_id = workers.new_context()
    there = workers.move(context_id, 0, 1, [x, y])
    (back,) = workers.move(context_id, 1, 0, [there[0] * 2])
    workers.backward(context_id, 0, [back.sum()])
    assert workers.gradients(context_id, 0)[y].tolist() == [0, 0]


def test_several_roots(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    back = workers.move(context_id, 1, 0, [there * 2, there * 3])
    workers.backward(context_id, 0, [back[0].sum(), back[1].sum(), x.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [6, 6]


def test_passes_add_up_while_the_graph_is_retained(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    (back,) = workers.move(context_id, 1, 0, [there * there])
    loss = back.sum()
    workers.backward(context_id, 0, [loss], retain_graph=True)
    workers.backward(context_id, 0, [loss])
    assert workers.gradients(context_id, 0)[x].tolist() == [4, 8]
    with pytest.raises(RuntimeError, match="Error on Node 1: Trying to backward through the graph a second time"):
        workers.backward(context_id, 0, [loss])


def test_two_contexts_over_one_graph_at_once_do_not_mix(workers: Workers) -> None:
    x = leaf(1, 2)
    shared = x * 2
    losses = {}
    for factor in (3, 5):
        context_id = workers.new_context()
        (there,) = workers.move(context_id, 0, 1, [shared])
        (back,) = workers.move(context_id, 1, 0, [there * factor])
        losses[context_id] = factor, back.sum()
    runs = [
        workers.in_thread(lambda key=key, loss=loss: workers.backward(key, 0, [loss], retain_graph=True))
        for key, (_, loss) in losses.items()
    ]
    for run in runs:
        run.wait()
    for context_id, (factor, _) in losses.items():
        assert workers.gradients(context_id, 0)[x].tolist() == [2 * factor] * 2


def test_a_plain_backward_meanwhile_goes_to_grad(workers: Workers) -> None:
    x = leaf(1, 2)

    class RunsAnother(Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                workers.in_thread(lambda: (x * 100).sum().backward()).wait()
            return gradient

    context_id = workers.new_context()
    workers.backward(context_id, 0, [RunsAnother.apply(x).sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [1, 1]
    assert x.grad is not None
    assert x.grad.tolist() == [100, 100]


def test_hooks_of_a_variable_run_before_and_after_its_gradient_is_gathered(workers: Workers) -> None:
    x = leaf(1, 2)
    doubled = x * 2
    node = doubled.grad_fn.next_functions[0][0]
    events: list[str] = []
    x.register_hook(lambda gradient: gradient + 1)
    node.register_prehook(lambda gradients: (gradients[0] * 10,))
    context_id = workers.new_context()
    node.register_hook(lambda inputs, outputs: events.append(f"after {workers.gradients(context_id, 0)[x].tolist()}"))
    workers.backward(context_id, 0, [doubled.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [30, 30]
    assert events == ["after [30.0, 30.0]"]


def test_our_own_hooks_are_gone_afterwards(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    loss = (x * 2).sum()
    workers.backward(context_id, 0, [loss])
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, passes.LocalPass)]  # though its graph is there
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert workers.gradients(context_id, 0)[x].tolist() == [2, 2]


def test_what_was_received_can_be_changed_in_place(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    there.mul_(3)
    there[0] = 7.0
    (back,) = workers.move(context_id, 1, 0, [there])
    workers.backward(context_id, 0, [back.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [0, 3]


def test_nor_does_it_matter_that_it_came_as_a_view(workers: Workers) -> None:
    context_id = workers.new_context()
    views = [torch.ones(4).view(2, 2), torch.ones(4).view(2, 2).t()]
    outputs = record_received(workers.context(context_id, 0), 1, info(1), views)
    for output in outputs:
        output.mul_(2)
        assert output.grad_fn.name() == "MulBackward0"


def test_a_parameter_that_is_sent_stays_in_the_graph(workers: Workers) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [weight])
    (back,) = workers.move(context_id, 1, 0, [there * 6])
    workers.backward(context_id, 0, [back.sum()])
    assert workers.gradients(context_id, 0)[weight].tolist() == [6, 6]


def test_sparse_gradients_cross_workers(workers: Workers) -> None:
    table = torch.zeros(4, 2, requires_grad=True)
    context_id = workers.new_context()
    rows = torch.nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True)
    (there,) = workers.move(context_id, 0, 1, [rows])
    (back,) = workers.move(context_id, 1, 0, [there * 2])
    for expected in (2, 4):
        workers.backward(context_id, 0, [back.sum()], retain_graph=True)
        gradient = workers.gradients(context_id, 0)[table]
        assert gradient.is_sparse
        assert gradient.to_dense().tolist() == [[0, 0], [expected] * 2, [0, 0], [expected] * 2]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (3, 1, 2)])
def test_sizes_of_any_kind(workers: Workers, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    (back,) = workers.move(context_id, 1, 0, [there * 2])
    workers.backward(context_id, 0, [back.sum()])
    assert torch.equal(workers.gradients(context_id, 0)[x], torch.full(shape, 2.0))


# What goes wrong


def failing(value: torch.Tensor) -> torch.Tensor:
    value = value * 1

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("the hook refuses")

    value.register_hook(refuse)
    return value


def test_an_error_on_another_worker_ends_the_pass_everywhere(workers: Workers) -> None:
    x, y = leaf(1, 2), leaf(3, 4)
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 0, 1, [x])
    (two,) = workers.move(context_id, 0, 2, [y])
    (three,) = workers.move(context_id, 1, 2, [failing(one * 2)])
    (home,) = workers.move(context_id, 2, 0, [two + three])
    with pytest.raises(RuntimeError, match="Error on Node 1: the hook refuses") as caught:
        workers.backward(context_id, 0, [home.sum()])
    assert isinstance(caught.value.__cause__, ValueError)
    assert {("abandon", 1), ("abandon", 2)} <= set(workers.told)


def test_who_waits_for_gradients_that_never_come_is_told(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 2, 1, [x])
    (two,) = workers.move(context_id, 1, 0, [failing(one)])
    (three,) = workers.move(context_id, 2, 0, [x * 2])  # begins the pass at worker2, which then waits for worker1
    with pytest.raises(RuntimeError, match="Error on Node 1: the hook refuses"):
        workers.backward(context_id, 0, [(two + three).sum()])
    assert [gradient.tolist() for gradient in workers.gradients(context_id, 2).values()] in ([], [[2, 2]])


def test_after_an_error_the_next_pass_is_as_good_as_any(workers: Workers) -> None:
    x = leaf(1, 2)
    refuses = True

    def perhaps_refuse(gradient: torch.Tensor) -> None:
        if refuses:
            raise ValueError("not yet")

    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    doubled = there * 2
    doubled.register_hook(perhaps_refuse)
    (back,) = workers.move(context_id, 1, 0, [doubled])
    loss = back.sum()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Error on Node 1: not yet"):
            workers.backward(context_id, 0, [loss], retain_graph=True)
    refuses = False
    workers.backward(context_id, 0, [loss], retain_graph=True)
    assert workers.gradients(context_id, 0)[x].tolist() == [2, 2]


def test_an_error_where_it_began_names_that_worker(workers: Workers) -> None:
    context_id = workers.new_context()
    with pytest.raises(RuntimeError, match="Error on Node 0: the hook refuses"):
        workers.backward(context_id, 0, [failing(leaf(1)).sum()])


def test_a_worker_that_is_lost_ends_the_pass(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 0, 1, [x])
    (two,) = workers.move(context_id, 1, 2, [one * 2])
    (three,) = workers.move(context_id, 2, 1, [two * 2])
    (home,) = workers.move(context_id, 1, 0, [three])
    workers.lost.add(2)
    with pytest.raises(WorkerLostError, match="worker2"):
        workers.backward(context_id, 0, [home.sum()])


@pytest.mark.parametrize("is_known_before", [True, False])
def test_who_waits_for_gradients_of_a_worker_that_is_lost_is_told(workers: Workers, is_known_before: bool) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    assert there.requires_grad  # and nothing comes of it
    root = (x * 2).sum()
    if is_known_before:
        workers[0].lost(info(1))
    else:
        root.register_hook(lambda gradient: workers[0].lost(info(1)))
    done = workers.in_thread(lambda: workers.backward(context_id, 0, [root]))
    assert done.block(monotonic() + 10)
    with pytest.raises(WorkerLostError, match="worker 'worker1', to which tensors were sent in it, is gone"):
        done.value()


def test_a_call_that_fails_meanwhile_gives_no_gradients(workers: Workers) -> None:
    x, y = leaf(1, 2), leaf(3, 4)
    context_id = workers.new_context()
    workers.move(context_id, 0, 1, [x, y])
    context = workers.context(context_id, 0)
    (request,) = context.sent
    root = (x * 2).sum()
    root.register_hook(lambda gradient: workers[0].forget_call(context, info(1), request))
    done = workers.in_thread(lambda: workers.backward(context_id, 0, [root]))
    assert done.block(monotonic() + 10)
    done.value()
    assert workers.gradients(context_id, 0)[x].tolist() == [2, 2]
    assert y not in workers.gradients(context_id, 0)
    assert ("forget", 1) in workers.told


def test_an_error_without_words_is_named(workers: Workers) -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise KeyError

    root = leaf(1).sum()
    root.register_hook(refuse)
    with pytest.raises(RuntimeError, match=r"Error on Node 0: KeyError\(\) \(worker 'worker0'\)"):
        workers.backward(workers.new_context(), 0, [root])


def test_no_pass_begins_in_a_context_that_is_released_meanwhile(workers: Workers) -> None:
    context_id = workers.new_context()
    context = workers.context(context_id, 0)
    context.is_released = True
    for begin in (
        lambda: workers.backward(context_id, 0, [leaf(1).sum()]),
        lambda: take_part(workers[0], context_id, PassId(1, 0), 5, [], False),
    ):
        with pytest.raises(RuntimeError, match="it was released while"):
            begin()
    assert context.passes == {}


def test_a_context_that_is_released_ends_its_passes(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])  # what comes of it is never used: the pass waits for ever
    assert there.requires_grad
    started = threading.Event()
    loss = (x * 2).sum()
    loss.register_hook(lambda gradient: started.set())
    begun = workers.in_thread(lambda: workers.backward(context_id, 0, [loss]))
    assert started.wait(10)
    workers[0].release(context_id)
    with pytest.raises(RuntimeError, match="no longer valid"):
        begun.wait()
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        workers.context(context_id, 1)


def test_who_waits_for_long_says_for_whom(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "PATIENCE", 0.0)
    context_id = workers.new_context()
    x = leaf(1)
    workers.move(context_id, 0, 2, [x])
    said: list[str] = []
    warned = threading.Event()

    def warn(words: str, *more: object) -> None:
        said.append(words % more)
        warned.set()

    monkeypatch.setattr(trouble.logger, "warning", warn)
    begun = workers.in_thread(lambda: workers.backward(context_id, 0, [(x * 2).sum()]))
    assert warned.wait(10)
    workers[0].release(context_id)
    assert isinstance(begun.exception(), RuntimeError)
    assert ["waits for gradients from worker 'worker2'" in words for words in said] == [True]


def test_gradients_that_come_for_a_pass_that_has_failed_do_not_begin_it_again(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    (back,) = workers.move(context_id, 1, 0, [there])
    pass_id = workers[0].new_pass_id()
    workers[1].abandon(context_id, pass_id, "it failed elsewhere")
    (received,) = workers.context(context_id, 0).received
    post = workers[0].post
    with pytest.raises(RuntimeError, match="has failed already"):
        post.propagate(info(1), context_id, pass_id, received, [torch.ones(2)], False, False).wait()
    assert back.requires_grad


def test_gradients_for_a_message_that_nobody_sent_are_refused(workers: Workers) -> None:
    context_id = workers.new_context()
    workers.move(context_id, 0, 1, [leaf(1)])
    future = workers[0].post.propagate(info(1), context_id, workers[0].new_pass_id(), 99, [torch.ones(1)], False, False)
    with pytest.raises(RuntimeError, match="Could not find send function for autograd message id: 99"):
        future.wait()


def test_a_plain_backward_through_what_was_received_says_what_to_use(workers: Workers) -> None:
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [leaf(1)])
    with pytest.raises(RuntimeError, match=r"came from worker 'worker0'.*Use torch\.distributed"):
        there.sum().backward()

"""Taking a graph apart: which parts there are, when they are none, and what a run gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autograd_stage import Workers, info

from farcall.pytorch.autograd.engine import prepare
from farcall.pytorch.autograd.nodes import record_later, record_received, record_sent
from farcall.pytorch.autograd.parts import Part, Produced, Walk, Walks


@pytest.fixture
def context() -> Any:
    workers = Workers(2)
    return workers.context(workers.new_context(), 0)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def sent_node(context: Any, *tensors: torch.Tensor) -> Any:
    number = len(context.sent)
    record_sent(context, number, number, info(1), tensors)
    return context.sent[number].end.grad_fn


def run(context: Any, part: Part, gradients: list[torch.Tensor]) -> list[Produced]:
    """What a part gives for others; the rest is in the context."""
    produced, found = part.run(gradients, retain_graph=False)
    part.keep(context, found)
    return produced


def parts_of(context: Any, roots: list[torch.Tensor], *sent: torch.Tensor) -> tuple[Part | None, list[Part]] | None:
    return Walks().survey(roots, [sent_node(context, tensor) for tensor in sent])


def test_parts_without_a_common_node_are_apart(context: Any) -> None:
    x, y, z = leaf(1), leaf(2), leaf(3)
    surveyed = parts_of(context, [(x * 2).sum()], y * 3, z)
    assert surveyed is not None
    root_part, parts = surveyed
    assert root_part is not None
    assert root_part.variables == [x]
    assert [part.variables for part in parts] == [[y], [z]]
    assert all(part.received == [] for part in parts)


def test_a_node_in_two_parts_connects_them(context: Any) -> None:
    shared = leaf(1) * 2
    assert parts_of(context, [shared.sum()], shared * 3) is None
    assert parts_of(context, [], shared * 3, shared * 4) is None
    assert parts_of(context, [], shared, shared) is None


def test_what_was_received_and_is_in_two_parts_connects_them(context: Any) -> None:
    (value,) = record_received(context, 7, info(1), [torch.ones(2)])
    assert parts_of(context, [], value, value * 2) is None
    surveyed = parts_of(context, [], value * 2)
    assert surveyed is not None
    assert [part.received for part in surveyed[1]] == [[value.grad_fn]]


def test_a_variable_in_two_parts_does_not_unless_it_has_hooks(context: Any) -> None:
    x = leaf(1)
    assert parts_of(context, [x.sum()], x * 2) is not None
    x.register_hook(lambda gradient: None)
    assert parts_of(context, [], x * 2) is not None
    assert parts_of(context, [x.sum()], x * 2) is None


def test_a_node_of_a_variable_that_somebody_holds_may_have_hooks(context: Any) -> None:
    x = leaf(1)
    product = x * 2
    assert parts_of(context, [], product) is not None
    node = product.grad_fn.next_functions[0][0]
    assert parts_of(context, [], product) is None
    del node
    assert parts_of(context, [], product) is not None


def test_nor_is_one_taken_apart_that_has_something_to_do_afterwards(context: Any) -> None:
    x = leaf(1)
    x.register_post_accumulate_grad_hook(lambda variable: None)
    assert parts_of(context, [], x * 2) is None


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_nor_one_with_hooks_at_a_receive_function(context: Any, register: str) -> None:
    (value,) = record_received(context, 7, info(1), [torch.ones(2)])
    assert parts_of(context, [], value * 2) is not None
    getattr(value.grad_fn, register)(lambda *gradients: None)
    assert parts_of(context, [], value * 2) is None


def test_a_run_gives_gradients_for_others_and_gathers_those_of_variables(context: Any) -> None:
    weight = leaf(3, 4)
    one, two, unused = record_received(context, 7, info(1), [torch.ones(2), torch.ones(2), torch.ones(1, 3)])
    surveyed = parts_of(context, [], one * weight + two * 2)
    assert surveyed is not None
    ((part,)) = surveyed[1]
    (produced,) = run(context, part, [torch.tensor([1.0, 10.0])])
    assert (produced.to, produced.message_id) == (info(1), 7)
    assert [gradient.tolist() for gradient in produced.gradients] == [[3, 40], [2, 20], [[0, 0, 0]]]
    assert context.gradients[weight].tolist() == [1, 10]
    assert weight.grad is None
    assert unused.requires_grad


def test_hooks_of_tensors_run_and_what_they_retain_is_there(context: Any) -> None:
    x = leaf(1, 2)
    (value,) = record_received(context, 7, info(1), [torch.ones(2)])
    value.register_hook(lambda gradient: gradient * 10)
    value.retain_grad()
    x.register_hook(lambda gradient: gradient + 1)
    surveyed = parts_of(context, [], value * x)
    assert surveyed is not None
    (produced,) = run(context, surveyed[1][0], [torch.ones(2)])
    assert produced.gradients[0].tolist() == [10, 20]
    assert value.grad is not None
    assert value.grad.tolist() == [10, 20]
    assert context.gradients[x].tolist() == [2, 2]


def test_a_variable_and_what_was_received_may_be_sent_as_they_are(context: Any) -> None:
    x = leaf(1, 2)
    (value,) = record_received(context, 7, info(1), [torch.ones(2)])
    surveyed = Walks().survey([], [sent_node(context, x, value)])
    assert surveyed is not None
    (produced,) = run(context, surveyed[1][0], [torch.ones(2), torch.full((2,), 5.0)])
    assert produced.gradients[0].tolist() == [5, 5]
    assert context.gradients[x].tolist() == [1, 1]


def test_of_what_was_received_and_is_no_plain_memory(context: Any) -> None:
    one, two = record_received(context, 7, info(1), [torch.eye(2).to_sparse() for _ in range(2)])
    surveyed = parts_of(context, [], one.to_dense() * 2)
    assert surveyed is not None
    (produced,) = run(context, surveyed[1][0], [torch.ones(2, 2)])
    assert [gradient.to_dense().diag().tolist() for gradient in produced.gradients] == [[2, 2], [0, 0]]
    assert two.requires_grad


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From where walks have begun."""
    begun: list[Any] = []
    go = Walk.go

    def noting(self: Walk, starts: Any, others: Any) -> bool:
        begun.extend(starts)
        return go(self, starts, others)

    monkeypatch.setattr(Walk, "go", noting)
    return begun


def test_what_is_behind_a_message_is_walked_through_once(context: Any, walked: list[Any]) -> None:
    walks, node = Walks(), sent_node(context, leaf(1) * 2)
    root = (leaf(2) * 3).sum()
    walks.through(node)
    for _ in range(2):
        assert walks.survey([root], [node]) is not None
    assert walked == [node, root.grad_fn, root.grad_fn]


def test_what_has_changed_since_then_is_seen(context: Any) -> None:
    x = leaf(1)
    (value,) = record_received(context, 7, info(1), [torch.ones(1)])
    product = x * value
    node = sent_node(context, product)
    walks = Walks()
    walks.through(node)
    assert walks.survey([], [node]) is not None
    held = product.grad_fn.next_functions[0][0]
    assert walks.survey([], [node]) is None
    del held
    assert walks.survey([], [node]) is not None
    hook = x.register_post_accumulate_grad_hook(lambda variable: None)
    assert walks.survey([], [node]) is None
    hook.remove()
    assert walks.survey([], [node]) is not None
    value.grad_fn.register_hook(lambda *gradients: None)
    assert walks.survey([], [node]) is None


def test_messages_that_are_not_apart_stay_so_and_are_not_walked_through_again(context: Any, walked: list[Any]) -> None:
    shared = leaf(1) * 2
    one, two, three = (sent_node(context, shared * number) for number in (3, 4, 5))
    walks = Walks()
    assert walks.through(one) is not None
    assert walks.through(two) is None
    assert [walks.through(each) for each in (one, two, three)] == [None, None, None]
    assert walks.survey([], [one]) is None
    assert walked == [one, two]


def test_a_root_that_touches_a_message_is_not_apart_from_it_whichever_is_walked_through_first(context: Any) -> None:
    shared = leaf(1) * 2
    walks, node = Walks(), sent_node(context, shared * 3)
    assert walks.survey([shared.sum()], [node]) is None
    assert walks.survey([], [node]) is not None, "one that does not is"


def test_walks_of_other_contexts_do_not_count_as_holders(context: Any) -> None:
    x = leaf(1)
    walks = [Walks() for _ in range(3)]
    nodes = [sent_node(context, x * 2) for _ in walks]
    for each, node in zip(walks, nodes, strict=True):
        each.through(node)
    assert all(each.survey([], [node]) is not None for each, node in zip(walks, nodes, strict=True))


def test_a_context_is_prepared_while_others_work(context: Any, walked: list[Any]) -> None:
    x = leaf(1)
    record_later(context, 5, 1, info(1), (x * 2,))
    prepare(context)
    prepare(context)
    assert list(context.sent) == [5]
    assert walked == [context.sent[5].end.grad_fn]

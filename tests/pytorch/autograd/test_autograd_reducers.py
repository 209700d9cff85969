"""Variables of DistributedDataParallel: its reducer finds the gradients of a context in `.grad`, for a time."""

from __future__ import annotations

import torch
from autograd_stage import Workers

from farcall.pytorch.autograd import reducers
from farcall.pytorch.autograd.reducers import Reducer, note_reduced


def halving(variable: torch.Tensor) -> torch.Tensor:
    """As a reducer: changes what is in `.grad` when the gradient has been added to it."""
    output = variable * 6

    def halve(inputs: object, outputs: object) -> None:
        assert variable.grad is not None
        variable.grad.div_(2)

    output.grad_fn.next_functions[0][0].register_hook(halve)
    return output


def test_a_reducer_works_on_the_gradients_of_the_context() -> None:
    reduced, other, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    note_reduced([reduced, unused])
    reduced.grad = before = torch.full((2,), 100.0)
    workers = Workers(1)
    context_id = workers.new_context()
    workers.backward(context_id, 0, [(halving(reduced) + other).sum()])
    gradients = workers.gradients(context_id, 0)
    assert gradients[reduced].tolist() == [3, 3]
    assert gradients[other].tolist() == [1, 1]
    assert unused not in gradients
    assert reduced.grad is before
    assert before.tolist() == [100, 100]
    assert other.grad is None


def test_the_next_pass_in_the_context_adds_to_them() -> None:
    reduced = torch.ones(2, requires_grad=True)
    note_reduced([reduced])
    workers = Workers(1)
    context_id = workers.new_context()
    for expected in (3, 4.5):  # (3 + 6) / 2
        workers.backward(context_id, 0, [halving(reduced).sum()])
        assert workers.gradients(context_id, 0)[reduced].tolist() == [expected] * 2
        assert reduced.grad is None


def test_it_stands_for_torchs() -> None:
    assert issubclass(Reducer, torch.distributed.Reducer)


def test_a_reducer_lets_others_have_the_interpreter_before_it_ends() -> None:
    """Else its last process group waits for its threads, and they for the interpreter, for ever."""
    waited: list[float] = []
    reducers._end(None, waited.append)
    assert waited == [reducers._MOMENT]
    assert Reducer.__del__ is reducers._end

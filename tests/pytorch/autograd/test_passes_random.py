"""Random graphs over two to four workers: gradients, and what hooks see, are those of one process, to the last bit.

All numbers are small whole ones, so that the order of sums makes no difference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from autograd_stage import Workers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

LEAVES = 3
EXACT = 2.0**53


class Step(NamedTuple):
    """One value that a worker computes from two earlier ones, which come to it from wherever they are."""

    worker: int
    left: int
    right: int
    operation: str
    is_one_message: bool
    """Whether both come in one message, if they come from one worker."""


def steps(size: int) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        st.integers(0, size - 1),
        st.integers(0, 20),
        st.integers(0, 20),
        st.sampled_from(["add", "subtract", "multiply"]),
        st.booleans(),
    )
    return st.lists(step, min_size=1, max_size=8)


class Run:
    """One run of a program. Without workers, all of it is here."""

    def __init__(self, program: list[Step], workers: Workers | None) -> None:
        self.leaves = [
            torch.tensor([1.0 + place, -2.0, 3.0], dtype=torch.float64, requires_grad=True) for place in range(LEAVES)
        ]
        self.hooked: dict[int, list[list[float]]] = {}
        self._workers = workers
        self._context_id = workers.new_context() if workers is not None else -1
        self._places = [0] * LEAVES
        self._values = list(self.leaves)
        used: set[int] = set()
        for step in program:
            used |= self._compute(step)
        loss = torch.zeros((), dtype=torch.float64)
        for place in range(LEAVES, len(self._values)):
            if place not in used:
                (value,) = self._bring([place], 0)
                loss = loss + value.sum()
        assume(all(value.detach().abs().max() < EXACT for value in self._values))
        if workers is None:
            loss.backward()
            self.gradients = [leaf.grad for leaf in self.leaves]
        else:
            workers.backward(self._context_id, 0, [loss])
            gathered = workers.gradients(self._context_id, 0)
            self.gradients = [gathered.get(leaf) for leaf in self.leaves]

    def _compute(self, step: Step) -> set[int]:
        left, right = step.left % len(self._values), step.right % len(self._values)
        if step.operation == "multiply":
            right = right % LEAVES
        if step.is_one_message and self._places[left] == self._places[right] and left != right:
            one, two = self._bring([left, right], step.worker)
        else:
            (one,), (two,) = self._bring([left], step.worker), self._bring([right], step.worker)
        result = {"add": torch.add, "subtract": torch.sub, "multiply": torch.mul}[step.operation](one, two)
        seen = self.hooked.setdefault(len(self._values), [])
        result.register_hook(lambda gradient: seen.append(gradient.tolist()))
        self._values.append(result)
        self._places.append(step.worker)
        return {left, right}

    def _bring(self, which: list[int], to: int) -> list[torch.Tensor]:
        values = [self._values[place] for place in which]
        source = self._places[which[0]]
        if self._workers is None or source == to:
            return values
        return self._workers.move(self._context_id, source, to, values)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(2, 4))
def test_gradients_and_hooks_are_those_of_one_process(data: st.DataObject, size: int) -> None:
    program = data.draw(steps(size))
    alone = Run(program, None)
    with Workers(size) as workers:
        together = Run(program, workers)
    for mine, theirs in zip(together.gradients, alone.gradients, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs)
    assert together.hooked == alone.hooked
    assert all(leaf.grad is None for leaf in together.leaves)

"""`DistributedDataParallel` under distributed autograd: its gradients are reduced before a context gets them.

The reducer of torch's data parallel modules hangs on the nodes that write gradients into `.grad`: each of them tells it
that its parameter is ready, and with the last one it averages all of them over its process group, in `.grad`. A
backward pass of distributed autograd writes nothing there. So the gradients of such parameters are held back until the
worker has them all; then a local backward pass with nothing but these nodes in it writes them into `.grad`, which makes
the reducer do its work, and the averages go from there to the context. What was in `.grad` is there again afterwards.

Rules
- Only reducers that were made after `install()` are known: `Reducer` stands for torch's own.
- Several reducers of a worker have their turns in the order in which they were made, which is the same on all workers:
  their processes wait for each other.
- A static graph (`static_graph=True`) is not supported: its first pass reduces from another place.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

_numbers: Final = itertools.count()
_reducers: Final = WeakTensorKeyDictionary()
"""Weak references to the reducers, by the parameters."""


class Reducer(dist.Reducer):  # type: ignore[misc]  # torch may not be there when types are checked
    """The reducer of a data parallel module, which is known here."""

    def __init__(self, params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        """As torch's, and raises as that."""
        super().__init__(params, *args, **kwargs)
        self.number = next(_numbers)
        self.size = len(params)
        self.turn = threading.Lock()
        for parameter in params:
            _reducers[parameter] = weakref.ref(self)


def _reducer_of(parameter: torch.Tensor) -> Reducer | None:
    found = _reducers.get(parameter)
    return found() if found is not None else None


class HeldBack:
    """Gradients of one backward pass on one worker that have to be reduced before they count."""

    def __init__(self) -> None:
        self._gradients: dict[Reducer, dict[torch.Tensor, torch.Tensor]] = {}

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether this gradient is held back: it is then added to what there is for that parameter already."""
        if not _reducers or (reducer := _reducer_of(parameter)) is None:
            return False
        gradients = self._gradients.setdefault(reducer, {})
        gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient
        return True

    def release_complete(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and their averages, of all modules that have gradients for all of their parameters."""
        return self._release(reducer for reducer, found in self._gradients.items() if len(found) == reducer.size)

    def release_all(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same for all modules: there is nothing more to come. Waits for the other processes of their groups."""
        return self._release(self._gradients)

    def _release(self, reducers: Iterable[Reducer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            reduced
            for reducer in sorted(reducers, key=lambda each: each.number)
            for reduced in _reduced(reducer, self._gradients.pop(reducer))
        ]


def _reduced(reducer: Reducer, gradients: dict[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parameters = list(gradients)
    with reducer.turn:
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            torch.autograd.backward(parameters, list(gradients.values()))
            return [(parameter, _own(parameter.grad)) for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def _own(gradient: torch.Tensor) -> torch.Tensor:
    """Not a part of the reducer's buffer, which the next pass writes to."""
    if gradient.layout is torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes:
        return gradient.clone()
    return gradient

"""DistributedDataParallel inside of distributed autograd: its reducer averages what is in `.grad`.

torch's reducer asks torch's own distributed autograd whether the gradients are in a context, and takes them from
`.grad` if not. So the variables of a reducer lend it their `.grad` for the time of a backward pass: it has the
gradients of the context, and what it had before comes back. Two backward passes over the variables of one reducer at
once are no more possible than torch's own.

`Reducer` stands for torch's after `install()`, and notes whose variables it has.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import distributed
from torch.utils.weak import WeakTensorKeyDictionary

from farcall.pytorch.autograd.contexts import DistAutogradContext

_together: Final[Any] = WeakTensorKeyDictionary()
"""For a variable of a reducer: weak references to all variables of that."""


_TorchReducer: Final[Any] = vars(distributed)["Reducer"]


def _begin(self: Any, params: Sequence[torch.Tensor], *others: Any, **options: Any) -> None:
    _TorchReducer.__init__(self, params, *others, **options)
    note_reduced(params)


_MOMENT: Final = 2e-3


def _end(self: Any, wait: Any = time.sleep) -> None:
    """The last that holds a process group of Gloo's ends its threads, and waits for them with the interpreter's lock.

    One that has just reduced something may want that lock, to let go of a tensor: they would wait for each other for
    ever. So they get it before.
    """
    wait(_MOMENT)


# Not by `class`: without torch, its type is not known when types are checked.
Reducer: Final[Any] = type(
    "Reducer", (_TorchReducer,), {"__init__": _begin, "__del__": _end, "__doc__": "torch's, and it notes its own."}
)


def note_reduced(variables: Sequence[torch.Tensor]) -> None:
    """These are reduced together."""
    references = [weakref.ref(variable) for variable in variables]
    for variable in variables:
        _together[variable] = references


def has_reducers() -> bool:
    """Whether any variables of this process are reduced."""
    return bool(_together)


@contextmanager
def lent_to_reducers(context: DistAutogradContext, variables: Sequence[torch.Tensor]) -> Iterator[Collection[int]]:
    """The variables whose `.grad` is that of the context inside: those that are reduced together with one of these."""
    lent: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    if _together:
        for variable in variables:
            for reference in _together.get(variable, ()):
                reduced = reference()
                if reduced is not None:
                    lent[id(reduced)] = reduced, reduced.grad
    for reduced, _ in lent.values():
        reduced.grad = context.gradients.get(reduced)
    try:
        yield lent.keys()
    finally:
        with context.lock:
            for reduced, before in lent.values():
                if reduced.grad is not None:
                    context.gradients[reduced] = _own(reduced.grad)
                reduced.grad = before


def _own(gradient: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy if it is a part of the reducer's memory, to which the next pass writes."""
    if gradient.layout is torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes:
        return gradient.clone()
    return gradient

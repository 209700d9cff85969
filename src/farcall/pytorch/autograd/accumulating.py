"""How gradients add up in a context: the rules by which torch adds them to `.grad`.

Rules
- The first gradient of a variable is kept as it is if nobody else has it and it lies in memory as the variable does;
  else a copy is that lies so.
- A later one is added to it, in its memory. Only a dense one to a sparse one makes a new tensor.
- Nothing of it is recorded for gradients of gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


class GradientTable(MutableMapping[torch.Tensor, torch.Tensor]):
    """The gradients of variables. torch hashes tensors in Python, so they are kept by the ids of the variables."""

    __slots__ = ("by_id",)

    def __init__(self) -> None:
        self.by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The variable and its gradient."""

    def __getitem__(self, variable: torch.Tensor) -> torch.Tensor:
        return self.by_id[id(variable)][1]

    def __setitem__(self, variable: torch.Tensor, gradient: torch.Tensor) -> None:
        self.by_id[id(variable)] = variable, gradient

    def __delitem__(self, variable: torch.Tensor) -> None:
        del self.by_id[id(variable)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (variable for variable, _ in self.by_id.values())

    def __len__(self) -> int:
        return len(self.by_id)


def accumulate(
    gradients: MutableMapping[torch.Tensor, torch.Tensor], variable: torch.Tensor, arrived: Gradients
) -> None:
    """Adds the one gradient that the engine gave to a hook, in the tuple in which it did."""
    is_unshared = all(have <= wanted for have, wanted in zip(holders(arrived), unshared_holders(), strict=True))
    new = arrived[0]
    assert new is not None
    with torch.no_grad():
        add_up(gradients, variable, new, is_unshared)


def add_up(
    gradients: MutableMapping[torch.Tensor, torch.Tensor], variable: torch.Tensor, new: torch.Tensor, is_unshared: bool
) -> None:
    """Adds a gradient of that variable. `is_unshared`: nobody else has it. Inside of `torch.no_grad()`."""
    old = gradients.get(variable)
    if old is None:
        gradients[variable] = _taken(new, variable, is_unshared)
    elif old.layout is not torch.strided and new.layout is torch.strided:
        gradients[variable] = new + old
    else:
        old += new


def shows_others(gradient: torch.Tensor) -> bool:
    """Whether somebody else has the memory of a dense gradient, by another tensor: that of a sum is a view."""
    return gradient._is_view() and any(have > one for have, one in zip(_viewers(gradient), _one_viewer(), strict=True))


def _viewers(view: Any) -> tuple[int, int]:
    return torch._C._storage_Use_Count(view.untyped_storage()._cdata), view._base._use_count()


@cache
def _one_viewer() -> tuple[int, int]:
    """What `_viewers` gives for the only view of a tensor that nobody else has: measured, as it is torch's affair."""
    return _viewers(torch.zeros(1).view(1))


def _taken(new: torch.Tensor, variable: torch.Tensor, is_unshared: bool) -> torch.Tensor:
    if new.layout is torch.sparse_coo:
        indices, values = new._indices(), new._values()
        if is_unshared and indices.is_contiguous() and values.is_contiguous():
            # Not detach(): what is detached shares its shape with the original, and may not change it.
            return torch.sparse_coo_tensor(
                indices, values, new.shape, is_coalesced=new.is_coalesced(), check_invariants=False
            )
        return new.clone()
    if new.layout is not torch.strided or new.is_nested:
        return new.clone()
    is_unshared = is_unshared and not shows_others(new)
    if is_unshared and new.is_contiguous() and variable.is_contiguous():  # the rule, and quick to see
        return new.detach()
    strides = _wanted_strides(new, variable)
    if is_unshared and _lies_so(new, strides):
        return new.detach()
    return torch.empty_strided(new.shape, strides, dtype=new.dtype, device=new.device).copy_(new)


def _wanted_strides(new: torch.Tensor, variable: torch.Tensor) -> Any:
    """Those of the variable if each of its elements has a place of its own and there are no gaps; else row by row."""
    if variable.layout is torch.strided and torch.ops.aten.is_non_overlapping_and_dense(variable):
        return variable.stride()
    return torch.empty(new.shape, device="meta").stride()


def _lies_so(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return all(
        size == 1 or mine == wanted for size, mine, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def holders(arrived: Gradients) -> tuple[int, int]:
    """How many hold the gradient: in torch, and in Python."""
    return arrived[0]._use_count(), sys.getrefcount(arrived[0])  # type: ignore[union-attr]


@cache
def unshared_holders() -> tuple[int, int]:
    """What `holders` gives where only the engine and its hooks hold the gradient: measured, as it is torch's affair.

    To be called outside of the engine first: inside, others would be measured along.
    """
    variable = torch.zeros(1, requires_grad=True)
    seen: list[Any] = []

    def look(arrived: Gradients) -> Gradients:
        seen.append(holders(arrived))
        return (None,)

    with torch.enable_grad():
        output = (variable * 2).sum()
    handle = get_gradient_edge(variable).node.register_prehook(look)
    torch.autograd.backward((output,))
    handle.remove()
    return seen[0]  # type: ignore[no-any-return]

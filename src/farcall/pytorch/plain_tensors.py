"""Tensors at workers that restrict what is sent to them (the option `allow`): plain data, as arrays are.

A pickle may then call what makes tensors anew in `tensors` and `layouts`, by the functions here in their place, which
look at the arguments first. Dense and sparse tensors and parameters of modules are taken. Quantized tensors, nested
ones and subclasses are not: torch's own functions make them, and believe what they are told.

Rules
- Arguments are numbers, texts, shapes, plain memory, and tensors that were made here: nothing with methods of others.
- A truth value is 0 or 1: some of torch's loops count the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from farcall.pytorch import layouts, tensors
from farcall.serialization import register_plain

_KINDS: Final = frozenset({bytes, bytearray, memoryview, str, int, bool, type(None), torch.Tensor})


def checked(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function for arguments that nobody has looked at. Raises `TypeError` for those that it must not get."""

    def make(*args: Any) -> torch.Tensor:
        for value in args:
            if type(value) not in _KINDS and not _is_shape(value):
                raise TypeError(f"a {type(value).__name__} was sent as a part of a tensor")
        made = function(*args)
        if made.dtype is torch.bool and made.layout is torch.strided and 0 not in made.stride():
            made.view(torch.uint8).ne_(0)
        return made

    return make


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(type(length) is int for length in value)


def count_as_plain() -> None:
    """From now on, restricted workers take tensors; once is enough."""
    for function in (
        tensors.rebuild_tensor,
        tensors.rebuild_expanded,
        tensors.rebuild_with_gaps,
        tensors.rebuild_parameter,
        layouts.rebuild_coordinates,
        layouts.rebuild_compressed,
    ):
        register_plain(function, checked(function))

"""Tensors on workers with an allow-list (the option `allow`): they are accepted as plain data, like arrays.

A pickle from another worker calls the functions of this module instead of those of `tensors` that rebuild tensors. They
check the arguments first. Dense and sparse tensors and parameters are accepted. Quantized tensors, nested tensors and
subclasses are not, because torch's own functions rebuild those without checking their arguments.

Rules
- Arguments are numbers, texts, shapes, plain memory, and tensors that were rebuilt here. Objects with other methods are
  rejected.
- A truth value is stored as 0 or 1, because some of torch's loops count the bytes.
- Data that is checked (truth values, the indices of sparse tensors) is copied first. Otherwise a pickle could let
  several tensors use one buffer, or write into a `bytearray` after the tensor that uses it was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from farcall.pytorch import tensors
from farcall.serialization import register_plain

_MAX_EXPANDED_BYTES: Final = 1 << 20
"""The largest size of a copied part of a sparse tensor whose memory is much smaller than itself."""

_TO_TRUTH_VALUES: Final = b"\0" + b"\1" * 255
"""A translation table for `bytes.translate`: 0 stays 0, every other byte becomes 1."""

_MEMORY_TYPES: Final = frozenset({bytes, bytearray, memoryview})
_ALLOWED_TYPES: Final = _MEMORY_TYPES | frozenset({str, int, bool, type(None), torch.Tensor})


def make_checked(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function that checks its arguments, and then calls `function` to rebuild a tensor from them.

    The returned function raises `TypeError` if an argument has a type that is not allowed, and `ValueError` if a part
    of a sparse tensor repeats the same elements many times. Allowed are memory, texts, whole numbers, truth values,
    None, tensors, and tuples of whole numbers.

    Args:
        function: One of the functions of `tensors` whose name begins with `rebuild_`. It is not checked.
    """
    is_sparse = function in (tensors.rebuild_coordinates, tensors.rebuild_compressed)

    def make(*args: Any) -> torch.Tensor:
        for value in args:
            if type(value) not in _ALLOWED_TYPES and not _is_shape(value):
                raise TypeError(f"a {type(value).__name__} was sent as a part of a tensor, which is not allowed")
        if is_sparse:
            # Copied before torch checks the indices; see the rules. `_copy_part` limits the size of expanded tensors.
            args = tuple(_copy_part(value) if type(value) is torch.Tensor else value for value in args)
        elif function is tensors.rebuild_tensor and args[1:2] == ("bool",) and type(args[0]) in _MEMORY_TYPES:
            args = (bytearray(args[0]).translate(_TO_TRUTH_VALUES), *args[1:])
        return function(*args)

    return make


def _copy_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of a part of a sparse tensor: its indices or its values. The part may be empty.

    Raises `TypeError` if the part is not dense, and `ValueError` if it is an expanded view of much less memory.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} was sent as a part of a sparse tensor")
    if tensor.numel() * tensor.itemsize > max(_MAX_EXPANDED_BYTES, 2 * tensor.untyped_storage().nbytes()):
        raise ValueError("a part of a sparse tensor was sent that repeats the same elements many times")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _is_shape(value: Any) -> bool:
    """Returns True for a tuple of integers, also for an empty one; False for anything else."""
    return type(value) is tuple and all(type(length) is int for length in value)


def allow_tensors() -> None:
    """Makes workers with an allow-list accept tensors from now on. Calling it again changes nothing."""
    for function in (
        tensors.rebuild_tensor,
        tensors.rebuild_expanded,
        tensors.rebuild_with_gaps,
        tensors.rebuild_parameter,
        tensors.rebuild_coordinates,
        tensors.rebuild_compressed,
    ):
        register_plain(function, make_checked(function))

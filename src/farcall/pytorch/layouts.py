"""How tensors travel that are no plain memory of this host: sparse and quantized ones, and those of other kinds.

Each travels as the plain tensors it is made of. Sparse tensors are checked as they are made again: indices that lead
outside of one would be read and written outside of memory later. What is left, nested tensors say, and subclasses of
`torch.Tensor`, travel as torch pickles them, with their whole storages; these are beside the pickle.
"""

from __future__ import annotations

from ctypes import c_char
from pickle import PickleBuffer
from typing import Any, Final

import torch

_COMPRESSED: Final = {
    torch.sparse_csr: ("csr", torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: ("csc", torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsr: ("bsr", torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsc: ("bsc", torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS: Final = {name: layout for layout, (name, _, _) in _COMPRESSED.items()}

_NO_MAP: Final = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending them "
    "over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device mapping."
)


def no_map(side: str, device: torch.device, destination: str = "") -> RuntimeError:
    """The error for a tensor of that device, in torch's words. `side`: `Request` or `Response`, or both."""
    where = f" for destination {destination}" if destination else ""
    return RuntimeError(f"{_NO_MAP} {side} device mapping is not available{where}: a tensor is on {device}")


def reduce_unplain(tensor: torch.Tensor) -> Any:
    """What pickle makes of such a tensor. Raises `RuntimeError` if it is on another device than the processor."""
    if not tensor.is_cpu:
        raise no_map("Request or Response", tensor.device)
    requires_grad = tensor.requires_grad
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        shape, is_coalesced = tuple(tensor.shape), tensor.is_coalesced()
        return rebuild_coordinates, (tensor._indices(), tensor._values(), shape, is_coalesced, requires_grad)
    if tensor.layout in _COMPRESSED:
        name, outer, inner = _COMPRESSED[tensor.layout]
        parts = outer(tensor), inner(tensor), tensor.values()
        return rebuild_compressed, (name, *parts, tuple(tensor.shape), requires_grad)
    if tensor.is_quantized and tensor.dtype in (torch.qint8, torch.quint8, torch.qint32):
        scheme = tensor.qscheme()
        if scheme is torch.per_tensor_affine:
            return rebuild_quantized, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
        if scheme is torch.per_channel_affine:
            channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
            return rebuild_quantized, (tensor.int_repr(), *channels)
    return tensor.requires_grad_(requires_grad).__reduce_ex__(2)


def rebuild_coordinates(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    """A sparse tensor with the indices of its values. Raises `RuntimeError` if some are outside of it."""
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=is_coalesced, check_invariants=True, requires_grad=requires_grad
    )


def rebuild_compressed(
    name: str,
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """A sparse tensor with compressed rows or columns. Raises `RuntimeError` if its indices cannot be."""
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=_LAYOUTS[name], check_invariants=True, requires_grad=requires_grad
    )


def rebuild_quantized(whole: torch.Tensor, scale: Any, zero_point: Any, axis: int | None = None) -> torch.Tensor:
    """A quantized tensor: one scale for all of it, or one for each channel."""
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(whole, scale, zero_point)
    return torch._make_per_channel_quantized_tensor(whole, scale, zero_point, axis)


# Storages


def reduce_storage(storage: torch.UntypedStorage) -> Any:
    """What pickle makes of memory that tensors are in. Raises `RuntimeError` for that of other devices."""
    if storage.device.type != "cpu":
        raise no_map("Request or Response", storage.device)
    size = storage.nbytes()
    if not size:
        return rebuild_storage, (b"",)
    memory: Any = (c_char * size).from_address(storage.data_ptr())
    memory.owner = storage
    return rebuild_storage, (PickleBuffer(memory),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    """The same for memory of which the type of elements is known."""
    return rebuild_typed_storage, (storage._untyped_storage, storage.dtype)


def rebuild_storage(memory: Any) -> torch.UntypedStorage:
    """That memory again, which is its own."""
    if not memory:
        return torch.UntypedStorage(0)
    view = memoryview(memory)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).untyped_storage()


def rebuild_typed_storage(storage: torch.UntypedStorage, kind: torch.dtype) -> torch.TypedStorage:
    """The same with the type of elements."""
    return torch.TypedStorage(wrap_storage=storage, dtype=kind, _internal=True)

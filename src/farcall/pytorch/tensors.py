"""How tensors are sent: as the elements that they show, outside of the pickle if they are large.

`reduce_tensor` is the reducer of `torch.Tensor` in farcall's messages, and in no other pickles. torch's own pickle of a
tensor copies the whole storage behind it.

Rules
- A tensor arrives with the same type, shape and values, in writable memory of its own. Of a view, only the elements
  that it shows are sent.
- The strides are the same, with two exceptions: a view whose elements span more than `MAX_GAPPED_BYTES`, and one whose
  elements overlap, arrive without gaps. An expanded tensor arrives expanded, and only what was expanded is sent.
- A tensor that requires gradients arrives so, as a leaf without history.
- Two tensors that share memory arrive as two. One object that is sent twice in a message arrives as one.
- Attributes and hooks of a tensor are not sent, as in torch's own RPC.
- Whatever a pickle says, a rebuilt tensor lies inside of the memory that came with it.
- Sparse and quantized tensors are sent as the plain tensors that they consist of. Sparse tensors are checked when they
  are rebuilt, because an index outside of the tensor would later read or write outside of its memory.
- Everything else (nested tensors, subclasses of `torch.Tensor`) is pickled by torch, with the whole storage, which is
  sent outside of the pickle.

`sending_apart` and `receiving_apart` collect the tensors of a value in a list, for code that must see them
(`envelopes`). The reducer of `internal`'s pickler puts them there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char
from pickle import PickleBuffer
from typing import Any, Final

import torch
from torch.nn import Parameter

try:
    import numpy
except ImportError:  # torch works without numpy
    numpy = None  # type: ignore[assignment]

from farcall.pytorch.internal import SendTable, _internal_rpc_pickler
from farcall.pytorch.internal import _thread_local_tensor_tables as _tables
from farcall.serialization import (
    OUT_OF_BAND_MIN_BYTES,
    SINGLE_ARRAY_START,
    Packed,
    dtype_code,
    pack_array_header,
    register_array_type,
    register_reducer,
)

MAX_GAPPED_BYTES: Final = 16 * 1024
"""The largest distance, from the first to the last byte of a view, for which its gaps are recreated on arrival."""

_MAX_CACHED_SIZES: Final = 1024
_QUANTIZED: Final = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_NAMES: Final[dict[torch.dtype, str]] = {
    kind: name
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype) and kind not in _QUANTIZED and str(kind) == f"torch.{name}"
}
"""The name of each element type whose tensors are plain memory."""
_TYPES: Final[dict[str, torch.dtype]] = {name: kind for kind, name in _NAMES.items()}
_IN_NUMPY: Final[dict[str, Any]] = {} if numpy is None else {n: numpy.dtype(n) for n in _TYPES if hasattr(numpy, n)}
"""The numpy type for each name that numpy has. Making a tensor from a numpy array is faster than from memory."""

_strided: Final = torch.strided
_frombuffer: Final = torch.frombuffer
_from_numpy: Final = torch.from_numpy
_ndarray: Final = None if numpy is None else numpy.ndarray


# -- sending


class _ThreadState(threading.local):
    """State of the current thread. Each thread has its own.

    Attributes:
        is_apart: True inside `sending_apart`: tensors that this thread pickles are collected in a list. Else False.
    """

    is_apart = False
    """True inside `sending_apart`. Faster to check than the table."""


_thread = _ThreadState()


@contextmanager
def sending_apart() -> Iterator[SendTable]:
    """Context manager: the tensors of everything that this thread pickles inside it are collected in a list.

    Yields the list, which is empty at first. The pickle contains only the indices of the tensors. Blocks can be nested;
    each has its own list.
    """
    was_apart = _thread.is_apart
    mine = _tables.__dict__  # this thread's; faster than looking up an attribute that is usually missing
    before = mine.get("send_tables")
    mine["send_tables"] = table = SendTable()
    _thread.is_apart = True
    try:
        yield table
    finally:
        _thread.is_apart = was_apart
        if before is None:
            del mine["send_tables"]
        else:
            mine["send_tables"] = before


@contextmanager
def receiving_apart(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context manager: everything that this thread unpickles inside it takes its tensors from a list, by index.

    An index that the list does not have makes unpickling fail with `IndexError`, or with an error of which that is the
    cause.

    Args:
        tensors: The list that `sending_apart` yielded at the sender; may be empty.
    """
    mine = _tables.__dict__
    before = mine.get("recv_tables")
    mine["recv_tables"] = tensors
    try:
        yield
    finally:
        if before is None:
            del mine["recv_tables"]
        else:
            mine["recv_tables"] = before


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Returns what pickle needs to rebuild a tensor: a function and its arguments.

    Inside `sending_apart`, a context manager, the tensor is added to its list, and the arguments are only its index.
    Otherwise they contain the elements that the tensor shows. Raises `RuntimeError` if the tensor is not in CPU memory,
    except inside `sending_apart`.
    """
    if _thread.is_apart:
        return _internal_rpc_pickler._tensor_reducer(tensor)
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not _strided or not tensor.is_cpu or tensor.is_nested:
        return reduce_other(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return _reduce_view(tensor.detach(), name, tensor.requires_grad)
    if tensor.requires_grad:
        return rebuild_tensor, (_tensor_memory(tensor), name, tuple(tensor.shape), None, True)
    return rebuild_tensor, (_tensor_memory(tensor), name, tuple(tensor.shape))


def reduce_parameter(parameter: Parameter) -> Any:
    """Returns what pickle needs to rebuild a parameter of a module: a function and its arguments.

    Inside `sending_apart`, a context manager, the parameter is added to its list, and the arguments are only its index.
    Otherwise they contain its tensor, and pickling that raises `RuntimeError` if it is not in CPU memory.
    """
    if _thread.is_apart:
        return _internal_rpc_pickler._tensor_reducer(parameter)
    return rebuild_parameter, (parameter.detach(), parameter.requires_grad)


_bytes_at: Final[dict[int, Any]] = {}
"""For each size, a function from an address to an object whose `raw` copies that many bytes.

Faster than `ctypes.string_at`, which makes a foreign function call.
"""


def _bytes_of(size: int) -> Any:
    """Returns a function for copying `size` bytes of memory: `function(address).raw` is a copy, as `bytes`.

    Stores the function in `_bytes_at`, a cache with one function for each size. Empties the cache first if it is full.
    """
    if len(_bytes_at) >= _MAX_CACHED_SIZES:
        _bytes_at.clear()
    found = _bytes_at[size] = (c_char * size).from_address
    return found


def _tensor_memory(tensor: torch.Tensor) -> Any:
    """Returns the memory of a contiguous tensor in CPU memory: a copy as `bytes` if it is small, else a buffer over it.

    Returns empty `bytes` for an empty tensor. It is not checked that the tensor is contiguous and in CPU memory.
    """
    size = tensor.nbytes
    if size < OUT_OF_BAND_MIN_BYTES:
        return (_bytes_at.get(size) or _bytes_of(size))(tensor.data_ptr()).raw if size else b""
    memory: Any = (c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # keeps the memory alive until it is sent
    return PickleBuffer(memory)


_small_tensors: Final[dict[tuple[torch.dtype, torch.Size], tuple[bytes, Any]]] = {}
"""For small tensors that need no pickle, by type and shape: their header, and the function that copies them."""


def pack_tensor(tensor: torch.Tensor, start: bytes = SINGLE_ARRAY_START, with_gradients: bool = False) -> Packed | None:
    """Returns a tensor in a format that needs no pickle: bytes, and a list of buffers.

    The bytes are `start`, a header with the type and shape and, for a small tensor, its elements. The list has one
    buffer over the elements of a large tensor, and is empty for a small one. Returns None for a tensor that must be
    pickled: not in CPU memory, not contiguous, sparse, empty and so on.

    Args:
        tensor: The tensor. It is not checked that it is one.
        start: The first bytes of the result.
        with_gradients: If False, a tensor that requires gradients must be pickled. If True, the caller sends separately
            that it requires them.
    """
    if (
        tensor.dtype not in _CODES
        or (tensor.requires_grad and not with_gradients)
        or tensor.layout is not _strided
        or not tensor.is_cpu
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
    ):
        return None
    known = _small_tensors.get((tensor.dtype, tensor.shape))
    if known is None:
        return _pack_unknown(tensor, start)
    head, bytes_at = known
    return start + head + bytes_at(tensor.data_ptr()).raw, []


def _pack_unknown(tensor: torch.Tensor, start: bytes) -> Packed | None:
    """Returns a tensor that is large, or the first of its type and shape, as bytes and a list of buffers.

    The bytes are `start`, a header and, for a small tensor, its elements. The list has one buffer over the elements of
    a large tensor, and is empty for a small one. Caches the header of a small tensor for others of its type and shape.
    Returns None for a tensor that must be pickled: it is empty, or has more than 8 dimensions.
    """
    head = pack_array_header(_CODES[tensor.dtype], tensor.shape) if tensor.nbytes else None
    if head is None:
        return None
    memory = _tensor_memory(tensor)
    if type(memory) is not bytes:
        return start + head, [memory.raw()]
    if len(_small_tensors) >= _MAX_CACHED_SIZES:
        _small_tensors.clear()
    _small_tensors[tensor.dtype, tensor.shape] = head, _bytes_of(len(memory))
    return start + head + memory, []


def _reduce_view(tensor: torch.Tensor, name: str, requires_grad: bool) -> Any:
    """Returns what pickle needs to rebuild a tensor whose memory cannot be sent as it is: a function and its arguments.

    Such a tensor is not contiguous, or torch conjugates it, negates it or fills it with zeros lazily.

    Args:
        tensor: The tensor, detached from its graph.
        name: The name of its element type.
        requires_grad: Whether the rebuilt tensor requires gradients.
    """
    shape = tuple(tensor.shape)
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        tensor = tensor.clone().resolve_conj().resolve_neg()
        return rebuild_tensor, (_tensor_memory(tensor.contiguous()), name, shape, None, requires_grad)
    strides = tensor.stride()
    if any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True)):
        once = tuple(slice(0, 1) if not stride else slice(None) for stride in strides)
        return rebuild_expanded, (tensor[once], shape, requires_grad)
    if _has_no_gaps(shape, strides):
        return rebuild_tensor, (_tensor_memory(tensor), name, shape, strides, requires_grad)
    extent = _extent(shape, strides) * tensor.itemsize
    if extent <= MAX_GAPPED_BYTES and extent >= tensor.nbytes:
        return rebuild_with_gaps, (tensor.contiguous(), strides, requires_grad)
    dense = tensor.clone()  # keeps the order of the dimensions in memory
    return rebuild_tensor, (_tensor_memory(dense), name, shape, dense.stride(), requires_grad)


def _has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns True if a tensor of this shape and these strides uses each element of its memory exactly once.

    Both have one number per dimension; otherwise raises `ValueError`. Returns True for no dimensions.
    """
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements there are in memory from the first to the last of a tensor, including gaps.

    The tensor has this shape and these strides, one number per dimension; otherwise raises `ValueError`. It must not be
    empty, which is not checked.
    """
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


# -- receiving


def rebuild_tensor(
    memory: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """Returns a tensor over the memory that came. Read-only memory is copied first.

    Args:
        memory: The elements: `bytes`, a `bytearray` or a `memoryview`. May be empty for a tensor without elements.
        name: The name of the element type, for example `float32`.
        shape: The shape.
        strides: The strides; None for a contiguous tensor.
        requires_grad: Whether the tensor requires gradients.

    Raises:
        TypeError: `memory` has another type.
        KeyError: The element type is unknown.
        Exception: `memory` is too small, or ends in the middle of an element. This is a `TypeError`, `ValueError` or
            `RuntimeError`, depending on the element type and the strides.
    """
    if type(memory) is bytes:
        memory = bytearray(memory)
    elif not isinstance(memory, (bytearray, memoryview)):
        raise TypeError(f"a {type(memory).__name__} was sent as the memory of a tensor, which is not allowed")
    elif memoryview(memory).readonly:
        memory = bytearray(memory)
    else:
        memory = memoryview(memory)  # a view of our own, which keeps the memory from being released or resized
    if not memory:
        tensor = torch.empty(0, dtype=_TYPES[name]).view(shape)
    elif strides is None and name in _IN_NUMPY:
        tensor = _from_numpy(_ndarray(shape, _IN_NUMPY[name], memory))
    else:
        tensor = _frombuffer(memory, dtype=_TYPES[name])
        tensor = tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_expanded(once: torch.Tensor, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Returns `once`, a tensor with the length 1 in some dimensions, expanded to `shape` without copying.

    The result requires gradients if `requires_grad` is True. Raises `RuntimeError` if `once` cannot be expanded so.
    """
    tensor = once.expand(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_with_gaps(dense: torch.Tensor, strides: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Returns a copy of `dense` whose elements lie in memory as `strides` say, with gaps between them.

    The result requires gradients if `requires_grad` is True. Raises `ValueError` if it needs more than
    `MAX_GAPPED_BYTES`, or its elements would overlap.
    """
    # The lower limit excludes overlapping elements: `dense` may be an expanded tensor of any size, which is copied.
    if not dense.nbytes <= _extent(dense.shape, strides) * dense.itemsize <= MAX_GAPPED_BYTES:
        raise ValueError(f"a tensor was sent with strides {strides}, which need more than {MAX_GAPPED_BYTES} bytes")
    tensor = torch.empty_strided(dense.shape, strides, dtype=dense.dtype).copy_(dense)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_parameter(tensor: torch.Tensor, requires_grad: bool) -> Parameter:
    """Returns a parameter of a module with the contents of `tensor`.

    Raises `RuntimeError` if `requires_grad` is True for integers, which cannot have gradients.
    """
    return Parameter(tensor, requires_grad)


# -- sparse, quantized and other tensors

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


def missing_device_map_error(side: str, device: torch.device, destination: str = "") -> RuntimeError:
    """Returns the error for a tensor on a device for which there is no device map, in torch's words.

    Args:
        side: Which message has the tensor: `Request`, `Response`, or `Request or Response`.
        device: The device of the tensor.
        destination: The name of the other worker; empty if it is not known.
    """
    where = f" for destination {destination}" if destination else ""
    return RuntimeError(f"{_NO_MAP} {side} device mapping is not available{where}: a tensor is on {device}")


def reduce_other(tensor: torch.Tensor) -> Any:
    """Returns what pickle needs to rebuild a sparse, quantized, nested or otherwise unusual tensor.

    That is a function and its arguments. Sparse tensors, and quantized ones of 8 or 32 bits, are taken apart into plain
    tensors. All others are pickled by torch. Raises `RuntimeError` if the tensor is not in CPU memory.
    """
    if not tensor.is_cpu:
        raise missing_device_map_error("Request or Response", tensor.device)
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
    """Returns a sparse tensor in coordinate format (COO): a list of values with their indices.

    Args:
        indices: The indices of the values, one column for each; may have no columns.
        values: The values.
        shape: The shape of the tensor.
        is_coalesced: Whether the indices are sorted and unique.
        requires_grad: Whether the tensor requires gradients.

    Raises:
        RuntimeError: An index is outside of `shape`.
    """
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
    """Returns a sparse tensor with compressed rows or columns.

    Args:
        name: The format: "csr", "csc", "bsr" or "bsc". Any other raises `KeyError`.
        outer: Where the values of each compressed row or column begin.
        inner: The column or row of each value, or of each block of values.
        values: The values.
        shape: The shape of the tensor.
        requires_grad: Whether the tensor requires gradients.

    Raises:
        RuntimeError: The indices are invalid.
    """
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=_LAYOUTS[name], check_invariants=True, requires_grad=requires_grad
    )


def rebuild_quantized(whole: torch.Tensor, scale: Any, zero_point: Any, axis: int | None = None) -> torch.Tensor:
    """Returns a quantized tensor: one whose elements are integers that stand for `(integer - zero_point) * scale`.

    Args:
        whole: Its integers.
        scale: The scale, or a tensor with one per channel.
        zero_point: The zero point, or a tensor with one per channel.
        axis: The dimension of the channels; None for one scale for all.

    Raises:
        RuntimeError: The arguments do not fit together.
        TypeError: An argument has the wrong type.
    """
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(whole, scale, zero_point)
    return torch._make_per_channel_quantized_tensor(whole, scale, zero_point, axis)


# -- storages


def reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Returns what pickle needs to rebuild a storage, the memory behind a tensor: a function and its arguments.

    An empty storage is accepted. Raises `RuntimeError` if the storage is not in CPU memory.
    """
    if storage.device.type != "cpu":
        raise missing_device_map_error("Request or Response", storage.device)
    size = storage.nbytes()
    if not size:
        return rebuild_storage, (b"",)
    memory: Any = (c_char * size).from_address(storage.data_ptr())
    memory.owner = storage
    return rebuild_storage, (PickleBuffer(memory),)


def reduce_typed_storage(storage: torch.TypedStorage) -> Any:
    """Returns what pickle needs to rebuild a storage with its element type: a function and its arguments.

    Pickling the inner storage, which is one of the arguments, raises `RuntimeError` if it is not in CPU memory.
    """
    return rebuild_typed_storage, (storage._untyped_storage, storage.dtype)


def rebuild_storage(memory: Any) -> torch.UntypedStorage:
    """Returns a storage, the memory behind a tensor, over the memory that came; an empty one if the memory is empty.

    Read-only memory is copied first.

    Args:
        memory: `bytes`, a `bytearray` or a `memoryview`. An object without a buffer raises `TypeError`.
    """
    if not memory:
        return torch.UntypedStorage(0)
    view = memoryview(memory)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).untyped_storage()


def rebuild_typed_storage(storage: torch.UntypedStorage, kind: torch.dtype) -> torch.TypedStorage:
    """Returns a storage that interprets the memory of `storage` as elements of type `kind`. The size is not checked."""
    return torch.TypedStorage(wrap_storage=storage, dtype=kind, _internal=True)


# -- registration with farcall's picklers

_CODES: Final[dict[torch.dtype, int]] = {}
"""The codes of the element types whose tensors need no pickle. `bool` does need one: see `serialization.arrays`."""
if numpy is not None:
    register_array_type(torch.Tensor, pack_tensor, _from_numpy)
    _CODES.update({_TYPES[n]: code for n in _IN_NUMPY if n != "bool" and (code := dtype_code(n)) is not None})

register_reducer(torch.Tensor, reduce_tensor)
register_reducer(Parameter, reduce_parameter)
register_reducer(torch.UntypedStorage, reduce_storage)
register_reducer(torch.TypedStorage, reduce_typed_storage)

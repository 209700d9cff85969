"""How tensors travel: as what they show, beside the pickle where they are large.

`reduce_tensor` is the reducer of `torch.Tensor` in farcall's messages, and in nobody else's pickles: torch's own
pickles of a tensor copy all of the storage behind it. What is not plain memory of this host (sparse, quantized ...) is
in `layouts`.

Rules
- A tensor arrives with the same type, shape and values, in memory of its own, which can be written to. Of a view, what
  it shows travels, not the storage behind it.
- Its strides are the same, too, with two exceptions: a view with gaps of more than `LARGEST_WITH_GAPS`, and one whose
  elements overlap, arrive without gaps. An expanded tensor arrives expanded, and travels as what was expanded.
- It requires gradients if it did, and has no history: it is a leaf.
- Two tensors that share memory arrive as two; one object that is there twice arrives as one.
- Attributes and hooks of a tensor do not travel, as with torch's own RPC.
- Whatever a pickle says, a rebuilt tensor lies inside of the memory that came.

Around it, `sending_apart` and `receiving_apart` let the tensors of a value travel in a list of their own, for those who
have to see them (`envelopes`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_char
from pickle import PickleBuffer
from typing import Any, Final

import torch
from torch.nn import Parameter

try:
    import numpy
except ImportError:  # torch can do without
    numpy = None  # type: ignore[assignment]

from farcall.pytorch.layouts import reduce_storage, reduce_typed_storage, reduce_unplain
from farcall.serialization import OUT_OF_BAND_SIZE, VALUE, Packed, code_of, head_of, register_kind, register_reducer

LARGEST_WITH_GAPS: Final = 16 * 1024
"""Bytes from the first to the last element of a view up to which its gaps are made again where it arrives."""

_MOST_SIZES: Final = 1024
_QUANTIZED: Final = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_NAMES: Final[dict[torch.dtype, str]] = {
    kind: name
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype) and kind not in _QUANTIZED and str(kind) == f"torch.{name}"
}
"""Of the types of elements that are plain memory."""
_TYPES: Final[dict[str, torch.dtype]] = {name: kind for kind, name in _NAMES.items()}
_IN_NUMPY: Final[dict[str, Any]] = {} if numpy is None else {n: numpy.dtype(n) for n in _TYPES if hasattr(numpy, n)}
"""The same in numpy, of those that it has: a tensor over an array over memory is made quicker than one over memory."""

_strided: Final = torch.strided
_frombuffer: Final = torch.frombuffer
_from_numpy: Final = torch.from_numpy
_ndarray: Final = None if numpy is None else numpy.ndarray


# Apart from the pickle


class _Apart(dict[int, torch.Tensor]):
    """The tensors of one value, by their ids, each once though pickle may come twice; in order."""


class _Thread(threading.local):
    sent: _Apart | None = None
    received: Sequence[torch.Tensor] | None = None


_thread = _Thread()


@contextmanager
def sending_apart() -> Iterator[Mapping[int, torch.Tensor]]:
    """What is pickled inside has its tensors in there, in order, and only their places in the pickle."""
    before, tensors = _thread.sent, _Apart()
    _thread.sent = tensors
    try:
        yield tensors
    finally:
        _thread.sent = before


@contextmanager
def receiving_apart(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What is unpickled inside finds its tensors in this list."""
    before, _thread.received = _thread.received, tensors
    try:
        yield
    finally:
        _thread.received = before


def take_apart(place: int) -> torch.Tensor:
    """For the unpickler: the tensor at that place. Raises `RuntimeError` outside of `receiving_apart`."""
    if _thread.received is None:
        raise RuntimeError("a tensor that travelled apart from its pickle was read without it")
    return _thread.received[place]


def _place_apart(sent: _Apart, tensor: torch.Tensor) -> tuple[Any, ...]:
    if id(tensor) not in sent:
        sent[id(tensor)] = tensor
        return take_apart, (len(sent) - 1,)
    return take_apart, (list(sent).index(id(tensor)),)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """What pickle makes of a tensor. Raises `RuntimeError` for one on another device than the processor."""
    if _thread.sent is not None:
        return _place_apart(_thread.sent, tensor)
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not _strided or not tensor.is_cpu or tensor.is_nested:
        return reduce_unplain(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return _reduce_view(tensor.detach(), name, tensor.requires_grad)
    if tensor.requires_grad:
        return rebuild_tensor, (_memory(tensor), name, tuple(tensor.shape), None, True)
    return rebuild_tensor, (_memory(tensor), name, tuple(tensor.shape))


def reduce_parameter(parameter: Parameter) -> Any:
    """The same for a parameter of a module, which arrives as one."""
    if _thread.sent is not None:
        return _place_apart(_thread.sent, parameter)
    return rebuild_parameter, (parameter.detach(), parameter.requires_grad)


_bytes_at: Final[dict[int, Any]] = {}
"""What shows so many bytes at an address: quicker than `ctypes.string_at`, which calls through a foreign function."""


def _bytes_of(size: int) -> Any:
    if len(_bytes_at) >= _MOST_SIZES:
        _bytes_at.clear()
    found = _bytes_at[size] = (c_char * size).from_address
    return found


def _memory(tensor: torch.Tensor) -> Any:
    """The memory of a tensor without gaps: a copy if it is small, else the memory itself."""
    size = tensor.nbytes
    if size < OUT_OF_BAND_SIZE:
        return (_bytes_at.get(size) or _bytes_of(size))(tensor.data_ptr()).raw if size else b""
    memory: Any = (c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # it stays where it is for as long as somebody sends it
    return PickleBuffer(memory)


_small: Final[dict[tuple[torch.dtype, torch.Size], tuple[bytes, Any]]] = {}
"""Of small tensors that need no pickle, by type and shape: what is sent before their contents, and what shows these."""


def pack_tensor(tensor: torch.Tensor, start: bytes = VALUE, with_gradients: bool = False) -> Packed | None:
    """A tensor that needs no pickle, as most, see `register_kind`. None for one that is pickled.

    `with_gradients`: that it requires gradients is told in another way.
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
    known = _small.get((tensor.dtype, tensor.shape))
    if known is None:
        return _pack_unknown(tensor, start)
    head, bytes_at = known
    return start + head + bytes_at(tensor.data_ptr()).raw, []


def _pack_unknown(tensor: torch.Tensor, start: bytes) -> Packed | None:
    """The same for one that is large, or the first of its kind."""
    head = head_of(_CODES[tensor.dtype], tensor.shape) if tensor.nbytes else None
    if head is None:
        return None
    memory = _memory(tensor)
    if type(memory) is not bytes:
        return start + head, [memory.raw()]
    if len(_small) >= _MOST_SIZES:
        _small.clear()
    _small[tensor.dtype, tensor.shape] = head, _bytes_of(len(memory))
    return start + head + memory, []


def _reduce_view(tensor: torch.Tensor, name: str, requires_grad: bool) -> Any:
    shape = tuple(tensor.shape)
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        tensor = tensor.clone().resolve_conj().resolve_neg()
        return rebuild_tensor, (_memory(tensor.contiguous()), name, shape, None, requires_grad)
    strides = tensor.stride()
    if any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True)):
        once = tuple(slice(0, 1) if not stride else slice(None) for stride in strides)
        return rebuild_expanded, (tensor[once], shape, requires_grad)
    if _has_no_gaps(shape, strides):
        return rebuild_tensor, (_memory(tensor), name, shape, strides, requires_grad)
    extent = _extent(shape, strides) * tensor.itemsize
    if extent <= LARGEST_WITH_GAPS and extent >= tensor.nbytes:
        return rebuild_with_gaps, (tensor.contiguous(), strides, requires_grad)
    dense = tensor.clone()  # in the order in which the view has its dimensions in memory
    return rebuild_tensor, (_memory(dense), name, shape, dense.stride(), requires_grad)


def _has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether its elements fill its memory, each place once."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last that it shows."""
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


# Receiving


def rebuild_tensor(
    memory: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, requires_grad: bool = False
) -> torch.Tensor:
    """A tensor again, in the memory that came. Raises if it does not fit in there."""
    if type(memory) is bytes:
        memory = bytearray(memory)
    elif not isinstance(memory, (bytearray, memoryview)):
        raise TypeError(f"a {type(memory).__name__} was sent as the memory of a tensor")
    elif memoryview(memory).readonly:
        memory = bytearray(memory)
    else:
        memory = memoryview(memory)  # of our own: nobody gives it back, or makes it longer, while the tensor lives
    if not memory:
        tensor = torch.empty(0, dtype=_TYPES[name]).view(shape)
    elif strides is None and name in _IN_NUMPY:
        tensor = _from_numpy(_ndarray(shape, _IN_NUMPY[name], memory))
    else:
        tensor = _frombuffer(memory, dtype=_TYPES[name])
        tensor = tensor.view(shape) if strides is None else tensor.as_strided(shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_expanded(once: torch.Tensor, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A tensor that shows some of its elements many times."""
    tensor = once.expand(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_with_gaps(dense: torch.Tensor, strides: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A view with gaps between its elements. Raises `ValueError` if they are larger than they are made."""
    if _extent(dense.shape, strides) * dense.itemsize > LARGEST_WITH_GAPS:
        raise ValueError(f"a tensor was sent with strides {strides}, which need more than {LARGEST_WITH_GAPS} bytes")
    tensor = torch.empty_strided(dense.shape, strides, dtype=dense.dtype).copy_(dense)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_parameter(tensor: torch.Tensor, requires_grad: bool) -> Parameter:
    """A parameter of a module again."""
    return Parameter(tensor, requires_grad)


_CODES: Final[dict[torch.dtype, int]] = {}
"""The types of elements of tensors that need no pickle. Truth values do: see `plain_arrays`."""
if numpy is not None:
    register_kind(torch.Tensor, pack_tensor, _from_numpy)
    _CODES.update({_TYPES[n]: code for n in _IN_NUMPY if n != "bool" and (code := code_of(n)) is not None})

register_reducer(torch.Tensor, reduce_tensor)
register_reducer(Parameter, reduce_parameter)
register_reducer(torch.UntypedStorage, reduce_storage)
register_reducer(torch.TypedStorage, reduce_typed_storage)

"""Messages of autograd as flat rows of plain values: what goes most needs no pickle of functions, types and states.

The arguments of most calls in a context are small tensors, references that their owner knows, and plain values, and
their results are one small tensor; gradients are small tensors. Such a row holds a tensor as the bytes that stand for
it in plain calls (`plain_arrays`), and a reference as its numbers and token.

Rules
- What does not fit in, is large, or may be there twice, goes the usual way: `flatten` and the others give None then.
- Bytes in a row are never a value of the program. They begin with what they are: 1 for an array, `_NUMBERS` for others.
- What is read may have been written by anybody: whatever is not such a row raises `TypeError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import Parameter

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch import tensors
from farcall.serialization import OUT_OF_BAND_MIN_BYTES, unpack_small_array

_NUMBERS: Final = 2
_PLAIN: Final = frozenset({int, float, bool, str, type(None)})
_named: Final = struct.Struct("<B3Q16sQ")
_answer: Final = struct.Struct("<?QQQ")
_LOW: Final = (1 << 64) - 1

NumbersOf = Callable[[Any, WorkerInfo], "tuple[int, int, int, bytes, int] | None"]


class _Kind:
    """The one kind of objects that travels as four numbers and a token."""

    type: type | None = None
    numbers_of: NumbersOf
    receive: Callable[[int, int, int, bytes, int], Any]


_kind: Final = _Kind()


def travels_as_numbers(kind: type, numbers_of: NumbersOf, receive: Callable[[int, int, int, bytes, int], Any]) -> None:
    """Objects of that type go as what `numbers_of(object, worker)` gives, if it does, and are made of it again.

    The object itself lives until the call is answered.
    """
    _kind.type, _kind.numbers_of, _kind.receive = kind, numbers_of, receive


class Row:
    """The arguments of a call, flat."""

    __slots__ = ("kept", "mask", "tensors", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        """Those that require gradients."""
        self.mask = 0
        """Where these are: a bit for each place."""
        self.kept: list[Any] = []
        """What has to live until the call is answered."""


def flatten(args: Sequence[Any], to: WorkerInfo) -> Row | None:
    """The arguments of a call to that worker; None if they are not of the kind."""
    row = Row()
    values = row.values
    seen = None
    for value in args:
        kind = type(value)
        if kind is torch.Tensor or kind is Parameter:
            if value.requires_grad:
                row.mask |= 1 << len(values)
                row.tensors.append(value)
            elif kind is Parameter:
                return None
            if seen is None:
                seen = {id(value)}
            elif id(value) in seen:
                return None
            else:
                seen.add(id(value))
            packed = pack_tensor(value)
            if packed is None:
                return None
            values.append(packed)
        elif kind in _PLAIN:
            values.append(value)
        elif kind is _kind.type:
            numbers = _kind.numbers_of(value, to)
            if numbers is None:
                return None
            try:
                values.append(_named.pack(_NUMBERS, *numbers))
            except struct.error:
                return None
            row.kept.append(value)
        else:
            return None
    return row


def pack_tensor(tensor: torch.Tensor) -> bytes | None:
    """What a small tensor holds, as bytes; None for one that goes the usual way."""
    packed = tensors.pack_tensor(tensor, with_gradients=True)
    return packed[0] if packed is not None and not packed[1] else None


def pack_gradient(gradient: torch.Tensor) -> bytes | None:
    """The same for a gradient, of which nobody needs the strides: that of a sum shows one number many times."""
    packed = pack_tensor(gradient)
    if packed is None and gradient.layout is torch.strided and gradient.nbytes < OUT_OF_BAND_MIN_BYTES:
        packed = pack_tensor(gradient.contiguous())
    return packed


def tensor_of(packed: Any) -> torch.Tensor:
    """A tensor again. Raises `TypeError` if it is none."""
    tensor = unpack_small_array(packed) if type(packed) is bytes else None
    if type(tensor) is not torch.Tensor:
        raise TypeError(f"a {type(packed).__name__} came from another worker in place of a tensor")
    return tensor


def unflatten(values: Sequence[Any]) -> list[Any]:
    """The arguments again. Raises `TypeError` for what is no such row."""
    found = []
    for value in values:
        if type(value) is bytes:
            if value[:1] == b"\2" and len(value) == _named.size:
                found.append(_kind.receive(*_named.unpack(value)[1:]))
            else:
                found.append(tensor_of(value))
        elif type(value) in _PLAIN:
            found.append(value)
        else:
            raise TypeError(f"a {type(value).__name__} came from another worker in place of a plain value")
    return found


def answer_of(flag: bool, stamp: int, message_id: int, packed: bytes) -> bytes:
    """One packed tensor, with the words and numbers of a message. A stamp has 128 bits: nobody drives it beyond."""
    return _answer.pack(flag, stamp & _LOW, stamp >> 64, message_id) + packed


def read_answer(answer: bytes) -> tuple[bool, int, int, torch.Tensor]:
    """The same again. Raises `TypeError` for what is none."""
    if len(answer) < _answer.size:
        raise TypeError("what came from another worker is no answer")
    flag, low, high, message_id = _answer.unpack_from(answer)
    return flag, high << 64 | low, message_id, tensor_of(answer[_answer.size :])


def pack_ids(ids: Sequence[int]) -> bytes:
    """Some numbers as bytes."""
    return struct.pack(f"<{len(ids)}Q", *ids)


def read_ids(packed: Any) -> tuple[int, ...]:
    """The same again. Raises `TypeError` for what are none."""
    if type(packed) is not bytes or len(packed) % 8:
        raise TypeError(f"a {type(packed).__name__} came from another worker in place of numbers")
    return struct.unpack(f"<{len(packed) // 8}Q", packed)

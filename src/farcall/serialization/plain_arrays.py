"""Arrays of plain numbers as bytes, without pickle: arguments that are nothing else, or a result that is one.

numpy has pickle write down how to make an array: functions, types and states, whose finding and calling take several
times as long as the copy of some kilobytes. Here a few bytes say it all. Whatever else there is goes through pickle.

    offset  size  what (little-endian)
    0       1     1, with which no pickle begins
    1       1     how many arrays, for the arguments of a call; 0 for one array that is the value itself
    2       ...   of each array: its type's place in `_CODES` and, if it cannot be written to, 128, and if it is of an
                  edge's kind, 64; how many dimensions (1 byte each); its lengths (8 bytes each)
            ...   the contents of those of less than `OUT_OF_BAND_SIZE` bytes, in order; the others' are beside it

Rules
- Only `numpy.ndarray` itself, C-contiguous, of numpy's own type for bools, integers, floats or complex
  numbers in the byte order of the machine. These arrive as they would through pickle: their own memory, as writable.
- An edge may have one kind of arrays of its own go the same way (`register_kind`): the tensors of torch.
- One array that is several arguments is left to pickle, which makes it one again.
- An array is made only of just its own bytes: what is read may have been written by anybody. One whose memory came
  beside the payload uses that, through a view which keeps the memory where it is; a bytearray can be made longer.
- numpy is not imported to write: it is noticed by the first array that pickle meets (`notice`).
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Final

MARK: Final = 1
OUT_OF_BAND_SIZE: Final = 16 * 1024
"""Bytes from which on a buffer travels beside the payload: one more piece to send costs more than a copy of less."""
MOST_ARRAYS: Final = 16
_MOST_DIMENSIONS: Final = 8
_MOST_HEADS: Final = 1024
_READ_ONLY: Final = 128
_KIND: Final = 64
_TYPE: Final = 63

ARRAYS: set[type] = set()
"""The classes of arrays, once they are known."""

Packed = tuple[bytes, list[memoryview]]
"""A payload, and the buffers beside it."""

_CODES: Final = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
_numpy_array: list[Any] = []  # its class
_types: list[Any] = []  # as `_CODES`, as numpy's types
_codes: dict[Any, tuple[Any, int]] = {}  # by type: the very object, and its place
_heads: dict[bytes, tuple[tuple[int, ...], Any, int, Callable[[Any], Any] | None]] = {}
"""What was read of small arrays that came: lengths, type, bytes, and what makes one of the edge's kind, if it is."""
_shapes: Final = tuple(struct.Struct(f"<{count}Q") for count in range(_MOST_DIMENSIONS + 1))
_lengths: Final = tuple(struct.Struct(f"<BB{count}Q") for count in range(_MOST_DIMENSIONS + 1))


class _Kind:
    """The kind of an edge, if there is one."""

    pack: Callable[[Any, bytes], Packed | None]
    make: Callable[[Any], Any] | None = None


_kind: Final = _Kind()


def register_kind(kind: type, pack: Callable[[Any, bytes], Packed | None], make: Callable[[Any], Any]) -> None:
    """Has arrays of that type, which is not numpy's, go this way, too; instead of the one before, if there was one.

    `pack` puts what `head_of` gives and the contents after the given start of a payload; None for one that is to be
    pickled. `make` makes one of an array of numpy's, in its memory. Raises `ImportError` if numpy is not installed.
    """
    if not ARRAYS:
        import numpy

        _learn(numpy)
    _kind.pack, _kind.make = pack, make
    _heads.clear()
    ARRAYS.add(kind)


def code_of(name: str) -> int | None:
    """The place in `_CODES` of a type of elements by numpy's name for it, if it is there."""
    for place, dtype in enumerate(_types):
        if dtype.name == name:
            return place
    return None


def head_of(code: int, shape: Sequence[int]) -> bytes | None:
    """What comes before the contents of an array of the edge's kind; None if it has too many dimensions.

    `code`: see `code_of`.
    """
    count = len(shape)
    return _lengths[count].pack(code | _KIND, count, *shape) if count <= _MOST_DIMENSIONS else None


def _maker(code: int) -> Callable[[Any], Any]:
    """What makes one of the edge's kind. Truth values are not taken: only pickle sees to it that each is 0 or 1."""
    if _kind.make is None or not code & _TYPE:
        raise ValueError("an array came of a kind that is not known here")
    return _kind.make


def notice() -> None:
    """Gets to know numpy, if somebody has imported it."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and not ARRAYS:
        _learn(numpy)


def _over(memory: memoryview, dtype: Any) -> Any:
    import numpy

    return numpy.frombuffer(memory, dtype)


def _learn(numpy: Any) -> None:
    types = [numpy.dtype(code) for code in _CODES]
    _codes.update({dtype: (dtype, place) for place, dtype in enumerate(types)})
    _types[:] = types
    _numpy_array.append(numpy.ndarray)
    ARRAYS.add(numpy.ndarray)  # last: it says that all else is there


def pack_arguments(values: Sequence[Any]) -> Packed | None:
    """The payload of these arguments and the buffers beside it; None if they are to be pickled."""
    count = len(values)
    if count == 1:
        return pack_value(values[0], _ONE)
    if count > MOST_ARRAYS or len({id(value) for value in values}) < count:
        return None
    payload = bytes((MARK, count))
    contents: list[bytes] = []
    buffers: list[memoryview] = []
    for value in values:
        packed = pack_value(value, b"") if type(value) in ARRAYS else None
        if packed is None:
            return None
        start = 2 + 8 * packed[0][1]
        payload += packed[0][:start]
        contents.append(packed[0][start:])
        buffers += packed[1]
    return b"".join([payload, *contents]), buffers


_ONE: Final = bytes((MARK, 1))
VALUE: Final = bytes((MARK, 0))
"""How the payload of one array begins that is the value itself."""


def pack_value(array: Any, start: bytes = VALUE) -> Packed | None:
    """The same for a result, an array."""
    if type(array) is not _numpy_array[0]:
        return _kind.pack(array, start)
    dtype = array.dtype
    known = _codes.get(dtype)
    flags = array.flags
    shape = array.shape
    size = array.nbytes
    # Types that are equal may still differ, by what users have attached to them: only numpy's very own will do.
    if known is None or known[0] is not dtype or not flags.c_contiguous or len(shape) > _MOST_DIMENSIONS:
        return None
    code = known[1] if flags.writeable else known[1] | _READ_ONLY
    start += _lengths[len(shape)].pack(code, len(shape), *shape)
    if size < OUT_OF_BAND_SIZE:
        return start + array.tobytes(), []
    return start, [PickleBuffer(array).raw()]


def small_array(payload: bytes | bytearray | memoryview) -> Any:
    """What comes most, on its own: the array of a payload that holds all of one, quicker than `unpack` makes it.

    None if it holds something else, or an array that can only be read, or nothing good: `unpack` says what. Raises
    nothing, and runs no code of a user's.
    """
    try:
        at = 4 + 8 * payload[3]
        head = payload[2:at]
        known = _heads.get(head)  # type: ignore[arg-type]  # what cannot be hashed is not known
        if known is None:
            lengths, dtype = _shapes[head[1]].unpack_from(head, 2), _types[head[0] & _TYPE]
            make = _maker(head[0]) if head[0] & _KIND else None
            known = lengths, dtype, math.prod(lengths) * dtype.itemsize, make
            if not 0 <= known[2] < OUT_OF_BAND_SIZE or head[0] & _READ_ONLY:
                return None
            if len(_heads) >= _MOST_HEADS:
                _heads.clear()
            _heads[bytes(head)] = known
        lengths, dtype, size, make = known
        if size != len(payload) - at or payload[1] > 1:
            return None
        if make is None:
            return _numpy_array[0](lengths, dtype, payload, at).copy()
        # A copy of the bytes is quicker than one of an array; nobody gets at the array below, to make them longer.
        return make(_numpy_array[0](lengths, dtype, bytearray(payload[at:])))
    except Exception:
        return None


def unpack(payload: bytes | bytearray | memoryview, buffers: Sequence[Any]) -> Any:
    """What was packed: a tuple of arrays, or one.

    Raises `ImportError` if numpy is not installed; `ValueError`, `IndexError`, `struct.error` or `TypeError` for what
    is no such payload.
    """
    if not ARRAYS:
        import numpy

        _learn(numpy)
    count = payload[1]
    if count <= 1 and not buffers:
        array = small_array(payload)
        if array is not None:
            return (array,) if count else array
    ndarray = _numpy_array[0]
    found = []
    at = 2
    for _ in range(count or 1):
        found.append((payload[at], _shapes[payload[at + 1]].unpack_from(payload, at + 2)))
        at += 2 + 8 * payload[at + 1]
    arrays = []
    left = list(buffers)
    for code, lengths in found:
        dtype = _types[code & _TYPE]
        size = math.prod(lengths) * dtype.itemsize
        if size < OUT_OF_BAND_SIZE:
            if not 0 <= size <= len(payload) - at:
                raise ValueError(f"an array of {size} bytes came in {len(payload) - at}")
            array = ndarray(lengths, dtype, payload, at).copy()
            at += size
        else:
            memory = memoryview(left.pop(0))
            if memory.nbytes != size:
                raise ValueError(f"{memory.nbytes} bytes came for an array of {size}")
            array = _over(memory, dtype).reshape(lengths)  # not ndarray(), which lets go of the view
        if code & _READ_ONLY:
            array.flags.writeable = False
        arrays.append(_maker(code)(array) if code & _KIND else array)
    if left or at != len(payload):
        raise ValueError("more came than the arrays that were announced")
    return tuple(arrays) if count else arrays[0]

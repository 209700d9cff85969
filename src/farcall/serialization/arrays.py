"""Serializes arrays of plain numbers without pickle: arguments that are all arrays, or a result that is one array.

A pickle of a numpy array names the functions, types and states that rebuild it. Looking these up and calling them takes
several times as long as copying a few kilobytes. Here a few bytes describe the array. Everything else is pickled.

    offset  size  what (little-endian)
    0       1     1, with which no pickle begins
    1       1     the number of arrays, for the arguments of a call; 0 for a single array that is the value itself
    2       ...   the header of each array: its dtype code, plus 128 if the array is read-only, plus 64 if it is of the
                  registered type (1 byte); its number of dimensions (1 byte); its lengths (8 bytes each)
            ...   the contents of the arrays of less than `OUT_OF_BAND_MIN_BYTES` bytes, in order; the contents of the
                  others are sent as buffers

Rules
- Only instances of `numpy.ndarray` itself are packed, not of subclasses. They must be C-contiguous, with one of numpy's
  own dtypes for bools, integers, floats or complex numbers, in native byte order. They arrive as they would through
  pickle: with memory of their own, and writable if they were.
- Another package may register one array type of its own (`register_array_type`). `farcall.pytorch` registers tensors.
- If one array is passed as several arguments, the arguments are pickled, because pickle keeps it one array.
- A payload may come from an attacker. An array is made from exactly its own bytes. If its contents came as a buffer, it
  uses that memory through a memoryview, which prevents a `bytearray` from being resized.
- This module never imports numpy in order to send. `detect_numpy` looks whether the program has imported it.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Final

ARRAYS_MARK: Final = 1
"""The first byte of a payload that this module has written. No pickle begins with it."""
OUT_OF_BAND_MIN_BYTES: Final = 16 * 1024
"""The size, in bytes, from which a buffer is sent beside the payload. Copying a smaller one into the payload is cheaper
than sending one more piece."""
MAX_ARRAYS: Final = 16
"""The largest number of arguments that are packed without pickle."""
_MAX_DIMENSIONS: Final = 8
_MAX_KNOWN_HEADERS: Final = 1024

# The first byte of an array's header: the dtype code in the lower bits, and two flags.
_READ_ONLY: Final = 128
_REGISTERED: Final = 64
_DTYPE_CODE: Final = 63

ARRAYS: set[type] = set()
"""The types whose instances may be packed. Empty until numpy has been detected."""

Packed = tuple[bytes, list[memoryview]]
"""A payload, and the buffers that are sent beside it."""

_DTYPES: Final = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
"""The dtypes that can be packed. The index of a dtype is its code."""

# Set by _set_up_numpy, when numpy is detected.
_ndarray: list[Any] = []  # numpy.ndarray, the only element
_numpy_dtypes: list[Any] = []  # `_DTYPES` as objects of numpy
_dtype_codes: dict[Any, tuple[Any, int]] = {}  # for each dtype: numpy's own dtype object that equals it, and its code

_known_headers: dict[bytes, tuple[tuple[int, ...], Any, int, Callable[[Any], Any] | None]] = {}
"""A cache for `unpack_small_array`: for the header of an array, its lengths, its dtype, its size in bytes, and the
function that converts it to the registered type, or None."""
_lengths_formats: Final = tuple(struct.Struct(f"<{count}Q") for count in range(_MAX_DIMENSIONS + 1))
"""The lengths of an array, by the number of dimensions."""
_header_formats: Final = tuple(struct.Struct(f"<BB{count}Q") for count in range(_MAX_DIMENSIONS + 1))
"""The header of an array, by the number of dimensions."""


class _RegisteredType:
    """The functions for the array type of another package, such as torch's tensors; `register_array_type` sets both.

    Attributes:
        pack: Returns the payload and the buffers of an array, given the array and the first bytes of the payload; None
            if the array must be pickled. Not set until a type is registered.
        make: Converts a numpy array to the registered type; None if no type is registered.
    """

    pack: Callable[[Any, bytes], Packed | None]
    make: Callable[[Any], Any] | None = None


_registered: Final = _RegisteredType()


def register_array_type(kind: type, pack: Callable[[Any, bytes], Packed | None], make: Callable[[Any], Any]) -> None:
    """Makes arrays of a type of another package serializable without pickle.

    Only one set of functions is kept: a second call replaces those of the first. Nothing is checked.

    Args:
        kind: The type. Subclasses are not affected.
        pack: Called with an array and the first bytes of the payload. Returns the payload and the list of buffers, or
            None for an array that must be pickled. The payload consists of these first bytes, the header made by
            `pack_array_header`, and the contents of the array. Contents of `OUT_OF_BAND_MIN_BYTES` or more must be a
            buffer instead.
        make: Converts a numpy array to the type. The result may use the memory of the numpy array.

    Raises:
        ImportError: numpy is not installed.
    """
    if not ARRAYS:
        import numpy

        _set_up_numpy(numpy)
    _registered.pack, _registered.make = pack, make
    _known_headers.clear()
    ARRAYS.add(kind)


def dtype_code(name: str) -> int | None:
    """Returns the code of a dtype, from 0 to 13, given numpy's name for it ("float32"); None if it cannot be packed.

    Returns None for an unknown or empty name. Before numpy is set up (by `detect_numpy`, by `register_array_type`, or
    by the first array that arrives), returns None for every name.
    """
    for code, dtype in enumerate(_numpy_dtypes):
        if dtype.name == name:
            return code
    return None


def pack_array_header(code: int, shape: Sequence[int]) -> bytes | None:
    """Returns the bytes that describe an array of the registered type (dtype, shape); None for more than 8 dimensions.

    The registered type is the one passed to `register_array_type`. Raises `struct.error` if a length is negative or not
    an int. The code is not checked.

    Args:
        code: The code of its dtype, as `dtype_code` returned it.
        shape: The lengths of its dimensions; empty for an array without dimensions.
    """
    count = len(shape)
    return _header_formats[count].pack(code | _REGISTERED, count, *shape) if count <= _MAX_DIMENSIONS else None


def _registered_maker(code: int) -> Callable[[Any], Any]:
    """Returns the function that converts a numpy array to the registered type, given the first byte of a header.

    The lower six bits of `code` are the code of the dtype. Raises `ValueError` if no type is registered here, and for
    bools (code 0): a bool of the registered type must have the value 0 or 1, which only the pickled form checks.
    """
    if _registered.make is None or not code & _DTYPE_CODE:
        raise ValueError("an array of a type arrived that is not registered on this worker")
    return _registered.make


def detect_numpy() -> None:
    """Makes numpy arrays serializable without pickle if the program has imported numpy; otherwise does nothing.

    May be called again, for example after the program has imported numpy. Imports nothing.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and not ARRAYS:
        _set_up_numpy(numpy)


def _view_as_array(memory: memoryview, dtype: Any) -> Any:
    """Returns a one-dimensional numpy array of the numpy dtype `dtype` that uses `memory`, without a copy.

    Raises `ValueError` if the size of the memory is not a multiple of the size of an element. Empty memory gives an
    empty array, or `ValueError` with older versions of numpy.
    """
    import numpy

    return numpy.frombuffer(memory, dtype)


def _set_up_numpy(numpy: Any) -> None:
    """Fills the tables of this module from the imported module `numpy`, so that numpy arrays can be packed.

    May be called again, with the same module.
    """
    dtypes = [numpy.dtype(name) for name in _DTYPES]
    _dtype_codes.update({dtype: (dtype, code) for code, dtype in enumerate(dtypes)})
    _numpy_dtypes[:] = dtypes
    _ndarray.append(numpy.ndarray)
    ARRAYS.add(numpy.ndarray)  # last, because other threads take this as the sign that the tables are complete


def pack_arguments(values: Sequence[Any]) -> Packed | None:
    """Returns the payload and the buffers of the arguments of a call; None if the arguments must be pickled.

    They must be pickled if `pack_array` cannot pack one of them, if one array occurs twice, or if there are more than
    `MAX_ARRAYS`.

    Args:
        values: The arguments, at least one. If there are several, those of types not in `ARRAYS` make the result None.
            The type of a single argument is not checked: it must be in `ARRAYS`.
    """
    count = len(values)
    if count == 1:
        return pack_array(values[0], _ONE_ARGUMENT_START)
    if count > MAX_ARRAYS or len({id(value) for value in values}) < count:
        return None
    payload = bytes((ARRAYS_MARK, count))
    contents: list[bytes] = []
    buffers: list[memoryview] = []
    for value in values:
        packed = pack_array(value, b"") if type(value) in ARRAYS else None
        if packed is None:
            return None
        start = 2 + 8 * packed[0][1]
        payload += packed[0][:start]
        contents.append(packed[0][start:])
        buffers += packed[1]
    return b"".join([payload, *contents]), buffers


_ONE_ARGUMENT_START: Final = bytes((ARRAYS_MARK, 1))
"""The first bytes of a payload for the arguments of a call with one argument."""
SINGLE_ARRAY_START: Final = bytes((ARRAYS_MARK, 0))
"""The first bytes of a payload for a single array that is the value itself."""


def pack_array(array: Any, start: bytes = SINGLE_ARRAY_START) -> Packed | None:
    """Returns the payload and the buffers of one array; None if the array must be pickled.

    It must be pickled if it is not C-contiguous, has more than 8 dimensions, or a dtype other than numpy's own bools,
    integers, floats and complex numbers in native byte order. Contents of less than `OUT_OF_BAND_MIN_BYTES` bytes are
    in the payload; larger contents are in the list of buffers.

    Args:
        array: An array of a type in `ARRAYS`. The type is not checked.
        start: The first bytes of the payload. The default marks a payload whose value is the array itself, not a tuple
            of arguments.
    """
    if type(array) is not _ndarray[0]:
        return _registered.pack(array, start)
    dtype = array.dtype
    known = _dtype_codes.get(dtype)
    flags = array.flags
    shape = array.shape
    size = array.nbytes
    # Equal dtypes may differ in their metadata, which only pickle keeps. So it must be numpy's own dtype object.
    if known is None or known[0] is not dtype or not flags.c_contiguous or len(shape) > _MAX_DIMENSIONS:
        return None
    code = known[1] if flags.writeable else known[1] | _READ_ONLY
    start += _header_formats[len(shape)].pack(code, len(shape), *shape)
    if size < OUT_OF_BAND_MIN_BYTES:
        return start + array.tobytes(), []
    return start, [PickleBuffer(array).raw()]


def unpack_small_array(payload: bytes | bytearray | memoryview) -> Any:
    """Returns the array of a payload with one small, writable array; this is faster than `unpack_arrays`.

    Returns None, and never raises, for any other payload: one that is empty, is a `bytearray`, has invalid contents, or
    has several arrays or a large or read-only one. Pass such a payload to `unpack_arrays`, which returns its arrays or
    raises the error. Runs no code of users.
    """
    try:
        at = 4 + 8 * payload[3]
        header = payload[2:at]
        known = _known_headers.get(header)  # type: ignore[arg-type]  # a bytearray raises TypeError
        if known is None:
            lengths = _lengths_formats[header[1]].unpack_from(header, 2)
            dtype = _numpy_dtypes[header[0] & _DTYPE_CODE]
            make = _registered_maker(header[0]) if header[0] & _REGISTERED else None
            known = lengths, dtype, math.prod(lengths) * dtype.itemsize, make
            if not 0 <= known[2] < OUT_OF_BAND_MIN_BYTES or header[0] & _READ_ONLY:
                return None
            if len(_known_headers) >= _MAX_KNOWN_HEADERS:
                _known_headers.clear()
            _known_headers[bytes(header)] = known
        lengths, dtype, size, make = known
        if size != len(payload) - at or payload[1] > 1:
            return None
        if make is None:
            return _ndarray[0](lengths, dtype, payload, at).copy()
        # Copying the bytes is faster than copying an array. The bytearray cannot be resized, because only the numpy
        # array refers to it, and users do not get that one.
        return make(_ndarray[0](lengths, dtype, bytearray(payload[at:])))
    except Exception:
        return None


def unpack_arrays(payload: bytes | bytearray | memoryview, buffers: Sequence[Any]) -> Any:
    """Returns the arrays of a payload that `pack_arguments` or `pack_array` has written.

    Args:
        payload: The payload, not empty.
        buffers: The buffers that arrived with it, in order; empty if all arrays are small. Large arrays use the memory
            of the buffers, without a copy.

    Returns:
        A tuple of arrays for the arguments of a call; the array itself for a single value.

    Raises:
        ImportError: numpy is not installed.
        ValueError, IndexError, struct.error, TypeError: The payload is invalid or does not fit the buffers.
    """
    if not ARRAYS:
        import numpy

        _set_up_numpy(numpy)
    count = payload[1]
    if count <= 1 and not buffers:
        array = unpack_small_array(payload)
        if array is not None:
            return (array,) if count else array
    ndarray = _ndarray[0]
    found = []
    at = 2
    for _ in range(count or 1):
        found.append((payload[at], _lengths_formats[payload[at + 1]].unpack_from(payload, at + 2)))
        at += 2 + 8 * payload[at + 1]
    arrays = []
    left = list(buffers)
    for code, lengths in found:
        dtype = _numpy_dtypes[code & _DTYPE_CODE]
        size = math.prod(lengths) * dtype.itemsize
        if size < OUT_OF_BAND_MIN_BYTES:
            if not 0 <= size <= len(payload) - at:
                raise ValueError(f"an array of {size} bytes arrived with only {len(payload) - at} bytes")
            array = ndarray(lengths, dtype, payload, at).copy()
            at += size
        else:
            memory = memoryview(left.pop(0))
            if memory.nbytes != size:
                raise ValueError(f"an array of {size} bytes arrived with a buffer of {memory.nbytes} bytes")
            array = _view_as_array(memory, dtype).reshape(lengths)  # ndarray() would not keep the memoryview
        if code & _READ_ONLY:
            array.flags.writeable = False
        arrays.append(_registered_maker(code)(array) if code & _REGISTERED else array)
    if left or at != len(payload):
        raise ValueError("the payload has more bytes or buffers than its arrays need")
    return tuple(arrays) if count else arrays[0]

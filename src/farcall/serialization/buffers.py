"""Serializes plain memory: `bytes`, `bytearray`, `memoryview` and `array.array`.

Pickle copies plain memory into the payload, and cannot pickle a `memoryview`. Here plain memory that is itself an
argument or the result is sent as a buffer, beside the payload. Plain memory inside other values is left to pickle.

Theory of operation: before pickling, `wrap_buffers` replaces each such value by a wrapper. Pickle reduces the wrapper
to a `PickleBuffer`, which it sends out of band, and to one of the `rebuild_...` functions for the receiver to call.

Rules
- The receiver copies `bytes`, `bytearray` and `array.array` once, because these types own their memory.
- A `memoryview` arrives with the same format, shape and contents, and writable if it was. An empty one arrives with one
  dimension. One whose items have no native format, such as a view of a ctypes structure, cannot be sent.
- If one object is passed as several arguments, it arrives as one object. If it is an argument and also inside another
  argument, it arrives as two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pickle import PickleBuffer
from typing import Any, Final

BUFFER_MIN_BYTES: Final = 16 * 1024
"""The size, in bytes, from which a value is sent as a buffer. A memoryview is sent as a buffer at any size."""

_NATIVE_FORMATS: Final = frozenset("cbB?hHiIlLqQnNfdP")
"""The formats to which `memoryview.cast` can cast."""

BUFFER_TYPES: Final = frozenset({bytes, bytearray, memoryview, array})
"""The types of plain memory."""


def has_buffer(values: Iterable[Any]) -> bool:
    """Returns True if any of the values is a `bytes`, `bytearray`, `memoryview` or `array.array`, of any size.

    Returns False if there is none, or no values. Subclasses do not count. Runs for every call, so it must be fast.
    """
    for value in values:  # noqa: SIM110 (any() would create a generator)
        if type(value) in BUFFER_TYPES:
            return True
    return False


def wrap_buffers(arguments: Sequence[Any]) -> list[Any]:
    """Returns the arguments of a call with plain memory replaced by wrappers that pickle sends as buffers.

    Plain memory is `bytes`, `bytearray`, `memoryview` and `array.array`. The receiver gets it back, without the
    wrapper.

    Args:
        arguments: Two elements: the positional arguments (a tuple) and the keyword arguments (a dict). Both may be
            empty. Another number of elements raises `ValueError`.

    Returns:
        A list of the two. Values that are not plain memory, and `bytes`, `bytearray` and `array` of less than
        `BUFFER_MIN_BYTES` bytes, are left as they are.
    """
    values, named = arguments
    wrapped: dict[int, _WrappedBuffer] = {}

    def wrap(value: Any) -> Any:
        kind = type(value)
        if kind not in BUFFER_TYPES or (
            kind is not memoryview and len(value) * getattr(value, "itemsize", 1) < BUFFER_MIN_BYTES
        ):
            return value
        return wrapped.setdefault(id(value), _WrappedBuffer(value))

    return [tuple(map(wrap, values)), {name: wrap(value) for name, value in named.items()}]


class _WrappedBuffer:
    """Takes the place of plain memory while it is pickled; the receiver gets the plain memory, not the wrapper.

    Args:
        value: A `bytes`, `bytearray`, `memoryview` or `array.array`. The type is not checked.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_buffer(self._value)


def reduce_buffer(value: Any) -> tuple[Any, ...]:
    """Returns what `__reduce__` returns for plain memory: the function that rebuilds it, and a tuple of its arguments.

    Empty memory is allowed.

    Args:
        value: A `bytes`, `bytearray`, `memoryview` or `array.array`. The type is not checked.

    Raises:
        TypeError: `value` is a memoryview whose format the receiver could not rebuild, such as one of a ctypes
            structure.
    """
    if type(value) is memoryview:
        if value.format.removeprefix("@") not in _NATIVE_FORMATS:
            raise TypeError(f"a memoryview of format {value.format!r} cannot be rebuilt; send view.tobytes()")
        # PickleBuffer needs contiguous memory, so a view with gaps is copied.
        view = value if value.c_contiguous else memoryview(bytearray(value.tobytes()))
        memory = PickleBuffer(view) if view.nbytes else bytearray()
        return rebuild_memoryview, (memory, value.format, value.shape, value.readonly)
    if type(value) is array:
        return rebuild_array, (value.typecode, PickleBuffer(value))
    return rebuild_bytes if type(value) is bytes else rebuild_bytearray, (PickleBuffer(value),)


def rebuild_bytes(memory: Any) -> bytes:
    """Returns the received memory as `bytes`, copied unless it is `bytes` already; empty for empty memory.

    Raises `TypeError` if `memory` is not `bytes`, `bytearray` or a `memoryview`.
    """
    return memory if type(memory) is bytes else bytes(_view_memory(memory))


def rebuild_bytearray(memory: Any) -> bytearray:
    """Returns the received memory as a `bytearray`; empty for empty memory.

    A `bytearray` is returned as it is, because the message was received into it and nothing else uses it. `bytes` and a
    `memoryview` are copied. Raises `TypeError` for any other type.
    """
    return memory if type(memory) is bytearray else bytearray(_view_memory(memory))


def rebuild_memoryview(memory: Any, form: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    """Returns a memoryview of the received memory, with the format and shape that the sender's had. Does not copy.

    Args:
        memory: The received memory: `bytes`, `bytearray` or a `memoryview`.
        form: The format of the items, as in `memoryview.format`.
        shape: The shape; ignored if the memory is empty, which gives one dimension of length 0.
        readonly: Whether the result is read-only. It is read-only in any case if `memory` is.

    Raises:
        TypeError: `memory` is of another type, or does not fit the format and shape.
        ValueError: The format or the shape is not valid.
    """
    view = _view_memory(memory).cast("B")
    cast: Any = view.cast
    shaped: memoryview = cast(form, shape) if view.nbytes else cast(form)
    return shaped.toreadonly() if readonly else shaped


def rebuild_array(typecode: str, memory: Any) -> array[Any]:
    """Returns a copy of the received memory as an `array.array` with that typecode, such as "d"; may be empty.

    Raises `TypeError` if `memory` is not `bytes`, `bytearray` or a `memoryview`, and `ValueError` if the typecode is
    unknown or the size of the memory is not a multiple of the size of an item.
    """
    made: array[Any] = array(typecode)
    made.frombytes(_view_memory(memory))
    return made


def _view_memory(memory: Any) -> memoryview:
    """Returns a memoryview of `bytes`, `bytearray` or a `memoryview`, which may be empty.

    Raises `TypeError` for anything else. Other objects with the buffer protocol, such as arrays of Python objects,
    would reveal addresses of memory.
    """
    if type(memory) not in (bytes, bytearray, memoryview):
        raise TypeError(f"a {type(memory).__name__} is not plain memory")
    return memoryview(memory)

"""Plain memory among the arguments and results: `bytes`, `bytearray`, `memoryview`, `array.array`.

Pickle writes them into the payload, which copies them, and refuses a memoryview. Here those that are an argument, or
the result itself, travel beside the payload as an array of numpy's does. What is inside of something is left to pickle.

- A `bytes`, `bytearray` and `array.array` is copied once where it arrives, as its memory must be its own.
- A `memoryview` arrives as one of the same format, shape and contents; one that could be written to still can. One of
  no bytes has one dimension there. One whose items have no native format, as those of ctypes, cannot be sent.
- One object that is several arguments is one object there too. One that is an argument and also inside another argument
  becomes two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pickle import PickleBuffer
from typing import Any, Final

LEAST: Final = 16 * 1024
"""Bytes from which on it is worth it. A memoryview is taken at any size."""

_NATIVE: Final = frozenset("cbB?hHiIlLqQnNfdP")
"""The formats that a memoryview may be cast to."""

RAW: Final = frozenset({bytes, bytearray, memoryview, array})
"""The types that may be."""


def has_raw(values: Iterable[Any]) -> bool:
    """Whether any of these may have to be lifted. On the path of every call."""
    for value in values:  # noqa: SIM110 (any() makes a generator)
        if type(value) in RAW:
            return True
    return False


def lifted(arguments: Sequence[Any]) -> list[Any]:
    """The same arguments, a tuple and a dict, with all plain memory that is worth it wrapped for pickle."""
    values, named = arguments
    wrapped: dict[int, _Raw] = {}

    def lift(value: Any) -> Any:
        kind = type(value)
        if kind not in RAW or (kind is not memoryview and len(value) * getattr(value, "itemsize", 1) < LEAST):
            return value
        return wrapped.setdefault(id(value), _Raw(value))

    return [tuple(map(lift, values)), {name: lift(value) for name, value in named.items()}]


class _Raw:
    """Stands for a value while it is pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_raw(self._value)


def reduce_raw(value: Any) -> tuple[Any, ...]:
    """What pickle makes of plain memory. Raises `TypeError` for a memoryview that could not be made again."""
    if type(value) is memoryview:
        if value.format.removeprefix("@") not in _NATIVE:
            raise TypeError(f"a memoryview of format {value.format!r} cannot be made again; send view.tobytes()")
        # What has gaps is copied, and then has none.
        view = value if value.c_contiguous else memoryview(bytearray(value.tobytes()))
        memory = PickleBuffer(view) if view.nbytes else bytearray()
        return view_of, (memory, value.format, value.shape, value.readonly)
    if type(value) is array:
        return array_of, (value.typecode, PickleBuffer(value))
    return bytes_of if type(value) is bytes else bytearray_of, (PickleBuffer(value),)


def bytes_of(memory: Any) -> bytes:
    """Bytes again."""
    return memory if type(memory) is bytes else bytes(_checked(memory))


def bytearray_of(memory: Any) -> bytearray:
    """A bytearray again. One that was received into is just that, and nobody else's."""
    return memory if type(memory) is bytearray else bytearray(_checked(memory))


def view_of(memory: Any, form: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    """A memoryview again."""
    view = _checked(memory).cast("B")
    cast: Any = view.cast
    shaped: memoryview = cast(form, shape) if view.nbytes else cast(form)
    return shaped.toreadonly() if readonly else shaped


def array_of(typecode: str, memory: Any) -> array[Any]:
    """An array again."""
    made: array[Any] = array(typecode)
    made.frombytes(_checked(memory))
    return made


def _checked(memory: Any) -> memoryview:
    """Raises `TypeError` for anything but plain memory: what holds objects would show where they are."""
    if type(memory) not in (bytes, bytearray, memoryview):
        raise TypeError(f"a {type(memory).__name__} is no plain memory")
    return memoryview(memory)

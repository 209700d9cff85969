"""Rebuilds numpy's arrays, scalars and dtypes from untrusted pickles.

The functions that numpy's pickles name are made for numpy's own use and trust their arguments:
- `ndarray` takes any memory as Python objects, or creates an array far outside its memory.
- A second state frees memory that other arrays still use.
- An array without a state shows what was in the memory before.
- A dtype that contains objects but denies it, or whose fields lie beyond its end, turns bytes into pointers.

So a pickle never gets these functions. It gets the replacements in `STAND_INS`, which accept only what numpy's own
pickles pass.

Theory of operation: pickle creates an empty object first and sets its state afterwards. The unpickler gets a `Pending`
object instead, which cannot be used for anything. When its state arrives, the value is created from that state in one
step, by a constructor that checks everything.

Rules
- An array is created once, from its shape, dtype and contents together, and only if they fit.
- Objects arrive one by one, as objects. Memory becomes an array only if its dtype has no objects.
- An array over a buffer that came with the message uses the memory of the buffer. Contents in the pickle are copied.
- Only plain arrays: no subclasses (masked arrays, matrices, record arrays), and no array that contains itself.
- Only the dtypes that are built into numpy, and records of them: no `StringDType`, whose elements are pointers as well,
  and no dtypes of other packages. Metadata is dropped.
- numpy is imported only when an array arrives. The names are those of numpy 1 and 2, so that either may be installed.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final


class Pending:
    """Takes the place of a value in the unpickler until the state of the value arrives. `finish(state)` creates it.

    Use a subclass: the class itself cannot create anything.

    Attributes:
        finished: The value, once `finish` has created it; None before.
    """

    __slots__ = ("finished",)

    def __init__(self) -> None:
        self.finished: Any = None

    def finish(self, state: Any) -> Any:
        """Creates the value from its state, sets `finished`, and returns the value.

        Args:
            state: The state from the pickle. It is checked, because an attacker may have chosen it.

        Raises:
            TypeError, ValueError, LookupError: The state is not valid, or the value has been created already.
        """
        if self.finished is not None:
            raise TypeError("the pickle gives one value two states")
        self.finished = self._make(state)
        return self.finished

    def _make(self, state: Any) -> Any:
        """Returns the value that a state describes. Implemented by subclasses; raises `NotImplementedError` here.

        An implementation raises `TypeError`, `ValueError` or `LookupError` if the state is not valid.
        """
        raise NotImplementedError


# Dtypes

_ALIGNED: Final = 0x80
"""The flag of a record dtype that is laid out as a C compiler does."""

_FOREIGN_BYTE_ORDER: Final = ">" if sys.byteorder == "little" else "<"

_LAST_BUILTIN: Final = 23
"""The highest number of a dtype that is built into numpy (NPY_HALF)."""

_MAX_NAME_LENGTH: Final = 32
"""The longest name of a dtype or of a unit of time, in characters."""

_MAX_RECORD_DEPTH: Final = 30
"""How deep records may be nested, because numpy walks through them by recursion in C."""


class PendingDtype(Pending):
    """Takes the place of `numpy.dtype` in a pickle, and of the dtype until its state arrives.

    Args:
        text: The name of the dtype, as in "f8" or "V16": 1 to 32 alphanumeric characters.
        align: Ignored, because the state repeats it.
        copy: Ignored.

    Raises:
        TypeError: `text` cannot be the name of a dtype. Whether numpy knows it is found out when the state arrives.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str, align: bool = False, copy: bool = False) -> None:
        super().__init__()
        if type(text) is not str:
            raise TypeError(f"the name of a dtype must be a str, not a {type(text).__name__}")
        # numpy also accepts the text of a whole record, such as "T,i4" or one with a million fields. Its pickles do not
        # contain such texts.
        if len(text) > _MAX_NAME_LENGTH or not text.isalnum():
            raise TypeError("the pickle has a dtype with an invalid name")
        self._text = text

    def _make(self, state: Any) -> Any:
        """Returns the dtype that `state`, a tuple of eight or more elements, describes.

        Raises `TypeError`, `ValueError` or `LookupError` if the state is not one that numpy itself writes, or the dtype
        is not built into numpy.
        """
        import numpy

        if type(state) is not tuple:
            raise TypeError(f"the state of a dtype must be a tuple, not a {type(state).__name__}")
        _, order, subarray, names, fields, size, _, flags, *more = state
        _check_kinds((order, str), (size, int), (flags, int))
        if names:
            _check_kinds((names, tuple), (fields, dict), *((name, str) for name in names))
            wanted = [fields[name] for name in names]
            for field in wanted:
                _check_kinds((field, tuple), (field[1], int), *((title, str) for title in field[2:]))
            record: dict[str, Any] = {
                "names": list(names),
                "formats": [check_dtype(field[0]) for field in wanted],
                "offsets": [field[1] for field in wanted],
                "itemsize": size,
            }
            if any(len(field) > 2 for field in wanted):
                record["titles"] = [field[2] if len(field) > 2 else None for field in wanted]
            made: Any = numpy.dtype(record, align=bool(flags & _ALIGNED))  # type: ignore[call-overload]
        elif subarray:
            base, shape = subarray
            _check_kinds((shape, tuple), *((length, int) for length in shape))
            made = numpy.dtype((check_dtype(base), shape))
        else:
            text = self._text
            if text in ("M8", "m8") and more:
                unit, count = more[0][1][:2]
                _check_kinds((unit, bytes), (count, int))
                if len(unit) > _MAX_NAME_LENGTH or not unit.isalpha():
                    raise TypeError("the pickle has a dtype with an invalid unit of time")
                text += "" if unit == b"generic" else f"[{count:d}{unit.decode()}]"
            made = numpy.dtype(text)
            if order == _FOREIGN_BYTE_ORDER:
                made = made.newbyteorder("S")
        if _record_depth(made, {}) > _MAX_RECORD_DEPTH:
            raise ValueError(f"records are nested more than {_MAX_RECORD_DEPTH} deep")
        return made


def _check_kinds(*expected: tuple[Any, type]) -> None:
    """Raises `TypeError` if a value is not exactly of the type that it is paired with; subclasses do not count.

    Does nothing without pairs. numpy's own check would put the repr of the value into the message, which can take any
    time and memory.
    """
    for value, kind in expected:
        if type(value) is not kind:
            raise TypeError(f"the state of a dtype has a {type(value).__name__} where a {kind.__name__} is expected")


def check_dtype(value: Any) -> Any:
    """Returns `value` if it is a `numpy.dtype`; raises `TypeError` if it is not, or numpy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.dtype):
        raise TypeError(f"a {type(value).__name__} is not a dtype")
    return value


def _record_depth(dtype: Any, known: dict[int, int]) -> int:
    """Returns how deep the records of a dtype are nested; 1 for a dtype without fields.

    Args:
        dtype: The dtype.
        known: The depths of dtypes that have been visited, by id, so that each is visited once. Empty at first; the
            function fills it.

    Raises:
        TypeError: The dtype, or a dtype in it, is not built into numpy.
    """
    depth = known.get(id(dtype))
    if depth is None:
        if not 0 <= dtype.num <= _LAST_BUILTIN:
            raise TypeError(f"arrays of {dtype} are not supported by workers that have an allow-list (option allow)")
        parts = [field[0] for field in (dtype.fields or {}).values()]
        if dtype.subdtype:
            parts.append(dtype.subdtype[0])
        depth = known[id(dtype)] = 1 + max((_record_depth(part, known) for part in parts), default=0)
    return depth


# Arrays and scalars

_MAX_RECORD_BYTES: Final = 1024
"""The largest size of a record with objects, unless the whole array has at most `_MAX_RECORDS_BYTES`. A pickle needs
only a few bytes for each record, however large the record is."""
_MAX_RECORDS_BYTES: Final = 1 << 20
_MAX_EMPTY_ELEMENTS: Final = 1 << 16
"""How many elements an array may have if they take no memory, as texts of length 0 do. For other arrays the bytes that
were sent limit the number."""


class NdarrayName:
    """The type of `NDARRAY`, which takes the place of the class `numpy.ndarray` in a pickle.

    A pickle can only pass it to `reconstruct`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "the class numpy.ndarray"


NDARRAY: Final = NdarrayName()


class PendingArray(Pending):
    """Takes the place of an array in the unpickler until its state (shape, dtype and contents) arrives."""

    __slots__ = ()

    def _make(self, state: Any) -> Any:
        """Returns the array that `state` describes: (version, shape, dtype, whether it is in Fortran order, contents).

        The version is ignored. The contents are bytes, or a list for a dtype with objects; both may be empty. Raises
        `TypeError` or `ValueError` if `state` has another form, or shape, dtype and contents do not fit.
        """
        import numpy

        _, shape, dtype, is_fortran, contents = state
        order = "F" if is_fortran else "C"
        count = _count_elements(shape)
        if not _check_element(dtype).hasobject:
            if type(contents) not in (bytes, bytearray):
                raise TypeError(f"the contents of an array of {dtype} cannot be a {type(contents).__name__}")
            return _copy_array(_view_as_array(contents, dtype, count).reshape(shape, order=order))
        if type(contents) is not list or len(contents) != count:
            raise ValueError(f"the contents of an array of {count} objects must be a list of that length")
        if dtype.itemsize > _MAX_RECORD_BYTES and dtype.itemsize * max(count, 1) > _MAX_RECORDS_BYTES:
            raise ValueError(f"an array of records with objects has {dtype.itemsize} bytes in each record")
        # One by one: numpy.array(contents) would look into lists and arrays among the objects.
        flat: Any = numpy.zeros(count, dtype)
        for place, value in enumerate(contents):
            flat[place] = value
        array = flat.reshape(shape)  # objects are sent in C order, whatever the order of the array
        return array.copy(order="F") if is_fortran else array


def objects_in(array: Any) -> list[Any]:
    """Returns the objects in a numpy array, including those in its records; an empty list if its dtype has none."""
    dtype = array.dtype
    if not dtype.hasobject:
        return []
    if dtype.names:
        return [value for name in dtype.names for value in objects_in(array[name])]
    objects: list[Any] = array.ravel().tolist()
    return objects


def reconstruct(cls: Any, shape: Any, typecode: Any) -> PendingArray:
    """Returns a `PendingArray`, which becomes an array when its state (shape, dtype and contents) arrives.

    Takes the place of numpy's `_reconstruct` in pickles.

    Args:
        cls: Must be the class `numpy.ndarray`, for which `NDARRAY` stands.
        shape: Ignored.
        typecode: Ignored.

    Raises:
        TypeError: `cls` is something else, such as a subclass of `numpy.ndarray`.
    """
    if cls is not NDARRAY:
        raise TypeError("subclasses of numpy.ndarray are not supported by workers that have an allow-list")
    return PendingArray()


def from_buffer(memory: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Returns an array that uses `memory`, writable if that is. Takes the place of numpy's `_frombuffer` in pickles.

    Args:
        memory: The contents: bytes, a bytearray or a memoryview; may be empty.
        dtype: The dtype, without objects.
        shape: The shape, a tuple of ints.
        order: The memory layout: "C", "F" or "K".
        axes: With "K", the order of the axes in memory; None for C order.

    Raises:
        TypeError: `memory` is not plain memory, `dtype` is not a dtype, or it has objects.
        ValueError: The memory does not fit the dtype and shape, or another argument is not valid.
    """
    if _check_element(dtype).hasobject:
        raise TypeError("an array of objects cannot be made from memory")
    if type(order) is not str or order not in ("C", "F", "K"):
        raise ValueError("the pickle has an array with an invalid order")
    if axes is not None and (type(axes) is not tuple or any(type(axis) is not int for axis in axes)):
        raise ValueError("the pickle has an array with invalid axes")
    array = _view_as_array(memory, dtype, _count_elements(shape))
    if order == "K" and axes is not None:
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order="C" if order == "K" else order)


def scalar(dtype: Any, contents: Any) -> Any:
    """Returns a scalar of that dtype. Takes the place of numpy's `scalar` in pickles.

    Args:
        dtype: The dtype.
        contents: The bytes of the scalar; for a record with objects an array without dimensions.

    Raises:
        TypeError: `dtype` is not a dtype, or `contents` is of another type or dtype.
        ValueError: `contents` has the wrong size.
    """
    import numpy

    if _check_element(dtype).hasobject:  # a record, which numpy sends as an array without dimensions
        if type(contents) is not numpy.ndarray or contents.dtype != dtype or contents.shape or not dtype.names:
            raise TypeError(f"a record of {dtype} must be sent as an array without dimensions")
        return contents.copy()[()]
    if type(contents) is not bytes:
        raise TypeError(f"the contents of a scalar of {dtype} cannot be a {type(contents).__name__}")
    return _copy_array(_view_as_array(contents, dtype, 1))[0]


def _check_element(dtype: Any) -> Any:
    """Returns `dtype` if an array can have elements of it.

    Raises `TypeError` if it is not a dtype, or one whose elements are arrays themselves, such as "2f8".
    """
    if check_dtype(dtype).subdtype:
        raise TypeError(f"an array cannot have the dtype {dtype}")
    return dtype


def _count_elements(shape: Any) -> int:
    """Returns the number of elements of an array of that shape; 1 for an empty tuple.

    Raises `ValueError` if `shape` is not a tuple of ints from 0 on.
    """
    if type(shape) is not tuple or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError("the pickle has an array with an invalid shape")
    return math.prod(shape)


def _view_as_array(memory: Any, dtype: Any, count: int) -> Any:
    """Returns a one-dimensional array of `count` elements that uses all of `memory`.

    Raises `TypeError` if `memory` is not bytes, a bytearray or a memoryview. Raises `ValueError` if it has another
    size, or is empty for more than `_MAX_EMPTY_ELEMENTS` elements.
    """
    import numpy

    if type(memory) not in (bytes, bytearray, memoryview):
        raise TypeError(f"the memory of an array cannot be a {type(memory).__name__}")
    # A bytearray cannot be resized, and so its memory not move, as long as this memoryview of it exists.
    view = memoryview(memory)
    if not view.c_contiguous or view.nbytes != count * dtype.itemsize:
        raise ValueError(f"an array of {count} elements of {dtype} has {view.nbytes} bytes of contents")
    if not view.nbytes:  # numpy.frombuffer refuses empty memory
        if count > _MAX_EMPTY_ELEMENTS:
            raise ValueError(f"an array has {count} elements without contents, more than {_MAX_EMPTY_ELEMENTS}")
        return numpy.ndarray((count,), dtype)
    return numpy.frombuffer(view, dtype)


def _copy_array(array: Any) -> Any:
    """Returns a copy of a numpy array, with memory of its own and in the same order.

    An array without bytes is returned as it is, because copying texts of length 0 would give them a length.
    """
    return array.copy(order="K") if array.nbytes else array


STAND_INS: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "dtype"): PendingDtype,
    ("numpy", "ndarray"): NDARRAY,
    **{
        (f"numpy.{package}.{module}", name): stand_in
        for package in ("core", "_core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", reconstruct),
            ("multiarray", "scalar", scalar),
            ("numeric", "_frombuffer", from_buffer),
        )
    },
}
"""The functions and objects that a pickle gets, by the module and the name that it asks for."""

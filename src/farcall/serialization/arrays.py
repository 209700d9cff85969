"""Arrays and scalars of numpy out of pickles that are not trusted.

The functions that numpy's pickles name are made for numpy's own use: `ndarray` takes any memory for objects, or for an
array far outside of it; a second state frees memory that others still show; an array without a state shows what was in
the memory before. So a pickle never gets hold of them. It gets what stands here in their place (`STAND_INS`), which
takes what numpy itself writes, and nothing else.

Rules
- An array is made once, from its shape, type and contents together, and only if they fit.
- Objects come one by one, as objects. Memory becomes arrays only of types that hold none.
- An array over a buffer that came beside the pickle uses its memory; what came inside of the pickle's states is copied.
- Plain arrays only: no subclasses (masked arrays, matrices, records with attributes), and none that holds itself.

numpy is imported only when an array comes. The names are those of numpy 1 and 2, whichever is here.
"""

from __future__ import annotations

import math
from typing import Any, Final

from farcall.serialization.array_types import PendingType, checked
from farcall.serialization.pending import Pending


class ArrayName:
    """What the name `numpy.ndarray` in a pickle leads to: only `reconstruct` takes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "the class numpy.ndarray"


ARRAY: Final = ArrayName()


class PendingArray(Pending):
    """What stands for an array while its pickle is read."""

    __slots__ = ()

    def _made(self, state: Any) -> Any:
        import numpy

        _, shape, dtype, is_fortran, contents = state
        order = "F" if is_fortran else "C"
        count = _count(shape)
        if not _element(dtype).hasobject:
            if type(contents) not in (bytes, bytearray):
                raise TypeError(f"an array of {dtype} was sent as a {type(contents).__name__}")
            return _own(_over(contents, dtype, count).reshape(shape, order=order))
        if type(contents) is not list or len(contents) != count:
            raise ValueError(f"an array of {count} objects was sent with other contents")
        # Each by itself: told to make an array of a list, numpy would look into lists and arrays in it.
        flat: Any = numpy.zeros(count, dtype)
        for place, value in enumerate(contents):
            flat[place] = value
        array = flat.reshape(shape)  # objects are listed in this order, whichever the array has
        return array.copy(order="F") if is_fortran else array


def reconstruct(cls: Any, shape: Any, typecode: Any) -> PendingArray:
    """In the place of `_reconstruct`: what it is called with says nothing, the state does."""
    if cls is not ARRAY:
        raise TypeError("subclasses of numpy's array are not supported where a worker restricts what is sent to it")
    return PendingArray()


def from_buffer(memory: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """In the place of `_frombuffer`: an array that uses that memory, and can be written to if that can."""
    if _element(dtype).hasobject:
        raise TypeError("memory was sent for an array of objects")
    if order not in ("C", "F", "K"):
        raise ValueError(f"there is no order {order!r}")
    array = _over(memory, dtype, _count(shape))
    if order == "K" and axes is not None:
        return array.reshape(shape).transpose(axes)
    return array.reshape(shape, order="C" if order == "K" else order)


def scalar(dtype: Any, contents: Any) -> Any:
    """In the place of `scalar`."""
    import numpy

    if _element(dtype).hasobject:  # a record, which is sent as an array of no dimensions
        if type(contents) is not numpy.ndarray or contents.dtype != dtype or contents.shape or not dtype.names:
            raise TypeError(f"a record of {dtype} was sent with other contents")
        return contents.copy()[()]
    if type(contents) is not bytes:
        raise TypeError(f"a {dtype} was sent as a {type(contents).__name__}")
    return _own(_over(contents, dtype, 1))[0]


def _element(dtype: Any) -> Any:
    """That type, if arrays can be of it."""
    if checked(dtype).subdtype:
        raise TypeError(f"no array is of {dtype}")
    return dtype


def _count(shape: Any) -> int:
    if type(shape) is not tuple or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError("an array was sent without a proper shape")
    return math.prod(shape)


def _over(memory: Any, dtype: Any, count: int) -> Any:
    """An array of so many elements that uses this memory, all of it. Raises if it is more or less than that."""
    import numpy

    if type(memory) not in (bytes, bytearray, memoryview):
        raise TypeError(f"a {type(memory).__name__} was sent as the memory of an array")
    # A view of our own keeps the memory where it is for as long as the array lives: a bytearray can be made longer.
    view = memoryview(memory)
    if not view.c_contiguous or view.nbytes != count * dtype.itemsize:
        raise ValueError(f"{view.nbytes} bytes were sent for {count} elements of {dtype}")
    if not view.nbytes:  # numpy knows no array over nothing; this one has no memory to show either
        return numpy.ndarray((count,), dtype)
    return numpy.frombuffer(view, dtype)


def _own(array: Any) -> Any:
    """The same with memory of its own. Texts of no length would get one by being copied."""
    return array.copy(order="K") if array.nbytes else array


STAND_INS: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "dtype"): PendingType,
    ("numpy", "ndarray"): ARRAY,
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
"""What a pickle gets, by the module and the name that it asks for."""

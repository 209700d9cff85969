"""How some types are pickled in our messages, and nowhere else: reducers that only our own picklers know.

`copyreg` would have every pickle of the program use them, those of other packages too. What is registered here is for
types whose own pickles are slow or copy: the tensors of torch, say, whose edge registers them when it is imported.

A reducer is what `copyreg.pickle` takes: a function of the object that gives what `__reduce__` gives. It stands for
the very type, or for a *family*: a type and all its subclasses. That of the very type comes first.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any, Final

Reducer = Callable[[Any], Any]


_families: Final[dict[type, Reducer]] = {}


class _Table(dict[type, Reducer]):
    """Ours first, then those that all picklers use, as they are at the moment."""

    __slots__ = ()

    def __missing__(self, kind: type) -> Reducer:
        return family_reducer(kind) or copyreg.dispatch_table[kind]  # a KeyError tells pickle that there is none


REDUCERS: Final[dict[type, Reducer]] = _Table()
"""Empty in most processes; then `pickle.dumps` itself does the work."""


def register_reducer(kind: type, reduce: Reducer) -> None:
    """Has objects of that very type pickled by `reduce` from now on. Instead of the one before, if there was one."""
    REDUCERS[kind] = reduce


def register_family_reducer(base: type, reduce: Reducer) -> None:
    """Has objects of that type and of its subclasses pickled by `reduce` from now on."""
    _families[base] = reduce
    REDUCERS.setdefault(base, reduce)  # so that the table is not empty


def family_reducer(kind: type) -> Reducer | None:
    """The reducer of the nearest family that a type is of, if it is of one."""
    if _families:
        for base in kind.__mro__:
            if base in _families:
                return _families[base]
    return None


class _Pickler(pickle.Pickler):
    """Knows our reducers from the start: quicker than to be told."""

    dispatch_table = REDUCERS


def dumps_reduced(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    """As `pickle.dumps` with protocol 5, with our reducers. Raises whatever pickle raises."""
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()

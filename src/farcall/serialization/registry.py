"""Reducers: how single types are pickled in farcall's messages, and nowhere else.

A reducer is what `copyreg.pickle` takes: a function of an object that returns what `__reduce__` returns. `copyreg`
itself would change every pickle of the program, including those of other packages. The reducers registered here are
known to farcall's picklers only. They serve types whose own pickles are slow or copy their memory, such as torch's
tensors, whose reducers are registered when `farcall.pytorch` is imported.

A reducer is registered for one type, or for a *family*: a type and all its subclasses. The reducer of the exact type
takes precedence.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any, Final

Reducer = Callable[[Any], Any]
"""A function of an object that returns what the object's `__reduce__` would return."""

_families: Final[dict[type, Reducer]] = {}
"""The reducers of families, by the type at the head of the family."""


class _ReducerTable(dict[type, Reducer]):
    """A dispatch table for picklers, from types to reducers: looking a type up never changes the table.

    It has the registered reducers as items. For a missing type the reducer of the nearest registered base class is
    used, then that of `copyreg`.
    """

    __slots__ = ()

    def __missing__(self, kind: type) -> Reducer:
        """Returns the reducer of the type's nearest registered base class, else that of `copyreg`.

        Raises `KeyError`, as pickle expects, if there is neither.
        """
        return family_reducer(kind) or copyreg.dispatch_table[kind]


REDUCERS: Final[dict[type, Reducer]] = _ReducerTable()
"""The registered reducers, by type. Empty in most processes: then `pickle.dumps` can be used as it is."""


def register_reducer(kind: type, reduce: Reducer) -> None:
    """Registers how objects of exactly that type are pickled in farcall's messages, and replaces an earlier reducer.

    Neither argument is checked.

    Args:
        kind: The type. Subclasses are not affected.
        reduce: Returns for an object what `__reduce__` returns. What it raises makes pickling fail.
    """
    REDUCERS[kind] = reduce


def register_family_reducer(base: type, reduce: Reducer) -> None:
    """Registers how objects of a type and of all its subclasses, its family, are pickled in farcall's messages.

    Replaces an earlier reducer of the family. A reducer that `register_reducer` registered for exactly one of these
    types takes precedence. Neither argument is checked.

    Args:
        base: The type at the head of the family.
        reduce: Returns for an object what `__reduce__` returns. What it raises makes pickling fail.
    """
    _families[base] = reduce
    REDUCERS.setdefault(base, reduce)  # so that the table is not empty, and is used


def family_reducer(kind: type) -> Reducer | None:
    """Returns the reducer that `register_family_reducer` registered for a type or its nearest base class.

    Returns None if there is none.
    """
    if _families:
        for base in kind.__mro__:
            if base in _families:
                return _families[base]
    return None


class _Pickler(pickle.Pickler):
    """A pickler that uses the registered reducers.

    The table is an attribute of the class, because setting it for each pickler would take longer.
    """

    dispatch_table = REDUCERS


def dumps_reduced(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    """Returns the pickle of a value, in protocol 5, using the registered reducers. None is pickled as any other value.

    A reducer says how one type is pickled; `register_reducer` and `register_family_reducer` register them.

    Args:
        value: The value.
        buffer_callback: Called with each buffer of the value. The buffer stays out of the pickle if it returns a false
            value. None keeps all buffers in the pickle.

    Raises:
        Exception: What pickle or a reducer raises for a value that cannot be pickled, such as `TypeError` or
            `pickle.PicklingError`.
    """
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()

"""Pickles by value what pickle itself cannot name: lambdas, closures, local classes, all of an interactive `__main__`.

cloudpickle does it, with three differences. It sends everything of `__main__` by value, which is right for a notebook
and wrong for a script that all workers run, whose functions must see the globals of the worker they run on. It sends
an open text file as a copy of its text, into which one could write for ever without a word reaching the file: here, as
in pickle, a file cannot be sent. And it cannot send a memoryview.

A module of its own as the `pickler` imports it only when there is something to do by value: cloudpickle would be a
good part of the time that `import farcall` takes.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pickle import PickleBuffer
from types import FunctionType
from typing import Any

import cloudpickle

from farcall.serialization.callables import is_interactive, leads_to
from farcall.serialization.raw import reduce_raw
from farcall.serialization.reducers import REDUCERS, family_reducer


def dumps_by_value(value: Any, buffer_callback: Callable[[PickleBuffer], bool] | None) -> bytes:
    """The pickle of a value; `buffer_callback` as in `pickle.dumps`. Raises whatever pickle and cloudpickle raise."""
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, but what a script's `__main__` can name goes by name, as all does in `__mp_main__`."""

    def reducer_override(self, obj: Any) -> Any:
        in_main = isinstance(obj, (FunctionType, type)) and getattr(obj, "__module__", None) == "__main__"
        if in_main and not is_interactive() and leads_to("__main__", obj.__qualname__, obj):
            return NotImplemented
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError("an open file belongs to its process")
        if type(obj) is memoryview:
            return reduce_raw(obj)
        reduce = REDUCERS.get(type(obj)) or family_reducer(type(obj))
        if reduce is not None:
            return reduce(obj)
        return super().reducer_override(obj)

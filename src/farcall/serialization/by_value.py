"""Pickles functions and classes by value that pickle cannot send by name.

These are lambdas, closures, local classes, and everything that an interactive `__main__` (a notebook) defines.
cloudpickle does the work, with three differences:

- cloudpickle sends everything of `__main__` by value. That is right for a notebook, and wrong for a script that all
  workers run, whose functions must see the globals of the worker that runs them.
- cloudpickle sends an open text file as a copy of its text. What the receiver wrote into the copy would never reach the
  file. Here a file cannot be sent, as with pickle.
- cloudpickle cannot send a `memoryview`.

`payload` imports this module only when something has to be sent by value, because importing cloudpickle would take a
good part of the time of `import farcall`.
"""

from __future__ import annotations

import io
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pickle import PickleBuffer
from types import CodeType, FunctionType
from typing import Any, Final

import cloudpickle

from farcall.errors import SerializationError
from farcall.serialization.buffers import reduce_buffer
from farcall.serialization.callables import is_interactive, leads_to
from farcall.serialization.registry import REDUCERS, Reducer, family_reducer

BYTECODE_VERSION: Final = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
"""The Python whose bytecode runs here, such as "CPython 3.13"."""


def dumps_by_value(
    value: Any, buffer_callback: Callable[[PickleBuffer], bool] | None, reducers: Mapping[type, Reducer] | None = None
) -> bytes:
    """Returns the pickle of a value, with functions and classes by value where pickle cannot send them by name.

    Lambdas, closures, local classes, and all functions and classes of an interactive `__main__` are pickled by value.
    None is pickled as any other value.

    Args:
        value: The value.
        buffer_callback: Called with each buffer of the value. The buffer stays out of the pickle if it returns a false
            value. None keeps all buffers in the pickle.
        reducers: A table of reducers by type, to use instead of the registered ones; None uses the registered ones. A
            type for which the table raises `KeyError` has no reducer.

    Raises:
        Exception: What pickle, cloudpickle or a reducer raises for a value that cannot be pickled, such as `TypeError`
            or `pickle.PicklingError`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, 5, buffer_callback=buffer_callback)
    pickler.reducers = reducers
    pickler.dump(value)
    return file.getvalue()


def make_code(version: str, *parts: Any) -> CodeType:
    """Returns a code object; pickles of functions by value call this where they are unpickled.

    Args:
        version: The `BYTECODE_VERSION` of the process that pickled the function, such as "CPython 3.13".
        parts: The arguments of `types.CodeType`, which raises `TypeError` or `ValueError` if they are wrong.

    Raises:
        SerializationError: This process runs another version of Python. The message names both versions.
    """
    if version != BYTECODE_VERSION:
        raise SerializationError(
            f"it contains a function or class by value, compiled by {version}, and this worker runs "
            f"{BYTECODE_VERSION}. Bytecode cannot be sent between Python versions: run the same version on both "
            "workers, or call a function that a module or the script defines at its top level, which is sent by name"
        )
    return CodeType(*parts)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's pickler, with other rules for some objects.

    Functions and classes of a script's `__main__` are sent by name, and a `memoryview` can be sent. An open text file
    cannot be sent. Code objects carry the version of Python that compiled them, and registered reducers are used.

    Attributes:
        reducers: A table of reducers by type; None uses `registry.REDUCERS`, the registered ones.
    """

    reducers: Mapping[type, Reducer] | None = None

    def reducer_override(self, obj: Any) -> Any:
        """Returns how to pickle `obj`, in the form that `__reduce__` returns; `NotImplemented` leaves it to pickle.

        Raises `TypeError` for an open text file and a memoryview that cannot be rebuilt, and what a registered reducer
        raises.
        """
        in_main = isinstance(obj, (FunctionType, type)) and getattr(obj, "__module__", None) == "__main__"
        if in_main and not is_interactive() and leads_to("__main__", obj.__qualname__, obj):
            return NotImplemented
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError("an open file cannot be sent to another process")
        if type(obj) is memoryview:
            return reduce_buffer(obj)
        if type(obj) is CodeType:
            _, parts = self.dispatch_table[CodeType](obj)
            return make_code, (BYTECODE_VERSION, *parts)
        reduce: Reducer | None = None
        if self.reducers is None:
            reduce = REDUCERS.get(type(obj)) or family_reducer(type(obj))
        else:
            with suppress(KeyError):
                reduce = self.reducers[type(obj)]
        if reduce is not None:
            return reduce(obj)
        return super().reducer_override(obj)

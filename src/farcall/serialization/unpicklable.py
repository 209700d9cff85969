"""Finds the part of a value that cannot be pickled, for the error message.

The search runs after pickle has failed, never before. It looks into containers, attributes, closures and the globals
that a function uses, and follows the first part that cannot be pickled until that part has no such part itself. The
search is bounded and never raises: a value that does not let itself be inspected is reported as the culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

_MAX_DEPTH: Final = 12
"""How many levels of a value are searched."""
_MAX_TRIALS: Final = 1000
"""How many parts are pickled for one search, because a list may have millions."""


def find_unpicklable(root: str, value: Any, is_picklable: Callable[[Any], bool]) -> tuple[str, Any]:
    """Returns the path, as text, to the innermost part of a value that cannot be pickled, and the part. Never raises.

    Args:
        root: The name of the value, with which the path begins.
        value: The value, which cannot be pickled.
        is_picklable: Returns whether a part can be pickled. If it raises, the search stops.

    Returns:
        The path, such as "config['lock']", and the part. These are `root` and `value` if every part can be pickled by
        itself, or the value has no parts. The search stops early after 12 levels or 1000 parts, with the part that it
        has reached.
    """
    path = root
    trials = 0
    for _ in range(_MAX_DEPTH):
        try:
            for label, part in _parts(value):
                trials += 1
                if trials > _MAX_TRIALS:
                    return path, value
                if part is not value and not is_picklable(part):
                    path, value = path + label, part
                    break
            else:
                return path, value
        except Exception:
            return path, value
    return path, value


def type_name(value: Any) -> str:
    """Returns the full name of a value's type, such as "numpy.ndarray", without the module for builtins ("list").

    Returns "NoneType" for None, and "unknown type" if the type has no name. Never raises.
    """
    return class_name(type(value))


def class_name(cls: type) -> str:
    """Returns the full name of a class, such as "numpy.ndarray", without the module for builtins ("list").

    Reads the name without running code of a metaclass. Returns "unknown type" if there is none, or `cls` is not a
    class. Never raises.
    """
    try:
        name = type.__dict__["__qualname__"].__get__(cls)
        module = type.__dict__["__module__"].__get__(cls)
        return f"{name}" if module == "builtins" else f"{module}.{name}"
    except Exception:
        return "unknown type"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields pairs of a label and a part: the parts of a value that pickle would pickle.

    The label, such as "['lock']" for an item of a dict, is appended to the path of the value to get the path of the
    part. Yields nothing for a class and for a value without parts. May raise what the methods of the value raise.
    """
    kind = type(value)
    if kind is dict:
        for key, item in list(value.items()):
            yield f" → key {_short(key)}", key
            yield f"[{_short(key)}]", item
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif kind in (set, frozenset):
        for item in value:
            yield " → element", item
    elif kind is MethodType:
        yield ".__self__", value.__self__
    elif kind is partial:
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif kind is FunctionType:
        yield from _parts_of_function(value)
    elif not isinstance(value, type):
        yield from _parts_of_object(value)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields pairs of a label and a part: the closure variables, the used globals and the defaults of a function.

    The label, such as " → global 'lock'", is appended to the path of the function to get the path of the part. The
    defaults are one part: a tuple, or None if there are none. Raises `ValueError` for a closure variable that is not
    set yet.
    """
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        yield f" → variable {name!r}", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f" → global {name!r}", function.__globals__[name]
    yield ".__defaults__", function.__defaults__


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields pairs of a label and a part: the attributes, arguments and items that an object's `__reduce_ex__` returns.

    The label, such as ".lock", is appended to the path of the object to get the path of the part. Yields nothing for an
    object that pickle sends by name. Raises what `__reduce_ex__` raises, usually `TypeError`.
    """
    reduced = value.__reduce_ex__(5)
    if isinstance(reduced, str):
        return
    state = reduced[2] if len(reduced) > 2 else None
    # The default __getstate__ returns the attributes, or a pair of the attributes and the slots.
    for attributes in state if type(state) is tuple and len(state) == 2 else (state,):
        if type(attributes) is dict:
            for name, item in attributes.items():
                yield f".{name}", item
        elif attributes is not None:
            yield " → state", attributes
    for index, item in enumerate(reduced[1]):
        yield f" → part {index}", item
    for index, item in enumerate(reduced[3] if len(reduced) > 3 and reduced[3] is not None else ()):
        yield f"[{index}]", item
    for key, item in reduced[4] if len(reduced) > 4 and reduced[4] is not None else ():
        yield f"[{_short(key)}]", item


def _short(key: Any) -> str:
    """Returns the repr of a key of a dict, cut to 40 characters. Raises what the repr of the key raises."""
    text = repr(key)
    return text if len(text) <= 40 else text[:37] + "..."

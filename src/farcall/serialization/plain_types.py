"""The types of plain data, and what a pickle that is not trusted may give them.

Most are harmless whatever they are given. Of the others it is known what pickle itself gives them, and nothing else is
passed on:

- Collections are given what was sent in full: not a `range`, or a number of bytes, which would take all memory.
- A `Fraction` is given whole numbers: a text with an exponent takes for ever.
- A `UnicodeDecodeError` shows the byte at its place, wherever that is: it has to be within what it is about.
- Attributes of the interpreter's or of pickle's are not set: pickle obeys an instance that says how it is pickled.
- What has all it needs from its constructor is given no state: a path could look like another one than it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

QUICK: Final = frozenset(
    {f"builtins.{name}" for name in ("complex", "range", "slice")}
    | {f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")}
    | {"decimal.Decimal"}
)
"""Names of types that can be left to pickle's C code: no arguments of theirs do harm, and they take no state."""

_STATELESS: Final = frozenset(
    {f"collections.{name}" for name in ("Counter", "OrderedDict", "deque")}
    | {f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}
    | {"decimal.Decimal", "fractions.Fraction"}
)

_SENT: Final = frozenset({list, tuple, dict, set, frozenset, str, bytes, bytearray})
"""What has as many elements as were sent."""

_ABOUT_TEXT: Final[Mapping[type[UnicodeError], type[bytes | str]]] = {
    UnicodeDecodeError: bytes,
    UnicodeEncodeError: str,
    UnicodeTranslateError: str,
}
"""Exceptions that point into something, and what that is."""

_WHOLE: Final = re.compile(r"[-+]?[0-9]+(/[0-9]+)?")


def _collection(args: Sequence[Any]) -> bool:
    return not args or type(args[0]) in _SENT


def _fraction(args: Sequence[Any]) -> bool:
    return all(type(arg) is int or (type(arg) is str and _WHOLE.fullmatch(arg) is not None) for arg in args)


ARGUMENTS: Final[Mapping[str, Callable[[Sequence[Any]], bool]]] = {
    **dict.fromkeys(("builtins.bytearray", "builtins.frozenset", "builtins.set"), _collection),
    **dict.fromkeys(("collections.Counter", "collections.OrderedDict", "collections.deque"), _collection),
    "fractions.Fraction": _fraction,
}
"""By the name of the type, whether these are arguments for it."""


def takes_state(value: object) -> bool:
    """Whether a pickle may give that value a state, if it has made it."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}" not in _STATELESS


def is_reserved(name: str) -> bool:
    """Whether an attribute is the interpreter's or pickle's own. The notes of an exception are anybody's."""
    return name[:2] == name[-2:] == "__" and name != "__notes__"


def is_sound(value: object) -> bool:
    """Whether it can be looked at. Only of some exceptions that is not so by itself."""
    for cls, kind in _ABOUT_TEXT.items():
        if isinstance(value, cls):
            # Read past what a subclass may define: these are what the interpreter looks at.
            about, start, end = (vars(cls)[name].__get__(value) for name in ("object", "start", "end"))
            return isinstance(about, kind) and 0 <= start <= len(about) and end >= 0
    return True

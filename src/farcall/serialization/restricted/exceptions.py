"""Decides what an exception from another worker may contain, so that inspecting or printing it has no side effects.

The interpreter and the `traceback` module trust the attributes of an exception. To suggest a better name they import
the module that an `ImportError` names, list the attributes of the object of an `AttributeError`, and ask the `self` of
a frame for the attribute that a `NameError` names. They print as many carets as a `SyntaxError` says, and read the byte
at the position that a `UnicodeDecodeError` says. They print an exception group member by member, however often one
exception is a member.

Rules
- Attributes that only serve such suggestions are dropped for every sender (`is_dropped`).
- An exception from an untrusted sender gets no attribute that hides one of its methods (`hides_method`), and attributes
  that the interpreter uses are checked (`is_sound`).
- What would be printed must be text (notes) and a tree of limited size (`are_printable`): nothing that contains itself,
  and nothing that occurs so often that printing it would take all memory.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

MAX_MEMBERS: Final = 10_000
"""How many exceptions a group and the groups in it may have, each counted as often as it is printed."""
_MAX_PRINTED_BYTES: Final = 1 << 26
"""About how many bytes all exceptions of a message may print together."""
_MAX_COLUMN: Final = 10_000
"""The largest column of a `SyntaxError`, unless its text is longer."""
_MAX_LINE: Final = 1 << 31

_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the flag of classes that a class statement has created, as opposed to builtin classes."""

_DROPPED: Final[tuple[tuple[type[BaseException], frozenset[str]], ...]] = (
    (ImportError, frozenset({"name_from"})),
    (AttributeError, frozenset({"obj"})),
    (SyntaxError, frozenset({"_metadata", "print_file_and_line"})),
)
"""The attributes of exceptions that are dropped for every sender."""
_DROPPED_IF_UNTRUSTED: Final[tuple[tuple[type[BaseException], frozenset[str]], ...]] = (
    *_DROPPED,
    (BaseException, frozenset({"args"})),  # setting it creates a tuple of any iterable, which may take all memory
    (NameError, frozenset({"name"})),
)
"""The attributes of exceptions that are dropped if the sender is not trusted."""

_POINTS_INTO: Final[Mapping[type[UnicodeError], type[bytes | str]]] = {
    UnicodeDecodeError: bytes,
    UnicodeEncodeError: str,
    UnicodeTranslateError: str,
}
"""Exceptions with a position in an object, and the type of that object."""

_TEXT_ATTRIBUTES: Final[tuple[tuple[type[BaseException], tuple[str, ...]], ...]] = (
    (ImportError, ("name", "path")),
    (NameError, ("name",)),
    (AttributeError, ("name",)),
    (SyntaxError, ("filename", "text")),
)
"""Attributes of exceptions that must be a text or None."""

_CONTAINERS: Final = (list, tuple, set, frozenset, deque)

_ARGS: Final[Any] = vars(BaseException)["args"]
_DICT: Final[Any] = vars(BaseException)["__dict__"]
_MEMBERS: Final[Any] = vars(BaseExceptionGroup)["exceptions"]


def slot_values(error: BaseException) -> list[Any]:
    """Returns the values of the attributes that a builtin exception keeps outside `args` and `__dict__`.

    `OSError.filename` is one. An attribute that is not set counts as None. Returns an empty list for an exception
    without such attributes. Attributes that a class of the user defines in `__slots__` are left out.
    """
    return [
        descriptor.__get__(error)
        for cls in type(error).__mro__
        if not cls.__flags__ & _HEAP_TYPE and cls is not BaseException
        for descriptor in vars(cls).values()
        if type(descriptor) is MemberDescriptorType
    ]


def is_dropped(error: BaseException, name: str, trusted: bool) -> bool:
    """Returns True if an attribute must not be set when an exception is rebuilt, because the interpreter would use it.

    Returns False for all other names.

    Args:
        error: The exception.
        name: The name of the attribute.
        trusted: Whether the sender is trusted. More attributes are dropped if not, such as `args`.
    """
    for cls, names in _DROPPED if trusted else _DROPPED_IF_UNTRUSTED:
        if name in names and isinstance(error, cls):
            return True
    return False


def hides_method(error: BaseException, name: str) -> bool:
    """Returns True if an instance attribute of that name would hide a method of the exception, such as `add_note`.

    Returns False for the name of another attribute, and for a name that the class does not have.
    """
    for cls in type(error).__mro__:
        if name in vars(cls):
            return type(vars(cls)[name]) not in (MemberDescriptorType, GetSetDescriptorType) and callable(
                getattr(cls, name, None)
            )
    return False


def is_sound(value: object) -> bool:
    """Returns False if `value` is an exception with attributes that the interpreter cannot use safely; else True.

    It cannot use a text that is not a str, or a position that is not valid. An attribute that is dropped for every
    sender (`is_dropped`) must not be set either. Returns True for values that are not exceptions.
    """
    if not isinstance(value, BaseException):
        return True
    for cls, kind in _POINTS_INTO.items():
        if isinstance(value, cls):
            about, start, end = (_read_member(cls, value, name) for name in ("object", "start", "end"))
            texts = [_read_member(cls, value, name) for name in ("encoding", "reason") if name in vars(cls)]
            return (
                type(about) is kind
                and 0 <= start <= len(about)
                and end >= 0
                and all(text is None or type(text) is str for text in texts)
            )
    for text_cls, names in _TEXT_ATTRIBUTES:
        if isinstance(value, text_cls) and not all(
            text is None or type(text) is str for text in (_read_member(text_cls, value, name) for name in names)
        ):
            return False
    # A class with its own `__setstate__` may have set attributes that `is_dropped` would have kept out.
    attributes = _DICT.__get__(value)
    for dropped_cls, dropped in _DROPPED:
        if isinstance(value, dropped_cls):
            for name in dropped:
                found = _read_member(dropped_cls, value, name) if name in vars(dropped_cls) else attributes.get(name)
                if found is not None:
                    return False
    return not isinstance(value, SyntaxError) or _has_valid_position(value)


def _has_valid_position(error: SyntaxError) -> bool:
    """Returns True if each line and column number of a `SyntaxError` is None, or an int from -1 to its limit.

    The limit of a line is `_MAX_LINE`. That of a column is `_MAX_COLUMN`, or the end of the text if that is further.
    """
    text = _read_member(SyntaxError, error, "text")
    widest = max(_MAX_COLUMN, 0 if text is None else len(text) + 1)
    for name, highest in (
        ("lineno", _MAX_LINE),
        ("end_lineno", _MAX_LINE),
        ("offset", widest),
        ("end_offset", widest),
    ):
        number = _read_member(SyntaxError, error, name)
        if number is not None and (type(number) is not int or not -1 <= number <= highest):
            return False
    return True


def _read_member(cls: type, error: BaseException, name: str) -> Any:
    """Returns an attribute as the interpreter reads it: by the descriptor of `cls`, whatever subclasses define.

    Raises `KeyError` if `cls` itself does not define `name`.
    """
    return vars(cls)[name].__get__(error)


def are_printable(errors: Iterable[BaseException]) -> bool:
    """Returns True if printing these exceptions together ends, and does not take all memory; also for no exceptions.

    A value is printed each time that it occurs. So the sizes of values are added up over all paths that lead to them.
    Returns False if the sum is more than `_MAX_PRINTED_BYTES`, if an exception group prints more than `MAX_MEMBERS`
    exceptions, if a value contains itself, or if the notes of an exception are not a list of texts.
    """
    sizes: dict[int, int] = {}  # for the id of a value: how much it prints
    members: dict[int, int] = {}  # for the id of a group: how many exceptions it prints
    total = 0  # of all exceptions, because they may be causes of each other and be printed together
    kept: list[list[Any]] = []  # keeps temporary parts alive, so that their ids are not used again
    for error in errors:
        notes = _DICT.__get__(error).get("__notes__")
        if notes is not None and not (type(notes) is list and all(type(note) is str for note in notes)):
            return False
        total += sum(map(len, notes or ()))
        # Depth first, without recursion: (value, None) is popped on the way down, (value, parts) on the way up.
        waiting: list[tuple[Any, list[Any] | None]] = [(error, None)]
        path: set[int] = set()
        while waiting:
            value, parts = waiting.pop()
            key = id(value)
            if parts is None:
                if key in path:
                    return False
                if key in sizes:
                    continue
                parts = _parts(value)
                if not parts:
                    sizes[key] = _size(value)
                    continue
                path.add(key)
                kept.append(parts)
                waiting.append((value, parts))
                waiting += [(part, None) for part in parts]
            else:
                path.discard(key)
                sizes[key] = 1 + sum(sizes[id(part)] for part in parts)
                if sizes[key] > _MAX_PRINTED_BYTES:
                    return False
                if isinstance(value, BaseExceptionGroup):
                    members[key] = 1 + sum(members.get(id(member), 1) for member in _MEMBERS.__get__(value))
                    if members[key] > MAX_MEMBERS:
                        return False
        total += sizes[id(error)]
        if total > _MAX_PRINTED_BYTES:
            return False
    return True


def _parts(value: Any) -> list[Any]:
    """Returns the values that are printed when a value is printed; an empty list for a value without parts.

    These are the items of a collection, the keys and values of a dict, the limits of a slice, and the arguments,
    attributes and members of an exception.
    """
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, BaseException):
        found = list(_ARGS.__get__(value))
        if isinstance(value, BaseExceptionGroup):
            found += _MEMBERS.__get__(value)
        return found + slot_values(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return []


def _size(value: Any) -> int:
    """Returns about how many bytes are printed for a value without parts: a path's length, else its size in memory."""
    return len(str(value)) if hasattr(type(value), "__fspath__") else sys.getsizeof(value, 8)

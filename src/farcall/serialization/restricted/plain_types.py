"""The types of plain data, and the arguments and states that an untrusted pickle may give them.

Most plain types are harmless whatever their arguments are. For the others it is known which arguments pickle itself
passes, and only these are accepted:

- Collections get collections that were sent in full: not a `range` or a length, which would take all memory. A call
  that creates a set gets no tuples, because `opcodes` counts the cost of hashing only where opcodes do the hashing.
- An exception group gets a list and a `SyntaxError` a tuple, for the same reason.
- A `Fraction` gets whole numbers of moderate size: a text with an exponent takes for ever, and so does the greatest
  common divisor of two numbers of some megabytes. For the same reason a `range` gets small numbers, and a `Decimal` a
  text.
- Dates and times get bytes that are a valid date or time. Their constructors check only the month, and a date without
  a day makes the interpreter read outside its tables.
- A path gets texts, and a `UUID` a number. Their constructors are written in Python, and would call methods of other
  arguments.
- Attributes of the interpreter or of pickle are not set, because pickle obeys an instance that says how it is pickled.
- A type that gets everything by its constructor gets no state. Otherwise a path could show another path than its own.

Exceptions have rules of their own; see `exceptions`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

FAST_TYPES: Final = frozenset(
    {f"builtins.{name}" for name in ("complex", "range")}
    | {"datetime.timedelta", "datetime.timezone", "decimal.Decimal"}
)
"""The full names of types that can be left to pickle's C code in pickles of at most `MAX_FAST_BYTES` bytes. No
arguments that fit in such a pickle do harm, and these types accept no state."""

MAX_FAST_BYTES: Final = 4096

_SENT_IN_FULL: Final = frozenset({list, tuple, dict, set, frozenset, str, bytes, bytearray})
"""The types of collections that have only as many elements as were sent."""

_FRACTION_TEXT: Final = re.compile(r"[-+]?[0-9]+(/[0-9]+)?")

_MAX_FRACTION_BITS: Final = 1 << 14
_MAX_RANGE_BITS: Final = 1 << 10
_FAST_HASHED: Final = frozenset({str, bytes, float, complex, bool, type(None)})
"""The types of values whose hash takes little time, whatever the value."""


def sent_size(value: Any) -> int:
    """Returns how much of one argument a call would copy.

    For a collection that is the number of its elements, and for an int or a memoryview the number of its bytes. Returns
    0 for an empty collection and for a value of any other type.
    """
    kind = type(value)
    if kind in _SENT_IN_FULL:
        return len(value)
    if kind is memoryview:
        return int(value.nbytes)
    return value.bit_length() >> 3 if kind is int else 0


def _is_collection_args(args: Sequence[Any]) -> bool:
    """Returns True for no arguments, or one list, tuple, dict, set, frozenset, str, bytes or bytearray; else False.

    These collections have only as many elements as were sent, unlike a `range`.
    """
    return not args or (len(args) == 1 and type(args[0]) in _SENT_IN_FULL)


def _is_set_args(args: Sequence[Any]) -> bool:
    """Returns True for no arguments, or one collection, such as a list, whose elements are all hashed fast; else False.

    Fast are str, bytes, float, complex, bool, None and ints of at most 1024 bits.
    """
    return _is_collection_args(args) and all(
        type(member) in _FAST_HASHED or (type(member) is int and member.bit_length() <= _MAX_RANGE_BITS)
        for members in args
        for member in members
    )


def _is_counter_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `Counter`: none, or one dict, whose keys are hashed already; else False."""
    return not args or (len(args) == 1 and type(args[0]) is dict)


def _is_range_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `range`: any number of ints of at most 1024 bits; else False."""
    return all(type(arg) is int and arg.bit_length() <= _MAX_RANGE_BITS for arg in args)


def _is_decimal_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `Decimal`: none, or one text; else False."""
    return not args or (len(args) == 1 and type(args[0]) is str)


def _is_deque_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `deque`: none, a collection such as a list, or a collection and a maximum length.

    The maximum length is an int or None. Returns False for anything else, such as a `range` as the collection.
    """
    return _is_collection_args(args[:1]) and (not args[1:] or (len(args) == 2 and type(args[1]) in (int, type(None))))


def _is_fraction_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `Fraction`: ints of at most 16384 bits, or texts of whole numbers; else False.

    A text has at most 4096 characters, and may have a denominator, "1/3". Returns True for no arguments. Their number
    is not checked.
    """
    return all(
        (type(arg) is int and arg.bit_length() <= _MAX_FRACTION_BITS)
        or (type(arg) is str and len(arg) <= _MAX_FRACTION_BITS // 4 and _FRACTION_TEXT.fullmatch(arg) is not None)
        for arg in args
    )


def _numbers_of_date(state: bytes) -> tuple[int, int, int]:
    """Returns the year, month and day in the first four bytes of a pickled date. They may be out of range.

    Raises `IndexError` for fewer bytes.
    """
    return state[0] << 8 | state[1], state[2] & 0x7F, state[3]  # the highest bit of the month may be the fold


def _numbers_of_time(state: bytes) -> tuple[int, int, int, int]:
    """Returns the hour, minute, second and microsecond in the six bytes of a pickled time. They may be out of range.

    Raises `IndexError` for fewer than three bytes; missing bytes after that count as a smaller number.
    """
    return state[0] & 0x7F, state[1], state[2], int.from_bytes(state[3:6], "big")


def _is_date_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `date`: four bytes of a valid date and nothing else.

    Also returns True for no arguments, and if the first is an int: the constructor checks numbers itself. Else False.
    """
    if not args or type(args[0]) is int:
        return True  # the constructor checks numbers itself
    state = args[0]
    return (
        len(args) == 1
        and type(state) is bytes
        and len(state) == 4
        and _is_valid(datetime.date, _numbers_of_date(state))
    )


def _is_datetime_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `datetime`: ten bytes of a valid one, and at most one more, a time zone.

    Also returns True for no arguments, and if the first is an int: the constructor checks numbers itself. Else False.
    """
    if not args or type(args[0]) is int:
        return True
    state = args[0]
    return (
        len(args) <= 2
        and type(state) is bytes
        and len(state) == 10
        and _is_valid(datetime.datetime, (*_numbers_of_date(state), state[4], *_numbers_of_time(state[4:])[1:]))
    )


def _is_time_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `time`: six bytes of a valid one, and at most one more, a time zone.

    Also returns True for no arguments, and if the first is an int: the constructor checks numbers itself. Else False.
    """
    if not args or type(args[0]) is int:
        return True
    state = args[0]
    return (
        len(args) <= 2
        and type(state) is bytes
        and len(state) == 6
        and _is_valid(datetime.time, _numbers_of_time(state))
    )


def _is_valid(kind: Callable[..., object], numbers: Sequence[int]) -> bool:
    """Returns True if the constructor of a date or time accepts these numbers, False if it raises `ValueError`."""
    try:
        kind(*numbers)
    except ValueError:
        return False
    return True


def _is_group_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of an exception group: a text, and a list or tuple; else False."""
    return len(args) == 2 and type(args[0]) is str and type(args[1]) in (list, tuple)


def _is_syntax_error_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `SyntaxError`: none, one of any type, or two with a tuple second; else False."""
    return len(args) < 2 or (len(args) == 2 and type(args[1]) is tuple)


def _are_texts(args: Sequence[Any]) -> bool:
    """Returns True if all arguments are exactly of type str, also for no arguments; else False."""
    return all(type(arg) is str for arg in args)


def _are_no_args(args: Sequence[Any]) -> bool:
    return not args


def _is_worker_args(args: Sequence[Any]) -> bool:
    """Returns True for arguments of a `WorkerInfo`: none, or a name (str) and an id (int); else False."""
    return not args or _is_worker_state(list(args))


def _is_worker_state(state: Any) -> bool:
    """Returns True if this is a state for a `WorkerInfo`: a list of a name (str) and an id (int); else False."""
    return type(state) is list and [type(value) for value in state] == [str, int]


def _is_uuid_state(state: Any) -> bool:
    """Returns True if this is a state for a `UUID`: a dict with "int", a number from 0 to 2**128 - 1; else False.

    The dict may also have "is_safe", which must be None, 0 or -1.
    """
    return (
        type(state) is dict
        and state.keys() <= {"int", "is_safe"}
        and type(state.get("int")) is int
        and 0 <= state["int"] < 1 << 128
        and state.get("is_safe") in (None, 0, -1)
    )


_PATHS: Final = frozenset(
    f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")
)
_ARGUMENTS: Final[Mapping[str, Callable[[Sequence[Any]], bool]]] = {
    "builtins.bytearray": _is_collection_args,
    **dict.fromkeys(("builtins.frozenset", "builtins.set"), _is_set_args),
    "builtins.range": _is_range_args,
    "collections.Counter": _is_counter_args,
    "decimal.Decimal": _is_decimal_args,
    "collections.deque": _is_deque_args,
    **dict.fromkeys(("builtins.BaseExceptionGroup", "builtins.ExceptionGroup"), _is_group_args),
    **dict.fromkeys(("builtins.SyntaxError", "builtins.IndentationError", "builtins.TabError"), _is_syntax_error_args),
    "fractions.Fraction": _is_fraction_args,
    "datetime.date": _is_date_args,
    "datetime.datetime": _is_datetime_args,
    "datetime.time": _is_time_args,
    **dict.fromkeys(_PATHS, _are_texts),
    **dict.fromkeys(("collections.OrderedDict", "uuid.UUID"), _are_no_args),
    "farcall.protocol.ids.WorkerInfo": _is_worker_args,
}
"""The check of the arguments of each type that has one, by the full name of the type."""
_STATES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "uuid.UUID": _is_uuid_state,
    "farcall.protocol.ids.WorkerInfo": _is_worker_state,
}
"""The check of the state of each type that has one, by the full name of the type."""
_STATELESS: Final = frozenset(
    {f"collections.{name}" for name in ("Counter", "OrderedDict", "deque")}
    | _PATHS
    | {"decimal.Decimal", "fractions.Fraction"}
)
"""The full names of types that get no state."""


def takes_arguments(called: object, args: Sequence[Any]) -> bool:
    """Returns True if a pickle may call a function or class with these arguments, else False.

    A plain type that could do harm, such as `set`, has a check of its arguments, which decides. The checks of dates and
    times also decide about their subclasses if the first argument is bytes or a str. Returns True for all other
    classes, and for functions.
    """
    if not isinstance(called, type):
        return True
    check = _ARGUMENTS.get(_full_name(called))
    if check is not None:
        return check(args)
    # The constructor of a subclass may take other arguments. But bytes would reach the constructor of the date or time.
    if args and type(args[0]) in (bytes, str):
        for cls in called.__mro__:
            if cls.__module__ == "datetime":
                check = _ARGUMENTS.get(_full_name(cls))
                return check is None or check(args)
    return True


def _full_name(cls: type) -> str:
    """Returns the full name of a class, such as "datetime.date"."""
    return f"{cls.__module__}.{cls.__qualname__}"


def takes_state(value: object, state: object) -> bool:
    """Returns True if a pickle may set this state of a value that it has created, else False.

    False for types that get everything by their constructor, such as `deque` and `Decimal`. For `UUID` and `WorkerInfo`
    the form of the state decides. True for all other types.
    """
    name = _full_name(type(value))
    check = _STATES.get(name)
    return name not in _STATELESS and (check is None or check(state))


def is_reserved(name: str) -> bool:
    """Returns True if an attribute has a name of the interpreter or of pickle, `__like_this__`; else False.

    `__notes__` is not reserved, because every exception may have notes. Nor is an empty name.
    """
    return name[:2] == name[-2:] == "__" and name != "__notes__"

"""Element types of numpy arrays out of pickles that are not trusted.

numpy rebuilds a type by setting its state, and believes all of it: a type that holds objects but says that it does not,
or whose fields lie behind its end, turns the bytes of an array into pointers. So here nothing is set: a `PendingType`
stands for it until its state is there, and then it is made anew from that, by the constructor, which checks everything.

Rules
- Only the types that are built into numpy, and records of them. Not its strings of any length (`StringDType`), whose
  elements are pointers as well, nor types of other packages.
- Metadata is left out. numpy is imported only when an array comes.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from farcall.serialization.pending import Pending

_ALIGNED: Final = 0x80
"""Flag of a record type that is laid out as a C compiler does."""

_FOREIGN: Final = ">" if sys.byteorder == "little" else "<"

_LAST_BUILTIN: Final = 23
"""The highest number of a type that is built into numpy (NPY_HALF)."""

_DEEPEST: Final = 30
"""Records in records: what goes through them recurses in C."""


class PendingType(Pending):
    """What stands for a type while its pickle is read."""

    __slots__ = ("_text",)

    def __init__(self, text: str, align: bool = False, copy: bool = False) -> None:
        """As `numpy.dtype` is called by a pickle."""
        super().__init__()
        if type(text) is not str:
            raise TypeError(f"a {type(text).__name__} names no type of elements")
        self._text = text

    def _made(self, state: Any) -> Any:
        import numpy

        _, order, subarray, names, fields, size, _, flags, *more = state
        if names:
            wanted = [fields[name] for name in names]
            record: dict[str, Any] = {
                "names": list(names),
                "formats": [checked(field[0]) for field in wanted],
                "offsets": [field[1] for field in wanted],
                "itemsize": size,
            }
            if any(len(field) > 2 for field in wanted):
                record["titles"] = [field[2] if len(field) > 2 else None for field in wanted]
            made: Any = numpy.dtype(record, align=bool(flags & _ALIGNED))  # type: ignore[call-overload]
        elif subarray:
            base, shape = subarray
            made = numpy.dtype((checked(base), shape))
        else:
            text = self._text
            if text in ("M8", "m8") and more:
                unit, count = more[0][1][:2]
                text += "" if unit == b"generic" else f"[{count:d}{unit.decode()}]"
            made = numpy.dtype(text)
            if order == _FOREIGN:
                made = made.newbyteorder("S")
        if not 0 <= made.num <= _LAST_BUILTIN:
            raise TypeError(f"arrays of {made} are not supported where a worker restricts what is sent to it")
        if _depth(made, {}) > _DEEPEST:
            raise ValueError(f"records are nested more than {_DEEPEST} deep")
        return made


def checked(value: Any) -> Any:
    """That type of elements. Raises `TypeError` if it is none that was made here."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.dtype):
        raise TypeError(f"a {type(value).__name__} is no type of elements")
    return value


def _depth(dtype: Any, known: dict[int, int]) -> int:
    """How deep its records are. Each type is looked at once, however often it is part of others."""
    depth = known.get(id(dtype))
    if depth is None:
        parts = [field[0] for field in (dtype.fields or {}).values()]
        if dtype.subdtype:
            parts.append(dtype.subdtype[0])
        depth = known[id(dtype)] = 1 + max((_depth(part, known) for part in parts), default=0)
    return depth

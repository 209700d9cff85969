"""Element types of numpy arrays out of pickles that are not trusted.

numpy rebuilds a type by setting its state, and believes all of it: a type that holds objects but says that it does not,
or whose fields lie behind its end, turns the bytes of an array into pointers. So here nothing is set: a `Pending` type
stands for it until its state is there, and then it is made anew from that, by the constructor, which checks everything.
Nobody can use a pending type, nor change one that is made.

Metadata is left out. numpy is imported only when an array comes.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_ALIGNED: Final = 0x80
"""Flag of a record type that is laid out as a C compiler does."""

_FOREIGN: Final = ">" if sys.byteorder == "little" else "<"


class Pending:
    """What stands for a type while its pickle is read."""

    __slots__ = ("_text",)

    def __init__(self, text: str, align: bool = False, copy: bool = False) -> None:
        """As `numpy.dtype` is called by a pickle."""
        self._text = str(text)

    def made(self, state: Any) -> Any:
        """The type of that state. Raises `TypeError`, `ValueError`, `LookupError` if there is none."""
        import numpy

        _, order, subarray, names, fields, size, _, flags, *more = state
        if names:
            wanted = [fields[name] for name in names]
            record: dict[str, Any] = {
                "names": list(names),
                "formats": [_finished(field[0]) for field in wanted],
                "offsets": [field[1] for field in wanted],
                "itemsize": size,
            }
            if any(len(field) > 2 for field in wanted):
                record["titles"] = [field[2] if len(field) > 2 else None for field in wanted]
            return numpy.dtype(record, align=bool(flags & _ALIGNED))  # type: ignore[call-overload]
        if subarray:
            base, shape = subarray
            return numpy.dtype((_finished(base), shape))
        text = self._text
        if text in ("M8", "m8") and more:
            unit, count = more[0][1][:2]
            text += "" if unit == b"generic" else f"[{count:d}{unit.decode()}]"
        made = numpy.dtype(text)
        return made.newbyteorder("S") if order == _FOREIGN else made


def is_made(value: object) -> bool:
    """Whether it is such a type."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.dtype)


def _finished(value: Any) -> Any:
    if not is_made(value):
        raise TypeError(f"a {type(value).__name__} is no type of elements")
    return value

"""`WorkerInfo` as torch has it: it says at once whether a name can be one.

It equals the `WorkerInfo` of farcall itself, so either finds a worker.
"""

from __future__ import annotations

import re
from typing import Any, Final

from farcall.protocol import ids

_NAME: Final = re.compile(r"[A-Za-z0-9_:\-]*")
_LONGEST_NAME: Final = 128


class WorkerInfo(ids.WorkerInfo):
    """A worker: its name and its rank."""

    __slots__ = ()

    def __init__(self, name: str, id: int) -> None:  # noqa: A002 (torch's name)
        """Raises `RuntimeError` for what torch does not take for a name."""
        if not name:
            raise RuntimeError("Worker name must be non-empty.")
        if len(name) >= _LONGEST_NAME:
            raise RuntimeError(f"Worker name must be shorter than {_LONGEST_NAME} characters, but it has {len(name)}.")
        if _NAME.fullmatch(name) is None:
            raise RuntimeError(
                f"Worker name must match [A-Za-z0-9_:-]* (letters, digits, '_', '-', ':'), not {name!r}."
            )
        super().__init__(name, id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ids.WorkerInfo) and (other.name, other.id) == (self.name, self.id)

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerInfo, (self.name, self.id)


def as_torch(info: ids.WorkerInfo) -> WorkerInfo:
    """The same worker, as torch's programs know it. A name that torch would not take is let be."""
    if isinstance(info, WorkerInfo):
        return info
    known = WorkerInfo.__new__(WorkerInfo)
    ids.WorkerInfo.__init__(known, info.name, info.id)
    return known

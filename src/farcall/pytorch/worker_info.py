"""`WorkerInfo` as torch has it: its constructor rejects names that torch rejects.

It equals a `WorkerInfo` of farcall itself with the same name and id, so both can be used to name a worker.
"""

from __future__ import annotations

import re
from typing import Any, Final

from farcall.protocol import ids

_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_:\-]*")
_MAX_NAME_CHARS: Final = 128


class WorkerInfo(ids.WorkerInfo):
    """The name and the rank of a worker. Calls accept it as the worker to call.

    It equals any `WorkerInfo` of farcall with the same name and rank. The constructor raises `RuntimeError` for a name
    that torch's class of this name does not accept.

    Attributes:
        name: The name of the worker: A-Z, a-z, 0-9, `_`, `-` and `:`, from 1 to 127 characters.
        id: Its rank.
    """

    __slots__ = ()

    def __init__(self, name: str, id: int) -> None:  # noqa: A002 (torch's name)
        """Creates a `WorkerInfo`; it need not belong to an existing worker.

        Args:
            name: A-Z, a-z, 0-9, `_`, `-` and `:`, from 1 to 127 characters.
            id: The rank. It is not checked.

        Raises:
            RuntimeError: The name is empty, too long or contains another character.
        """
        if not name:
            raise RuntimeError("Worker name must be non-empty.")
        if len(name) >= _MAX_NAME_CHARS:
            raise RuntimeError(
                f"Worker name must be shorter than {_MAX_NAME_CHARS} characters, but it has {len(name)}."
            )
        if _NAME_PATTERN.fullmatch(name) is None:
            raise RuntimeError(
                f"Worker name must match [A-Za-z0-9_:-]* (A to Z, a to z, digits, '_', '-', ':'), not {name!r}."
            )
        super().__init__(name, id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ids.WorkerInfo) and (other.name, other.id) == (self.name, self.id)

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerInfo, (self.name, self.id)


def as_torch(info: ids.WorkerInfo) -> WorkerInfo:
    """Returns a `WorkerInfo` of this module with the name and id of one of farcall. Names are not checked.

    A `WorkerInfo` of this module is returned as it is.
    """
    if isinstance(info, WorkerInfo):
        return info
    known = WorkerInfo.__new__(WorkerInfo)
    ids.WorkerInfo.__init__(known, info.name, info.id)
    return known

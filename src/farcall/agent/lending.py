"""How long a handle that was passed to this worker is lent, before its owner is asked to count it.

It counts looks, not time: the book looks every few milliseconds while there is something to do. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_tables import Held

LENT_FOR: Final = 4
"""So many looks, and as many more at most: some tens of milliseconds. Many functions take longer than one look is from
the next, and few longer than that."""


class Lending:
    """What was lent to one worker when it was last looked through."""

    __slots__ = ("_before", "_looks")

    def __init__(self) -> None:
        self._looks = 0
        self._before: list[ForkId] = []

    def due(self, lent: Mapping[ForkId, Held]) -> list[tuple[RRefId, ForkId]]:
        """The handles that have been lent for so long that their owners are to be asked. To be called at each look."""
        self._looks += 1
        if self._looks % LENT_FOR:
            return []
        before, self._before = self._before, list(lent)
        return [(lent[fork].reference, fork) for fork in before if fork in lent and not lent[fork].dropped]

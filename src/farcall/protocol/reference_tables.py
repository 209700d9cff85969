"""The entries of the tables of `references.py`: what an owner knows of a reference, and a holder of its fork."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from farcall.protocol.ids import ForkId, RRefId, Worker


class Owned:
    """A reference whose value lives here, or will (`created` is False while its creator's request is under way)."""

    __slots__ = ("created", "forks", "handles", "refused")

    def __init__(self, created: bool) -> None:
        self.created = created
        self.refused = False  # the value is gone, or will never come: an error stands for it
        self.handles = 0
        self.forks: dict[ForkId, Worker] = {}  # who holds which


new_owned: Final[Callable[[type[Owned]], Owned]] = Owned.__new__
"""`new_owned(Owned)`: with nothing in it, and without a frame; for who makes one for every remote call."""


class Standing(Enum):
    """What the owner has said about a fork of ours."""

    LENT = "lent"
    """It was not asked yet: the parent's fork keeps the value for ours, and waits for our word."""
    UNCONFIRMED = "unconfirmed"
    CONFIRMED = "confirmed"


LENT: Final = Standing.LENT
UNCONFIRMED: Final = Standing.UNCONFIRMED
CONFIRMED: Final = Standing.CONFIRMED


class Held:
    """A fork that this worker holds."""

    __slots__ = ("children", "dropped", "parent", "reference", "standing")

    def __init__(self, reference: RRefId, standing: Standing, parent: Worker | None) -> None:
        self.reference = reference
        self.standing = standing
        self.parent = parent  # who waits for our ChildAccepted; None if nobody does
        self.dropped = False
        self.children: dict[ForkId, Worker] = {}  # made from this one, not yet counted by the owner: who gets which


new_held: Final[Callable[[type[Held]], Held]] = Held.__new__
"""The same for a fork that is held."""

"""Who is who: the identities of workers, references and handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

Worker: TypeAlias = int
"""A worker as the protocols see it: a number that no other worker, nor the same one started again, ever has."""

new_tuple: Final[Callable[..., Any]] = tuple.__new__
"""`new_tuple(RRefId, (owner, creator, number))`: what is made for every reference and message, without a frame."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker of the group: its name and its number. Equal, hashed and pickled by value."""

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class RRefId(NamedTuple):
    """A reference, the same on all workers: who owns its value, who created it, and the creator's count of those."""

    owner: Worker
    creator: Worker
    number: int

    def __str__(self) -> str:
        return f"reference {self.creator}:{self.number} owned by {self.owner}"


class ForkId(NamedTuple):
    """One handle of a reference, made by a worker for itself or for another: a fork of the handle it came from."""

    creator: Worker
    number: int

    def __str__(self) -> str:
        return f"fork {self.creator}:{self.number}"

"""The ids of workers, references and forks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

Worker: TypeAlias = int
"""The number of a worker. No other worker ever has it, nor does the same worker after a restart."""

new_tuple: Final[Callable[..., Any]] = tuple.__new__
"""`new_tuple(RRefId, (owner, creator, number, token))` creates a named tuple without a call of a Python function.

Defaults are not filled in, and the number of fields is not checked.
"""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the id of a worker. Two of them are equal if both fields are."""

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


TOKEN_SIZE: Final = 16
"""The length of a token in bytes. 128 bits cannot be guessed, so no limit on the rate of requests is needed."""
NO_TOKEN: Final = bytes(TOKEN_SIZE)
"""Stands for a missing token. No reference that can be used has it."""


class RRefId(NamedTuple):
    """The id of a reference, equal on all workers.

    Only workers that were given the reference know its token. An id with another token is not found in any table. The
    lookup compares hashes of the whole id (Python's keyed hash), not single bytes, so its duration says nothing about
    the token.

    Neither `str` nor `repr` shows the token, so that it does not get into logs, reports and error messages.

    Attributes:
        owner: The worker on which the value lives.
        creator: The worker that created the reference.
        number: Counts the references that the creator has created at this owner, from 1 on. 0 for an id that cannot be
            used.
        token: A random secret of `TOKEN_SIZE` bytes, drawn by the creator. `NO_TOKEN` for an id that cannot be used.
    """

    owner: Worker
    creator: Worker
    number: int
    token: bytes = NO_TOKEN

    def __str__(self) -> str:
        return f"reference {self.creator}:{self.number} owned by {self.owner}"

    def __repr__(self) -> str:
        return f"RRefId(owner={self.owner}, creator={self.creator}, number={self.number})"


class ForkId(NamedTuple):
    """The id of a fork, that is of one worker's copy of a reference.

    Attributes:
        creator: The worker that made the fork, for itself or for another worker.
        number: Counts the forks that the creator has made, from 1 on.
    """

    creator: Worker
    number: int

    def __str__(self) -> str:
        return f"fork {self.creator}:{self.number}"

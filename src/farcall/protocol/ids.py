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
    """The name and the id of a worker. Equal, hashed and pickled by value."""

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

    It has the owner of the value, the worker that created the reference, a number that counts the creator's references
    at this owner, and a token. The creator draws the token at random, so only workers that were given the reference can
    name it. Tables are looked up by all four fields, so an id with a wrong token is not found. The lookup compares
    hashes of the whole id (Python's keyed hash) and not single bytes, so its duration says nothing about the token.

    Neither `str` nor `repr` shows the token, so that it does not get into logs, reports and error messages.
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
    """The id of a fork: the worker that made the fork, for itself or for another worker, and that worker's count."""

    creator: Worker
    number: int

    def __str__(self) -> str:
        return f"fork {self.creator}:{self.number}"

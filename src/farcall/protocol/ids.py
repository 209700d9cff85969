"""Who is who: the identity of a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker of the group: its name and its number. Equal, hashed and pickled by value."""

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

"""What the simulators know about `ReferenceCounts`: its state as a value, events as values, and predictable tokens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

from farcall.protocol.ids import TOKEN_SIZE, RRefId, Worker
from farcall.protocol.refcount import ReferenceCounts
from farcall.protocol.reference_messages import Effect

Event: TypeAlias = tuple[Any, ...]
"""The name of a method of `ReferenceCounts`, and its arguments."""

_FORGED = b"forged"


def apply(counts: ReferenceCounts, event: Event) -> list[Effect]:
    """Calls the method that the event names. Raises `ProtocolError` as that method does."""
    name, *arguments = event
    effects: list[Effect] = getattr(counts, name)(*arguments)
    return effects


class SimulatedTokens:
    """Tokens that are the same in every run. Nobody in a simulation tries to guess them."""

    __slots__ = ("drawn", "me")

    def __init__(self, me: Worker, drawn: int = 0) -> None:
        self.me = me
        self.drawn = drawn

    def __call__(self) -> bytes:
        """Returns the next token of this worker."""
        self.drawn += 1
        return _token(self.me, self.drawn)


def _token(creator: Worker, drawn: int) -> bytes:
    return f"token {creator}:{drawn}".encode().ljust(TOKEN_SIZE)


def genuine(owner: Worker, creator: Worker, number: int) -> RRefId:
    """Returns the id of a reference whose creator has made no references at other owners."""
    return RRefId(owner, creator, number, _token(creator, number))


def forged(reference: RRefId) -> RRefId:
    """Returns the same reference with a wrong token: a worker that was not given the reference knows no better."""
    return reference._replace(token=_FORGED.ljust(TOKEN_SIZE))


def is_forged(reference: RRefId) -> bool:
    """Returns whether the token of a reference is wrong."""
    return reference.token.startswith(_FORGED)


def tables(counts: ReferenceCounts) -> tuple[Hashable, ...]:
    """Returns the whole state of a `ReferenceCounts` as a value, the references that are owned first."""
    return (
        frozenset(
            (reference, owned.created, owned.refused, owned.handles, frozenset(owned.forks.items()))
            for reference, owned in counts.owned.items()
        ),
        frozenset(
            (fork, held.reference, held.state.value, held.parent, held.dropped, frozenset(held.children.items()))
            for fork, held in counts.held.items()
        ),
        frozenset(counts.unreported),
        frozenset((worker, seen.mark, frozenset(seen.beyond)) for worker, seen in counts.workers.items()),
        frozenset(counts.parents.items()),
        frozenset(counts.numbers.items()),
        counts.forks_made,
        frozenset((key, frozenset(named.items())) for key, named in counts.noted.items()),
    )


def genuine_tables(counts: ReferenceCounts) -> Hashable:
    """Returns the same without what is kept of forged references."""
    owned, *others, _ = tables(counts)
    assert isinstance(owned, frozenset)
    return frozenset(entry for entry in owned if not is_forged(entry[0])), *others

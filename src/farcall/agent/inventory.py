"""What a worker owns and holds: reports about references, for people who look for a leak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from farcall.agent.handle import Handle, Made, described
from farcall.agent.values import Value
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_tables import Standing
from farcall.protocol.references import References


@dataclass(frozen=True)
class OwnedReference:
    """A reference whose value lives here."""

    reference: str
    type: str
    """The type of the value; empty if it is not there yet."""
    handles: int
    """How many handles this worker itself has."""
    holders: tuple[str, ...]
    """The names of the other workers that hold it, once for each handle."""
    created_at: str
    """The source line, or the stack, where it was made here; else who asked for it."""

    def __str__(self) -> str:
        here = [f"{self.handles} here"] if self.handles else []
        held = ", ".join([*here, *_counted(self.holders)]) or "by nobody yet"
        return f"{self.reference} ({self.type or 'no value yet'}), held {held}; made at {self.created_at}"


@dataclass(frozen=True)
class HeldReference:
    """A handle on this worker of a reference whose value lives elsewhere."""

    reference: str
    owner: str
    confirmed: bool
    pending: tuple[str, ...]
    """To whom it was passed on without the owner knowing yet."""
    dropped: bool
    """The program has let it go; it stays until the owner knows those to whom it was passed on."""
    created_at: str
    """The source line, or the stack, where it was made; else from whom it came."""

    def __str__(self) -> str:
        state = "confirmed" if self.confirmed else "not confirmed yet"
        if self.pending:
            state += f", passed on {', '.join(_counted(self.pending))} that its owner does not know yet"
        if self.dropped:
            return f"{self.reference}, owned by {self.owner!r}, {state}; dropped, but not given back yet"
        return f"{self.reference}, owned by {self.owner!r}, {state}; made at {self.created_at}"


@dataclass(frozen=True)
class Inventory:
    """All references of a worker."""

    owned: tuple[OwnedReference, ...]
    held: tuple[HeldReference, ...]

    def between_workers(self) -> Inventory:
        """What of it concerns others: a reference that only its owner has is as good as its value."""
        return Inventory(tuple(each for each in self.owned if each.holders), self.held)

    def __str__(self) -> str:
        lines = [f"owns {len(self.owned)}, holds {len(self.held)}"]
        return "\n  ".join([*lines, *map(str, self.owned), *map(str, self.held)])


def _counted(names: tuple[str, ...]) -> list[str]:
    return [f"{names.count(name)} by {name!r}" for name in dict.fromkeys(names)]


def take_inventory(
    references: References,
    values: Mapping[RRefId, Value],
    origins: Mapping[RRefId, Made],
    handle_of: Callable[[ForkId], Handle | None],
    name_of: Callable[[Worker], str],
) -> Inventory:
    """All references of a worker, out of its tables. `origins` says where values of this worker got theirs."""
    owned = [
        OwnedReference(
            str(reference),
            values[reference].describe() if reference in values else "",
            entry.handles,
            tuple(name_of(holder) for holder in entry.forks.values()),
            described(origins[reference]) if reference in origins else f"the request of {name_of(reference.creator)!r}",
        )
        for reference, entry in references.owned.items()
    ]
    held = []
    for fork, entry in references.held.items():
        handle = handle_of(fork)
        held.append(
            HeldReference(
                str(entry.reference),
                name_of(entry.reference.owner),
                entry.standing is Standing.CONFIRMED,
                tuple(name_of(child) for child in entry.children.values()),
                entry.dropped,
                handle.made_at if handle is not None else "",
            )
        )
    return Inventory(tuple(owned), tuple(held))


def count_references(references: References, values_to_come: Set[RRefId]) -> dict[str, str]:
    """Counters, by the names that torch gives them. It does not count a value that nobody else has heard of."""
    owned = sum(bool(each.forks) or reference in values_to_come for reference, each in references.owned.items())
    pending = sum(held.standing is not Standing.CONFIRMED for held in references.held.values())
    return {
        "num_owner_rrefs": str(owned),
        "num_pending_users": str(pending),
        "num_pending_futures": str(len(values_to_come)),
        "num_forks": str(sum(len(owned.forks) for owned in references.owned.values())),
    }

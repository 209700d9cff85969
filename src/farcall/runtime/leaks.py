"""Reports about the references that a worker owns and holds, for finding leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.refcount import ForkState, ReferenceCounts
from farcall.runtime.handles import Handle, Made, Value, describe_place

MOST_REPORTED: Final = 10
"""A report lists at most this many references, or places where references were created."""


@dataclass(frozen=True)
class OwnedReference:
    """A reference whose value this worker owns: who holds it, and where it was created.

    Attributes:
        reference: The id of the reference, as text.
        type: The name of the value's type; empty if the value does not exist yet. If there is an error in place of the
            value, text that says so.
        handles: How many handles of the reference exist on this worker; may be 0.
        holders: The names of the other workers that hold the reference, once for each fork; may be empty.
        created_at: The source line or the stack where this worker created the reference. If another worker created it
            with a remote call, text that names that worker.
    """

    reference: str
    type: str
    handles: int
    holders: tuple[str, ...]
    created_at: str

    def __str__(self) -> str:
        here = [f"{self.handles} here"] if self.handles else []
        held = ", ".join([*here, *_counted(self.holders)]) or "by nobody yet"
        return f"{self.reference} ({self.type or 'no value yet'}), held {held}; made at {self.created_at}"


@dataclass(frozen=True)
class HeldReference:
    """A fork on this worker of a reference that another worker owns.

    Attributes:
        reference: The id of the reference, as text.
        owner: The name of the owner.
        confirmed: Whether the owner counts this fork.
        pending: This worker has passed the reference on to these workers, but the owner does not count their forks yet.
            A name occurs once for each fork; may be empty.
        dropped: Whether the program has dropped its handle. This fork stays until the owner counts those in `pending`.
        created_at: The source line or the stack where the handle was created; else the worker that sent it. Empty if
            the handle is gone.
    """

    reference: str
    owner: str
    confirmed: bool
    pending: tuple[str, ...]
    dropped: bool
    created_at: str

    def __str__(self) -> str:
        state = "confirmed" if self.confirmed else "not confirmed yet"
        if self.pending:
            state += f", passed on {', '.join(_counted(self.pending))} that its owner does not know yet"
        if self.dropped:
            return f"{self.reference}, owned by {self.owner!r}, {state}; dropped, but not given back yet"
        return f"{self.reference}, owned by {self.owner!r}, {state}; made at {self.created_at}"


@dataclass(frozen=True)
class Inventory:
    """All references that a worker owns or holds at one moment.

    Attributes:
        owned: The references whose values live on the worker; may be empty.
        held: The references to values on other workers; may be empty.
    """

    owned: tuple[OwnedReference, ...]
    held: tuple[HeldReference, ...]

    def between_workers(self) -> Inventory:
        """Returns an inventory without the owned references that no other worker holds. All held references stay."""
        return Inventory(tuple(each for each in self.owned if each.holders), self.held)

    def report(self) -> str:
        """Returns text for a log, in a few lines.

        If there are at most `MOST_REPORTED` references (10), lists all of them. If there are more, lists the places
        where most of them were created. If there are none, says that 0 are owned and 0 are held.
        """
        if len(self.owned) + len(self.held) <= MOST_REPORTED:
            return str(self)
        made = Counter([("owned", each.created_at) for each in self.owned])
        made.update([("held", each.created_at or "a place that is not known any more") for each in self.held])
        most = made.most_common(MOST_REPORTED)
        lines = [f"{times} {what}, made at {place}" for (what, place), times in most]
        if len(made) > len(most):
            others = made.total() - sum(times for _, times in most)
            lines.append(f"{others} more, made at {len(made) - len(most)} other places")
        lines.append("farcall.references(), before shutdown(), lists all of them")
        return "\n  ".join([self._numbers(), *lines])

    def _numbers(self) -> str:
        """Returns how many references are owned and held, as text."""
        return f"owns {len(self.owned)}, holds {len(self.held)}"

    def __str__(self) -> str:
        lines = [self._numbers()]
        return "\n  ".join([*lines, *map(str, self.owned), *map(str, self.held)])


def _counted(names: tuple[str, ...]) -> list[str]:
    """Returns how often each name occurs, as text like "2 by 'a'", in order of the first occurrence.

    Returns an empty list for no names.
    """
    return [f"{names.count(name)} by {name!r}" for name in dict.fromkeys(names)]


def take_inventory(
    references: ReferenceCounts,
    values: Mapping[RRefId, Value],
    origins: Mapping[RRefId, Made],
    handle_of: Callable[[ForkId], Handle | None],
    name_of: Callable[[Worker], str],
) -> Inventory:
    """Returns all references that a worker owns or holds at this moment.

    Args:
        references: The reference counts of the worker.
        values: The values that the worker owns, by reference.
        origins: The places where the worker itself has created references to values that it owns, by reference. A
            reference that is missing here was created by another worker with `remote`.
        handle_of: Returns the handle of a fork; None if the program has dropped it.
        name_of: Returns the name of a worker, given its number.
    """
    owned = [
        OwnedReference(
            str(reference),
            values[reference].describe() if reference in values else "",
            entry.handles,
            tuple(name_of(holder) for holder in entry.forks.values()),
            describe_place(origins[reference])
            if reference in origins
            else f"the request of {name_of(reference.creator)!r}",
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
                entry.state is ForkState.CONFIRMED,
                tuple(name_of(child) for child in entry.children.values()),
                entry.dropped,
                handle.made_at if handle is not None else "",
            )
        )
    return Inventory(tuple(owned), tuple(held))


def count_references(references: ReferenceCounts, values_to_come: Set[RRefId]) -> dict[str, str]:
    """Counts the references of a worker. Returns four numbers as text, under the names that torch has for them.

    Args:
        references: The reference counts of the worker.
        values_to_come: The references that the worker owns and whose values do not exist yet; may be empty.

    Returns:
        `num_owner_rrefs`: the owned references that other workers hold, or that are in `values_to_come`.
        `num_pending_users`: the forks on this worker that their owner has not confirmed. `num_pending_futures`: the
        size of `values_to_come`. `num_forks`: the forks of owned references on other workers.
    """
    owned = sum(bool(each.forks) or reference in values_to_come for reference, each in references.owned.items())
    pending = sum(held.state is not ForkState.CONFIRMED for held in references.held.values())
    return {
        "num_owner_rrefs": str(owned),
        "num_pending_users": str(pending),
        "num_pending_futures": str(len(values_to_come)),
        "num_forks": str(sum(len(owned.forks) for owned in references.owned.values())),
    }

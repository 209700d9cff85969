"""What a dishonest worker may say about references it has no right to, and the check that none of it has an effect.

A forger knows all ids, because they count up. It does not know the tokens of references it was not given, and it cannot
speak in the name of another worker. For tokens even that is tried: nothing can be done to a reference without its
token, whatever the sender.

FORGED: whatever a forger says, the owner of a reference and all its holders are as before.
"""

from __future__ import annotations

from collections.abc import Callable

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.refcount import ReferenceCounts
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    UserDeleted,
)
from simulation.invariants import BrokenInvariant
from simulation.reference_state import Event, apply, forged, genuine_tables, is_forged

NEVER = 10**6
"""A number that no fork of a simulation reaches."""


def forgeries(counts: ReferenceCounts, forger: Worker) -> list[Event]:
    """Returns all events that are known to be forged if they come from that worker, in this state."""
    found: list[Event] = []
    invented = ForkId(forger, NEVER)
    for reference, owned in counts.owned.items():
        if is_forged(reference) or not owned.created:
            continue
        wrong = forged(reference)
        found.append(("receive_message", forger, ForkRequest(wrong, invented)))
        found.append(("may_still_be_created", wrong, forger))
        found.append(("receive_handle", Carried(wrong, invented), forger))
        for fork, holder in owned.forks.items():
            if holder in counts.workers:
                found.append(("receive_message", holder, UserDeleted(wrong, fork)))
            if holder != forger:
                found.append(("receive_message", forger, UserDeleted(reference, fork)))
    for fork, held in counts.held.items():
        wrong, owner = forged(held.reference), held.reference.owner
        for answer in (ForkAccepted, ForkRefused):
            if owner in counts.workers:
                found.append(("receive_message", owner, answer(wrong, fork)))
            if owner != forger:
                found.append(("receive_message", forger, answer(held.reference, fork)))
        for child, to in held.children.items():
            if to in counts.workers:
                found.append(("receive_message", to, ChildAccepted(wrong, child)))
            if to != forger:
                found.append(("receive_message", forger, ChildAccepted(held.reference, child)))
    return found


def guessed_reference(counts: ReferenceCounts, forger: Worker, creator: Worker, ahead: int = 1) -> RRefId | None:
    """Returns what a forger can guess of a reference that a worker will create at this owner: all but the token.

    It is the next reference of the creator, or one that is further `ahead`. None if the forger or the creator is not in
    the group, or that reference was created out of turn.
    """
    created = counts.workers.get(creator)
    if created is None or forger not in counts.workers or created.mark + ahead in created:
        return None
    return forged(RRefId(counts.me, creator, created.mark + ahead))


def claim(counts: ReferenceCounts, forger: Worker, creator: Worker, ahead: int = 1) -> ForkRequest | None:
    """Returns the request of a forger to be counted for a `guessed_reference`. None also if it has asked before."""
    wrong = guessed_reference(counts, forger, creator, ahead)
    if wrong is None:
        return None
    fork, owned = ForkId(forger, NEVER + wrong.number), counts.owned.get(wrong)
    return ForkRequest(wrong, fork) if owned is None or fork not in owned.forks else None


def check_forgeries(
    counts: ReferenceCounts, forger: Worker, kind: int | None = None, take: Callable[[Event], object] | None = None
) -> bool:
    """FORGED: tries all forgeries of a worker, or only one.

    Args:
        counts: Where they are tried.
        forger: The dishonest worker.
        kind: Which forgery is tried, counted round; None for all.
        take: Takes the event. It is given to the counts if this is None.

    Returns:
        Whether there was a forgery to try.
    """
    found = forgeries(counts, forger)
    before = genuine_tables(counts)
    for event in found if kind is None or not found else [found[kind % len(found)]]:
        try:
            if take is not None:
                take(event)
            else:
                apply(counts, event)
                if event[0] == "receive_handle":
                    counts.drop_handle(event[1].reference, None)
        except ProtocolError:
            pass
        if genuine_tables(counts) != before:
            raise BrokenInvariant("FORGED", f"worker {counts.me} took {event}, which was forged by worker {forger}")
    return bool(found)

"""Input that no lawful worker could have caused, for a `ReferenceCounts` in whatever state, to check UNCHANGED with."""

from __future__ import annotations

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.refcount import ForkState, ReferenceCounts
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    UserDeleted,
)
from simulation.invariants import BrokenInvariant
from simulation.reference_state import Event, apply, tables

NOBODY: Worker = 999
NEVER = 10**6
"""A number that no reference or fork of a simulation reaches."""


def illegal_events(counts: ReferenceCounts) -> list[Event]:
    """Returns all illegal events that are known for this state."""
    return [*_always(counts), *_of_what_is_owned(counts), *_of_what_is_held(counts)]


def _always(counts: ReferenceCounts) -> list[Event]:
    me = counts.me
    other = next((worker for worker in counts.workers if worker != me), me)
    foreign = RRefId(NOBODY, NOBODY, NEVER)
    ours = RRefId(me, me, NEVER)
    theirs = RRefId(other, me, NEVER)
    nowhere = ForkId(me, NEVER)
    return [
        ("add_worker", me),
        ("remove_worker", NOBODY),
        ("remove_worker", me),
        ("create_value", foreign),
        ("confirm_created", theirs, nowhere),
        ("pass_handle", theirs, nowhere, ForkId(me, NEVER + 1), other),
        ("pass_handle", ours, None, nowhere, other),
        ("receive_handle", Carried(foreign, ForkId(NOBODY, NEVER)), other),
        ("report_fork", theirs, nowhere),
        ("drop_handle", ours, None),
        ("receive_message", NOBODY, ForkRequest(ours, ForkId(NOBODY, 1))),
        ("receive_message", other, CreateRequest(RRefId(NOBODY, other, NEVER), ForkId(other, NEVER))),
        ("receive_message", other, CreateRequest(RRefId(me, NOBODY, NEVER), ForkId(other, NEVER))),
        ("receive_message", other, CreateRequest(RRefId(me, other, NEVER), ForkId(NOBODY, NEVER))),
        ("receive_message", other, ForkRequest(foreign, nowhere)),
        ("receive_message", other, ForkRequest(RRefId(me, other, NEVER), ForkId(me, NEVER))),
        ("receive_message", other, ForkAccepted(theirs, nowhere)),
        ("receive_message", other, ForkRefused(theirs, nowhere)),
        ("receive_message", other, ChildAccepted(theirs, ForkId(NOBODY, 1))),
        ("receive_message", other, UserDeleted(ours, nowhere)),
    ]


def _of_what_is_owned(counts: ReferenceCounts) -> list[Event]:
    me = counts.me
    found: list[Event] = []
    for reference, owned in counts.owned.items():
        if owned.created and reference.creator == me:
            found.append(("create_value", reference))
        if owned.created and reference.creator in counts.workers:
            request = CreateRequest(reference, ForkId(reference.creator, NEVER))
            found.append(("receive_message", reference.creator, request))
        for fork, holder in owned.forks.items():
            found.append(("receive_message", holder, ForkRequest(reference, fork)))
            for other in counts.workers:
                if other != holder:
                    found.append(("receive_message", other, UserDeleted(reference, fork)))
            if owned.handles:
                found.append(("pass_handle", reference, None, fork, holder))
        if owned.handles:
            found.append(("pass_handle", reference, None, ForkId(NOBODY, NEVER), me))
    return found


def _of_what_is_held(counts: ReferenceCounts) -> list[Event]:
    found: list[Event] = []
    for fork, held in counts.held.items():
        reference, owner = held.reference, held.reference.owner
        unknown, unused = RRefId(owner, NOBODY, NEVER), ForkId(counts.me, NEVER)
        found.append(("receive_handle", Carried(reference, fork), fork.creator))
        for other in counts.workers:
            if other != owner:
                found.append(("receive_message", other, ForkAccepted(reference, fork)))
                found.append(("receive_message", other, ForkRefused(reference, fork)))
        is_reportable = held.state is ForkState.UNREPORTED and not held.dropped
        found.append(("report_fork", unknown if is_reportable else reference, fork))
        if held.state is not ForkState.REQUESTED:
            found.append(("confirm_created", reference, fork))
            found.append(("receive_message", owner, ForkAccepted(reference, fork)))
            found.append(("receive_message", owner, ForkRefused(reference, fork)))
        if held.dropped:
            found.append(("drop_handle", reference, fork))
            found.append(("pass_handle", reference, fork, unused, owner))
        else:
            found.append(("pass_handle", unknown, fork, unused, owner))
            found.append(("pass_handle", reference, fork, ForkId(NOBODY, NEVER), owner))
        for child, to in held.children.items():
            for other in counts.workers:
                if other != to:
                    found.append(("receive_message", other, ChildAccepted(reference, child)))
            if not held.dropped:
                found.append(("pass_handle", reference, fork, child, to))
    return found


def check_unchanged(counts: ReferenceCounts, kind: int | None = None) -> None:
    """UNCHANGED: an illegal event raises `ProtocolError` and changes nothing.

    Tries all that are known for this state, or only the `kind`-th, counted round.
    """
    events = illegal_events(counts)
    if kind is not None:
        events = [events[kind % len(events)]]
    before = tables(counts)
    for event in events:
        _check_refused(counts, event)
    if tables(counts) != before:  # compared once for all, because it costs more than all else
        for event in events:
            before = tables(counts)
            _check_refused(counts, event)
            if tables(counts) != before:
                raise BrokenInvariant("UNCHANGED", f"worker {counts.me} refused {event}, and has changed")
        raise BrokenInvariant("UNCHANGED", f"worker {counts.me} refused {events}, and has changed")


def _check_refused(counts: ReferenceCounts, event: Event) -> None:
    try:
        effects = apply(counts, event)
    except ProtocolError:
        return
    raise BrokenInvariant("UNCHANGED", f"worker {counts.me} took {event} and answered {effects}")

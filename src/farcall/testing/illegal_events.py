"""Input that no lawful worker could have caused, for a `References` in whatever state: UNCHANGED is checked with it."""

from __future__ import annotations

from collections.abc import Callable

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    CreateDelivered,
    CreateRequest,
    Effect,
    Event,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    HandleDropped,
    HandleKept,
    HandlePassed,
    HandleReceived,
    MessageReceived,
    PeerJoined,
    PeerLost,
    RemoteCalled,
    UserDeleted,
    ValueMade,
)
from farcall.protocol.references import References
from farcall.testing.invariants import BrokenInvariant
from farcall.testing.simulated_workers import tables

NOBODY: Worker = 999
NEVER = 10**6  # a number that no reference or fork of a simulation reaches


def _always(references: References) -> list[Event]:
    me = references.me
    peer = next((worker for worker in references.peers if worker != me), me)
    foreign = RRefId(NOBODY, NOBODY, NEVER)
    ours = RRefId(me, me, NEVER)
    theirs = RRefId(peer, me, NEVER)
    nowhere = ForkId(me, NEVER)
    return [
        PeerJoined(me),
        PeerLost(NOBODY),
        PeerLost(me),
        ValueMade(foreign),
        RemoteCalled(foreign, nowhere),
        RemoteCalled(RRefId(peer, me, NEVER), ForkId(NOBODY, NEVER)),
        CreateDelivered(theirs, nowhere),
        HandlePassed(theirs, nowhere, ForkId(me, NEVER + 1), peer),
        HandlePassed(ours, None, nowhere, peer),
        HandleReceived(Carried(foreign, ForkId(NOBODY, NEVER)), peer),
        HandleKept(theirs, nowhere),
        HandleDropped(ours, None),
        MessageReceived(NOBODY, ForkRequest(ours, ForkId(NOBODY, 1))),
        MessageReceived(peer, CreateRequest(RRefId(NOBODY, peer, NEVER), ForkId(peer, NEVER))),
        MessageReceived(peer, CreateRequest(RRefId(me, NOBODY, NEVER), ForkId(peer, NEVER))),
        MessageReceived(peer, CreateRequest(RRefId(me, peer, NEVER), ForkId(NOBODY, NEVER))),
        MessageReceived(peer, ForkRequest(foreign, nowhere)),
        MessageReceived(peer, ForkRequest(RRefId(me, peer, NEVER), ForkId(me, NEVER))),
        MessageReceived(peer, ForkAccepted(theirs, nowhere)),
        MessageReceived(peer, ForkRefused(theirs, nowhere)),
        MessageReceived(peer, ChildAccepted(theirs, ForkId(NOBODY, 1))),
        MessageReceived(peer, UserDeleted(ours, nowhere)),
    ]


def _of_what_is_owned(references: References) -> list[Event]:
    me = references.me
    found: list[Event] = []
    for reference, owned in references.owned.items():
        if owned.created and reference.creator == me:
            found.append(ValueMade(reference))
        if owned.created and reference.creator in references.peers:
            request = CreateRequest(reference, ForkId(reference.creator, NEVER))
            found.append(MessageReceived(reference.creator, request))
        for fork, holder in owned.forks.items():
            found.append(MessageReceived(holder, ForkRequest(reference, fork)))
            found += [
                MessageReceived(other, UserDeleted(reference, fork)) for other in references.peers if other != holder
            ]
            if owned.handles:
                found.append(HandlePassed(reference, None, fork, holder))
        if owned.handles:
            found.append(HandlePassed(reference, None, ForkId(NOBODY, NEVER), me))
    return found


def _of_what_is_held(references: References) -> list[Event]:
    found: list[Event] = []
    for fork, held in references.held.items():
        reference, owner = held.reference, held.reference.owner
        found.append(HandleReceived(Carried(reference, fork), fork.creator))
        for other in references.peers:
            if other != owner:
                found.append(MessageReceived(other, ForkAccepted(reference, fork)))
                found.append(MessageReceived(other, ForkRefused(reference, fork)))
        if held.standing.value != "lent" or held.dropped:
            found.append(HandleKept(reference, fork))
        else:
            found.append(HandleKept(RRefId(owner, NOBODY, NEVER), fork))
        if held.standing.value != "unconfirmed":
            found.append(CreateDelivered(reference, fork))
            found.append(MessageReceived(owner, ForkAccepted(reference, fork)))
            found.append(MessageReceived(owner, ForkRefused(reference, fork)))
        if held.dropped:
            found.append(HandleDropped(reference, fork))
            found.append(HandlePassed(reference, fork, ForkId(references.me, NEVER), owner))
        else:
            found.append(HandlePassed(RRefId(owner, NOBODY, NEVER), fork, ForkId(references.me, NEVER), owner))
            found.append(HandlePassed(reference, fork, ForkId(NOBODY, NEVER), owner))
        for child, to in held.children.items():
            found += [
                MessageReceived(other, ChildAccepted(reference, child)) for other in references.peers if other != to
            ]
            if not held.dropped:
                found.append(HandlePassed(reference, fork, child, to))
    return found


_KINDS: list[Callable[[References], list[Event]]] = [_always, _of_what_is_owned, _of_what_is_held]


def illegal_events(references: References) -> list[Event]:
    """All illegal events that are known for this state."""
    return [event for kind in _KINDS for event in kind(references)]


def check_unchanged(
    references: References, kind: int | None = None, handle: Callable[[Event], list[Effect]] | None = None
) -> None:
    """UNCHANGED: an illegal event raises `ProtocolError` and changes nothing.

    All that are known for this state are tried, or only the `kind`-th, counted round. `handle` takes them, where it is
    not the protocol itself.
    """
    handle = handle or references.handle
    events = illegal_events(references)
    before = tables(references)
    for event in events if kind is None else [events[kind % len(events)]]:
        try:
            effects = handle(event)
        except ProtocolError:
            if tables(references) != before:
                raise BrokenInvariant("UNCHANGED", f"worker {references.me} refused {event}, and has changed") from None
        else:
            raise BrokenInvariant("UNCHANGED", f"worker {references.me} took {event} and answered {effects}")

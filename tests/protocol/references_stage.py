"""The references of one worker, after some events, and what an event leads to.

Worker 0 owns, 1 creates, 2 and 3 are others. Effects are compared by what they print, because named tuples of
different kinds are equal if their fields are.
"""

from __future__ import annotations

from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_messages import (
    Carried,
    CreateDelivered,
    CreateRequest,
    Effect,
    Event,
    HandleKept,
    HandlePassed,
    HandleReceived,
    Message,
    MessageReceived,
    PeerJoined,
    RemoteCalled,
)
from farcall.protocol.references import References

REMOTE = RRefId(owner=0, creator=1, number=1)
OWN = RRefId(owner=0, creator=0, number=1)
FIRST = ForkId(1, 1)  # the creator's own
CHILD = ForkId(1, 2)  # made by the creator for worker 2
PASSED = ForkId(0, 1)  # made by the owner


def worker(me: Worker, *events: Event) -> References:
    references = References(me)
    for peer in range(4):
        references.handle(PeerJoined(peer))
    for event in events:
        references.handle(event)
    return references


def said(effects: list[Effect]) -> list[str]:
    return list(map(repr, effects))


def leads(references: References, event: Event, *effects: Effect) -> None:
    assert said(references.handle(event)) == said(list(effects))


def came(sender: Worker, message: Message) -> MessageReceived:
    return MessageReceived(sender, message)


CREATED = came(1, CreateRequest(REMOTE, FIRST))
CALLED = RemoteCalled(REMOTE, FIRST)
CONFIRMED = CreateDelivered(REMOTE, FIRST)
TO_TWO = HandlePassed(REMOTE, FIRST, CHILD, to=2)
RECEIVED = HandleReceived(Carried(REMOTE, CHILD), sender=1)
"""At worker 2, or at the owner."""
KEPT = HandleKept(REMOTE, CHILD)

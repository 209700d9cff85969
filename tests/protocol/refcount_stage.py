"""The reference counts of one worker after some events, and a check of what an event leads to.

Worker 0 owns, 1 creates, 2 and 3 are others. An event is the name of a method of `ReferenceCounts` with its arguments.
Effects are compared by what they print, because named tuples of different types are equal if their fields are.
"""

from __future__ import annotations

from farcall.protocol.ids import NO_TOKEN, ForkId, RRefId, Worker
from farcall.protocol.refcount import ReferenceCounts
from farcall.protocol.reference_messages import Carried, CreateRequest, Effect, Message
from simulation.reference_state import Event, apply

REMOTE = RRefId(owner=0, creator=1, number=1)
OWN = RRefId(owner=0, creator=0, number=1)
FIRST = ForkId(1, 1)  # the creator's own
CHILD = ForkId(1, 2)  # made by the creator for worker 2
PASSED = ForkId(0, 1)  # made by the owner


def no_token() -> bytes:
    """Returns the same token for all references. The tests about tokens use others."""
    return NO_TOKEN


def worker(me: Worker, *events: Event) -> ReferenceCounts:
    counts = ReferenceCounts(me, no_token)
    for other in range(4):
        counts.add_worker(other)
    for event in events:
        apply(counts, event)
    return counts


def shown(effects: list[Effect]) -> list[str]:
    return list(map(repr, effects))


def leads(counts: ReferenceCounts, event: Event, *effects: Effect) -> None:
    """Asserts that an event has exactly these effects, in this order."""
    assert shown(apply(counts, event)) == shown(list(effects))


def came(sender: Worker, message: Message) -> Event:
    return "receive_message", sender, message


def made(reference: RRefId) -> Event:
    return "create_value", reference


def passed(reference: RRefId, parent: ForkId | None, child: ForkId, to: Worker) -> Event:
    return "pass_handle", reference, parent, child, to


def received(reference: RRefId, fork: ForkId, sender: Worker) -> Event:
    return "receive_handle", Carried(reference, fork), sender


def dropped(reference: RRefId, fork: ForkId | None) -> Event:
    return "drop_handle", reference, fork


def reported(reference: RRefId, fork: ForkId) -> Event:
    return "report_fork", reference, fork


def confirmed(reference: RRefId, fork: ForkId) -> Event:
    return "confirm_created", reference, fork


def lost(worker: Worker) -> Event:
    return "remove_worker", worker


CREATED = came(1, CreateRequest(REMOTE, FIRST))
"""At the owner."""
CALLED: Event = ("create_remote", 0)
"""At the creator: `REMOTE`, of which it holds `FIRST`."""
CONFIRMED = confirmed(REMOTE, FIRST)
TO_TWO = passed(REMOTE, FIRST, CHILD, to=2)
RECEIVED = received(REMOTE, CHILD, sender=1)
"""At worker 2, or at the owner."""
REPORTED = reported(REMOTE, CHILD)

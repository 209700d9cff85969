"""UNCHANGED: input that cannot be is refused by the reference protocol, and changes nothing.

Worker 0 owns, 1 creates, 2 and 3 are others.
"""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    CreateDelivered,
    CreateRequest,
    Event,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    HandleDropped,
    HandlePassed,
    HandleReceived,
    PeerJoined,
    PeerLost,
    RemoteCalled,
    UserDeleted,
    ValueMade,
)
from farcall.protocol.references import References
from farcall.testing.illegal_events import illegal_events
from farcall.testing.simulated_workers import tables
from protocol.references_stage import (
    CALLED,
    CHILD,
    CONFIRMED,
    CREATED,
    FIRST,
    KEPT,
    OWN,
    PASSED,
    RECEIVED,
    REMOTE,
    TO_TWO,
    came,
    worker,
)


def refuses(references: References, event: Event, message: str) -> None:
    before = tables(references)
    with pytest.raises(ProtocolError, match=message):
        references.handle(event)
    assert tables(references) == before


NOT_OURS = RRefId(3, 3, 1)
STRANGE = ForkId(3, 8)


@pytest.mark.parametrize(
    ("references", "event", "message"),
    [
        (worker(0), PeerJoined(1), "worker 1 is there already"),
        (worker(0), PeerLost(8), "worker 8 is not there"),
        (worker(0), PeerLost(0), "worker 0 cannot lose itself"),
        (worker(0), ValueMade(REMOTE), "is not ours to make"),
        (worker(0, ValueMade(OWN)), ValueMade(OWN), "was made before"),
        (worker(0, ValueMade(OWN), HandleDropped(OWN, None)), ValueMade(OWN), "was made before"),
        (References(0), ValueMade(OWN), "was made before"),
        (worker(1), RemoteCalled(NOT_OURS, FIRST), "is not ours to ask for"),
        (worker(1), RemoteCalled(REMOTE, STRANGE), "is not ours to ask for"),
        (worker(1, CALLED), RemoteCalled(RRefId(0, 1, 2), FIRST), "fork 1:1 is held already"),
        (worker(1), TO_TWO, "does not hold fork 1:1"),
        (worker(1, CALLED), HandlePassed(NOT_OURS, FIRST, CHILD, 2), "does not hold fork 1:1 of reference 3:1"),
        (worker(1, CALLED, HandleDropped(REMOTE, FIRST)), TO_TWO, "does not hold fork 1:1"),
        (worker(1, CALLED), HandlePassed(REMOTE, FIRST, STRANGE, 2), "fork 3:8 is not ours to make"),
        (worker(1, CALLED, TO_TWO), TO_TWO, "fork 1:2 was passed before"),
        (worker(0), HandlePassed(OWN, None, PASSED, 2), "no handle of its own"),
        (worker(0, CREATED), HandlePassed(REMOTE, None, PASSED, 2), "no handle of its own"),
        (worker(2), HandleReceived(Carried(REMOTE, CHILD), 3), "came from worker 3, who cannot have made it"),
        (worker(2, RECEIVED), RECEIVED, "fork 1:2 is held already"),
        (worker(0), HandleDropped(OWN, None), "no handle of its own"),
        (worker(0, CREATED), HandleDropped(REMOTE, None), "no handle of its own"),
        (worker(1, CALLED, HandleDropped(REMOTE, FIRST)), HandleDropped(REMOTE, FIRST), "was dropped before"),
        (worker(0, PeerLost(1)), CREATED, "a message of worker 1 came, who is not there"),
        (worker(2), CREATED, "is not ours to make"),
        (worker(0), came(2, CreateRequest(REMOTE, FIRST)), "is not worker 2's to ask for"),
        (worker(0), came(1, CreateRequest(REMOTE, STRANGE)), "is not worker 1's to ask for"),
        (worker(0, CREATED), CREATED, "is counted already"),
        (worker(0), came(1, CreateRequest(RRefId(0, 1, 0), FIRST)), "was made before"),
        (worker(0, came(2, ForkRequest(REMOTE, FIRST))), CREATED, "fork 1:1 is counted already"),
        (worker(2), came(1, ForkRequest(REMOTE, CHILD)), "is not ours"),
        (worker(0), came(2, ForkRequest(REMOTE, PASSED)), "was counted when it was passed"),
        (worker(0, CREATED), came(2, ForkRequest(REMOTE, FIRST)), "fork 1:1 is counted already"),
        (worker(1), came(0, ForkAccepted(REMOTE, FIRST)), "which did not ask"),
        (worker(1, CALLED, CONFIRMED), CONFIRMED, "did not ask for"),
        (worker(1, CALLED), came(0, ForkAccepted(NOT_OURS, FIRST)), "which did not ask"),
        (worker(1, CALLED), came(0, ForkAccepted(REMOTE, FIRST)), "which asked to make it"),
        (worker(1, CALLED), CreateDelivered(RRefId(0, 1, 9), FIRST), "did not ask for"),
        (worker(2, RECEIVED, KEPT), CreateDelivered(REMOTE, CHILD), "was not asked for by"),
        (worker(1, CALLED, CONFIRMED), came(0, ForkRefused(REMOTE, FIRST)), "which did not ask"),
        (worker(2, RECEIVED, KEPT), came(1, ForkRefused(REMOTE, CHILD)), "worker 1 answered for"),
        (worker(1), came(2, ChildAccepted(REMOTE, STRANGE)), "fork 3:8 was not made here"),
        (worker(1, CALLED, TO_TWO), came(3, ChildAccepted(REMOTE, CHILD)), "was not made for worker 3"),
        (worker(0), came(1, UserDeleted(REMOTE, FIRST)), "which it does not hold"),
        (worker(0, CREATED), came(2, UserDeleted(REMOTE, FIRST)), "which it does not hold"),
    ],
)
def test_illegal_input_is_refused_and_changes_nothing(references: References, event: Event, message: str) -> None:
    refuses(references, event, message)


def test_all_illegal_events_of_a_busy_worker_are_refused() -> None:
    busy = worker(
        1, CALLED, CONFIRMED, TO_TWO, ValueMade(RRefId(1, 1, 1)), HandlePassed(RRefId(1, 1, 1), None, ForkId(1, 3), 3)
    )  # fmt: skip
    events = illegal_events(busy)
    assert len(events) > 30
    for event in events:
        refuses(busy, event, ".")

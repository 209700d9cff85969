"""UNCHANGED: input that cannot be is refused by the reference counts, and changes nothing.

Worker 0 owns, 1 creates, 2 and 3 are others.
"""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.refcount import ReferenceCounts
from farcall.protocol.reference_messages import (
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    UserDeleted,
)
from protocol.refcount_stage import (
    CALLED,
    CHILD,
    CONFIRMED,
    CREATED,
    FIRST,
    OWN,
    PASSED,
    RECEIVED,
    REMOTE,
    REPORTED,
    TO_TWO,
    came,
    confirmed,
    dropped,
    lost,
    made,
    no_token,
    passed,
    received,
    worker,
)
from simulation.illegal_events import illegal_events
from simulation.reference_state import Event, apply, tables


def refuses(counts: ReferenceCounts, event: Event, message: str) -> None:
    before = tables(counts)
    with pytest.raises(ProtocolError, match=message):
        apply(counts, event)
    assert tables(counts) == before


NOT_OURS = RRefId(3, 3, 1)
STRANGE = ForkId(3, 8)


@pytest.mark.parametrize(
    ("counts", "event", "message"),
    [
        (worker(0), ("add_worker", 1), "worker 1 is there already"),
        (worker(0), lost(8), "worker 8 is not there"),
        (worker(0), lost(0), "worker 0 cannot lose itself"),
        (worker(0), made(REMOTE), "is not ours to make"),
        (worker(0, made(OWN)), made(OWN), "was made before"),
        (worker(0, made(OWN), dropped(OWN, None)), made(OWN), "was made before"),
        (ReferenceCounts(0, no_token), made(OWN), "was made before"),
        (worker(1), TO_TWO, "does not hold fork 1:1"),
        (worker(1, CALLED), passed(NOT_OURS, FIRST, CHILD, 2), "does not hold fork 1:1 of reference 3:1"),
        (worker(1, CALLED, dropped(REMOTE, FIRST)), TO_TWO, "does not hold fork 1:1"),
        (worker(1, CALLED), passed(REMOTE, FIRST, STRANGE, 2), "fork 3:8 is not ours to make"),
        (worker(1, CALLED, TO_TWO), TO_TWO, "fork 1:2 was passed before"),
        (worker(0), passed(OWN, None, PASSED, 2), "no handle of its own"),
        (worker(0, CREATED), passed(REMOTE, None, PASSED, 2), "no handle of its own"),
        (worker(2), received(REMOTE, CHILD, 3), "came from worker 3, who cannot have made it"),
        (worker(2, RECEIVED), RECEIVED, "fork 1:2 is held already"),
        (worker(0), dropped(OWN, None), "no handle of its own"),
        (worker(0, CREATED), dropped(REMOTE, None), "no handle of its own"),
        (worker(1, CALLED, dropped(REMOTE, FIRST)), dropped(REMOTE, FIRST), "was dropped before"),
        (worker(0, lost(1)), CREATED, "a message of worker 1 came, who is not there"),
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
        (worker(1, CALLED), confirmed(RRefId(0, 1, 9), FIRST), "did not ask for"),
        (worker(2, RECEIVED, REPORTED), confirmed(REMOTE, CHILD), "was not asked for by"),
        (worker(1, CALLED, CONFIRMED), came(0, ForkRefused(REMOTE, FIRST)), "which did not ask"),
        (worker(2, RECEIVED, REPORTED), came(1, ForkRefused(REMOTE, CHILD)), "worker 1 answered for"),
        (worker(1), came(2, ChildAccepted(REMOTE, STRANGE)), "fork 3:8 was not made here"),
        (worker(1, CALLED, TO_TWO), came(3, ChildAccepted(REMOTE, CHILD)), "was not made for worker 3"),
        (worker(0), came(1, UserDeleted(REMOTE, FIRST)), "which it does not hold"),
        (worker(0, CREATED), came(2, UserDeleted(REMOTE, FIRST)), "which it does not hold"),
    ],
)
def test_illegal_input_is_refused_and_changes_nothing(counts: ReferenceCounts, event: Event, message: str) -> None:
    refuses(counts, event, message)


def test_all_illegal_events_of_a_busy_worker_are_refused() -> None:
    busy = worker(
        1, CALLED, CONFIRMED, TO_TWO, made(RRefId(1, 1, 1)), passed(RRefId(1, 1, 1), None, ForkId(1, 3), 3)
    )  # fmt: skip
    events = illegal_events(busy)
    assert len(events) > 30
    for event in events:
        refuses(busy, event, ".")

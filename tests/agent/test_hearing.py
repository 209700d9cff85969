"""The usual messages in one frame: the same as one by one, and nothing is half done by Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest

from farcall.agent.hearing import create_answered
from farcall.errors import ProtocolError
from farcall.protocol.control import pack_control, pack_remote
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, UserDeleted
from tests.agent.book_stage import Books, only
from tests.interruption import At, Interrupt

REFERENCE, FORK = RRefId(1, 0, 1), ForkId(0, 1)


def test_a_remote_call_that_is_answered_is_counted_later() -> None:
    books = Books()
    value = create_answered(books[1], 0, pack_remote(1, [], REFERENCE, FORK) + b"module\0function")
    assert value is not None
    assert not books[1]._references.owned
    assert not books[1].mailboxes.owed, "its answer says that it has come"
    assert books[1].has_work()
    assert books[1].value(REFERENCE) is value
    books[1].count_created()
    assert books[1]._references.owned[REFERENCE].forks == {FORK: 0}
    assert not books[1].has_work()


@pytest.mark.parametrize(
    "head",
    [
        b"short",
        pack_remote(2, [], REFERENCE, FORK),
        pack_remote(1, [], RRefId(2, 0, 1), FORK),
        pack_remote(1, [], RRefId(1, 2, 1), FORK),
        pack_remote(1, [], REFERENCE, ForkId(2, 1)),
        pack_remote(1, [Carried(RRefId(2, 0, 1), ForkId(0, 2))], REFERENCE, FORK),
    ],
    ids=["too short", "out of turn", "not ours", "another's", "another's fork", "with handles"],
)
def test_what_is_unusual_is_left_to_others(head: bytes) -> None:
    books = Books()
    assert create_answered(books[1], 0, head) is None
    assert not books[1]._values
    assert books[1].mailboxes.delivery.receive(0, 1), "its number was not taken"


def test_it_is_counted_before_anything_else_is_heard_of_it() -> None:
    books = Books()
    create_answered(books[1], 0, pack_remote(1, [], REFERENCE, FORK))
    books[1].control_received(0, pack_control(0, [(2, UserDeleted(REFERENCE, FORK))]))
    assert not books[1]._references.owned
    books[1].work_off()
    assert not books[1]._values


def test_it_is_counted_before_its_creator_is_lost() -> None:
    books = Books()
    create_answered(books[1], 0, pack_remote(1, [], REFERENCE, FORK))
    books[1].lost(0)
    books[1].work_off()
    assert not books[1]._references.owned
    assert not books[1]._values


def test_one_that_was_made_before_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    books[1].create_requested(0, 1, REFERENCE, FORK, [])
    books[1].control_received(0, pack_control(0, [(2, UserDeleted(REFERENCE, FORK))]))
    books[1].work_off()
    assert create_answered(books[1], 0, pack_remote(3, [], REFERENCE, FORK)) is not None
    books[1].count_created()
    assert "was made before" in caplog.text


def test_a_fork_that_is_not_held_cannot_be_given_up() -> None:
    books = Books()
    handle, _ = books.remote(0, 1)
    with pytest.raises(ProtocolError, match="does not hold"):
        books[1].control_received(2, pack_control(0, [(1, UserDeleted(handle.reference, ForkId(0, 1)))]))


def test_an_interrupt_at_any_point_of_an_acknowledgement_leaves_nothing_behind() -> None:
    for point in itertools.count():
        books = Books()
        kept, dropped = books.remote(0, 1)[0], books.remote(0, 1)[0]
        del dropped
        gc.collect()
        books[0].work_off()
        books[1].work_off()
        body = only(books[1].mailboxes.outbox(0)).body
        with contextlib.suppress(Interrupt), At(("agent/hearing.py",), (point,)) as at:
            books[0].control_received(1, body)
        books[0].control_received(1, body)
        assert kept.confirmed, at.places
        del kept
        assert books.left() == {}, at.places
        if not at.has_acted:
            assert point > 5
            return

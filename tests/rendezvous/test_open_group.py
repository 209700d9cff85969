"""Joining an open group and leaving it: who is there, and who gets which name."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from open_stage import OpenStage, Worker, hosts, payload

from eventually import eventually
from farcall.errors import RendezvousError, UsageError
from farcall.rendezvous import Rendezvous, join, join_open, leave_open, remove_member
from farcall.rendezvous.open_group_store import MEMBER_PREFIX, NAME_PREFIX
from farcall.testing.memory_store import MemoryStore
from interruption import At, Interrupt


@pytest.fixture
def stage(open_stage: OpenStage) -> OpenStage:
    return open_stage


# -- coming


def test_the_first_one_hosts_the_store_and_the_next_ones_see_who_is_there(stage: OpenStage) -> None:
    workers = [stage.join(name) for name in "abc"]
    assert [worker.number for worker in workers] == [1, 2, 3]
    assert hosts(*workers) == [True, False, False]
    assert [list(worker.there) for worker in workers] == [[1], [1, 2], [1, 2, 3]]
    assert workers[2].there == {1: b"a is 1", 2: b"b is 2", 3: b"c is 3"}
    assert len({worker.meeting.group for worker in workers}) == 1
    assert {(worker.meeting.world_size, worker.meeting.rank) for worker in workers} == {(None, -1)}
    assert {worker.meeting.host for worker in workers} == {"127.0.0.1"}


def test_many_that_come_at_once_make_one_group(stage: OpenStage, background: ThreadPoolExecutor) -> None:
    count = 24
    together = threading.Barrier(count)

    def come(name: str) -> Worker:
        together.wait(10)
        return stage.join(name)

    workers = [future.result(30) for future in [background.submit(come, f"w{n}") for n in range(count)]]
    assert len({worker.number for worker in workers}) == count
    assert len({worker.meeting.group for worker in workers}) == 1
    assert sum(hosts(*workers)) == 1
    for one in workers:
        assert one.there[one.number] == payload(one.name, one.number)
        for other in workers:  # of two, at least one knows of the other
            assert one.number in other.there or other.number in one.there


def test_it_works_over_any_store() -> None:
    first = MemoryStore()
    ends = [first, first.another_end()]
    meetings = [Rendezvous(end, -1, None, "h", "g") for end in ends]
    assert join_open(meetings[0], "a", lambda number: b"1", 5) == (1, {1: b"1"})
    assert join_open(meetings[1], "b", lambda number: b"2", 5) == (2, {1: b"1", 2: b"2"})
    remove_member(meetings[1], 1)
    leave_open(meetings[1], 2)
    assert first.read(MEMBER_PREFIX) == {}
    for end in ends:
        end.close()
    remove_member(meetings[0], 1)  # it is closed, and that harms nobody


def test_an_open_group_is_not_waited_for(stage: OpenStage) -> None:
    with pytest.raises(UsageError, match="join_open"):
        join(stage.meet("a"), "a", b"", 5)


# -- names


def test_of_many_that_want_one_name_at_once_one_gets_it(stage: OpenStage, background: ThreadPoolExecutor) -> None:
    meetings = [stage.meet("w") for _ in range(8)]
    together = threading.Barrier(8)

    def claim(meeting: Rendezvous) -> int | str:
        together.wait(10)
        try:
            return join_open(meeting, "w", lambda number: b"", 1.0)[0]
        except RendezvousError as error:
            return str(error)

    outcomes = list(background.map(claim, meetings))
    [winner] = [outcome for outcome in outcomes if isinstance(outcome, int)]
    losers = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(losers) == 7
    for text in losers:
        assert f"the worker name 'w' is not unique: the worker with number {winner}" in text
        assert "Choose another name" in text
    assert list(meetings[0].store.read(MEMBER_PREFIX)) == [f"{MEMBER_PREFIX}{winner}"]  # nothing of the losers is left


def test_a_name_of_one_that_is_gone_is_taken_again_at_once(stage: OpenStage) -> None:
    host, first = stage.join("host"), stage.join("w")
    first.crash()
    remove_member(host.meeting, first.number)
    second = stage.join("w", timeout=5)
    assert second.number == 3
    assert list(second.there) == [1, 3]


def test_a_name_is_waited_for_until_its_holder_is_declared_gone(
    stage: OpenStage, background: ThreadPoolExecutor
) -> None:
    host, first = stage.join("host"), stage.join("w")
    first.crash()
    second = background.submit(stage.join, "w")
    eventually(lambda: MEMBER_PREFIX + "3" in host.store.read(MEMBER_PREFIX))
    other = stage.join("other")
    assert list(other.there) == [1, 2, 4]  # who waits for a name is not there yet
    assert not second.done()
    remove_member(host.meeting, 2)
    assert second.result(10).number == 3
    assert list(second.result().there) == [1, 3, 4]


def test_who_waits_for_a_name_may_know_by_itself_that_its_holder_is_dead(stage: OpenStage) -> None:
    stage.join("host")
    stage.join("w").crash()
    asked: list[bytes] = []

    def is_dead(payload: bytes) -> bool:
        asked.append(payload)
        return len(asked) == 3

    number, there = join_open(stage.meet("w"), "w", lambda number: b"again", 20, is_dead)
    assert (number, there) == (3, {1: b"host is 1", 3: b"again"})
    assert asked == 3 * [b"w is 2"]


class Interrupted(BaseException):
    """Comes while somebody waits, as KeyboardInterrupt does."""


def test_who_is_interrupted_while_it_waits_for_a_name_leaves_nothing(stage: OpenStage) -> None:
    """Nobody would clear its entry away: it was never in the group that would miss it."""
    host = stage.join("host")

    def interrupted(payload: bytes) -> bool:
        assert MEMBER_PREFIX + "2" in host.store.read(MEMBER_PREFIX)
        raise Interrupted

    late = stage.meet("host")
    with pytest.raises(Interrupted):
        join_open(late, "host", lambda number: b"", 20, interrupted)
    assert list(host.store.read(MEMBER_PREFIX)) == [MEMBER_PREFIX + "1"]
    late.store.close()
    assert list(stage.join("next").there) == [1, 3]


def test_who_is_interrupted_at_any_point_of_joining_leaves_nothing() -> None:
    for point in range(1000):
        store = MemoryStore()
        meeting = Rendezvous(store, -1, None, "h", "g")
        with suppress(Interrupt), At(("rendezvous/open_group.py",), (point,)) as at:
            join_open(meeting, "w", lambda number: b"1", 5)
        if not at.has_acted:
            assert point > 10, "the last point was passed, and nothing interrupted"
            return
        assert store.read(MEMBER_PREFIX) == {}, at.places
        assert join_open(meeting, "w", lambda number: b"2", 5)[1].keys() <= {1, 2}, at.places
    pytest.fail("it never came to its end")


def test_a_store_that_is_gone_does_not_keep_who_is_interrupted(stage: OpenStage) -> None:
    host = stage.join("host")
    late = stage.meet("host")

    def interrupted(payload: bytes) -> bool:
        host.store._disconnect()
        raise Interrupted

    began = time.monotonic()
    with pytest.raises(Interrupted):
        join_open(late, "host", lambda number: b"", 20, interrupted)
    assert time.monotonic() - began < 5


def test_saying_again_that_one_is_gone_takes_nothing_from_the_next(stage: OpenStage) -> None:
    host, first = stage.join("host"), stage.join("w")
    leave_open(first.meeting, 2)
    second = stage.join("w")
    for _ in range(2):
        remove_member(host.meeting, 2)
        leave_open(first.meeting, 2)
    with pytest.raises(RendezvousError, match="with number 3 has it, and has neither left nor been declared lost in "):
        stage.join("w", timeout=0.4)
    assert list(stage.join("x").there) == [1, second.number, 5]


def test_a_free_name_that_another_one_takes_first_is_not_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.set("open/numbers", b"9")
    store.set(NAME_PREFIX + "w", b"1")  # of one that is gone
    delete = store.delete

    def too_late(key: str, expected: bytes | None = None) -> bool:
        if key == NAME_PREFIX + "w":
            store.set(MEMBER_PREFIX + "9", b"")
            store.set(NAME_PREFIX + "w", b"9")
        return delete(key, expected)

    monkeypatch.setattr(store, "delete", too_late)
    with pytest.raises(RendezvousError, match="with number 9"):
        join_open(Rendezvous(store, -1, None, "h", "g"), "w", lambda number: b"", 0.05)
    assert store.read("") == {NAME_PREFIX + "w": b"9", MEMBER_PREFIX + "9": b"", "open/numbers": b"10"}


def test_who_has_left_is_not_there_and_its_name_does_not_stay(stage: OpenStage) -> None:
    host = stage.join("host")
    for name in ("a/b", "a", ""):
        stage.join(name).leave()
    last = stage.join("last")
    assert list(last.there) == [1, 5]
    assert sorted(host.store.read(NAME_PREFIX)) == [NAME_PREFIX + "host", NAME_PREFIX + "last"]


def test_who_has_the_name_is_said_though_no_time_is_left(open_stage: OpenStage) -> None:
    """On a busy machine the store answers only after the time for joining is over: it is not stuck for that."""
    open_stage.join("a")
    with pytest.raises(RendezvousError, match=r"the worker name 'a' is not unique: the worker with number 1"):
        open_stage.join("a", timeout=0.0)

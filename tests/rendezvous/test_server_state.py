"""What the store decides, without sockets and with a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from farcall.protocol.handshake import Hello, Welcome
from farcall.rendezvous.handshake import StoreRefused
from farcall.rendezvous.messages import (
    Add,
    Collect,
    Delete,
    Done,
    Entries,
    Failed,
    Get,
    GoodBye,
    Number,
    Read,
    Reply,
    Request,
    Set,
    SetNew,
    TimedOut,
    Value,
)
from farcall.rendezvous.server_state import StoreState


class Desk:
    """A table whose connection number is the rank plus 100 times the attempt."""

    def __init__(self, world_size: int | None = 3, present: int = 3) -> None:
        self.table = StoreState("group", world_size, "host")
        for rank in range(present):
            assert self.hello(rank) == Welcome("host", -1 if world_size is None else 0)

    def hello(self, rank: int, name: str | None = None, group: str = "group", connection: int | None = None) -> object:
        hello = Hello(group, name or f"worker{rank}", rank, "")
        return self.table.introduce(rank if connection is None else connection, hello)

    def ask(self, connection: int, request: Request, now: float = 0.0) -> list[tuple[int, Reply]]:
        self.table.handle(connection, request, now)
        return self.table.take_replies()

    def end(self, connection: int) -> list[tuple[int, Reply]]:
        self.table.disconnect(connection)
        return self.table.take_replies()

    def expire(self, now: float) -> list[tuple[int, Reply]]:
        self.table.expire(now)
        return self.table.take_replies()


@pytest.fixture
def desk() -> Desk:
    return Desk()


# -- keys and values


def test_a_value_is_set_and_read_and_deleted(desk: Desk) -> None:
    assert desk.ask(0, Set(1, "k", b"v")) == [(0, Done(1))]
    assert desk.ask(1, Get(2, "k", 0)) == [(1, Value(2, b"v"))]
    assert desk.ask(1, Set(3, "k", b"w")) == [(1, Done(3))]
    assert desk.ask(0, Read(4, "")) == [(0, Entries(4, {"k": b"w"}))]
    assert desk.ask(0, Delete(5, "k")) == [(0, Number(5, 1))]
    assert desk.ask(0, Delete(6, "k")) == [(0, Number(6, 0))]


def test_a_value_may_be_deleted_only_if_it_is_the_expected_one(desk: Desk) -> None:
    desk.ask(0, Set(1, "k", b"v"))
    assert desk.ask(0, Delete(2, "k", b"w")) == [(0, Number(2, 0))]
    assert desk.ask(0, Delete(3, "nothing", b"v")) == [(0, Number(3, 0))]
    assert desk.ask(0, Get(4, "k", 0)) == [(0, Value(4, b"v"))]
    assert desk.ask(0, Delete(5, "k", b"v")) == [(0, Number(5, 1))]
    assert desk.ask(0, Read(6, "")) == [(0, Entries(6, {}))]


def test_a_table_may_begin_with_values() -> None:
    values = {"k": b"v"}
    table = StoreState("group", None, "host", values)
    assert table.introduce(1, Hello("group", "w", -1, "")) == Welcome("host", -1)
    table.handle(1, Add(1, "n", 1), 0.0)
    table.handle(1, Read(2, ""), 0.0)
    assert table.take_replies()[1] == (1, Entries(2, {"k": b"v", "n": b"1"}))
    assert values == {"k": b"v"}


def test_set_new_gives_the_value_that_was_first(desk: Desk) -> None:
    assert desk.ask(0, SetNew(1, "k", b"first")) == [(0, Value(1, b"first"))]
    assert desk.ask(1, SetNew(1, "k", b"second")) == [(1, Value(1, b"first"))]


def test_a_counter_counts_from_nothing(desk: Desk) -> None:
    assert desk.ask(0, Add(1, "n", 5)) == [(0, Number(1, 5))]
    assert desk.ask(1, Add(1, "n", -7)) == [(1, Number(1, -2))]
    assert desk.ask(1, Get(2, "n", 0)) == [(1, Value(2, b"-2"))]


@pytest.mark.parametrize(("value", "amount", "why"), [(b"x", 1, "not a number"), (b"%d" % (2**63 - 1), 1, "64 bits")])
def test_what_cannot_be_added_changes_nothing(desk: Desk, value: bytes, amount: int, why: str) -> None:
    desk.ask(0, Set(1, "n", value))
    [(_, reply)] = desk.ask(0, Add(2, "n", amount))
    assert isinstance(reply, Failed)
    assert why in reply.reason
    assert desk.ask(0, Get(3, "n", 0)) == [(0, Value(3, value))]


# -- waits


def test_a_get_waits_for_its_key_and_holds_up_nobody(desk: Desk) -> None:
    assert desk.ask(1, Get(7, "k", 5)) == []
    assert desk.ask(1, Read(8, "")) == [(1, Entries(8, {}))]
    assert sorted(desk.ask(0, Set(1, "k", b"v")), key=str) == [(0, Done(1)), (1, Value(7, b"v"))]
    assert desk.expire(100) == []


def test_a_counter_ends_a_wait_as_well(desk: Desk) -> None:
    desk.ask(1, Get(7, "n", 5))
    assert (1, Value(7, b"1")) in desk.ask(0, Add(1, "n", 1))


def test_a_collect_waits_for_enough_keys(desk: Desk) -> None:
    desk.ask(0, Set(1, "p/0", b"a"))
    assert desk.ask(0, Collect(2, "p/", 2, 5)) == []
    assert desk.ask(1, Set(1, "q/1", b"b")) == [(1, Done(1))]
    assert desk.ask(1, Set(2, "p/0", b"c")) == [(1, Done(2))]
    assert (0, Entries(2, {"p/0": b"c", "p/1": b"d"})) in desk.ask(1, Set(3, "p/1", b"d"))
    assert desk.ask(2, Collect(1, "p/", 2, 5)) == [(2, Entries(1, {"p/0": b"c", "p/1": b"d"}))]


def test_a_wait_ends_at_its_time_and_says_what_was_there(desk: Desk) -> None:
    desk.ask(0, Set(1, "p/2", b""), now=10)
    desk.ask(0, Set(1, "p/1", b""), now=10)
    desk.ask(0, Collect(2, "p/", 3, 5), now=10)
    desk.ask(1, Get(3, "k", 2), now=10)
    assert desk.table.next_deadline() == 12
    assert desk.expire(11.9) == []
    assert desk.expire(12) == [(1, TimedOut(3, ()))]
    assert desk.table.next_deadline() == 15
    assert desk.expire(15) == [(0, TimedOut(2, ("p/1", "p/2")))]
    assert desk.table.next_deadline() is None


@pytest.mark.parametrize("timeout", [-1.0, 0.0, math.nan])
def test_a_wait_without_time_ends_at_once(desk: Desk, timeout: float) -> None:
    desk.ask(0, Get(1, "k", timeout), now=10)
    assert desk.expire(10) == [(0, TimedOut(1, ()))]


def test_a_wait_without_end_has_no_time(desk: Desk) -> None:
    desk.ask(0, Get(1, "k", math.inf), now=10)
    assert desk.expire(1e300) == []
    assert (0, Value(1, b"")) in desk.ask(1, Set(1, "k", b""))


def test_settled_waits_leave_no_deadline(desk: Desk) -> None:
    desk.ask(0, Get(1, "k", 5))
    desk.ask(1, Set(1, "k", b""))
    assert desk.table.next_deadline() is None


def test_who_is_gone_waits_no_longer(desk: Desk) -> None:
    desk.ask(0, Get(1, "k", 5))
    desk.ask(1, Get(1, "k", 5))
    desk.end(0)
    desk.ask(1, GoodBye())
    assert desk.ask(2, Set(1, "k", b"")) == [(2, Done(1))]


def test_a_store_that_closes_ends_every_wait(desk: Desk) -> None:
    desk.ask(0, Get(1, "k", 5))
    desk.ask(1, Get(2, "k", 5))
    desk.ask(1, Collect(3, "p/", 1, 5))
    desk.table.fail_waits("closed")
    replies = desk.table.take_replies()
    assert sorted(replies, key=str) == [(0, Failed(1, "closed")), (1, Failed(2, "closed")), (1, Failed(3, "closed"))]
    assert desk.expire(100) == []


# -- who is here


def test_another_group_is_refused_and_both_are_named() -> None:
    refusal = Desk(present=0).hello(1, group="other")
    assert isinstance(refusal, StoreRefused)
    assert refusal.other_group
    assert "'group'" in refusal.reason
    assert "'other'" in refusal.reason


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_beyond_the_group_is_refused(rank: int) -> None:
    refusal = Desk(present=0).hello(rank)
    assert isinstance(refusal, StoreRefused)
    assert refusal.final
    assert f"rank {rank} does not exist" in refusal.reason


def test_a_rank_that_is_there_is_refused_and_both_are_named(desk: Desk) -> None:
    desk.ask(0, Collect(1, "p/", 1, 5))
    refusal = desk.hello(1, name="newcomer", connection=101)
    assert refusal == StoreRefused(
        "rank 1 is taken by worker 'worker1' (rank 1); start 'newcomer' with a rank of its own"
    )
    assert desk.table.take_replies() == []
    assert desk.table.members == 3


def test_a_name_that_is_there_is_refused_and_all_who_collect_are_told() -> None:
    desk = Desk(present=2)
    desk.ask(0, Collect(1, "p/", 3, 5))
    desk.ask(1, Get(1, "k", 5))
    refusal = desk.hello(2, name="worker1")
    why = "the worker name 'worker1' is not unique: rank 1 and rank 2 have it; give each worker a name of its own"
    assert refusal == StoreRefused(why, final=True)
    assert desk.table.take_replies() == [(0, Failed(1, why))]
    assert desk.ask(1, Collect(2, "p/", 3, 5)) == [(1, Failed(2, why))]
    assert desk.hello(2) == Welcome("host", 0)
    assert desk.ask(1, Collect(3, "p/", 3, 5)) == []


# -- who goes


def test_a_lost_worker_fails_collects_now_and_later_until_its_rank_returns(desk: Desk) -> None:
    desk.ask(1, Set(1, "p/1", b""))
    desk.ask(0, Collect(1, "p/", 3, 5))
    [(connection, reply)] = desk.end(1)
    assert connection == 0
    assert isinstance(reply, Failed)
    assert "'worker1' (rank 1) disconnected without leaving the group" in reply.reason
    assert desk.ask(2, Collect(1, "p/", 3, 5)) == [(2, Failed(1, reply.reason))]
    assert desk.hello(1, connection=101) == Welcome("host", 0)
    assert desk.ask(2, Collect(2, "p/", 3, 5)) == []


def test_a_collect_that_is_complete_is_complete_whoever_is_lost(desk: Desk) -> None:
    desk.ask(1, Set(1, "p/1", b""))
    desk.end(1)
    assert desk.ask(0, Collect(1, "p/", 1, 5)) == [(0, Entries(1, {"p/1": b""}))]


def test_a_get_goes_on_when_a_worker_is_lost(desk: Desk) -> None:
    desk.ask(1, Read(1, ""))
    desk.ask(0, Get(1, "k", 5))
    assert desk.end(1) == []


def test_a_worker_that_never_asked_for_anything_is_not_lost(desk: Desk) -> None:
    desk.ask(0, Collect(1, "p/", 1, 5))
    assert desk.end(1) == []
    assert desk.hello(1, connection=101) == Welcome("host", 0)


def test_a_worker_that_said_good_bye_is_not_lost(desk: Desk) -> None:
    desk.ask(0, Collect(1, "p/", 1, 5))
    assert desk.ask(1, GoodBye()) == []
    assert desk.end(1) == []
    assert desk.table.members == 2


def test_a_name_is_free_again_when_its_worker_has_gone(desk: Desk) -> None:
    desk.ask(2, Read(1, ""))
    desk.end(2)
    assert desk.hello(2, name="another", connection=102) == Welcome("host", 0)


def test_after_a_whole_run_a_rank_that_said_good_bye_must_wait_for_the_next_store(desk: Desk) -> None:
    desk.ask(1, GoodBye())
    assert desk.hello(1, connection=101) is None


def test_while_the_group_forms_a_rank_that_said_good_bye_may_come_back() -> None:
    desk = Desk(present=2)
    desk.ask(1, GoodBye())
    assert desk.hello(1, connection=101) == Welcome("host", 0)


def test_a_good_bye_is_forgotten_when_its_worker_is_back() -> None:
    desk = Desk(present=2)
    desk.ask(1, GoodBye())
    assert desk.hello(1, connection=101) == Welcome("host", 0)
    assert desk.hello(2) == Welcome("host", 0)  # now all have been here
    desk.end(101)
    assert desk.hello(1, connection=201) == Welcome("host", 0)


def test_the_end_of_a_stranger_means_nothing(desk: Desk) -> None:
    assert desk.end(77) == []


# -- open groups


def test_in_an_open_group_ranks_and_names_do_not_matter() -> None:
    desk = Desk(world_size=None, present=2)
    for connection, (rank, name) in enumerate([(1, "worker1"), (-1, "worker0"), (7000, "w")], 10):
        assert desk.hello(rank, name, connection=connection) == Welcome("host", -1)
    assert desk.table.members == 5


@pytest.mark.parametrize("how", ["vanishes", "leaves early", "leaves"])
def test_in_an_open_group_nobody_breaks_what_others_wait_for(how: str) -> None:
    desk = Desk(world_size=None)
    desk.ask(1, Set(1, "j/1", b""))
    desk.ask(0, Collect(1, "j/", 2, 10))
    if how == "vanishes":
        assert desk.end(1) == []
    else:
        assert desk.ask(1, GoodBye(early=how == "leaves early")) == []
    assert desk.hello(1) == Welcome("host", -1)  # and it may come back
    assert desk.ask(2, Set(1, "j/2", b"")) == [(0, Entries(1, {"j/1": b"", "j/2": b""})), (2, Done(1))]


@pytest.mark.parametrize(
    ("ours", "theirs", "mixed"),
    [
        ("here, open", "here, 4 workers", True),
        ("here, 4 workers", "here, open", True),
        ("here, 4 workers", "here, 3 workers", False),
        ("here, open", "there, 4 workers", False),
        ("here, open", "there, open", False),
    ],
)
def test_a_group_with_a_size_and_one_without_at_one_place_are_told_so(ours: str, theirs: str, mixed: bool) -> None:
    size = None if ours.endswith("open") else 4
    refusal = StoreState(ours, size, "host").introduce(1, Hello(theirs, "w", 1, ""))
    assert isinstance(refusal, StoreRefused)
    assert refusal.other_group
    assert refusal.open_and_fixed == mixed
    assert refusal.reason.endswith("start all workers with the same world_size, or all without one") == mixed

"""The way in and out: numbers and names at the store, who tells it that somebody has gone, and who hosts it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

import farcall.rendezvous
from eventually import eventually
from farcall import ExpelledError, RendezvousError, UsageError
from farcall.agent import entrance as entrance_module
from farcall.agent.entrance import Entrance
from farcall.options import RpcBackendOptions
from farcall.protocol.membership_messages import Member, News, encode
from farcall.rendezvous import Rendezvous, join_open
from farcall.testing import LocalGroup, MemoryStore
from group_stage import call, echo

pytestmark = pytest.mark.timeout(60)

SLOW_HEART = RpcBackendOptions(heartbeat_interval=1000.0, heartbeat_patience=8000.0, init_timeout=0.5)
ADDRESSES = ("memory:1",)


def names_at(group: LocalGroup) -> set[str]:
    """The names that are taken at the store."""
    entries = group._store.read("open/")
    there = {key.removeprefix("open/here/") for key in entries if key.startswith("open/here/")}
    return {
        key.removeprefix("open/name/")
        for key, number in entries.items()
        if key.startswith("open/name/") and number.decode() in there
    }


# -- Coming in


def test_in_a_fixed_group_the_number_is_the_rank() -> None:
    store = MemoryStore()
    entrances = [Entrance(Rendezvous(store, rank, 2, "", "run"), f"w{rank}", ADDRESSES, 8.0) for rank in range(2)]
    joined: dict[int, tuple[Member, list[Member]]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: joined.update({rank: entrances[rank].join(5)})) for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, (me, members) in joined.items():
        assert (me.number, me.rank, me.name, me.addresses) == (rank, rank, f"w{rank}", ADDRESSES)
        assert [(member.number, member.name) for member in members] == [(0, "w0"), (1, "w1")]
    assert not entrances[0].is_open


def test_in_an_open_group_the_store_gives_the_number() -> None:
    store = MemoryStore()
    entrances = [Entrance(Rendezvous(store, -1, None, "", "run"), name, ADDRESSES, 8.0) for name in ("a", "b")]
    assert entrances[0].join(5)[0].number == 1
    me, members = entrances[1].join(5)
    assert (me.number, me.rank, me.name) == (2, -1, "b")
    assert [(member.number, member.name) for member in members] == [(1, "a"), (2, "b")]
    assert entrances[0].is_open


def test_a_name_that_is_taken_is_refused_and_the_group_goes_on() -> None:
    with LocalGroup(2, SLOW_HEART, is_open=True) as group:
        with pytest.raises(RendezvousError, match="the name 'worker1' belongs to the worker with number 2"):
            group.join("worker1")
        assert call(group[0], "worker1", echo, 1) == 1
        assert names_at(group) == {"worker0", "worker1"}


def test_who_fails_after_it_came_in_goes_out_again() -> None:
    with LocalGroup(1, SLOW_HEART, is_open=True) as group:
        group._options = RpcBackendOptions(heartbeat_interval=1.0, heartbeat_patience=2.0)
        with pytest.raises(UsageError, match="leaves no time to ask others"):
            group.join("hasty")
        assert names_at(group) == {"worker0"}


# -- Going out


@pytest.mark.parametrize("graceful", [False, True])
def test_who_leaves_gives_its_name_back(graceful: bool) -> None:
    with LocalGroup(2, SLOW_HEART, is_open=True) as group:
        assert call(group[1], "worker0", echo, 1) == 1
        group.leave("worker1", graceful=graceful)
        assert names_at(group) == {"worker0"}
        assert group.join("worker1").group.me.number == 3


def test_who_was_expelled_gives_its_name_back_too_and_its_entrance_is_over() -> None:
    with LocalGroup(1, SLOW_HEART, is_open=True) as group:
        agent = group[0]
        agent.group.told(1, encode(News(lost=((1, 1),))))
        assert isinstance(agent.closed, ExpelledError)
        group.leave("worker0")
        assert agent._entrance._over.is_set(), "it would look for the store for ever"
        assert names_at(group) == set()


def test_leaving_twice_or_never_having_come_in_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(farcall.rendezvous, "leave_open", lambda meeting, number: left.append(number))
    entrance = Entrance(Rendezvous(MemoryStore(), -1, None, "", "run"), "a", ADDRESSES, 8.0)
    entrance.leave()
    assert left == []
    entrance.join(5)
    entrance.leave()
    entrance.leave()
    assert left == [1]


# -- For those who come later


class Porch:
    """An entrance of number 2 with everything around it made up; what is to run aside runs when the test says so."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, here: tuple[int, ...] = (1, 2, 3), is_open: bool = True
    ) -> None:
        self.here = {number: Member(number, f"w{number}", -1, "host", ADDRESSES) for number in here}
        self.marked: list[int] = []
        self.in_store = set(here)
        self.store_is_there = True
        self.hosted: list[tuple[set[int], int]] = []
        self.meanwhile: list[int] = []  # who goes while the store is being hosted
        self.host = "w1"
        self.told: list[tuple[int, str]] = []
        self.jobs: list[Any] = []
        self.lost: Any = None
        self.gone: set[str] = set()
        self.left: list[int] = []
        self.handed_over = 0
        monkeypatch.setattr(farcall.rendezvous, "clear_away", self._clear_away)
        monkeypatch.setattr(farcall.rendezvous, "host_again", self._host_again)
        monkeypatch.setattr(farcall.rendezvous, "is_hosted_by", lambda meeting, names: self.host in names)
        monkeypatch.setattr(farcall.rendezvous, "who_is_there", lambda meeting: {})
        monkeypatch.setattr(farcall.rendezvous, "when_store_lost", self._when_store_lost)
        monkeypatch.setattr(farcall.rendezvous, "hand_over", self._hand_over)
        monkeypatch.setattr(farcall.rendezvous, "leave_open", lambda meeting, number: self.left.append(number))
        monkeypatch.setattr(entrance_module, "_PAUSE", 0.0)
        store = MemoryStore()
        monkeypatch.setattr(store, "lost", lambda rank, why: self.told.append((rank, why)))
        meeting = Rendezvous(store, -1 if is_open else 2, None if is_open else 3, "", "run")
        if is_open:
            join_open(meeting, "first", lambda number: b"", 5)
        self.entrance = Entrance(meeting, "w2", ADDRESSES, 8.0)
        if is_open:
            store.delete("open/name/first")
            assert self.entrance.join(5)[0].number == 2
        group: Any = SimpleNamespace(
            here=lambda: dict(self.here),
            is_gone=lambda number: number not in self.here,
            name_of=lambda n: f"w{n}",
            names_gone=lambda: self.gone,
        )
        self.group = group
        group.is_quiet = False
        serving: Any = SimpleNamespace(run_aside=self.jobs.append)
        self.entrance.keep(group, serving)

    def _clear_away(self, meeting: Rendezvous, is_gone: Callable[[int], bool], names: Collection[str]) -> None:
        if self.store_is_there:
            gone = sorted(filter(is_gone, self.in_store))
            self.in_store.difference_update(gone)
            self.marked += gone

    def _hand_over(self, meeting: Rendezvous) -> None:
        self.handed_over += 1

    def _host_again(self, meeting: Rendezvous, here: dict[int, Any], next_number: int, gone: Collection[str]) -> bool:
        assert gone is self.gone
        self.hosted.append((set(here), next_number))
        self.in_store = set(here) if self.store_is_there else self.in_store
        for number in self.meanwhile:
            self.goes(number)
        self.meanwhile = []
        return self.store_is_there

    def _when_store_lost(self, meeting: Rendezvous, call: Any) -> None:
        self.lost = call

    def goes(self, number: int, left: bool = False) -> None:
        self.here.pop(number, None)
        self.entrance.member_gone(number, left)

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0).run()


def test_the_oldest_tell_the_store_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.goes(3)
    assert porch.marked == [], "it takes a while, and so it is left to the pool"
    porch.work()
    assert porch.marked == [3]


def test_those_who_came_later_leave_it_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch, here=(0, 1, 2, 3))
    porch.goes(3)
    assert porch.jobs == []
    porch.goes(0)
    porch.work()
    assert porch.marked == [0, 3], "now it is one of the oldest itself"


def test_in_a_fixed_group_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch, is_open=False)
    porch.goes(3)
    assert porch.jobs == []
    assert porch.lost is None


def test_in_a_fixed_group_those_who_wait_by_the_store_are_told_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch, is_open=False)
    porch.goes(1, left=True)
    assert porch.told == [], "it has told the store itself"
    porch.goes(3)
    assert porch.told == [(3, "worker 'w3' was lost")]


def test_when_all_are_about_to_go_only_the_loss_of_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch, is_open=False, here=(0, 1, 2))
    porch.group.is_quiet = True
    porch.goes(1)
    assert porch.told == [], "it may have gone in good order"
    porch.goes(0)
    assert porch.told == [(0, "worker 'w0' was lost")]


def test_in_an_open_group_the_store_is_told_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.goes(1)
    assert porch.told == []


def test_the_store_is_hosted_again_by_who_sees_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.lost()
    assert porch.hosted == [], "it takes a while, and so it is left to the pool"
    porch.work()
    assert porch.hosted == [({1, 2, 3}, 4)]


def test_the_store_of_a_host_that_is_lost_is_hosted_again_though_its_connection_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be frozen. Nobody else would hear of it, and who comes would begin a group of its own."""
    porch = Porch(monkeypatch, here=(0, 1, 2, 3))
    porch.goes(3)
    porch.work()
    assert porch.hosted == [], "it hosted nothing"
    porch.goes(1)
    assert porch.hosted == [], "it takes a while, and so it is left to the pool"
    porch.work()
    assert porch.hosted == [({0, 2}, 3)]


def test_hosting_is_tried_until_there_is_a_store_again(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.store_is_there = False
    porch.lost()
    worker = threading.Thread(target=porch.work)
    worker.start()
    eventually(lambda: len(porch.hosted) > 2)
    porch.store_is_there = True
    worker.join()


def test_hosting_is_given_up_by_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.store_is_there = False
    porch.lost()
    worker = threading.Thread(target=porch.work)
    worker.start()
    porch.entrance.leave()
    worker.join()
    porch.lost()
    porch.goes(3)
    assert porch.jobs == []


def test_who_was_expelled_hands_the_store_over_and_looks_for_none_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.store_is_there = False
    porch.lost()
    worker = threading.Thread(target=porch.work)
    worker.start()
    eventually(lambda: porch.hosted)
    porch.entrance.expelled()
    worker.join()
    porch.work()
    assert porch.handed_over == 1
    porch.lost()
    porch.goes(1)
    porch.entrance.tick(1000.0)
    assert porch.jobs == [], "the way in is the others' business"
    porch.entrance.leave()
    porch.entrance.leave()
    assert porch.left == [2], "its name is given back all the same, once"


def test_that_the_store_is_handed_over_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.entrance.expelled()
    assert porch.handed_over == 0, "it may take a while, and so it is left to the pool"
    porch.work()
    assert porch.handed_over == 1


def test_in_a_fixed_group_who_was_expelled_hands_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch, is_open=False)
    porch.entrance.expelled()
    assert porch.jobs == []


def test_who_goes_while_the_store_is_away_loses_its_name_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    porch = Porch(monkeypatch)
    porch.host = "w3"
    porch.store_is_there = False
    porch.goes(1)
    porch.work()
    assert porch.marked == []
    porch.store_is_there = True
    porch.in_store = {1, 2, 3}
    porch.entrance.tick(1000.0)
    porch.work()
    assert porch.marked == [1]


def test_who_goes_while_the_store_is_being_hosted_does_not_stay_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if this worker is none of those who tell the store: what is in it now is from here."""
    porch = Porch(monkeypatch, here=(0, 1, 2, 3))
    porch.meanwhile = [3]
    porch.lost()
    porch.work()
    assert porch.hosted == [({0, 1, 2, 3}, 4)]
    assert porch.marked == [3]

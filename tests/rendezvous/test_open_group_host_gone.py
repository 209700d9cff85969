"""An open group whose store is lost with the worker that hosted it: who hosts it again, and who waits for that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from open_stage import OpenStage, Worker, hosts, payload

from eventually import eventually
from farcall.errors import RendezvousError
from farcall.protocol.handshake import Welcome
from farcall.rendezvous import call_when_store_lost, join_open, leave_open, remove_member, stop_hosting
from farcall.rendezvous.client import StoreClient
from farcall.rendezvous.open_group_store import MEMBER_PREFIX, NAME_PREFIX, NUMBER_GAP


@pytest.fixture
def stage(open_stage: OpenStage) -> OpenStage:
    return open_stage


def test_of_two_that_host_the_store_again_one_does_and_the_other_uses_it(
    stage: OpenStage, background: ThreadPoolExecutor
) -> None:
    host, a, b = stage.join("host"), stage.join("a"), stage.join("b")
    host.crash()
    together = threading.Barrier(2)

    def compete(one: Worker, other: Worker) -> bool:
        together.wait(10)
        return one.ensure_store(other)

    assert list(background.map(compete, (a, b), (b, a))) == [True, True]
    assert sorted(hosts(a, b)) == [False, True]
    newcomer = stage.join("c")
    assert newcomer.number > 3 + NUMBER_GAP
    assert newcomer.there == {2: b"a is 2", 3: b"b is 3", newcomer.number: payload("c", newcomer.number)}
    assert newcomer.meeting.group == host.meeting.group
    with pytest.raises(RendezvousError, match="with number 2"):
        stage.join("a", timeout=0.4)
    assert stage.join("host", timeout=5).number > newcomer.number  # its name is free


def test_no_number_is_given_twice_though_host_after_host_is_gone(stage: OpenStage) -> None:
    host = stage.join("w0")
    numbers = [host.number]
    for n in range(1, 6):
        member, late = stage.join(f"w{n}"), stage.join(f"late{n}")
        numbers += [member.number, late.number]
        host.crash()
        late.crash()
        assert member.ensure_store()  # and it has not even heard of the late one
        host = member
    assert len(set(numbers)) == 11
    assert numbers == sorted(numbers)


def test_numbers_that_a_store_in_between_has_given_are_not_given_again(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall.rendezvous.open_group_store.random.randrange", lambda stop: 0)
    host, a, b = stage.join("host"), stage.join("a"), stage.join("b")
    host.crash()
    assert a.ensure_store(b)
    assert b.ensure_store(a)
    late = stage.join("late")
    assert late.number == 4 + NUMBER_GAP
    a.crash()
    assert b.ensure_store()  # it has not heard of the late one
    assert stage.join("next").number > late.number


def test_the_new_store_knows_those_whom_its_host_knows(stage: OpenStage) -> None:
    host, a, b = stage.join("host"), stage.join("a"), stage.join("b")
    host.crash()
    assert a.ensure_store(b)
    assert stage.join("c").there.keys() > {2, 3}
    with pytest.raises(RendezvousError, match="with number 3"):
        stage.join("b", timeout=0.4)
    leave_open(b.meeting, 3)
    b.store._disconnect()  # as if its connection had been lost just then
    assert b.ensure_store(a)
    assert MEMBER_PREFIX + "3" not in a.store.read(MEMBER_PREFIX)  # who has left does not come back


def test_a_store_that_answers_is_left_alone(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    connection = member.store._client
    assert member.ensure_store(host)
    assert member.ensure_store()  # somebody is gone, and it may have been the host
    assert host.ensure_store(member)
    assert hosts(host, member) == [True, False]
    assert member.store._client is connection


def test_a_host_that_is_gone_and_answers_is_not_what_the_group_has_its_store_from(stage: OpenStage) -> None:
    """It was taken for dead, and lives: nobody clears away in its store who is gone, until it lets another one host."""
    host, a, b = stage.join("host"), stage.join("a"), stage.join("b")
    remove_member(host.meeting, b.number)
    assert not a.ensure_store(b, gone=[host])
    assert not b.ensure_store(a, gone=[host])
    assert list(a.store.read(MEMBER_PREFIX)) == [MEMBER_PREFIX + "1", MEMBER_PREFIX + "2"], (
        "it can be asked meanwhile, and nobody settles in it"
    )
    host.store.forget_own_entries()
    stop_hosting(host.meeting)
    assert a.ensure_store(b, gone=[host])
    assert b.ensure_store(a, gone=[host])
    assert hosts(host, a, b) == [False, True, False]
    assert sorted(a.store.read(NAME_PREFIX)) == [NAME_PREFIX + "a", NAME_PREFIX + "b"]
    assert b.ensure_store(gone=[host]), "the new host is not known to be gone"


def test_who_has_handed_the_store_over_does_not_host_it_again_and_can_still_leave(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    for _ in range(2):
        stop_hosting(host.meeting)
    assert not host.ensure_store(member)
    assert not host.store.hosts
    client = member.store._client
    eventually(lambda: client is not None and client.is_ended)
    assert member.ensure_store(host)
    mark = MEMBER_PREFIX + str(host.number)
    assert mark in member.store.read(MEMBER_PREFIX)
    leave_open(host.meeting, host.number)
    assert mark not in member.store.read(MEMBER_PREFIX)


def test_who_only_uses_the_store_hands_nothing_over(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    stop_hosting(member.meeting)
    assert hosts(host, member) == [True, False]
    assert len(member.store.read(MEMBER_PREFIX)) == 2
    host.leave()
    assert not member.ensure_store()


def test_who_comes_while_nobody_hosts_the_store_waits_for_the_members(
    stage: OpenStage, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    asked = threading.Semaphore(0)
    here = "farcall.rendezvous.open_group_store.is_group_on_this_machine"

    def counted(place: object) -> bool:
        asked.release()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(here, counted)
        newcomer = background.submit(stage.join, "newcomer")
        for _ in range(3):
            assert asked.acquire(timeout=10)
    assert not newcomer.done()
    assert member.ensure_store()
    assert newcomer.result(10).meeting.group == host.meeting.group
    assert list(newcomer.result().there) == [2, newcomer.result().number]


def test_members_on_this_machine_keep_a_newcomer_from_beginning_anew(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    with pytest.raises(RendezvousError, match=r"worker 'n' found no store .*workers of a group at this address"):
        stage.meet("n", timeout=0.3)
    assert member.ensure_store()
    assert stage.join("n").meeting.group == member.meeting.group


def test_where_nobody_is_left_a_new_group_begins(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.rendezvous.open_group_store.FILE_WAIT_S", 0.05)
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    member.crash()
    fresh = stage.join("host")
    assert fresh.number == 1
    assert fresh.meeting.group != host.meeting.group


def test_workers_that_do_not_host_their_store_again_are_not_waited_for_without_end(
    stage: OpenStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall.rendezvous.open_group_store.PRESENCE_WAIT_S", 0.05)
    monkeypatch.setattr("farcall.rendezvous.open_group_store.FILE_WAIT_S", 0.05)
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    assert stage.join("fresh").number == 1
    # For the member this is somebody else's store, which it neither uses nor takes over.
    assert not member.ensure_store()
    remove_member(member.meeting, 1)
    assert list(stage.join("another").there) == [1, 2]


def test_a_member_that_the_new_host_did_not_know_makes_itself_known(stage: OpenStage) -> None:
    host, a, b = stage.join("host"), stage.join("a"), stage.join("b")
    host.crash()
    assert a.ensure_store()
    assert b.ensure_store(a)
    assert list(stage.join("c").there)[:2] == [2, 3]
    with pytest.raises(RendezvousError, match="with number 3"):
        stage.join("b", timeout=0.4)


def test_a_member_finds_the_new_store_by_itself_when_it_has_something_to_say(stage: OpenStage) -> None:
    host, a, b, c = (stage.join(name) for name in ("host", "a", "b", "c"))
    host.crash()
    assert a.ensure_store(b, c)
    remove_member(b.meeting, c.number)
    leave_open(b.meeting, b.number)
    assert list(a.store.read(MEMBER_PREFIX)) == [MEMBER_PREFIX + "2"]


def test_a_member_whose_store_is_silent_finds_the_new_one(
    stage: OpenStage, occupied: Callable[..., socket.socket]
) -> None:
    host, member = stage.join("host"), stage.join("member")
    client = member.store._client
    assert client is not None
    client.close()
    silent = socket.create_connection(occupied().getsockname())
    member.store._client = StoreClient(silent, Welcome("frozen", -1), limit=member.store._limit, good_bye_timeout=0)
    remove_member(member.meeting, 2)
    assert list(host.store.read(MEMBER_PREFIX)) == [MEMBER_PREFIX + "1"]


def test_who_is_gone_is_said_in_a_second_though_there_is_no_store(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    host.crash()
    began = time.monotonic()
    remove_member(member.meeting, 1)
    leave_open(member.meeting, 2)
    assert time.monotonic() - began < 2 * 2


def test_the_loss_of_the_store_is_told_and_its_closing_here_is_not(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    lost = {name: threading.Event() for name in ("host", "member")}
    for worker in (host, member):
        call_when_store_lost(worker.meeting, lost[worker.name].set)
    host.leave()
    assert lost["member"].wait(10)
    assert not lost["host"].is_set()
    assert member.ensure_store()
    member.store.close()
    assert not lost["host"].is_set()


def test_a_host_that_leaves_waits_for_nobody_and_the_others_go_on(stage: OpenStage) -> None:
    host, member = stage.join("host"), stage.join("member")
    began = time.monotonic()
    host.leave()
    host.store.close()
    assert time.monotonic() - began < 3
    assert not host.ensure_store()  # it has left
    assert member.ensure_store()
    assert next(iter(stage.join("host").there)) == member.number


def test_the_store_may_be_lost_while_a_worker_joins(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.rendezvous.open_group_store.FILE_WAIT_S", 0.05)
    host = stage.join("host")
    newcomer = stage.meet("n")
    before = newcomer.group
    asked: list[int] = []

    def payload_of(number: int) -> bytes:
        if not asked:
            host.crash()
        asked.append(number)
        return b"%d" % number

    assert join_open(newcomer, "n", payload_of, 20) == (1, {1: b"1"})  # nobody was left: a group of its own
    assert asked == [2, 1]
    assert newcomer.group != before
    assert stage.join("m").meeting.group == newcomer.group


def test_a_store_that_does_not_come_back_ends_the_joining_in_time(stage: OpenStage) -> None:
    host, _ = stage.join("host"), stage.join("member")
    newcomer = stage.meet("n")
    host.crash()
    with pytest.raises(RendezvousError, match="should host it again soon"):
        join_open(newcomer, "n", lambda number: b"", 0.3)

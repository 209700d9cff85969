"""The group as an agent lives in it: who goes, who is let in, who is told of it, and what is remembered of them."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from membership_stage import SLOW_HEART, connect_all, names_here

from eventually import eventually
from farcall import WorkerLost
from farcall.agent import Agent
from farcall.agent import agent as agent_module
from farcall.agent import group as group_module
from farcall.backends.interface import MembershipChange
from farcall.protocol.handshake import Hello
from farcall.protocol.membership_messages import Member, News, encode
from gates import SOON, new_gate, wait_at
from group_stage import NewGroup, call, echo, start

pytestmark = pytest.mark.timeout(60)


def served(agent: Agent) -> int:
    return sum(incoming.calls_served for incoming in list(agent._incoming))


def watched(agent: Agent) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    agent.watch_members(lambda change: seen.append((change.kind, change.worker.name)))
    return seen


# -- Who goes


@pytest.mark.parametrize("graceful", [False, True], ids=["shutdown", "graceful shutdown"])
def test_who_leaves_an_open_group_is_known_to_have_left_at_once_by_all(
    new_open_group: NewGroup, graceful: bool
) -> None:
    group = new_open_group(4)
    connect_all(group)
    seen = [watched(agent) for agent in group][:3]
    group.leave("worker3", graceful=graceful)
    eventually(lambda: all(each == [("left", "worker3")] for each in seen))
    for agent in group:
        assert names_here(agent) == {"worker0", "worker1", "worker2"}
        with pytest.raises(WorkerLost, match="worker 'worker3' has left the group"):
            call(agent, "worker3", echo, 1)
    connect_all(group)


def test_who_leaves_tells_those_too_with_whom_it_has_only_their_connection(new_group: NewGroup) -> None:
    group = new_group(2, **SLOW_HEART)
    assert call(group[0], "worker1", echo, 1) == 1
    assert not group[1]._connections
    seen = watched(group[0])
    group[1].shutdown()
    eventually(lambda: seen == [("left", "worker1")])


def test_who_dies_is_noticed_too_by_whom_it_only_called(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group(2, **SLOW_HEART)
    assert call(group[1], "worker0", echo, 1) == 1
    assert not group[0]._connections
    seen = watched(group[0])
    monkeypatch.setattr(group[1].group, "leave", lambda: None)
    group[1].shutdown()
    eventually(lambda: seen == [("lost", "worker1")])


def test_a_good_bye_ends_the_calls_that_it_comes_behind_at_once(new_group: NewGroup) -> None:
    """Though the connection stays: who leaves may have much to do before it hangs up."""
    group = new_group(2, **SLOW_HEART)
    gate = new_gate("good-bye")
    future = start(group[0], "worker1", wait_at, "good-bye")
    eventually(lambda: group[1]._serving.is_busy())
    group[1].group.leave()
    assert str(future.exception(SOON)).startswith("worker 'worker1' was lost: it has left the group")
    gate.set()


def test_whose_listeners_and_connections_are_gone_is_lost_at_once_for_all(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its process was killed: it says nothing to anybody."""
    group = new_group(4, **SLOW_HEART)
    connect_all(group)
    gate = new_gate("killed")
    futures = [start(agent, "worker3", wait_at, "killed") for agent in group if agent is not group[3]]
    seen = [watched(agent) for agent in group][:3]
    monkeypatch.setattr(group[3].group, "leave", lambda: None)
    monkeypatch.setattr(agent_module, "_CLOSE_TIMEOUT", 0.01)
    group[3].shutdown()
    for future in futures:
        with pytest.raises(WorkerLost, match="worker 'worker3' was lost") as caught:
            future.wait()
        assert caught.value.worker == "worker3"
    eventually(lambda: all(each == [("lost", "worker3")] for each in seen))
    gate.set()


@pytest.mark.parametrize("graceful", [False, True], ids=["left", "left in good order"])
def test_calls_under_way_end_at_once_and_name_who_left(new_open_group: NewGroup, graceful: bool) -> None:
    group = new_open_group(2)
    gate = new_gate("leaves")
    future = start(group[0], "worker1", wait_at, "leaves")
    eventually(lambda: group[1]._serving.is_busy())
    if graceful:
        gate.set()
        group.leave("worker1", graceful=True)
        assert future.wait() is None, "it ends what runs for others first"
    else:
        threading.Thread(target=group.leave, args=("worker1",)).start()
        with pytest.raises(WorkerLost, match="worker 'worker1'") as caught:
            future.wait()
        assert caught.value.worker == "worker1"
        gate.set()


def test_what_a_leaver_has_answered_arrives_though_others_say_first_that_it_has_left(
    new_open_group: NewGroup,
) -> None:
    group = new_open_group(3)
    connect_all(group)
    before = served(group[1])
    future = group[0].call("worker1", echo, (1,), None, SOON)
    eventually(lambda: served(group[1]) > before and not group[1]._serving.is_busy())
    group[0].group.told(3, encode(News(left=((2, 2),))))
    assert "worker1" not in names_here(group[0])
    with pytest.raises(WorkerLost, match="has left the group"):
        call(group[0], "worker1", echo, 1)
    assert future.wait() == 1


def test_a_leaver_that_does_not_hang_up_is_not_waited_for_for_long(new_open_group: NewGroup) -> None:
    group = new_open_group(2)
    gate = new_gate("lingers")
    future = start(group[0], "worker1", wait_at, "lingers")
    eventually(lambda: group[1]._serving.is_busy())
    group[0].group.told(2, encode(News(left=((2, 2),))))
    group[0].group.tick(1.0)
    assert not future.done()
    group[0].group.tick(2.0)
    assert str(future.exception(SOON)).startswith("worker 'worker1' was lost: it has left the group")
    gate.set()


def test_who_leaves_in_good_order_waits_until_its_answers_are_taken(
    new_open_group: NewGroup, background: ThreadPoolExecutor
) -> None:
    group = new_open_group(2)
    assert call(group[0], "worker1", echo, 1) == 1
    (incoming,) = group[1]._incoming
    leaver = group[1]
    incoming._sender.waiting += 1  # as if the caller did not read
    assert not leaver.is_idle()
    leaving = background.submit(group.leave, "worker1", graceful=True)
    incoming._sender.waiting -= 1
    leaving.result(SOON)


# -- Who is let in


def hello(agent: Agent, number: int, **changes: Any) -> Hello:
    me = agent.group.me
    said = {"group": agent.group.run, "wanted": me.name, "wanted_number": me.number, **changes}
    return Hello(name="stranger", rank=-1, number=number, host="host", addresses=("memory:1",), **said)


def refusal(agent: Agent, greeting: Hello) -> tuple[str, bool]:
    refused = agent.group.refusal(greeting)
    assert refused is not None
    return refused.reason, refused.gone


def test_an_unknown_number_is_refused_in_a_fixed_group_and_welcome_in_an_open_one(
    new_group: NewGroup, new_open_group: NewGroup
) -> None:
    fixed, open_one = new_group(1)[0], new_open_group(1)[0]
    assert refusal(fixed, hello(fixed, 7)) == ("there is no worker 'stranger' with number 7 in this group", False)
    assert open_one.group.refusal(hello(open_one, 7)) is None


def test_who_is_gone_is_refused_and_hears_that_it_is(new_open_group: NewGroup) -> None:
    agent = new_open_group(1)[0]
    agent.group.told(1, encode(News(lost=((7, 7),))))
    reason, gone = refusal(agent, hello(agent, 7))
    assert gone
    assert reason == "worker 'stranger' is not in the group any more: it has left, or was taken for dead"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": "other"}, "this worker is of group '.*', not of 'other'"),
        ({"wanted": "worker9"}, "this is worker 'worker0', not 'worker9'"),
        ({"wanted_number": 9}, "worker 'worker0' was started again, and is not the one that was wanted"),
    ],
)
def test_who_wants_another_one_is_refused(new_open_group: NewGroup, changes: Any, reason: str) -> None:
    agent = new_open_group(1)[0]
    refused = agent.group.refusal(hello(agent, 7, **changes))
    assert refused is not None
    assert not refused.gone
    assert re.fullmatch(reason, refused.reason)


def test_a_restarted_worker_is_another_one(new_open_group: NewGroup) -> None:
    group = new_open_group(2)
    connect_all(group)
    seen = watched(group[0])
    old = group[0].group.here()[2]
    group.leave("worker1")
    new = group.join("worker1")
    assert new.group.me.number > old.number
    eventually(lambda: seen == [("left", "worker1"), ("joined", "worker1")])
    assert call(group[0], "worker1", echo, 1) == 1
    assert call(new, "worker0", echo, 1) == 1
    assert group[0].group.here().keys() == {1, new.group.me.number}
    with pytest.raises(WorkerLost, match="has left the group"):
        group[0].calling.numbered[2].connect(SOON)


# -- Who is told


def test_watchers_are_told_of_all_in_order(new_open_group: NewGroup) -> None:
    group = new_open_group(2)
    seen = watched(group[0])
    for name in ("a", "b"):
        group.join(name)
    eventually(lambda: seen == [("joined", "a"), ("joined", "b")])
    group.leave("a")
    eventually(lambda: len(seen) == 3)
    group[0].group._unreachable(4)
    eventually(lambda: len(seen) == 4)
    assert seen[2:] == [("left", "a"), ("lost", "b")]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_watcher_that_raises_harms_nobody(
    new_open_group: NewGroup, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    group = new_open_group(1)

    def fails(change: MembershipChange) -> None:
        raise error(change.kind)

    group[0].watch_members(fails)
    seen = watched(group[0])
    assert call(group.join("a"), "worker0", echo, 1) == 1
    group.leave("a")
    eventually(lambda: seen == [("joined", "a"), ("left", "a")])
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    group[0].unwatch_members(fails)
    group[0].unwatch_members(fails)
    group.join("a")
    eventually(lambda: len(seen) == 3)
    assert len(caplog.records) == 2


def test_a_slow_watcher_is_told_one_thing_after_the_other(new_open_group: NewGroup) -> None:
    """Though the pool has threads to run several jobs at once."""
    group = new_open_group(1)
    gate = new_gate("slow watcher")
    seen: list[str] = []

    def slow(change: MembershipChange) -> None:
        seen.append(change.worker.name)
        if len(seen) == 1:
            wait_at("slow watcher")

    group[0].watch_members(slow)
    names = ["a", "b", "c"]
    for name in names:
        group.join(name)
    eventually(lambda: len(group[0].group.here()) == 4 and not group[0]._serving.ready)
    for name in names:
        assert call(group[0], name, echo, 1) == 1
        assert call(group[name], "worker0", echo, 1) == 1  # in the order of what is ready
    assert seen == ["a"]
    gate.set()
    eventually(lambda: seen == names)


# -- What is remembered


def test_of_those_who_have_gone_some_are_remembered(new_open_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_REMEMBERED", 2)
    agent = new_open_group(1)[0]
    strangers = tuple(Member(number, f"s{number}", -1, "elsewhere", ()) for number in range(10, 14))
    agent.group.told(1, encode(News(members=strangers)))
    assert len(agent.group.here()) == 5
    agent.group.told(1, encode(News(left=((10, 12),))))
    assert set(agent.calling.numbered) == {1, 11, 12, 13}
    assert [name for name in agent.calling.peers if isinstance(name, str)] == ["worker0", "s11", "s12", "s13"]
    with pytest.raises(WorkerLost, match="worker 's12' has left the group"):
        call(agent, "s12", echo, 1)
    assert agent.group.name_of(10) == "number 10"
    assert set(agent.group.ends()) == {1, 13}


def test_calls_to_those_end_of_whom_so_many_go_at_once_that_they_are_not_remembered(
    new_open_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_REMEMBERED", 0)
    group = new_open_group(2)
    gate = new_gate("forgotten")
    future = start(group[0], "worker1", wait_at, "forgotten")
    group[0].group._unreachable(2)
    assert isinstance(future.exception(SOON), WorkerLost)
    gate.set()

"""Who is silent is taken for dead, and hears of it; who is only busy is not.

Where time matters the hearts beat at the test's word (`Hearts`), so that a busy machine makes nobody seem dead.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from membership_stage import INTERVAL, ROUNDS, SLOW_HEART, connect_all, names_here

from eventually import eventually
from farcall import ExpelledError, ShutdownError, WorkerLost
from farcall.agent import Agent
from farcall.protocol.membership_messages import News, encode
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start

pytestmark = pytest.mark.timeout(60)


class Hearts:
    """Has the hearts of some workers beat, on a clock of its own."""

    def __init__(self, *agents: Agent) -> None:
        self.agents = agents
        self.now = 1.0
        for agent in agents:
            agent.group.tick(self.now)  # from now on they know what time it is

    def beat(self, rounds: int = 1) -> None:
        """Each pings its neighbours; the next round comes when those of them that beat here have answered."""
        for _ in range(rounds):
            self.now += INTERVAL
            for agent in self.agents:
                agent.group.tick(self.now)
            eventually(lambda: not any(self.unheard(agent) for agent in self.agents))

    def unheard(self, agent: Agent) -> list[str]:
        names = {each.info.name for each in self.agents}
        return [name for name, silence in agent.group.silences().items() if name in names and silence]


def expel(agent: Agent) -> None:
    """Somebody tells it that the group has taken it for dead."""
    number = agent.group.me.number
    somebody = next(each for each in agent.group.here() if each != number)
    agent.group.told(somebody, encode(News(lost=((number, number),))))


def deafen(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no ping any more. Connections that are there keep the old way: call it before any is made."""
    monkeypatch.setattr(agent.group, "told", lambda sender, news: None)


def test_who_does_not_answer_is_lost_for_all_after_the_patience_and_hears_of_it(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = new_group(4, **SLOW_HEART)
    deafen(group[3], monkeypatch)
    gate = new_gate("silent")
    future = start(group[0], "worker3", wait_at, "silent")
    of_its_own = start(group[3], "worker0", wait_at, "silent")
    hearts = Hearts(*list(group)[:3])
    hearts.beat(ROUNDS - 1)
    assert all("worker3" in names_here(agent) for agent in list(group)[:3]), "too early"
    hearts.beat(2)
    eventually(lambda: not any("worker3" in names_here(agent) for agent in list(group)[:3]))
    with pytest.raises(WorkerLost, match="worker 'worker3' was lost: the group cannot reach it"):
        future.wait()
    eventually(lambda: isinstance(group[3].closed, ExpelledError))
    assert of_its_own.exception(SOON) is not None
    with pytest.raises(ExpelledError, match=r"worker 'worker3' \(this one\) was taken .* shutdown\(graceful=False\)"):
        call(group[3], "worker0", echo, 1)
    gate.set()
    with pytest.raises(ShutdownError, match="was taken for dead by its group, and had nobody to wait for"):
        group[3].shutdown(graceful=True, timeout=SOON)
    assert call(group[0], "worker1", echo, 1) == 1


def test_the_first_call_of_one_that_was_taken_for_dead_says_so(new_group: NewGroup) -> None:
    """Nobody has told it before: it hears of it as it connects."""
    group = new_group(2, **SLOW_HEART)
    group[0].group.told(0, encode(News(lost=((1, 1),))))
    assert group[1].closed is None
    with pytest.raises(ExpelledError, match=r"worker 'worker1' \(this one\) was taken for dead"):
        call(group[1], "worker0", echo, 1)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "fixed"])
def test_a_shutdown_that_waits_ends_when_this_worker_is_taken_for_dead(
    new_group: NewGroup, new_open_group: NewGroup, background: ThreadPoolExecutor, is_open: bool
) -> None:
    """It has given back a reference, which nobody acknowledges any more; a function runs; and there is no deadline."""
    group = new_open_group(2) if is_open else new_group(2, **SLOW_HEART)
    one, other = group
    held = one.remote("worker1", echo, (1,), None)
    gate = new_gate("expelled meanwhile")
    future = start(other, "worker0", wait_at, "expelled meanwhile")
    assert arrived["expelled meanwhile"].wait(SOON)
    shutting_down = background.submit(one.shutdown, True, 0.0)
    with pytest.raises(TimeoutError):
        shutting_down.result(0.05)
    expel(one)
    with pytest.raises(ShutdownError, match="was taken for dead by its group, and had nobody to wait for; everything"):
        shutting_down.result(SOON)
    assert isinstance(future.exception(SOON), WorkerLost)
    assert held is not None
    gate.set()


def test_who_was_taken_for_dead_and_drops_a_reference_has_nothing_to_do(new_open_group: NewGroup) -> None:
    group = new_open_group(2)
    one = group[0]
    held = [one.remote("worker1", echo, (1,), None)]
    expel(one)
    eventually(lambda: held[0].new_error is not None)
    with pytest.raises(ExpelledError, match="create it anew"):
        held[0].check()
    held.clear()
    gc.collect()
    eventually(lambda: not one.book.has_work())
    assert one.is_idle()


def test_the_names_of_those_who_are_gone_unless_another_one_has_them(new_open_group: NewGroup) -> None:
    group = new_open_group(3)
    assert group[0].group.names_gone() == set()
    for name in ("worker1", "worker2"):
        group.leave(name)
    eventually(lambda: group[0].group.names_gone() == {"worker1", "worker2"})
    group.join("worker2")
    eventually(lambda: group[0].group.names_gone() == {"worker1"})


@pytest.mark.parametrize("threads", [1, 2])
def test_who_is_busy_in_all_its_threads_answers_all_the_same(new_group: NewGroup, threads: int) -> None:
    group = new_group(3, num_worker_threads=threads, **SLOW_HEART)
    gate = new_gate("busy")
    futures = [start(group[0], "worker1", wait_at, "busy") for _ in range(2 * threads)]
    hearts = Hearts(*group)
    hearts.beat(ROUNDS + 4)
    assert all(len(names_here(agent)) == 3 for agent in group)
    gate.set()
    assert [future.wait() for future in futures] == [None] * 2 * threads


def test_who_is_busy_in_its_only_thread_connects_all_the_same(new_group: NewGroup) -> None:
    """It has no connection to anybody yet: only so can it answer a ping."""
    group = new_group(2, num_worker_threads=1, **SLOW_HEART)
    gate = new_gate("connects")
    future = start(group[0], "worker1", wait_at, "connects")
    eventually(lambda: group[1]._serving.is_busy())
    assert not group[1]._connections
    Hearts(group[0], group[1]).beat(1)
    assert group[1]._connections
    gate.set()
    assert future.wait() is None


def test_without_a_thread_to_be_had_a_ping_is_answered_when_there_is_one(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = new_group(2, **SLOW_HEART)
    serving = group[1]._serving
    with monkeypatch.context() as patch:
        patch.setattr(serving, "_have_follower", lambda: None)
        Hearts(group[0], group[1]).beat(2)  # the leader itself connects
    assert len(names_here(group[0])) == 2


def test_a_connection_that_is_cut_is_made_anew_and_nobody_is_lost(new_group: NewGroup) -> None:
    group = new_group(3, **SLOW_HEART)
    connect_all(group)
    hearts = Hearts(*group)
    for _ in range(3):
        cut = {connection for agent in group for connection in agent._connections}
        for agent in group:
            for incoming in list(agent._incoming):
                incoming.close()
        eventually(lambda cut=cut: all(len(set(agent._connections) - cut) == 2 for agent in group))
        hearts.beat(1)
    connect_all(group)
    assert all(len(names_here(agent)) == 3 for agent in group)


def test_the_hearts_beat_by_themselves(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group(3, heartbeat_interval=0.05, heartbeat_patience=0.5)
    deafen(group[2], monkeypatch)
    monkeypatch.setattr(group[2]._supervisor, "beat", lambda now: None)
    eventually(lambda: isinstance(group[2].closed, ExpelledError) or "worker2" not in names_here(group[0]))
    eventually(lambda: "worker2" not in names_here(group[1]))

"""What workers say about references while connections break: every word is heard, and once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall import RRef, WorkerLost
from farcall.agent import Agent
from farcall.agent.incoming import Incoming
from farcall.agent.outgoing import Outgoing
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, run, runs, start
from reference_stage import expect_confirmed, expect_nothing_left, fetch, here, remote

pytestmark = pytest.mark.timeout(60)


def run_and_fetch(rref: RRef[Any]) -> Any:
    runs.append("fetch")
    return rref.to_here(timeout=SOON)


def connection(agent: Agent, to: int) -> Outgoing:
    found = agent._peers[to].connection
    assert found is not None
    return found


def cut(agent: Agent, to: int) -> None:
    """Ends the connection for calls of a worker to another, and waits until there is another."""
    old = connection(agent, to)
    old.lose("it was cut")
    eventually(lambda: agent._peers[to].connection is not None and agent._peers[to].connection is not old)


def reference_at(group: LocalGroup, gate: str) -> RRef[Any]:
    """Runs on worker 0: a reference of its own, after a while."""
    wait_at(gate)
    return here(group[0], "late")


def lose_before_sending(one: Outgoing) -> None:
    """The next message about references on this connection is lost with it."""

    def lose(*_: Any) -> None:
        del one.send_control
        one.lose("it was cut before the message was sent")

    one.send_control = lose  # type: ignore[method-assign]


def once(
    monkeypatch: pytest.MonkeyPatch,
    agent: Agent,
    method: str,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Does something before or after the next use of this method of a worker's book."""
    original = getattr(agent.book, method)

    def with_it(*args: Any) -> Any:
        monkeypatch.setattr(agent.book, method, original)
        before()
        result = original(*args)
        after()
        return result

    monkeypatch.setattr(agent.book, method, with_it)


def confirmed(creator: Agent, owner: int) -> RRef[Any]:
    """A reference that its owner counts: nothing more is to be said of it."""
    rref = remote(creator, owner, echo, "tea")
    expect_confirmed(rref)
    return rref


def fetch_again(rref: RRef[Any]) -> Any:
    """Fetches it, though a first attempt may meet the connection that is going."""
    try:
        return rref.to_here(timeout=SOON)
    except WorkerLost:
        return rref.to_here(timeout=SOON)


@pytest.mark.parametrize("moment", ["before it is sent", "after it was read"])
def test_a_remote_call_survives_its_connection(warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    if moment == "before it is sent":
        lose_before_sending(connection(warm[0], 1))
    else:
        # before it is answered
        once(monkeypatch, warm[1], "create_requested", after=lambda: warm[1].group._incoming[0].close())
    argument = here(warm[0], "milk")
    rref = remote(warm[0], 1, run, [argument])
    del argument
    expect_confirmed(rref)
    assert fetch_again(rref)[0].to_here() == "milk"
    assert len(runs) == 1
    runs.clear()
    del rref
    expect_nothing_left(warm)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_references_of_a_call_that_was_lost_do_not_leak(warm: LocalGroup, owner: int) -> None:
    """The callee has read it, or has not: the caller cannot know, and hears that the worker was lost."""
    rref = confirmed(warm[0], owner)
    gate = new_gate("lost")
    future = start(warm[0], 1, wait_and_drop, "lost", rref)
    assert arrived["lost"].wait(SOON)
    cut(warm[0], 1)
    with pytest.raises(WorkerLost, match="worker 'worker1' was lost"):
        future.wait()
    gate.set()
    assert call(warm[0], 1, fetch, rref) == "tea"
    del rref, future
    expect_nothing_left(warm)


def wait_and_drop(name: str, rref: RRef[Any]) -> None:
    wait_at(name)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_references_of_a_call_that_never_arrived_do_not_leak(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    rref = confirmed(warm[0], owner)
    once(monkeypatch, warm[0], "pass_on", after=lambda: connection(warm[0], 1).lose("it was cut before it was sent"))
    with pytest.raises(WorkerLost):
        call(warm[0], 1, run_and_fetch, rref)
    del rref
    expect_nothing_left(warm)
    assert runs == []


@pytest.mark.parametrize("way", ["call", "remote"])
def test_a_connection_that_was_replaced_just_before_its_use(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A thread has got the connection; it is lost and re-made by another before the thread goes on."""
    rref = confirmed(warm[0], 2)

    def replace_it() -> None:
        cut(warm[0], 1)
        eventually(lambda: not warm[0]._serving.is_busy())

    once(monkeypatch, warm[0], "pass_on" if way == "call" else "call_remote", before=replace_it)
    if way == "call":
        with pytest.raises(WorkerLost):
            call(warm[0], 1, fetch, rref)
    else:
        there = remote(warm[0], 1, fetch, rref)
        assert there.to_here(timeout=SOON) == "tea"
        del there
    del rref
    expect_nothing_left(warm)


@pytest.mark.parametrize("cut_by", ["caller", "callee"])
def test_a_reference_returned_to_a_caller_whose_connection_is_gone_does_not_leak(warm: LocalGroup, cut_by: str) -> None:
    gate = new_gate("gone")
    future = start(warm[1], 0, reference_at, warm, "gone")
    assert arrived["gone"].wait(SOON)
    if cut_by == "caller":
        cut(warm[1], 0)
    else:
        warm[0].group._incoming[1].close()
    with pytest.raises(WorkerLost):
        future.wait()
    eventually(lambda: 1 in warm[0].group._incoming)
    eventually(lambda: not warm[0]._serving.ready and not warm[1]._serving.ready)
    gate.set()
    del future
    expect_nothing_left(warm)


def test_what_was_given_back_survives_the_connection(warm: LocalGroup) -> None:
    rref = confirmed(warm[0], 1)
    eventually(lambda: not warm[0].book.has_work())
    lose_before_sending(connection(warm[0], 1))
    del rref
    expect_nothing_left(warm)


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_breaks_in_the_greeting_does_not_make_a_worker_dead(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Somebody listens there, so it lives."""
    rref = confirmed(warm[0], 1)
    broken: list[Incoming] = []
    greet = Incoming._greet

    def break_off(incoming: Incoming, data: bytes) -> bytes:
        if incoming._reception.me.number == 1 and len(broken) < times:
            broken.append(incoming)
            raise ConnectionResetError("cut")
        return greet(incoming, data)

    monkeypatch.setattr(Incoming, "_greet", break_off)
    connection(warm[0], 1).lose("it was cut")
    eventually(lambda: len(broken) == times)
    eventually(lambda: warm[0]._peers[1].connection is not None or warm[0]._peers[1].is_lost)
    assert not warm[0]._peers[1].is_lost
    assert rref.to_here() == "tea"
    del rref
    expect_nothing_left(warm)


def test_a_connection_that_is_made_while_the_worker_closes_is_closed(warm: LocalGroup) -> None:
    warm[0].shutdown(graceful=False, timeout=0)
    warm[0].group._posts[1].run()  # it was under way in the serving pool
    left = list(warm[0]._connections)
    for one in left:
        one.close("by the test")
    assert left == []


@pytest.mark.parametrize("seed", range(4))
def test_connections_are_cut_at_any_moment(new_group: Callable[..., LocalGroup], seed: int) -> None:
    """As often as the workers get on, not as the clock does: on a slow machine, nobody would ever get through."""
    group = new_group(3)
    chance = random.Random(seed)
    steps, enough = threading.Semaphore(0), threading.Event()
    cuts = 0
    with ThreadPoolExecutor(3) as pool:
        sharing = [
            pool.submit(share, group, number, random.Random(seed * 100 + number), steps, enough) for number in range(3)
        ]
        pause = threading.Event()
        while not all(one.done() for one in sharing):
            if not all(steps.acquire(timeout=0.1) for _ in range(chance.randrange(1, 8))):
                continue
            pause.wait(chance.random() * 0.005)
            agent = group[chance.randrange(3)]
            ends = [*agent._connections, *agent._incoming]
            if ends:
                end = chance.choice(ends)
                end.lose("it was cut") if isinstance(end, Outgoing) else end.close()
                cuts += 1
                if cuts == CUTS:
                    enough.set()
        shared = [one.result() for one in sharing]
    assert cuts >= CUTS
    assert min(shared) >= ROUNDS
    assert not any(peer.is_lost for agent in group for peer in agent._peers.values())
    assert len(runs) == len(set(runs)), "a remote call ran twice"
    expect_nothing_left(group)


ROUNDS, CUTS = 10, 60
"""So many references of each are made, passed on and fetched to their end; so many connections are cut meanwhile."""


def share(
    group: LocalGroup, number: int, chance: random.Random, steps: threading.Semaphore, enough: threading.Event
) -> int:
    """Makes references and passes them on, whatever is cut meanwhile; how many of these came to their end."""
    done = 0
    mine: list[RRef[Any]] = []
    for count in range(100 * CUTS):
        if done >= ROUNDS and enough.is_set():
            break
        agent = group[chance.randrange(3)]
        try:
            rref = remote(agent, chance.randrange(3), run, (number, count))
            mine.append(rref)
            steps.release()
            assert call(agent, chance.randrange(3), fetch, rref) == (number, count)
            steps.release()
            back = call(agent, chance.randrange(3), echo, rref)
            steps.release()
            assert back.to_here(timeout=SOON) == (number, count)
            done += 1
        except WorkerLost:
            pass
        if len(mine) > 4:
            del mine[chance.randrange(len(mine))]
    for rref in mine:
        expect_confirmed(rref)
    return done

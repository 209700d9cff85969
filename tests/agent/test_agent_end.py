"""How agents shut down: at once or gracefully, with calls under way; and groups that do not start."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import pytest
from agent_stage import add_async, forward, note, seen

from eventually import eventually
from farcall import NotInitializedError, RpcError, ShutdownError, UsageError, WorkerLost
from farcall.agent import Agent
from farcall.agent.lanes import Lane
from farcall.futures import Future
from farcall.testing import LocalGroup, MemoryStore
from farcall.transports.base import Channel
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start
from interruption import At, Interrupt, interrupt

pytestmark = pytest.mark.timeout(30)


def test_after_the_shutdown_every_call_is_refused(group: LocalGroup) -> None:
    agent = group[0]
    agent.shutdown(graceful=False, timeout=0)
    for to in ("worker0", "worker1", "nobody"):
        with pytest.raises(NotInitializedError, match="'worker0' has shut down"):
            start(agent, to, echo, 1)
    agent.shutdown(graceful=False, timeout=0)  # harmless


def test_the_others_cannot_reach_a_worker_that_shut_down(group: LocalGroup) -> None:
    assert call(group[0], 1, echo, 1) == 1
    group[1].shutdown(graceful=False, timeout=0)
    for _ in range(3):
        with pytest.raises(WorkerLost, match="'worker1'") as caught:
            call(group[0], 1, echo, 1)
        assert caught.value.worker == "worker1"
    assert call(group[0], 2, echo, 1) == 1
    with pytest.raises(WorkerLost, match=r"'worker1' (cannot be reached|has left the group)"):
        call(group[2], 1, echo, 1)  # never was connected; perhaps another one has told it


def test_calls_under_way_fail_when_this_worker_shuts_down(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gates = [new_gate(f"end {n}") for n in range(4)]
    waiting = [background.submit(call, group[0], 1, wait_at, f"end {n}") for n in range(3)]
    future = start(group[0], 1, wait_at, "end 3")
    assert all(arrived[f"end {n}"].wait(SOON) for n in range(4))
    began = monotonic()
    group[0].shutdown(graceful=False, timeout=0)
    assert monotonic() - began < 1
    for one in waiting:
        with pytest.raises(RpcError, match="'worker0' \\(this one\\) shut down"):
            one.result(SOON)
    with pytest.raises(RpcError, match="`wait_at`"):
        future.wait()
    for gate in gates:
        gate.set()


@pytest.mark.parametrize("is_open", [False, True])
def test_calls_under_way_blame_this_worker_though_the_other_hangs_up_first(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    with LocalGroup(2, is_open=is_open) as group:
        check_who_is_blamed(group, monkeypatch)


def check_who_is_blamed(group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(lambda: len(group[0].get_worker_infos()) == 2)
    gate = new_gate("blame")
    future = start(group[0], "worker1", wait_at, "blame")
    assert arrived["blame"].wait(SOON)
    (connection,) = group[0]._connections
    leave = group[0].group.leave

    def leave_and_be_left() -> None:
        leave()
        eventually(connection.is_lost)  # it was read by somebody

    monkeypatch.setattr(group[0].group, "leave", leave_and_be_left)
    group[0].shutdown(graceful=False, timeout=0)
    gate.set()
    with pytest.raises(RpcError, match=r"'worker0' \(this one\) shut down before the call ended") as caught:
        future.wait()
    assert not isinstance(caught.value, WorkerLost)


def test_a_call_that_connects_while_this_worker_shuts_down_fails_at_once(
    group: LocalGroup, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = group[0]._peers["worker1"]
    connect = peer._open

    def connect_and_shut_down(deadline: float) -> tuple[Channel, Lane]:
        opened = connect(deadline)
        background.submit(group[0].shutdown, False, 0).result(SOON)
        return opened

    monkeypatch.setattr(peer, "_open", connect_and_shut_down)
    gate = new_gate("closing")
    calling = background.submit(call, group[0], 1, wait_at, "closing", timeout=2)
    try:
        error: object = calling.exception(1)
    except TimeoutError as late:
        error = late
    gate.set()
    wait([calling], SOON)
    for connection in list(group[0]._connections):
        connection.close("left open")
    assert isinstance(error, RpcError), "it waits for a reply though this worker is closed"


def test_what_hangs_on_calls_under_way_ends_with_this_worker(group: LocalGroup) -> None:
    gate = new_gate("end")
    derived = [start(group[0], 1, wait_at, "end").then(lambda future: future.value()) for _ in range(3)]
    assert arrived["end"].wait(SOON)
    group[0].shutdown(graceful=False, timeout=0)
    gate.set()
    for future in derived:
        assert isinstance(future.exception(1), RpcError)


def test_graceful_waits_for_what_runs_anywhere(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("work")
    future = start(group[0], 1, forward, group, "worker1", "worker2", wait_at, "work", "done")
    assert arrived["work"].wait(SOON)
    leaving = [background.submit(agent.shutdown, True, SOON) for agent in group]
    assert not any(one.done() for one in leaving)
    assert call(group[2], 0, echo, "still served") == "still served"
    gate.set()
    for one in leaving:
        one.result(SOON)
    assert future.wait() == "done"


def test_graceful_waits_for_callbacks_that_wait(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    seen.clear()
    hold: Future[None] = Future()
    start(group[0], 1, echo, 1).then(lambda _: (hold.wait(), call(group[0], 2, note, "called on"))).then(
        lambda future: future.exception()
    )
    leaving = [background.submit(agent.shutdown, True, SOON) for agent in group]
    left_early = [one for one in leaving if one in wait(leaving, timeout=0.3, return_when=FIRST_COMPLETED).done]
    hold.set_result(None)
    for one in leaving:
        one.result(SOON)
    assert left_early == []
    assert seen == ["called on"]


def test_graceful_names_who_did_not_come(group: LocalGroup) -> None:
    began = monotonic()
    with pytest.raises(ShutdownError, match="'worker1', 'worker2' did not come in time"):
        group[0].shutdown(graceful=True, timeout=0.1)
    assert monotonic() - began < 1
    with pytest.raises(NotInitializedError):
        start(group[0], 1, echo, 1)


def test_graceful_says_that_work_was_left(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("work")
    future = start(group[0], 1, wait_at, "work")
    assert arrived["work"].wait(SOON)
    with pytest.raises(
        ShutdownError, match="calls were still under way here: a call of `wait_at` on worker 'worker1'; "
    ):
        group[0].shutdown(graceful=True, timeout=0.1)
    assert isinstance(future.exception(), RpcError)
    gate.set()


def test_shutting_down_with_a_function_running_says_so(group: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    gate = new_gate("stuck")
    future = start(group[0], 1, wait_at, "stuck")
    assert arrived["stuck"].wait(SOON)
    with caplog.at_level(logging.WARNING, "farcall"):
        group[1].shutdown(graceful=False, timeout=0)
    assert "1 function(s) still run" in caplog.text
    assert isinstance(future.exception(SOON), WorkerLost)
    gate.set()


# -- Ctrl-C


FREEING = tuple(f"agent/{name}.py" for name in ("agent", "coroutines", "entrance", "poller", "serving", "supervisor"))


def is_free(agent: Agent) -> bool:
    """Whether nothing of it runs or listens any more, and its name is free."""
    threads = (agent._supervisor._thread, agent._loop._thread)
    listening = False
    for listener in agent._listeners:
        with suppress(OSError):
            listening |= listener.fileno() >= 0
    store = agent._rendezvous.store
    assert isinstance(store, MemoryStore)
    return (
        not any(thread is not None and thread.is_alive() for thread in threads)
        and not agent._serving.thread_idents()
        and not listening
        and agent._poller._bell < 0
        and store._closed
        and not any(key.startswith("open/here/") for key in store._keys.values)
    )


def test_a_shutdown_frees_everything_wherever_it_is_interrupted() -> None:
    for point in itertools.count():
        agent = LocalGroup(1, is_open=True)[0]
        assert call(agent, "worker0", add_async, 1, 2) == 3
        with suppress(Interrupt), At(FREEING, (point,)) as at:
            agent.shutdown(graceful=False, timeout=0.0)
        if point == 0:  # before it has even begun
            agent.shutdown(graceful=False, timeout=0.0)
        assert agent._ended, at.places
        eventually(lambda agent=agent: is_free(agent))
        if not at.has_acted:
            break
    assert point > 50


def test_a_graceful_shutdown_that_is_interrupted_twice_frees_everything(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = group[0]
    monkeypatch.setattr(agent, "is_idle", interrupt)
    interrupted = interrupt_calls(agent._supervisor, "close", 1, monkeypatch)
    with pytest.raises(Interrupt):
        agent.shutdown(graceful=True, timeout=0.0)
    assert interrupted == [1]
    eventually(lambda: is_free(agent))


def test_what_many_interrupts_have_left_the_next_shutdown_frees(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = group[0]
    interrupted = interrupt_calls(agent._supervisor, "close", 2, monkeypatch)
    with pytest.raises(Interrupt):
        agent.shutdown(graceful=False, timeout=0.0)
    assert interrupted == [1, 1]
    assert not is_free(agent)
    agent.shutdown(graceful=False, timeout=0.0)
    eventually(lambda: is_free(agent))


def test_a_signal_handler_that_shuts_down_in_the_midst_of_a_shutdown_leaves_it_to_that(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = group[0]
    close = agent._rendezvous.store.close
    calls = []

    def handled(*args: Any) -> None:
        calls.append(args)
        agent.shutdown(graceful=False, timeout=0.0)  # it would wait for itself
        close(*args)

    monkeypatch.setattr(agent._rendezvous.store, "close", handled)
    agent.shutdown(graceful=False, timeout=0.0)
    assert len(calls) == 1
    eventually(lambda: is_free(agent))


def interrupt_calls(of: object, method: str, count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ctrl-C comes in so many calls of the method; those in which it came."""
    usual = getattr(of, method)
    interrupted: list[int] = []

    def call_it(*args: Any) -> None:
        if len(interrupted) < count:
            interrupted.append(1)
            interrupt()
        usual(*args)

    monkeypatch.setattr(of, method, call_it)
    return interrupted


# -- Groups that do not start


def test_a_group_that_is_not_whole_does_not_start() -> None:
    with pytest.raises(UsageError, match="give one for each"):
        LocalGroup(2, names=["one"])


def test_two_workers_of_one_name_do_not_start() -> None:
    with pytest.raises(RpcError, match="the worker name 'same' is not unique"):
        LocalGroup(2, names=["same", "same"])


def test_a_local_group_knows_its_agents(group: LocalGroup) -> None:
    assert [agent.info.name for agent in group] == ["worker0", "worker1", "worker2"]
    assert (group["worker2"], len(group)) == (group[2], 3)
    assert call(group[0], 1, partial(echo, group)) is group
    with pytest.raises(UsageError, match="no worker 'worker9'"):
        group["worker9"]


def test_a_local_group_leaves_gracefully(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(4)
    futures = [start(agent, to, echo, to) for agent in group for to in range(4)]
    group.shutdown()
    assert [future.wait() for future in futures] == [0, 1, 2, 3] * 4

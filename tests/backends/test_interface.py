"""The interface of agents: a backend of one's own does all that `farcall`'s functions ask."""

from __future__ import annotations

import inspect
import logging
import threading
from typing import Any

import pytest

import farcall as rpc
from backends.in_process import BACKEND, InProcessAgent, InProcessOptions
from farcall.backends import RpcAgent
from farcall.options import BackendOptions
from farcall.runtime.agent import Agent
from gates import SOON


@pytest.fixture
def agent(backend: rpc.BackendType) -> InProcessAgent:
    rpc.init_rpc("me", backend=backend)
    made = rpc.api.current_agent()
    assert isinstance(made, InProcessAgent)
    return made


@pytest.mark.usefixtures("agent")
def test_calls_over_another_backend() -> None:
    assert rpc.rpc_sync("me", max, args=(3, 4)) == 4
    assert rpc.rpc_async(0, int, args=("7",), kwargs={"base": 8}).wait() == 7
    assert rpc.wait_all([rpc.rpc_async("me", pow, args=(2, n)) for n in range(4)]) == [1, 2, 4, 8]
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("me", divmod, args=(1, 0))
    with pytest.raises(rpc.UnknownWorkerError):
        rpc.rpc_sync("you", int)
    assert rpc.get_worker_info() == rpc.WorkerInfo("me", 0)
    assert rpc.get_worker_infos() == [rpc.WorkerInfo("me", 0)]
    assert rpc._all_gather(5) == {"me": 5}
    with rpc._wait_all():
        future = rpc.rpc_async("me", int)
    assert future.done()


@pytest.mark.usefixtures("agent")
def test_references_over_another_backend() -> None:
    numbers: rpc.RRef[list[int]] = rpc.remote("me", list, args=((3, 1, 2),))
    assert numbers.is_owner()
    assert numbers.confirmed_by_owner()
    assert numbers.owner() == rpc.WorkerInfo("me", 0)
    assert numbers.to_here(timeout=5) == [3, 1, 2]
    assert numbers.local_value() == [3, 1, 2]
    numbers.rpc_sync().append(4)
    assert numbers.rpc_async().index(4).wait() == 3
    assert numbers.remote().copy().to_here() == [3, 1, 2, 4]
    assert numbers._get_type() is list
    assert rpc.RRef(5).to_here() == 5
    assert rpc.RRef(5) != rpc.RRef(5)
    assert str(rpc.references()) == "owns 0, holds 0"
    rpc._delete_all_user_and_unforked_owner_rrefs()
    rpc._destroy_rref_context(ignore_leak=False)


def test_timeouts_metrics_and_debug_info(agent: InProcessAgent) -> None:
    assert rpc.get_rpc_timeout() == 60.0
    rpc._set_rpc_timeout(3)
    assert agent.rpc_timeout == rpc.get_rpc_timeout() == 3
    rpc.rpc_sync("me", int)
    assert rpc.get_metrics() == {"calls_made": 1, "peers": {}}
    assert agent.get_debug_info() == {"agent.calls_made": "1"}
    assert rpc._get_debug_info() == {"num_owner_rrefs": "0", "agent.calls_made": "1"}
    agent.sync()
    assert agent.calls == 2


# -- what an agent need not do itself


def test_a_call_ends_at_its_time(agent: InProcessAgent) -> None:
    gate = threading.Event()
    with pytest.raises(rpc.RpcTimeoutError, match=r"worker 'me' did not answer `Event.wait` within 0.05 s; it may"):
        rpc.rpc_sync("me", gate.wait, args=(SOON,), timeout=0.05)
    rpc._set_rpc_timeout(0.06)
    later = rpc.rpc_async("me", int)
    assert "within 0.06 s" in str(later.exception())
    assert rpc.rpc_async("me", int, timeout=0).done() is False
    gate.set()
    assert rpc.rpc_sync("me", max, args=(3, 4), timeout=SOON) == 4
    assert agent.calls == 4


def test_the_timeout_of_the_options_is_that_of_the_agent(backend: rpc.BackendType) -> None:
    rpc.init_rpc("me", backend=backend, rpc_backend_options=InProcessOptions(rpc_timeout=5))
    assert rpc.get_rpc_timeout() == 5


@pytest.mark.usefixtures("agent")
def test_an_agent_is_who_its_group_says_it_is() -> None:
    assert rpc.api.current_agent().info == rpc.WorkerInfo("me", 0)
    rpc._barrier(["me"])
    rpc._wait_all_workers(SOON)


def test_what_is_wrong_with_a_call_never_reaches_the_agent(agent: InProcessAgent) -> None:
    wrong: Any = None
    number: Any = 3
    for call, reason in (
        (
            lambda: rpc.rpc_sync(wrong, int),
            "`to` must be a worker's name, rank or WorkerInfo, or a farcall.Worker, not None",
        ),
        (lambda: rpc.rpc_sync("you", int), "there is no worker 'you'"),
        (lambda: rpc.rpc_sync("me", wrong), "None cannot be called"),
        (lambda: rpc.rpc_sync("me", int, args=number), "`args` must be a tuple or list of arguments, not a int"),
        (lambda: rpc.rpc_sync("me", int, timeout=-2), "a timeout must be 0 .no timeout. or more seconds, not -2"),
        (
            lambda: rpc.rpc_sync("me", int, timeout=wrong),
            "a timeout must be a number of seconds .0 means no timeout., not None",
        ),
    ):
        with pytest.raises(rpc.UsageError, match=reason):
            call()
    assert agent.calls == 0


def test_an_agent_gets_what_is_left_to_do(agent: InProcessAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    def run_on(*given: Any) -> rpc.Future[Any]:
        got.append(given)
        future: rpc.Future[Any] = rpc.Future()
        future.set_result(None)
        return future

    monkeypatch.setattr(agent, "run_on", run_on)
    rpc.rpc_sync("me", int)
    rpc.rpc_async(0, int, args=["7"], kwargs={"base": 8}, timeout=3)
    me = rpc.WorkerInfo("me", 0)
    assert got == [(me, int, (), {}, 60.0), (me, int, ("7",), {"base": 8}, 3)]


def test_an_agent_that_gives_no_future(agent: InProcessAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "run_on", lambda *_: 3)
    with pytest.raises(rpc.BackendError, match=r"InProcessAgent.run_on must return a farcall.Future, not 3"):
        rpc.rpc_sync("me", int)


def test_an_agent_that_does_not_know_who_it_is(backend: rpc.BackendType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(InProcessAgent, "get_worker_info", lambda self, to=None: asked.append(self.asked_to_leave))
    with pytest.raises(
        rpc.BackendError, match=r"get_worker_info.* of an agent of .*IN_PROCESS must return a .* not None"
    ):
        rpc.init_rpc("me", backend=backend)
    assert asked[0] == [(False, 0.0)]
    with pytest.raises(rpc.NotInitializedError):
        rpc.get_worker_info()


def test_a_forked_child_cannot_call() -> None:
    parents = InProcessAgent("parent", InProcessOptions())
    parents.abandon()
    with pytest.raises(rpc.ForkedProcessError, match="this process was forked from worker 'parent'"):
        parents.call("parent", int, None, None, 1)


def test_the_end(agent: InProcessAgent) -> None:
    seen: list[int] = []
    rpc.rpc_async("me", seen.append, args=(1,))
    rpc.shutdown(timeout=5)
    assert seen == [1]
    assert agent.asked_to_leave == [(True, 5)]
    with pytest.raises(rpc.NotInitializedError):
        rpc.rpc_sync("me", int)
    rpc.shutdown()


def test_the_backend_is_told_by_its_options(backend: rpc.BackendType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="farcall"):
        rpc.init_rpc("me", rpc_backend_options=InProcessOptions(rpc_timeout=7))
    assert isinstance(rpc.api.current_agent(), InProcessAgent)
    assert rpc.get_rpc_timeout() == 7
    assert "BackendType.IN_PROCESS" in caplog.text
    assert backend.name in caplog.text


def test_an_agent_keeps_a_copy_of_its_options(backend: rpc.BackendType) -> None:
    options = InProcessOptions(rpc_timeout=7)
    rpc.init_rpc("me", backend=backend, rpc_backend_options=options)
    options.rpc_timeout = 8
    agent = rpc.api.current_agent()
    assert isinstance(agent, InProcessAgent)
    assert agent.options.rpc_timeout == 7


def test_a_handler_that_makes_no_agent() -> None:
    backend = rpc.register_backend("NONE", BACKEND[0], lambda **given: given)  # type: ignore[arg-type,return-value]
    try:
        with pytest.raises(
            rpc.BackendError, match=r"BackendType.NONE returned \{'store': None, .* instead of a farcall.RpcAgent"
        ):
            rpc.init_rpc("me", backend=backend)
        with pytest.raises(rpc.NotInitializedError):
            rpc.get_worker_info()
    finally:
        rpc.backend_registry.unregister_backend("NONE")


def test_an_agent_that_cannot_start_leaves_nothing(backend: rpc.BackendType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def start(self: InProcessAgent) -> None:
        asked.append(self.asked_to_leave)
        raise OSError("no thread")

    monkeypatch.setattr(InProcessAgent, "start", start)
    with pytest.raises(OSError, match="no thread"):
        rpc.init_rpc("me", backend=backend)
    assert asked == [[(False, 0.0)]]
    with pytest.raises(rpc.NotInitializedError):
        rpc.get_worker_info()


def test_what_an_agent_must_have() -> None:
    assert RpcAgent.__abstractmethods__ == {"run_on", "get_worker_info", "get_worker_infos", "join", "shutdown"}
    assert issubclass(Agent, RpcAgent)
    for name, method in inspect.getmembers(RpcAgent, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.getdoc(method), name
            assert (
                inspect.signature(getattr(Agent, name)).parameters.keys() == inspect.signature(method).parameters.keys()
            )


def test_what_the_least_agent_does(agent: InProcessAgent) -> None:
    least = InProcessAgent("least", InProcessOptions(with_references=False))
    RpcAgent.start(least)
    assert RpcAgent.get_metrics(least) == {}
    assert not least.is_forked
    least.abandon()
    assert least.is_forked
    assert isinstance(agent.options, BackendOptions)

"""What interceptors may do with calls, and when the functions run that they register for after the reply.

`docs/interceptors.md` has examples of the rest, and `tests/test_docs.py` runs them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from farcall import ClientInterceptor, Future, ServerInterceptor, UsageError
from farcall.functions import async_execution
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, gates, new_gate, wait_at
from group_stage import NewGroup, call, echo, start
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)

steps: list[str] = []
promised: list[Future[str]] = []


class AfterReply(ServerInterceptor):
    """Has a function called after the reply to each call but `echo`. That function waits at the gate "after"."""

    def intercept(self, call: Any, proceed: Callable[[Any], Any]) -> Any:
        if call.function is not echo:
            call.after_reply(after)
        return proceed(call)


def after() -> None:
    steps.append("after the reply")
    wait_at("after")


async def answer_at_gate() -> str:
    await await_at("answer")
    steps.append("answered")
    return "answer"


async def fail_at_gate() -> str:
    await answer_at_gate()
    raise ValueError("as planned")


@async_execution
def promise() -> Future[str]:
    promised.append(Future())
    arrived["answer"].set()
    return promised[-1]


def keep_promise() -> None:
    steps.append("answered")
    promised.pop().set_result("answer")


@pytest.fixture
def group_with_after_reply(make_group: NewGroup) -> LocalGroup:
    """Returns a group of two with one thread each, whose worker1 has `AfterReply`."""
    steps.clear()
    group = make_group(2, num_worker_threads=1)
    group.agents[1].add_interceptor(AfterReply())
    new_gate("answer")
    new_gate("after")
    return group


@pytest.mark.parametrize("function", [answer_at_gate, fail_at_gate, promise])
def test_functions_for_after_the_reply_wait_for_a_reply_that_is_sent_later(
    group_with_after_reply: LocalGroup, function: Callable[[], Any], background: Any
) -> None:
    group = group_with_after_reply
    future = start(group.agents[0], 1, function)
    assert arrived["answer"].wait(SOON)
    # One thread runs functions there. When it has served this, it is done with what it does for the other call.
    assert call(group.agents[0], 1, echo, "served") == "served"
    assert steps == []
    if function is promise:
        background.submit(keep_promise)
    gates["answer"].set()
    # The function for after the reply still waits at its gate, so the reply was sent before.
    assert isinstance(future.exception(SOON), ValueError) if function is fail_at_gate else future.wait() == "answer"
    assert arrived["after"].wait(SOON)
    gates["after"].set()
    assert steps == ["answered", "after the reply"]


@pytest.mark.parametrize("function", [int, len], ids=["result", "error"])
def test_functions_for_after_the_reply_run_after_a_reply_that_is_sent_at_once(
    group_with_after_reply: LocalGroup, function: Callable[..., Any]
) -> None:
    future = start(group_with_after_reply.agents[0], 1, function)
    assert arrived["after"].wait(SOON)
    assert future.exception(SOON) is None if function is int else isinstance(future.exception(SOON), TypeError)
    gates["after"].set()


# -- Changes of a call


class Change(ClientInterceptor):
    """Sets attributes of each call."""

    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes

    def intercept(self, call: Any, proceed: Callable[[Any], Any]) -> Any:
        for name, value in self.attributes.items():
            setattr(call, name, value)
        return proceed(call)


def double(value: int) -> int:
    return 2 * value


CALLS: dict[str, Callable[[LocalGroup, int], Any]] = {
    "call": lambda group, to: call(group.agents[0], to, echo, 21),
    "remote call": lambda group, to: group.remote(0, to, echo, (21,)).to_here(),
}
CALLS_OF_METHODS: dict[str, Callable[[LocalGroup], Any]] = {
    "call": lambda group: group.remote(0, 1, echo, ("Text",)).rpc_sync().upper(),
    "remote call": lambda group: group.remote(0, 1, echo, ("Text",)).remote().upper().to_here(),
}


@pytest.mark.parametrize("to", [0, 1], ids=["to itself", "to another"])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("function", [double, lambda value: 2 * value], ids=["by name", "by value"])
def test_another_function_is_called_if_an_interceptor_says_so(
    group: LocalGroup, kind: str, to: int, function: Callable[[int], int]
) -> None:
    group.agents[0].add_interceptor(Change(function=function))
    assert CALLS[kind](group, to) == 42


class ChangeMethods(Change):
    """Sets attributes of each call of a method."""

    def intercept(self, call: Any, proceed: Callable[[Any], Any]) -> Any:
        return super().intercept(call, proceed) if call.name == "upper" else proceed(call)


@pytest.mark.parametrize("kind", CALLS_OF_METHODS)
def test_another_method_is_called_if_an_interceptor_says_so(group: LocalGroup, kind: str) -> None:
    group.agents[0].add_interceptor(ChangeMethods(function="lower"))
    assert CALLS_OF_METHODS[kind](group) == "text"


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("change", [{"function": 5}, {"timeout": -1}, {"timeout": "soon"}], ids=str)
def test_a_change_that_is_not_valid_is_refused(group: LocalGroup, kind: str, change: dict[str, Any]) -> None:
    group.agents[0].add_interceptor(interceptor := Change(**change))
    with pytest.raises(UsageError):
        CALLS[kind](group, 1)
    group.agents[0].remove_interceptor(interceptor)
    assert CALLS[kind](group, 1) == 21


@pytest.mark.parametrize("kind", CALLS_OF_METHODS)
def test_a_function_in_place_of_a_method_is_refused(group: LocalGroup, kind: str) -> None:
    group.agents[0].add_interceptor(ChangeMethods(function=echo))
    with pytest.raises(UsageError, match="'upper'"):
        CALLS_OF_METHODS[kind](group)


@pytest.mark.parametrize("function", ["rpc_sync", "remote"])
def test_another_timeout_is_kept_if_an_interceptor_says_so(workers: StartWorkers, function: str) -> None:
    """The worker is stopped before there is a connection. Without the interceptor, the call waits for ten minutes."""
    script = f"""
    class Hasten(rpc.ClientInterceptor):
        def intercept(self, call, proceed):
            call.timeout = 0.1
            return proceed(call)
    start(heartbeat_patience=600, rpc_timeout=600)
    report(started=True)
    if RANK == 0:
        assert wait_for(lambda: os.path.exists("stopped"), 20)
        rpc.add_interceptor(Hasten())
        report(outcome=outcome(rpc.{function}, "w1", int).get("error"))
    else:
        assert wait_for(lambda: os.path.exists("stopped"), 20)
    rpc.shutdown(graceful=False)
    """
    group = workers(script)
    group.wait_for(0, "started")
    group.wait_for(1, "started")
    group.send_signal(1, signal.SIGSTOP)
    (group.directory / "stopped").touch()
    assert group.wait_for(0, "outcome") == "RpcTimeoutError"
    group.send_signal(1, signal.SIGCONT)
    group.finish(quiet=False)

"""What interceptors may do with calls, and when the functions run that they register for after the reply.

`docs/interceptors.md` has examples of the rest, and `tests/test_docs.py` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall import Future, ServerInterceptor
from farcall.functions import async_execution
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, gates, new_gate, wait_at
from group_stage import NewGroup, call, echo, start

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

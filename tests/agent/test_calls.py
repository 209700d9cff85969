"""The small objects of a call: what its future says of itself, and a reply that is unpickled once, by who wants it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from agent_stage import Counter, add

from farcall import SerializationError
from farcall.agent.calls import CallbackJob, Reply
from farcall.futures import DONE, FAILED, Future
from farcall.protocol.wire import FAILURE, RESULT, encode
from farcall.serialization import MARK, dumps, encode_failure
from farcall.testing import LocalGroup
from gates import SOON, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


def test_the_future_names_its_function_and_state(group: LocalGroup) -> None:
    gate = new_gate("state")
    future = start(group[0], 1, wait_at, "state")
    assert repr(future) == "<PendingCall pending of `wait_at`>"
    gate.set()
    future.wait()
    assert repr(future) == "<PendingCall done of `wait_at`>"
    failed = start(group[0], 1, add)
    assert isinstance(failed.exception(), TypeError)
    assert repr(failed) == "<PendingCall failed of `add`>"
    partial_call = start(group[0], 1, partial(Counter.double, 2))
    assert repr(partial_call).endswith(" of `partial(Counter.double)`>")
    assert partial_call.wait() == 4


def test_the_value_of_a_future_that_is_not_done_is_an_error(group: LocalGroup) -> None:
    gate = new_gate("state")
    future = start(group[0], 1, wait_at, "state", 5)
    assert not future.done()
    with pytest.raises(RuntimeError, match="not done"):
        future.value()
    gate.set()
    assert future.wait() == future.value() == future.result() == 5
    assert future.done()


_unpickled: list[int] = []


class Noted:
    """Notes when it is unpickled."""

    def __setstate__(self, _: Any) -> None:
        _unpickled.append(threading.get_ident())

    def __getstate__(self) -> int:
        return 1


def test_a_result_is_unpickled_once_by_who_wants_it(group: LocalGroup) -> None:
    future = start(group[0], 1, Noted)
    while not future.done():
        call(group[0], 1, echo, 1)
    _unpickled.clear()
    first = future.value()
    assert future.wait() is first
    assert future.result() is first
    assert _unpickled == [threading.get_ident()]


def test_many_threads_get_the_very_same_result(group: LocalGroup) -> None:
    for _ in range(20):
        future = start(group[0], 1, Counter, 3)
        with ThreadPoolExecutor(8) as pool:
            results = [one.result(SOON) for one in [pool.submit(future.wait) for _ in range(8)]]
        assert all(result is results[0] for result in results)


def test_a_failure_is_the_same_however_often_it_is_asked_for(group: LocalGroup) -> None:
    future = start(group[0], 1, add)
    error = future.exception()
    for _ in range(3):
        with pytest.raises(TypeError) as caught:
            future.wait()
        assert caught.value is error


def test_a_call_cannot_be_settled_by_hand(group: LocalGroup) -> None:
    gate = new_gate("hand")
    future = start(group[0], 1, wait_at, "hand", "reply")
    for settle, value in ((future.set_result, "by hand"), (future.set_exception, ValueError())):
        with pytest.raises(
            RuntimeError, match=r"of `wait_at`> is settled by its call alone; make a Future\(\) of your own"
        ):
            settle(value)
    gate.set()
    assert future.wait() == "reply"


def test_a_reply_gives_state_and_value() -> None:
    body, buffers = dumps([1, 2])
    assert Reply("w", add, RESULT, body, buffers).load() == (DONE, [1, 2])
    state, error = Reply("w", add, FAILURE, encode_failure(KeyError(3), "w", "add"), ()).load()
    assert (state, type(error), error.args) == (FAILED, KeyError, (3,))


def test_a_reply_that_cannot_be_unpickled_says_whose_it_is() -> None:
    state, error = Reply("w7", add, RESULT, b"no pickle", ()).load()
    assert state == FAILED
    assert isinstance(error, SerializationError)
    assert "the result of `add` from worker 'w7' cannot be rebuilt here" in str(error)
    assert error.__cause__ is not None


def test_a_reply_describes_its_failure() -> None:
    reply = Reply("w7", add, FAILURE, encode_failure(KeyError("why"), "w7", "add"), ())
    assert reply.describe() == "nobody looked at the failure of `add` on worker 'w7': KeyError: 'why'"


def test_a_callback_job_runs_them_in_order() -> None:
    future: Future[int] = Future()
    seen: list[Any] = []
    CallbackJob(future, [lambda one: seen.append((1, one)), lambda one: seen.append((2, one))]).run()
    assert seen == [(1, future), (2, future)]


def test_an_array_that_is_none_fails_its_call_only(group: LocalGroup) -> None:
    assert call(group[0], 1, echo, 1) == 1
    gate = new_gate("array")
    future = start(group[0], 1, wait_at, "array", 1)
    (incoming,) = group[1]._incoming
    incoming.answer(encode(RESULT, future.call_id, b"", bytes((MARK, 0, 2, 1)) + (5).to_bytes(8, "little")))
    with pytest.raises(
        SerializationError, match="the result of `wait_at` from worker 'worker1' cannot be rebuilt here"
    ):
        future.wait()
    gate.set()
    array = np.arange(3)
    assert call(group[0], 1, echo, array).tolist() == [0, 1, 2]

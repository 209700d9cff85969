"""Passes in parts: who hears of what, what goes back with a reply, and that nobody waits for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import torch
from autograd_stage import Workers, info

from eventually import eventually
from farcall.errors import WorkerLostError
from farcall.futures import Future
from farcall.pytorch.autograd import parted, parts, passes, trouble
from farcall.pytorch.autograd.engine import await_end, take_part


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(3) as workers:
        yield workers


@pytest.fixture
def only_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in which all passes are in parts."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a pass was not taken apart")

    monkeypatch.setattr(passes.LocalPass, "__init__", refuse)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def message_of(workers: Workers, context_id: int, number: int) -> int:
    """The last message that this worker has sent in the context."""
    return list(workers.context(context_id, number).sent)[-1]


@pytest.mark.usefixtures("only_parted")
def test_the_gradient_of_a_variable_that_was_sent_as_it_is_need_not_be_copied(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Any] = []
    monkeypatch.setattr(parts, "add_up", lambda *of: copied.append(of))
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    workers.backward(context_id, 1, [(there * torch.tensor([3.0, 4.0])).sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [3, 4]
    assert copied == []


@pytest.mark.usefixtures("only_parted")
def test_gradients_go_back_with_the_reply(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    value = x
    for factor in (2, 3, 5):
        (there,) = workers.move(context_id, 0, 1, [value])
        (value,) = workers.move(context_id, 1, 0, [there * factor])
    workers.backward(context_id, 0, [value.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [30, 30]
    assert {to for to, _, _ in workers.propagated} == {1}  # what worker1 had for worker0 went without calls
    assert len(workers.propagated) == 3
    assert not [what for what, _ in workers.told if what == "await_end"]


@pytest.mark.usefixtures("only_parted")
def test_a_variable_that_several_calls_use_gets_the_sum(workers: Workers) -> None:
    x, weight = leaf(1, 2), leaf(3, 4)
    context_id = workers.new_context()
    value = x
    for _ in range(3):
        (there,) = workers.move(context_id, 0, 1, [value])
        (value,) = workers.move(context_id, 1, 0, [there * weight])
    workers.backward(context_id, 0, [value.sum()])
    assert workers.gradients(context_id, 1)[weight].tolist() == [27, 2 * 3 * 16]


@pytest.mark.usefixtures("only_parted")
def test_who_is_not_through_when_it_answers_is_asked_to_tell(workers: Workers) -> None:
    """worker1 has gradients for worker0 at once, and waits for those of worker2."""
    x, y = leaf(1, 2), leaf(3, 4)
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 0, 1, [x])
    (away,) = workers.move(context_id, 1, 2, [y * 2])
    (home,) = workers.move(context_id, 1, 0, [one * 5])
    (other,) = workers.move(context_id, 2, 0, [away * 7])
    workers.backward(context_id, 0, [home.sum() + other.sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [5, 5]
    assert workers.gradients(context_id, 1)[y].tolist() == [14, 14]


def begun(workers: Workers) -> tuple[int, Any, list[int], torch.Tensor]:
    """worker1 has sent one message to worker0 and one to worker2, that are not connected."""
    x, y = leaf(1), leaf(3)
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 0, 1, [x])
    workers.move(context_id, 1, 0, [one * 5])
    workers.move(context_id, 1, 2, [y * 2])
    return context_id, workers[0].new_pass_id(), list(workers.context(context_id, 1).sent), y


def test_an_answer_says_whether_its_sender_is_through(workers: Workers) -> None:
    context_id, pass_id, (first, second), _ = begun(workers)
    answer = take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True)
    assert isinstance(answer, tuple)
    is_through, ((_, (gradient,)),) = answer
    assert not is_through
    assert gradient.tolist() == [5]
    asked = await_end(workers[1], context_id, pass_id)
    assert isinstance(asked, Future)
    assert not asked.done()
    assert take_part(workers[1], context_id, pass_id, second, [torch.ones(1)], False, True) is None
    assert asked.value() is None
    assert workers.context(context_id, 1).passes == {}
    assert await_end(workers[1], context_id, pass_id) is None


def test_the_first_call_stays_open_while_there_is_nothing_to_say(workers: Workers) -> None:
    context_id, pass_id, (first, second), _ = begun(workers)
    open_call = take_part(workers[1], context_id, pass_id, second, [torch.ones(1)], False, True)
    assert isinstance(open_call, Future)
    assert not open_call.done()
    answer = take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True)
    assert isinstance(answer, tuple)
    assert answer[0]  # worker0 is owed nothing: worker2 was first
    assert open_call.value() is None


def test_who_takes_nothing_back_gets_its_gradients_by_a_call(workers: Workers) -> None:
    context_id, pass_id, (first, second), _ = begun(workers)
    answer = take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, False)
    assert isinstance(answer, Future)
    assert [to for to, _, _ in workers.propagated] == [0]
    take_part(workers[1], context_id, pass_id, second, [torch.ones(1)], False, False)
    assert answer.block(monotonic() + 10)
    assert answer.value() is None


def test_a_parent_that_asks_hears_what_went_wrong_meanwhile(workers: Workers) -> None:
    context_id, pass_id, (first, _), _ = begun(workers)
    take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True)
    workers[1].lost(info(2))
    with pytest.raises(WorkerLostError, match="worker 'worker2', to which tensors were sent in it, is gone"):
        await_end(workers[1], context_id, pass_id)
    assert workers.context(context_id, 1).passes == {}


def test_and_one_whose_call_is_open_at_once(workers: Workers) -> None:
    context_id, pass_id, (first, _), _ = begun(workers)
    take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True)
    asked = await_end(workers[1], context_id, pass_id)
    assert isinstance(asked, Future)
    workers[1].lost(info(2))
    assert isinstance(asked.exception(), WorkerLostError)
    assert workers.context(context_id, 1).passes == {}


def test_what_is_abandoned_leaves_nothing(workers: Workers) -> None:
    context_id, pass_id, (first, _), _ = begun(workers)
    take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True)
    workers[1].abandon(context_id, pass_id, "it failed elsewhere")
    assert workers.context(context_id, 1).passes == {}
    with pytest.raises(RuntimeError, match="has failed already"):
        await_end(workers[1], context_id, pass_id)


def test_no_gradients_are_awaited_of_a_call_that_failed(workers: Workers) -> None:
    context_id, pass_id, (first, second), _ = begun(workers)
    take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True)
    asked = await_end(workers[1], context_id, pass_id)
    assert isinstance(asked, Future)
    workers.context(context_id, 1).forget(second)
    assert asked.value() is None


def test_gradients_that_come_twice_count_once(workers: Workers) -> None:
    context_id, pass_id, (_, second), y = begun(workers)
    open_call = take_part(workers[1], context_id, pass_id, second, [torch.ones(1)], True, True)
    assert isinstance(open_call, Future)
    assert take_part(workers[1], context_id, pass_id, second, [torch.ones(1)], True, True) == (False, [])
    assert workers.gradients(context_id, 1)[y].tolist() == [2]
    workers[1].abandon(context_id, pass_id, "enough")
    assert isinstance(open_call.exception(), RuntimeError)


def test_who_waits_for_others_for_long_says_so(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "PATIENCE", 0.0)
    monkeypatch.setattr(parted, "_GLANCE", 0.001)
    x, y = leaf(1), leaf(3)
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 0, 1, [x])
    workers.move(context_id, 1, 2, [y * 2])  # whose result nobody uses
    (home,) = workers.move(context_id, 1, 0, [one * 5])
    said: Future[str] = Future()
    monkeypatch.setattr(trouble.logger, "warning", lambda words, *more: said.set_result(words % more))
    done = workers.in_thread(lambda: workers.backward(context_id, 0, [home.sum()]))
    assert said.block(monotonic() + 10)
    assert "waits for worker 'worker1' to be through" in said.value()
    assert "earlier passes" not in said.value()
    workers[0].release(context_id)
    with pytest.raises(RuntimeError, match="no longer valid"):
        done.wait()


@pytest.mark.filterwarnings("ignore:nobody looked at a future that failed:farcall.futures.UnseenFailureWarning")
def test_a_second_pass_that_waits_for_the_calls_of_the_first_says_so(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "PATIENCE", 0.0)
    monkeypatch.setattr(parted, "_GLANCE", 0.001)
    x = leaf(1)
    context_id = workers.new_context()

    def forward() -> torch.Tensor:
        (there,) = workers.move(context_id, 0, 1, [x])
        (back,) = workers.move(context_id, 1, 0, [there * 5])
        return back.sum()

    workers.backward(context_id, 0, [forward()])
    said: list[str] = []  # it may be said more than once before the context is released
    monkeypatch.setattr(trouble.logger, "warning", lambda words, *more: said.append(words % more))
    done = workers.in_thread(lambda: workers.backward(context_id, 0, [forward()]))
    eventually(lambda: said)
    assert "this is pass number 2 of the context: give all losses to one backward" in said[0]
    workers[0].release(context_id)
    with pytest.raises(RuntimeError, match="no longer valid"):
        done.wait()
    del done
    gc.collect()  # calls of the pass that nobody waits for any more failed, too: they go here, not in another test


def test_a_pass_that_has_failed_goes_without_garbage_collection(workers: Workers) -> None:
    """The traceback of its error holds frames, and those the pass."""
    context_id = workers.new_context()
    doubled = leaf(1, 2) * 2
    workers.move(context_id, 0, 1, [doubled])
    seen: list[Any] = []

    def refuse(gradient: torch.Tensor) -> None:
        seen.extend(map(weakref.ref, workers.context(context_id, 0).passes.values()))
        raise ValueError("the hook refuses")

    doubled.register_hook(refuse)
    other = leaf(1) * 2
    other.register_hook(refuse)
    message = message_of(workers, context_id, 0)
    gc.disable()
    try:
        for fail in (
            lambda: take_part(workers[0], context_id, workers[1].new_pass_id(), message, [torch.ones(2)], False, True),
            lambda: workers.backward(context_id, 0, [other.sum()]),
        ):
            with pytest.raises(RuntimeError, match="the hook refuses"):
                fail()
        assert [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


def test_who_profiles_sees_send_and_receive_functions(workers: Workers) -> None:
    x = leaf(1, 2)
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])
    (home,) = workers.move(context_id, 1, 0, [there * 2])
    loss = home.sum()
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        workers.backward(context_id, 0, [loss])
    names = {event.name for event in profile.function_events}
    for wanted in ("autograd::backward", "SendRpcBackward", "RecvRpcBackward"):
        assert any(wanted in name for name in names), wanted


def test_an_open_call_of_the_parent_brings_it_gradients(workers: Workers) -> None:
    z, y = leaf(1), leaf(3)
    context_id = workers.new_context()
    (received,) = workers.move(context_id, 2, 1, [z])
    workers.move(context_id, 1, 0, [received * 3])
    workers.move(context_id, 1, 2, [y * 2])
    first, second = workers.context(context_id, 1).sent
    pass_id = workers[0].new_pass_id()
    open_call = take_part(workers[1], context_id, pass_id, second, [torch.ones(1)], False, True)
    assert isinstance(open_call, Future)
    assert take_part(workers[1], context_id, pass_id, first, [torch.ones(1)], False, True) is None
    answer = open_call.value()
    assert answer is not None
    is_through, ((_, (gradient,)),) = answer
    assert not is_through
    assert gradient.tolist() == [3]
    assert workers.propagated == []
    assert await_end(workers[1], context_id, pass_id) is None

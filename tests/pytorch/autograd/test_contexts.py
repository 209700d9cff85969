"""Contexts: their names, which thread has which, when they are released and who is told."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from autograd_stage import Workers, info

from farcall.pytorch.autograd.contexts import COUNTER_BITS, Contexts, _Memory
from farcall.pytorch.autograd.nodes import record_later, record_received
from farcall.pytorch.autograd.riding import pack


@pytest.fixture
def workers() -> Workers:
    return Workers(4)


def test_names_begin_with_the_worker(workers: Workers) -> None:
    one, two = workers.new_context(3), workers.new_context(3)
    assert one >> COUNTER_BITS == two >> COUNTER_BITS == 3
    assert two == one + 1
    assert workers[3].max_id == (3 << 48) + 281474976710655
    assert workers[3].new_message()[0] >> COUNTER_BITS == 3
    assert workers[1].new_pass_id() != workers[2].new_pass_id()


@pytest.mark.parametrize("number", [-1, 65536])
def test_a_worker_has_a_number_of_16_bits(workers: Workers, number: int) -> None:
    with pytest.raises(RuntimeError, match=r"range \[0, 65535\]"):
        Contexts(number, workers[0].post)


def test_a_thread_has_one_current_context(workers: Workers) -> None:
    contexts = workers[0]
    with pytest.raises(RuntimeError, match="Current thread doesn't have a valid autograd context"):
        contexts.current()
    made = contexts.new()
    assert contexts.current() is made
    with pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"):
        contexts.new()
    assert workers.in_thread(lambda: contexts.current_id).wait() is None
    contexts.release(made.context_id)
    assert contexts.current_id is None


def test_a_context_that_was_released_under_a_thread_is_not_found_by_it(workers: Workers) -> None:
    contexts = workers[0]
    made = contexts.new()
    workers.in_thread(lambda: contexts.release(made.context_id)).wait()
    with pytest.raises(RuntimeError, match="Couldn't find autograd context data"):
        contexts.current()
    with pytest.raises(RuntimeError, match="it was released while a call in it was under way"):
        made.add_known_worker(info(1))


def test_unknown_contexts(workers: Workers) -> None:
    for ask in (workers[0].retrieve, workers[0].release):
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
            ask(100)


def test_releasing_reaches_all_who_were_called_from_one_to_the_next(workers: Workers) -> None:
    context_id = workers.new_context()
    x = torch.ones(1, requires_grad=True)
    (one,) = workers.move(context_id, 0, 1, [x])
    (two,) = workers.move(context_id, 1, 2, [one])
    workers.move(context_id, 2, 0, [two])
    assert [workers[number].counts()[1] for number in range(4)] == [1, 1, 1, 0]
    workers[0].release(context_id)
    assert [workers[number].counts()[1] for number in range(4)] == [0, 0, 0, 0]
    assert ("release", 3) not in workers.told


def test_a_message_that_was_overtaken_does_not_bring_a_context_back(workers: Workers) -> None:
    context_id = workers.new_context()
    workers[1].release_if_present(context_id, is_told=True)
    with pytest.raises(RuntimeError, match="it was released before this call came"):
        workers[1].retrieve_or_make(context_id)
    assert workers[1].counts() == (0, 0)


def test_what_has_ended_is_not_remembered_for_ever() -> None:
    memory = _Memory()
    for number in range(5000):
        memory.add(number)
    assert 0 not in memory
    assert 4999 in memory
    assert len(memory._names) == 4096


def test_the_contexts_of_a_lost_worker_go(workers: Workers) -> None:
    theirs, ours = workers.new_context(3), workers.new_context(0)
    x = torch.ones(1, requires_grad=True)
    (one,) = workers.move(theirs, 3, 0, [x])
    workers.move(theirs, 0, 1, [one])
    workers[0].lost(info(3))
    assert workers[0].counts() == (0, 1)
    assert workers[1].counts() == (0, 0)
    workers[0].retrieve(ours)


@pytest.mark.parametrize("is_released_first", [True, False])
def test_contexts_known_by_a_lost_worker_alone_go_with_their_release(workers: Workers, is_released_first: bool) -> None:
    context_id = workers.new_context()
    (one,) = workers.move(context_id, 0, 1, [torch.ones(1, requires_grad=True)])
    workers.move(context_id, 1, 2, [one])
    workers.lost.add(1)
    if is_released_first:
        workers[0].release(context_id)
        assert workers[2].counts() == (0, 1)
        workers[2].lost(info(1))
    else:
        workers[2].lost(info(1))
        assert workers[2].counts() == (0, 1)
        workers[0].release(context_id)
    assert workers[2].counts() == (0, 0)


def test_a_call_of_a_worker_that_was_lost_meanwhile_leaves_no_context(workers: Workers) -> None:
    context_id = workers.new_context()
    arrive = workers[2].retrieve_or_make
    workers[2].lost(info(1))
    arrive(context_id, info(1))
    workers[0].release(context_id)
    assert workers[2].counts() == (0, 0)
    workers[2].lost(info(0))
    with pytest.raises(RuntimeError, match="it was released before this call came"):
        arrive(context_id + 1, info(3))
    workers[2].joined(info(0))
    arrive(context_id + 1, info(3))


def test_a_reply_that_is_not_awaited_is_not_recorded(workers: Workers) -> None:
    contexts, context_id = workers[1], workers.new_context()
    context = contexts.retrieve_or_make(context_id)
    x = torch.ones(1, requires_grad=True)
    pack(contexts, context, info(0), [x], True, answered=7)
    assert len(context.sent) == 1
    contexts.forget(context_id, 7)
    pack(contexts, context, info(0), [x], True, answered=7)
    assert context.sent == {}
    contexts.forget(context_id + 5, 7)  # one that is gone


def test_a_forgotten_context_is_reported_with_where_it_was_made(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    context_id = workers[0].new().context_id
    workers[0].retrieve_or_make(5 << COUNTER_BITS)  # another's, whose affair it is
    with caplog.at_level(logging.WARNING, "farcall"):
        workers[0].close()
    (record,) = caplog.records
    assert f"context {context_id} was never released: it was made at {__file__}:" in record.getMessage()
    assert workers[0].counts() == (0, 0)


def test_clocks_are_past_all_they_have_seen(workers: Workers) -> None:
    contexts = workers[0]
    _, first = contexts.new_message()
    contexts.hear(first + 50)
    assert contexts.new_message()[1] == first + 51
    contexts.hear(3)
    assert contexts.new_message()[1] == first + 52


@pytest.mark.parametrize("ahead", [1 << 49, 1 << 64, 1 << 5000])
def test_a_stamp_that_was_made_up_moves_no_clock(workers: Workers, ahead: int) -> None:
    """Ours would be as wrong from then on, and so would those of all whom we send it."""
    contexts = workers[0]
    _, first = contexts.new_message()
    with pytest.raises(TypeError, match="a stamp that cannot be"):
        contexts.hear(first + ahead)
    assert contexts.new_message()[1] == first + 1


def test_what_torch_asks_of_a_context(workers: Workers) -> None:
    context_id = workers.new_context()
    x, y = torch.ones(1, requires_grad=True), torch.ones(2)
    (there, plain) = workers.move(context_id, 0, 2, [x, y])
    context = workers.context(context_id, 0)
    assert context._context_id() == context_id
    assert context._known_worker_ids() == {2}
    ((message_id, send),) = context._send_functions().items()
    assert send.name() == "torch::distributed::autograd::SendRpcBackward"
    assert [node.variable for node, _ in send.next_functions] == [x]
    assert context._recv_functions() == {}
    assert workers.context(context_id, 2)._recv_functions() == {message_id: there.grad_fn}
    assert there.grad_fn.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert not plain.requires_grad


def test_a_receive_function_lives_as_long_as_its_context(workers: Workers) -> None:
    context_id = workers.new_context()
    workers.move(context_id, 0, 1, [torch.ones(1, requires_grad=True)])
    (node,) = workers.context(context_id, 1)._recv_functions().values()
    assert node.next_functions  # raises if torch's node is gone


def send_later(workers: Workers, context_id: int, tensor: torch.Tensor, answered: int | None = None) -> int:
    """Worker 0 sends that to worker 1, and has not recorded it yet; the number of the message."""
    context = workers[0].retrieve(context_id)
    message_id, stamp = workers[0].new_message()
    record_later(context, message_id, stamp, info(1), (tensor,), answered)
    return message_id


def test_who_looks_for_send_functions_finds_those_that_are_not_recorded_yet(workers: Workers) -> None:
    context_id = workers.new_context()
    message_id = send_later(workers, context_id, torch.ones(2, requires_grad=True))
    context = workers[0].retrieve(context_id)
    assert context.sent == {}
    assert list(context._send_functions()) == [message_id] == list(context.sent)
    workers[0].release(context_id)


def test_a_backward_pass_waits_for_what_is_not_recorded_yet(workers: Workers) -> None:
    context_id = workers.new_context()
    x = torch.ones(2, requires_grad=True)
    message_id = send_later(workers, context_id, x)
    context = workers[1].retrieve_or_make(context_id)
    (there,) = record_received(context, message_id, info(0), (torch.ones(2),))
    workers.backward(context_id, 1, [(there * 3).sum()])
    assert workers.gradients(context_id, 0)[x].tolist() == [3, 3]


def test_who_records_in_another_thread_is_waited_for(workers: Workers) -> None:
    context_id = workers.new_context()
    context = workers[0].retrieve(context_id)
    begun, go_on, found = threading.Event(), threading.Event(), []
    context.unrecorded.append(lambda: (begun.set(), go_on.wait(10)))  # type: ignore[arg-type,return-value]
    message_id = send_later(workers, context_id, torch.ones(2, requires_grad=True))
    first = threading.Thread(target=context.catch_up)
    second = threading.Thread(target=lambda: found.append(list(context._send_functions())))
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(0.05)
    assert found == []
    go_on.set()
    first.join(10)
    second.join(10)
    assert found == [[message_id]]
    workers[0].release(context_id)


def test_what_was_forgotten_or_released_before_it_was_recorded_stays_so(workers: Workers) -> None:
    context_id = workers.new_context()
    context = workers[0].retrieve(context_id)
    x = torch.ones(2, requires_grad=True)
    message_id = send_later(workers, context_id, x)
    reply = send_later(workers, context_id, x, answered=message_id)
    context.forget(message_id)
    assert reply not in context.sent
    assert context.sent == {}
    send_later(workers, context_id, x)
    workers[0].release(context_id)
    context.catch_up()
    assert context.sent == {}


def test_the_loss_of_a_worker_reaches_what_is_not_recorded_yet(workers: Workers) -> None:
    context_id = workers.new_context()
    message_id = send_later(workers, context_id, torch.ones(2, requires_grad=True))
    workers[0].lost(info(1))
    assert workers[0].retrieve(context_id).sent[message_id].is_lost
    workers[0].release(context_id)

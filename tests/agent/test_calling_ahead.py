"""The values of references that a call brings are asked for before its function runs, if it wanted them the last time.

Worker 0 calls, worker 1 owns, worker 2 runs the functions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from eventually import eventually
from farcall import ReferenceRefused, RRef
from farcall.agent.calls import ToldCall
from farcall.agent.outgoing import Outgoing
from farcall.agent.sending import Sender
from farcall.agent.spinning import Dozing
from farcall.futures import DONE
from farcall.protocol.wire import CALL_CARRYING, PLAIN, encode
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start
from reference_stage import expect_nothing_left, here, remote

pytestmark = pytest.mark.timeout(30)

kept: list[RRef[Any]] = []


@pytest.fixture
def group(new_group: NewGroup) -> LocalGroup:
    kept.clear()
    return new_group(3)


def fetch(reference: RRef[Any]) -> Any:
    return reference.to_here(timeout=SOON)


def told_of(reference: RRef[Any]) -> bool:
    return reference._handle.told is not None


def fetch_if(reference: RRef[Any], wanted: bool) -> Any:
    """What it was told, or was not."""
    told = reference._handle.told is not None
    if wanted:
        reference.to_here(timeout=SOON)
    return told


def keep(reference: RRef[Any]) -> bool:
    kept.append(reference)
    return reference._handle.told is not None


def connection(group: LocalGroup) -> Outgoing:
    """From who runs the functions to the owner."""
    found = group[2].calling.peers[1].connection
    assert found is not None
    return found


@pytest.mark.parametrize("value", [None, 7, 2**100, 0.5, True, "tea", "", 1j], ids=repr)
def test_plain_values_that_were_wanted_are_asked_for_before_the_next_call_runs(group: LocalGroup, value: Any) -> None:
    rref = remote(group[0], 1, echo, value)
    assert call(group[0], 2, fetch, rref) == value
    asked = connection(group).calls_started
    found = call(group[0], 2, fetch, remote(group[0], 1, echo, value))
    assert (found, type(found)) == (value, type(value))
    assert connection(group).calls_started == asked, "nothing was asked for by the function itself"
    del rref
    expect_nothing_left(group)
    assert not connection(group).pending


def test_of_a_function_that_does_not_want_them_nothing_is_asked_for(group: LocalGroup) -> None:
    for _ in range(3):
        assert not call(group[0], 2, told_of, remote(group[0], 1, echo, 7))


def test_a_function_that_no_longer_wants_them_is_believed(group: LocalGroup) -> None:
    told = [call(group[0], 2, fetch_if, remote(group[0], 1, echo, 7), wanted) for wanted in (True, False, False, True)]
    assert told == [False, True, False, False]
    expect_nothing_left(group)
    eventually(lambda: not connection(group).pending)


def test_many_calls_that_come_together_wait_together(group: LocalGroup) -> None:
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    futures = [start(group[0], 2, fetch, remote(group[0], 1, echo, number)) for number in range(100)]
    assert [future.wait() for future in futures] == list(range(100))
    del futures
    expect_nothing_left(group)


def test_values_that_may_change_are_shown_as_they_are_when_the_function_asks(group: LocalGroup) -> None:
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    changing = remote(group[0], 1, list, (1,))
    assert call(group[0], 2, fetch, changing) == [1]
    changing.rpc_sync().append(2)
    assert call(group[0], 2, fetch, changing) == [1, 2]
    assert not call(group[0], 2, told_of, changing)


def test_values_that_turn_out_to_change_are_shown_as_they_are_when_used(group: LocalGroup) -> None:
    assert not call(group[0], 2, keep, remote(group[0], 1, echo, 7))
    assert kept.pop().to_here(timeout=SOON) == 7
    changing = remote(group[0], 1, list, (1,))
    assert call(group[0], 2, keep, changing), "it is asked for if it is plain"
    told = kept[0]._handle.told
    assert told is not None
    eventually(lambda: told.done() or call(group[2], 1, len, ()))
    changing.rpc_sync().append(2)
    assert kept[0].to_here(timeout=SOON) == [1, 2]
    assert not call(group[0], 2, keep, changing), "it is not relied on again"


def test_what_was_asked_for_ahead_is_waited_for_with_patience(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the pool grants to the thread that leads, and to no other."""
    calling = group[2].calling
    serving = calling._place.serving
    doze, waits = serving.doze, []

    def record(dozing: Dozing, poll: Callable[[int], Any]) -> Any:
        waits.append(dozing)
        return doze(dozing, poll)

    monkeypatch.setattr(serving, "doze", record)
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    assert calling._patience not in waits, "nothing was asked for ahead yet"
    gate = new_gate("patience")
    future = start(group[0], 2, fetch, remote(group[0], 1, wait_at, "patience", 8))
    eventually(lambda: calling._patience in waits)
    gate.set()
    assert future.wait() == 8


def test_who_waits_with_patience_reads_by_itself(group: LocalGroup) -> None:
    assert not call(group[0], 2, keep, remote(group[0], 1, echo, 7))
    assert kept.pop().to_here(timeout=SOON) == 7
    gate = new_gate("read")
    assert call(group[0], 2, keep, remote(group[0], 1, wait_at, "read", 8))
    told = kept[0]._handle.told
    assert told is not None
    assert not told.read(1)
    gate.set()
    eventually(lambda: told.read(1))
    assert told.outcome() == (DONE, 8)


def test_a_value_that_is_there_later_is_told_then(group: LocalGroup) -> None:
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    gate = new_gate("later")
    rref = remote(group[0], 1, wait_at, "later", 8)
    future = start(group[0], 2, fetch, rref)
    assert arrived["later"].wait(SOON)
    assert not future.done()
    gate.set()
    assert future.wait() == 8


@pytest.mark.filterwarnings("error")
def test_a_failure_is_told_and_raised_by_each_use(group: LocalGroup) -> None:
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    rref = remote(group[0], 1, int, "tea")
    for _ in range(2):
        with pytest.raises(ValueError, match="tea"):
            call(group[0], 2, fetch, rref)


def test_a_value_of_the_worker_that_runs_the_function_is_not_asked_for(group: LocalGroup) -> None:
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    assert call(group[2], 2, echo, 7) == 7, "it has a connection to itself"
    assert call(group[0], 2, fetch, remote(group[0], 2, echo, 8)) == 8
    assert call(group[0], 2, fetch, here(group[0], 9)) == 9, "of the caller, to whom there is no connection yet"
    expect_nothing_left(group)


def test_what_is_told_to_a_handle_that_is_kept_can_be_had_later(group: LocalGroup) -> None:
    assert not call(group[0], 2, keep, remote(group[0], 1, echo, 7))
    assert kept.pop().to_here(timeout=SOON) == 7
    assert call(group[0], 2, keep, remote(group[0], 1, echo, 8))
    told = kept[0]._handle.told
    assert told is not None
    eventually(lambda: told.done() or call(group[2], 1, len, ()))
    asked = connection(group).calls_started
    assert kept[0].to_here(timeout=SOON) == 8
    assert connection(group).calls_started == asked
    kept.clear()
    expect_nothing_left(group)


def test_what_is_lost_with_its_connection_is_asked_for_by_the_function(group: LocalGroup) -> None:
    assert not call(group[0], 2, keep, remote(group[0], 1, echo, 7))
    assert kept.pop().to_here(timeout=SOON) == 7
    gate = new_gate("lost")
    assert call(group[0], 2, keep, remote(group[0], 1, wait_at, "lost", 8))
    assert arrived["lost"].wait(SOON)
    connection(group).lose("the test has it so", advice="")
    gate.set()
    assert kept[0].to_here(timeout=SOON) == 8
    kept.clear()
    expect_nothing_left(group)


def test_what_cannot_be_sent_any_more_is_asked_for_by_the_function(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 7)) == 7
    one = connection(group)

    def lost(_: bytes) -> None:
        pending = dict(one.pending)
        one.pending.clear()  # as of one that was lost before it was asked
        one.lose("the test has it so", advice="")
        one.pending.update(pending)

    monkeypatch.setattr(one, "send_news", lost)
    assert call(group[0], 2, fetch, remote(group[0], 1, echo, 8)) == 8
    assert not one.pending


def test_what_came_before_a_message_that_cannot_be_is_asked_for_all_the_same(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its function runs, though nobody hears of it any more, and must not wait for what was never asked."""
    assert not call(group[0], 2, keep, remote(group[0], 1, echo, 7))
    assert kept.pop().to_here(timeout=SOON) == 7
    calls = group[0].calling.peers[2].connection
    assert calls is not None
    rref = remote(group[0], 1, echo, 8)
    with monkeypatch.context() as patch:
        sender, send, rubbish = calls._sender, Sender.send, encode(CALL_CARRYING, 0, b"", b"")
        patch.setattr(Sender, "send", lambda each, data: send(each, data + rubbish if each is sender else data))
        future = start(group[0], 2, keep, rref)
    eventually(lambda: kept)
    assert kept[0].to_here(timeout=SOON) == 8
    assert future.exception() is not None
    assert "closed" in caplog.text


def test_of_many_references_in_one_call_none_is_asked_for(group: LocalGroup) -> None:
    assert call(group[0], 2, count_told, [remote(group[0], 1, echo, 7)]) == 0
    assert call(group[0], 2, count_told, [remote(group[0], 1, echo, number) for number in range(16)]) == 16
    assert call(group[0], 2, count_told, [remote(group[0], 1, echo, number) for number in range(17)]) == 0
    expect_nothing_left(group)


def count_told(references: list[RRef[Any]]) -> int:
    told = sum(reference._handle.told is not None for reference in references)
    assert [reference.to_here(timeout=SOON) for reference in references][1:] == list(range(1, len(references)))
    return told


def test_what_was_released_is_refused(group: LocalGroup) -> None:
    """Whoever asks for the plain value of what is not there any more hears that, as who asks for any value does."""
    rref = remote(group[0], 1, echo, 7)
    assert rref.to_here(timeout=SOON) == 7
    handle = rref._handle
    head = group[0].calling._head_on(handle, PLAIN, "")
    del rref, handle
    gc.collect()
    expect_nothing_left(group)
    one = group[0].calling.peers[1].connection
    assert one is not None
    future = one.call("to_here", head, b"", (), SOON)
    assert not isinstance(future, ToldCall)
    with pytest.raises(ReferenceRefused, match="was released"):
        future.wait()

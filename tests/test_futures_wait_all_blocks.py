"""Waiting for all calls of a block."""

from __future__ import annotations

import threading

import pytest

import farcall as rpc
from farcall.futures import AwaitedTogether, Future, _wait_all, awaited_together

_gate = threading.Event()


def wait_at_the_gate(result: int) -> int:
    assert _gate.wait(10)
    return result


@pytest.mark.usefixtures("alone")
def test_a_block_waits_for_its_calls() -> None:
    _gate.clear()
    opener = threading.Timer(0.05, _gate.set)
    opener.start()
    with _wait_all():
        futures = [rpc.rpc_async("alone", wait_at_the_gate, args=(n,)) for n in range(3)]
        assert not futures[0].done()
    assert [future.done() for future in futures] == 3 * [True]
    assert [future.value() for future in futures] == [0, 1, 2]
    opener.join()
    assert not awaited_together


class Gatekeeper:
    def wait(self) -> int:
        return wait_at_the_gate(5)


@pytest.mark.usefixtures("alone")
def test_calls_on_references_count() -> None:
    keeper = rpc.remote("alone", Gatekeeper)
    _gate.clear()
    opener = threading.Timer(0.05, _gate.set)
    opener.start()
    with _wait_all():
        future = keeper.rpc_async().wait()
    assert future.done()
    assert future.value() == 5
    opener.join()


@pytest.mark.usefixtures("alone")
def test_the_first_error_is_raised_when_all_are_done() -> None:
    futures: list[Future[object]] = []

    def block() -> None:
        with _wait_all():
            futures.append(rpc.rpc_async("alone", divmod, args=(1, 0)))
            futures.append(rpc.rpc_async("alone", int, args=("x",)))
            futures.append(rpc.rpc_async("alone", max, args=(1, 2)))

    with pytest.raises(ZeroDivisionError):
        block()
    assert futures[-1].done()
    assert not awaited_together


@pytest.mark.usefixtures("alone")
def test_what_the_block_raises_comes_first() -> None:
    futures: list[Future[object]] = []

    def block() -> None:
        with _wait_all():
            futures.append(rpc.rpc_async("alone", wait_at_the_gate, args=(1,)))
            raise LookupError("of the block")

    _gate.clear()
    opener = threading.Timer(0.05, _gate.set)
    opener.start()
    with pytest.raises(LookupError, match="of the block"):
        block()
    assert futures[0].done()
    opener.join()
    assert not awaited_together


def noted() -> Future[None]:
    future: Future[None] = Future()
    awaited_together.note(future)
    return future


def test_blocks_in_blocks_wait_for_their_own() -> None:
    with _wait_all():
        first = noted()
        with _wait_all():
            noted().set_result(None)
        assert not first.done()
        first.set_result(None)
        noted().set_result(None)
    assert not awaited_together


def test_calls_of_other_threads_are_not_waited_for() -> None:
    pending: list[Future[None]] = []
    with _wait_all():
        thread = threading.Thread(target=lambda: pending.append(noted()))
        thread.start()
        thread.join()
    assert not pending[0].done()


def test_an_interrupt_is_not_held_up() -> None:
    def block() -> None:
        with _wait_all():
            noted()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert not awaited_together


def test_without_a_block_nothing_is_kept() -> None:
    together = AwaitedTogether()
    together.note(Future())
    assert not together

"""Gates at which threads sleep, and the owner of a thread who hears when it does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from farcall.futures import Future
from farcall.gate import FOREVER, Gate, asleep, blocking_thread, on_serving_thread


def test_a_gate_that_is_open_lets_one_pass_without_sleeping() -> None:
    gate = Gate()
    gate.open()
    gate.open()
    assert gate.sleep(0.0)
    assert not gate.sleep(0.0)
    gate.open("whatever it is called with")
    assert gate.rest(FOREVER)
    assert not gate.rest(time.monotonic() + 0.001)


def test_a_gate_wakes_who_sleeps_there(background: ThreadPoolExecutor) -> None:
    gate = Gate()
    sleeping = background.submit(gate.sleep, FOREVER)
    gate.open()
    assert sleeping.result(60)


def test_the_owner_of_a_thread_hears_when_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(blocking_thread, "before", lambda: said.append("before"))
    monkeypatch.setattr(blocking_thread, "after", lambda: said.append("after"))
    assert on_serving_thread()
    gate = Gate()
    gate.rest(0.0)
    gate.open()
    gate.sleep(FOREVER)
    assert not said, "it did not sleep, or sleeps for itself"
    gate.sleep(0.0)
    assert said == ["before", "after"]
    with pytest.raises(TimeoutError):
        Future[int]().result(0)
    assert said == ["before", "after"] * 2
    with pytest.raises(KeyboardInterrupt), asleep():
        raise KeyboardInterrupt
    assert said == ["before", "after"] * 3


def test_a_thread_without_an_owner_sleeps_all_the_same(background: ThreadPoolExecutor) -> None:
    assert not on_serving_thread()
    assert not background.submit(on_serving_thread).result()
    with asleep():
        pass

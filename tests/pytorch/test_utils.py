"""`_utils`: turns at a store of torch's, and what the agent hears of who comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farcall.pytorch import _utils
from farcall.pytorch.worker_info import WorkerInfo


class WaitingStore:
    """A store that says when somebody waits at it."""

    def __init__(self, store: Any, waits: Callable[[], None]) -> None:
        self._store = store
        self._waits = waits

    def wait(self, keys: list[str]) -> None:
        self._waits()
        self._store.wait(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_one_at_a_time() -> None:
    store = dist.HashStore()
    waits = threading.Event()
    order: list[str] = []

    def second() -> None:
        with _utils._group_membership_management(WaitingStore(store, waits.set), "second", False):
            order.append("second")

    thread = threading.Thread(target=second)
    with _utils._group_membership_management(store, "first", True):
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_turn_ends_with_an_error() -> None:
    store = dist.HashStore()
    with pytest.raises(KeyError), _utils._group_membership_management(store, "first", True):
        raise KeyError
    with _utils._group_membership_management(store, "second", True):
        pass


def test_who_never_ends_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=20))
    taken = _utils._group_membership_management(store, "first", True)
    taken.__enter__()
    with pytest.raises(RuntimeError), _utils._group_membership_management(store, "second", True):
        pass
    assert "Token_for_second_join: Token_for_first_join has not released the lock" in caplog.text


class Hearing:
    is_forked = False

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def _update_group_membership(self, *what: Any) -> None:
        self.heard.append(what)


def test_the_agent_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Hearing()
    monkeypatch.setattr("farcall.current.sole", agent)
    info, devices = WorkerInfo("worker7", 7), [torch.device("cpu")]
    _utils._update_group_membership(info, devices, {}, True)
    assert agent.heard == [(info, devices, {}, True)]

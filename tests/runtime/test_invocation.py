"""What a callee does by itself about deadlines, when the caller's cancellation does not reach it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from eventually import eventually
from farcall import RpcBackendOptions, RpcTimeoutError
from farcall.runtime.server import ServerConnection
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, local_groups, run, runs, start

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def deaf_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalGroup]:
    """Returns a group whose workers have one thread each, and ignore CANCEL frames."""
    monkeypatch.setattr(ServerConnection, "_cancel", lambda *_: None)
    monkeypatch.setattr("farcall.deadlines.EXPIRY_GRACE_S", 0.02)
    with local_groups() as new:
        yield new(2, RpcBackendOptions(num_worker_threads=1))


def test_a_request_whose_time_is_over_is_not_run_and_is_counted(deaf_group: LocalGroup) -> None:
    gate = new_gate("busy")
    busy = start(deaf_group.agents[0], 1, wait_at, "busy")
    assert arrived["busy"].wait(SOON)
    for number in range(5):
        with pytest.raises(RpcTimeoutError, match="may still be running") as caught:
            call(deaf_group.agents[0], 1, run, number, timeout=0.02)
        assert caught.value.started is None, "the callee has not said so"
    gate.set()
    busy.wait()
    assert call(deaf_group.agents[0], 1, run, "in time") == "in time"
    assert runs == ["in time"]
    assert deaf_group.agents[1].get_metrics()["calls_expired"] == 5
    assert deaf_group.agents[1].get_metrics()["peers"]["worker0"]["calls_expired"] == 5


def test_a_late_reply_after_the_grace_is_dropped(deaf_group: LocalGroup) -> None:
    gate = new_gate("late")
    future: Any = start(deaf_group.agents[0], 1, wait_at, "late", "late", timeout=0.02)
    eventually(future.done)
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()
    assert call(deaf_group.agents[0], 1, run, "after") == "after"
    eventually(lambda: deaf_group.agents[0].is_idle())


def test_a_failure_is_sent_while_another_thread_imports_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncio", ModuleType("asyncio"))
    monkeypatch.setitem(sys.modules, "asyncio.exceptions", ModuleType("asyncio.exceptions"))
    with LocalGroup(2) as group, pytest.raises(ZeroDivisionError):
        group.agents[0].call(1, divmod, (1, 0), None, 20.0).wait()

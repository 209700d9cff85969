"""A graceful shutdown of an agent while another thread is in one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from farcall import ShutdownError
from farcall.testing import LocalGroup
from gates import SOON

pytestmark = pytest.mark.timeout(60)


def test_a_second_graceful_shutdown_that_takes_too_long_leaves_the_first_alone(
    background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalGroup(2) as group:
        agent = group.agents[0]
        is_idle = agent.is_idle
        is_waiting, may_end = threading.Event(), threading.Event()

        def is_idle_at_last() -> bool:
            is_waiting.set()
            return may_end.is_set() and is_idle()

        monkeypatch.setattr(agent, "is_idle", is_idle_at_last)
        leaving = [background.submit(each.shutdown, True, SOON) for each in group.agents]
        assert is_waiting.wait(SOON)
        with pytest.raises(ShutdownError, match=r"another thread is in shutdown\(\)"):
            agent.shutdown(graceful=True, timeout=0.05)
        may_end.set()
        for one in leaving:
            one.result(SOON)

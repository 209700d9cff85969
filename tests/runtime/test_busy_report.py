"""What a worker says that it is still doing."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from farcall.runtime.busy_report import describe_busy_work


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_stacks_are_looked_at(monkeypatch: pytest.MonkeyPatch, is_enabled: bool) -> None:
    """Some versions of CPython hold a lock meanwhile that a collection waits for."""
    seen = []
    original = vars(sys)["_current_frames"]

    def current_frames() -> dict[int, object]:
        seen.append(gc.isenabled())
        return dict(original())

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    was_enabled = gc.isenabled()
    try:
        if is_enabled:
            gc.enable()
        else:
            gc.disable()
        assert describe_busy_work([threading.get_ident()], []) == "something that is just ending"
        assert gc.isenabled() == is_enabled
    finally:
        if was_enabled:
            gc.enable()
        else:
            gc.disable()
    assert seen == [False]

"""Waits for what another thread does soon, where nothing tells when it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 20.0


def eventually(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; fails if it does not come to hold."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not come to hold"
        pause.wait(0.0005)

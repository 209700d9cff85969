"""Gates at which a function waits until the test opens them, and the news that it has come there.

All workers live in the process of the test, so both sides see the same gates.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

SOON = 10.0
"""Seconds in which everything that is to happen has happened, on a slow machine too."""

gates: dict[str, threading.Event] = {}
arrived: dict[str, threading.Event] = {}


def new_gate(name: str) -> threading.Event:
    """A gate that `wait_at` waits at, and the news that somebody does."""
    gates[name], arrived[name] = threading.Event(), threading.Event()
    return gates[name]


def wait_at(name: str, result: Any = None) -> Any:
    """Waits in a way of which farcall knows nothing."""
    arrived[name].set()
    assert gates[name].wait(SOON), f"nobody opened the gate {name!r}"
    return result


async def await_at(name: str) -> str:
    """Waits in a coroutine, and gives the gate's name."""
    arrived[name].set()
    while not gates[name].is_set():
        await asyncio.sleep(0.001)
    return name

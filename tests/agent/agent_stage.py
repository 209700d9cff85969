"""What the workers of the agent tests run.

All workers live in the process of the test, so functions here see the same globals as the test does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from farcall.futures import Future
from farcall.testing import LocalGroup
from gates import SOON
from group_stage import call

seen: list[Any] = []


def add(left: Any, right: Any = 1) -> Any:
    return left + right


async def add_async(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


def note(value: Any) -> None:
    seen.append(value)


def fail(error: BaseException) -> None:
    raise error


def thread_name() -> str:
    return threading.current_thread().name


def forward(group: LocalGroup, here: str, to: str, function: Callable[..., Any], *args: Any) -> Any:
    """Runs on `here` and calls on."""
    return call(group[here], to, function, *args)


def bounce(group: LocalGroup, here: str, there: str, depth: int) -> int:
    """Nested calls, to and fro: how many."""
    if depth == 0:
        return 0
    return 1 + call(group[here], there, bounce, group, there, here, depth - 1, timeout=3 * SOON)


class Counter:
    """Something with methods of all kinds. Sent by value where it is bound."""

    def __init__(self, total: int = 0) -> None:
        self.total = total

    def plus(self, amount: int) -> int:
        return self.total + amount

    def __call__(self, amount: int) -> int:
        return self.total + amount

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def name_and(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.total == self.total

    __hash__ = None  # type: ignore[assignment]


def settled(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def a_megabyte() -> bytes:
    return bytes(1 << 20)


class Odd(Exception):
    """Its constructor takes what `args` does not hold."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


def raise_odd() -> None:
    raise Odd(7, reason="odd")

"""What the workers of the tests of references run, and the check that no reference is left."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

from eventually import eventually
from farcall import Future, RRef
from farcall.functions import async_execution
from farcall.testing import LocalGroup
from gates import SOON


class ShelfError(Exception):
    """An error with arguments of its own."""


class Shelf:
    """A value with methods of all kinds."""

    capacity = 10

    def __init__(self, *items: str) -> None:
        self.items = list(items)

    def put(self, item: str, times: int = 1) -> int:
        self.items += [item] * times
        return len(self.items)

    def __call__(self, index: int) -> str:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def fail(self, text: str) -> None:
        raise ShelfError(text, 7)

    def fetch(self, rref: RRef[Any]) -> Any:
        return rref.to_here(timeout=SOON)

    @property
    def size(self) -> int:
        return len(self.items)

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @async_execution
    def later(self, value: int) -> Future[int]:
        future: Future[int] = Future()
        threading.Thread(target=lambda: future.set_result(value + len(self.items))).start()
        return future

    async def soon(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + len(self.items)


class Box:
    """Holds something."""

    def __init__(self, content: Any) -> None:
        self.content = content


def fail(text: str) -> Any:
    raise ShelfError(text, 7)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=SOON)


def fetch_all(value: Any) -> list[Any]:
    """Fetches every reference in a nested value."""
    return [rref.to_here(timeout=SOON) for rref in references_in(value)]


def references_in(value: Any) -> list[RRef[Any]]:
    match value:
        case RRef():
            return [value]
        case Box():
            return references_in(value.content)
        case dict():
            return [rref for pair in value.items() for part in pair for rref in references_in(part)]
        case list() | tuple() | set():
            return [rref for part in value for rref in references_in(part)]
    return []


kept: list[Any] = []
"""What `keep` was given. All workers are in this process, and share it."""


def keep(value: Any) -> None:
    kept.append(value)


USES: dict[str, Callable[[RRef[Any]], Any]] = {
    "to_here": lambda rref: rref.to_here(timeout=SOON),
    "rpc_sync": lambda rref: rref.rpc_sync(timeout=SOON).put("tea"),
    "rpc_async": lambda rref: rref.rpc_async(timeout=SOON).put("tea").wait(),
    "remote": lambda rref: rref.remote().put("tea").to_here(timeout=SOON),
    "remote of remote": lambda rref: rref.remote().put("tea").remote().bit_length().to_here(timeout=SOON),
    "call": lambda rref: rref.rpc_sync(timeout=SOON)(),
}
"""What can be done with a reference to a shelf."""


def expect_no_references(group: LocalGroup) -> None:
    """Waits until no worker owns or holds a reference."""

    def left() -> list[str]:
        gc.collect()  # an exception that was caught may have a reference in its traceback
        inventories = [group.references(name) for name in group.names]
        return [str(inventory) for inventory in inventories if inventory.owned or inventory.held]

    eventually(lambda: not left())

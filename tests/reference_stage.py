"""What tests of references share: how workers of one process make, pass and lose them, and that nothing is left.

What the workers run stands here too; all live in the process of the test, and see the same globals as it does.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from eventually import eventually
from farcall import RRef
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.runtime.agent import Agent
from gates import SOON


def remote(creator: Agent, to: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RRef[Any]:
    """What `farcall.remote` gives, for one of several workers of this process."""
    return RRef.of(creator.calling.remote(to, function, args, kwargs))


def here(owner: Agent, value: Any) -> RRef[Any]:
    """What `RRef(value)` gives, for one of several workers of this process."""
    return RRef.of(owner.reference_store.own(value))


def tables(agent: Agent) -> dict[str, int]:
    """How much is in each table of a worker that should be empty in the end; only those that are not."""
    return {name: size for name, size in agent.reference_store.table_sizes().items() if size}


def expect_nothing_left(agents: Iterable[Agent]) -> None:
    """All tables of these workers become empty, with nobody doing anything more."""
    agents = list(agents)

    def left() -> dict[str, dict[str, int]]:
        return {agent.info.name: sizes for agent in agents if (sizes := tables(agent))}

    deadline = monotonic() + SOON
    pause = threading.Event()
    gc.collect()
    while found := left():
        assert monotonic() < deadline, f"left in the tables: {found}"
        pause.wait(0.005)
        gc.collect()  # an error that was caught may have kept a handle in its traceback for a moment


def expect_confirmed(rref: RRef[Any]) -> None:
    """The owner comes to count this handle."""
    eventually(rref.confirmed_by_owner)


# -- What the workers run


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=SOON)


def fail(text: str) -> None:
    raise ShelfError(text, 7)


class ShelfError(Exception):
    """An error with arguments of its own."""


class Shelf:
    """Something with methods of all kinds."""

    capacity = 10

    def __init__(self, *items: str) -> None:
        self.items = list(items)

    def put(self, item: str, times: int = 1) -> int:
        self.items += [item] * times
        return len(self.items)

    def __call__(self, index: int) -> str:
        return self.items[index]

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
    """An object that holds something; equal by what it holds."""

    def __init__(self, content: Any) -> None:
        self.content = content


kept: list[RRef[Any]] = []


def keep_there(rref: RRef[Any]) -> None:
    kept.append(rref)


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


def fetch_all(value: Any) -> list[Any]:
    return [rref.to_here(timeout=SOON) for rref in references_in(value)]


# -- What can be done with a reference


USES: dict[str, Callable[[RRef[Any]], Any]] = {
    "to_here": lambda rref: rref.to_here(),
    "rpc_sync": lambda rref: rref.rpc_sync().put("tea"),
    "rpc_async": lambda rref: rref.rpc_async().put("tea").wait(),
    "remote": lambda rref: rref.remote().put("tea").to_here(),
    "remote of remote": lambda rref: rref.remote().put("tea").remote().bit_length().to_here(),
    "_get_type": lambda rref: rref._get_type(),
    "_get_type, later": lambda rref: rref._get_type(blocking=False).wait(),
    "_get_future": lambda rref: rref._get_future().wait(),
    "call": lambda rref: rref.rpc_sync()(),
}


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))

"""What tests of references share: how workers of one process make, pass and lose them, and that nothing is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from eventually import eventually
from farcall import RRef
from farcall.agent import Agent
from farcall.futures import Future

SOON = 10.0
"""Seconds in which everything that is to happen has happened, on a slow machine too."""


def remote(creator: Agent, to: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RRef[Any]:
    """What `farcall.remote` gives, for one of several workers of this process."""
    return RRef.of(creator.calling.remote(to, function, args, kwargs))


def here(owner: Agent, value: Any) -> RRef[Any]:
    """What `RRef(value)` gives, for one of several workers of this process."""
    return RRef.of(owner.book.own(value))


def call(caller: Agent, to: Any, function: Callable[..., Any], *args: Any, timeout: float = SOON) -> Any:
    """The result of a call, as `rpc_sync` gives it."""
    return caller.call(to, function, args, None, timeout).wait()


def start(caller: Agent, to: Any, function: Callable[..., Any], *args: Any, timeout: float = SOON) -> Future[Any]:
    """The future of a call, as `rpc_async` gives it."""
    return caller.call(to, function, args, None, timeout, unattended=True)


def tables(agent: Agent) -> dict[str, int]:
    """How much is in each table of a worker that should be empty in the end; only those that are not."""
    book = agent.book
    sizes = {
        "owned": len(book._references.owned),
        "held": len(book._references.held),
        "parents": len(book._references._parents),
        "values": len(book._values),
        "origins": len(book._origins),
        "handles": len(book._handles),
        "dropped": len(book._dropped),
        "outboxes": len(book._outboxes),
        "unacknowledged": sum(len(link.unacknowledged) for link in book._delivery._links.values()),
        "received out of turn": sum(len(link.received.beyond) for link in book._delivery._links.values()),
    }
    return {name: size for name, size in sizes.items() if size}


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

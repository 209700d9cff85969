"""What tests of references share: how workers of one process make, pass and lose them, and that nothing is left.

`reference_values` has what the workers run. This module may use parts of farcall that are not public.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import reference_values
from eventually import eventually
from farcall import RRef
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


# -- What can be done with a reference


USES: dict[str, Callable[[RRef[Any]], Any]] = {
    **reference_values.USES,
    "_get_type": lambda rref: rref._get_type(),
    "_get_type, later": lambda rref: rref._get_type(blocking=False).wait(),
    "_get_future": lambda rref: rref._get_future().wait(),
}
"""With torch's private methods, too."""


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))

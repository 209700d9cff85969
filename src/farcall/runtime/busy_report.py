"""Describes what a worker is still doing, for the messages of a shutdown that takes long.

No list of running functions is kept, because that would cost time in every call. Instead, the stacks of the executor's
threads are inspected when a description is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final

from farcall.runtime.cluster import call_watchers
from farcall.runtime.invocation import Invocation
from farcall.serialization import callable_name

if TYPE_CHECKING:
    from farcall.runtime.client import ClientConnection

_MAX_LISTED: Final = 5


def describe_busy_work(threads: Iterable[int], connections: Iterable[ClientConnection]) -> str:
    """Returns text that lists the functions that run here, and the calls of this worker that wait for a reply.

    At most five are named, and the rest are counted. If there are none, returns "something that is just ending".

    Args:
        threads: The idents of the executor's threads; may be empty.
        connections: The connections whose pending calls are listed; may be empty.
    """
    frames = sys._current_frames()
    things = [thing for ident in threads for thing in _functions_in(frames.get(ident))]
    for connection in connections:
        for call in list(connection.pending.values()):
            things.append(f"a call of `{callable_name(call.function)}` on worker {connection.peer.name!r}")
    if not things:
        return "something that is just ending"
    more = [f"{len(things) - _MAX_LISTED} more"] if len(things) > _MAX_LISTED else []
    return ", ".join(things[:_MAX_LISTED] + more)


def _functions_in(frame: FrameType | None) -> Iterator[str]:
    """Yields a description of each user function on a stack, innermost first; nothing if `frame` is None."""
    while frame is not None:
        if frame.f_code is Invocation.run.__code__:
            yield frame.f_locals["self"].describe(frame.f_locals.get("function"))
        elif frame.f_code is call_watchers.__code__ and "watcher" in frame.f_locals:
            yield f"the membership callback `{callable_name(frame.f_locals['watcher'])}`"
        frame = frame.f_back

"""Describes what a worker is still doing, for the messages of a shutdown that takes long.

No list of running functions is kept, because that would cost time in every call. Instead, the stacks of the executor's
threads are inspected when a description is needed.
"""

from __future__ import annotations

import gc
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


def _current_frames() -> dict[int, FrameType]:
    """Returns the stack frame of each thread of this process, by the ident of the thread.

    Garbage is not collected meanwhile: some versions of CPython would wait for ever for a lock that they hold
    themselves (gh-106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def describe_busy_work(threads: Iterable[int], connections: Iterable[ClientConnection]) -> str:
    """Returns text that lists what this worker is still doing, for messages.

    Lists the functions and membership callbacks that run in `threads`, and the calls on `connections` that wait for a
    reply. At most five of all these are named. The number of the others follows, such as "3 more". If there are none,
    returns "something that is just ending".

    Args:
        threads: The idents of the executor's threads; may be empty. Unknown idents are ignored.
        connections: This worker's connections to others; may be empty.
    """
    frames = _current_frames()
    things = [thing for ident in threads for thing in _functions_in(frames.get(ident))]
    for connection in connections:
        for call in list(connection.pending.values()):
            things.append(f"a call of `{callable_name(call.function)}` on worker {connection.peer.name!r}")
    if not things:
        return "something that is just ending"
    more = [f"{len(things) - _MAX_LISTED} more"] if len(things) > _MAX_LISTED else []
    return ", ".join(things[:_MAX_LISTED] + more)


def _functions_in(frame: FrameType | None) -> Iterator[str]:
    """Yields a text for each called function and each membership callback on the stack of one thread.

    A called function is one that the thread runs for a call. `frame` is the innermost stack frame of the thread. The
    innermost function comes first. Yields nothing if `frame` is None.
    """
    while frame is not None:
        if frame.f_code is Invocation.run.__code__:
            yield frame.f_locals["self"].describe(frame.f_locals.get("function"))
        elif frame.f_code is call_watchers.__code__ and "watcher" in frame.f_locals:
            yield f"the membership callback `{callable_name(frame.f_locals['watcher'])}`"
        frame = frame.f_back

"""What a worker is busy with, in words: for whoever waits for it to become idle, and wonders.

Nobody keeps a list of what runs, as each call would pay for it. It is read off the stacks of the serving threads when
somebody asks, which happens in a shutdown that takes long, and never else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Final

from farcall.agent.execution import FunctionJob
from farcall.agent.group import call_watchers
from farcall.agent.outgoing import Outgoing
from farcall.serialization import callable_name

_MOST: Final = 5


def describe_under_way(serving_threads: Iterable[int | None], connections: Iterable[Outgoing]) -> str:
    """The functions that these threads (their idents) run for others, and the calls that wait for a reply."""
    frames = sys._current_frames()
    things = [thing for ident in serving_threads for thing in _functions_in(frames.get(ident or 0))]
    for connection in connections:
        for call in list(connection.pending.values()):
            things.append(f"a call of `{callable_name(call.function)}` on worker {connection.peer.name!r}")
    if not things:
        return "something that is just ending"
    more = [f"{len(things) - _MOST} more"] if len(things) > _MOST else []
    return ", ".join(things[:_MOST] + more)


def _functions_in(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if frame.f_code is FunctionJob.run.__code__:
            job, function = frame.f_locals["self"], frame.f_locals.get("function")
            name = "a function" if function is None else f"`{callable_name(function)}`"
            yield f"{name}, called by {job.origin}" if job.origin is not None else f"{name}, for a reference"
        elif frame.f_code is call_watchers.__code__ and "watcher" in frame.f_locals:
            yield f"the membership callback `{callable_name(frame.f_locals['watcher'])}`"
        frame = frame.f_back

"""How workers find each other: a store that they share, found through a URL.

`rendezvous` finds the store (and hosts it at rank 0), `join` waits for everybody. Nothing here is on the path of a
call, and nothing is unpickled.

What does the work is imported when it is first asked for: it is a third of the time of `import farcall`, and a process
that only looks at the package's names does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farcall.rendezvous.store import PATIENCE, Store

if TYPE_CHECKING:
    from farcall.rendezvous.joining import join
    from farcall.rendezvous.meeting import Rendezvous, rendezvous

__all__ = ["PATIENCE", "Rendezvous", "Store", "join", "rendezvous"]


def __getattr__(name: str) -> Any:
    if name == "join":
        from farcall.rendezvous.joining import join

        return join
    if name in ("Rendezvous", "rendezvous"):
        from farcall.rendezvous import meeting

        return getattr(meeting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""How workers find each other: a store that they share, found through a URL.

`rendezvous` finds the store (and hosts it at rank 0), `join` waits for everybody. In an open group, where workers come
and go, whoever is first hosts it: `join_open`, `leave_open`, `clear_away`, `host_again` and so on. Nothing here is on
the path of a call, and nothing is unpickled.

What does the work is imported when it is first asked for: it is a third of the time of `import farcall`, and a process
that only looks at the package's names does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farcall.rendezvous.store import PATIENCE, Store

if TYPE_CHECKING:
    from farcall.rendezvous.joining import join
    from farcall.rendezvous.meeting import Rendezvous, rendezvous
    from farcall.rendezvous.open_group import (
        clear_away,
        hand_over,
        host_again,
        is_hosted_by,
        join_open,
        leave_open,
        mark_gone,
        settle_no_more,
        when_store_lost,
        who_is_there,
    )

__all__ = [
    "PATIENCE",
    "Rendezvous",
    "Store",
    "clear_away",
    "hand_over",
    "host_again",
    "is_hosted_by",
    "join",
    "join_open",
    "leave_open",
    "mark_gone",
    "rendezvous",
    "settle_no_more",
    "when_store_lost",
    "who_is_there",
]


def __getattr__(name: str) -> Any:
    if name == "join":
        from farcall.rendezvous.joining import join

        return join
    if name in ("Rendezvous", "rendezvous"):
        from farcall.rendezvous import meeting

        return getattr(meeting, name)
    if name in __all__:
        from farcall.rendezvous import open_group

        return getattr(open_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

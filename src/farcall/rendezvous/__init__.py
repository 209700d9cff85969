"""Rendezvous: how the workers of a group find each other when the group starts.

All workers know one URL. `rendezvous` turns the URL into a connection to the group's *store*, a small key-value server
that runs in rank 0. `join` then waits until every worker of the group has connected, and exchanges their payloads.

In an open group, where workers join and leave at any time, the first worker hosts the store. `join_open` and
`leave_open` add and remove one worker. If the hosting worker dies, `ensure_store` starts the store on another worker.

No call uses the store, so none of this code is on the path of a call. Nothing read from the network is unpickled.

    urls              combines a URL, the arguments of init_rpc and environment variables into a plan
    group_entry       `rendezvous`: connects to the store of a plan, or hosts it
    fixed_group       `join`: waits for all workers of a group of a known size
    open_group        joining and leaving an open group
    store             the interface of a store
    client            a worker's connection to the store
    open_group_store  the same for an open group, whose store may move to another worker
    hosted_store      starts the store of a group in this process
    server            the store's sockets and thread; server_state holds its data and decisions
    handshake         the first messages between a worker and a store
    messages          requests and replies as bytes
    location_file     the file behind `file:///path`
    presence_lock     tells whether workers of an open group run on this machine
    addresses         sockets and addresses for a store

Most modules are imported on first use (see `__getattr__`). Importing all of them takes a third of the time of
`import farcall`, and a program that never joins a group does not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farcall.rendezvous.store import CLOSE_TIMEOUT_S, Store

if TYPE_CHECKING:
    from farcall.rendezvous.fixed_group import join
    from farcall.rendezvous.group_entry import Rendezvous, rendezvous
    from farcall.rendezvous.open_group import (
        call_when_store_lost,
        ensure_store,
        forget_own_entries,
        is_hosted_by,
        join_open,
        leave_open,
        read_members,
        remove_lost_members,
        remove_member,
        stop_hosting,
    )

__all__ = [
    "CLOSE_TIMEOUT_S",
    "Rendezvous",
    "Store",
    "call_when_store_lost",
    "ensure_store",
    "forget_own_entries",
    "is_hosted_by",
    "join",
    "join_open",
    "leave_open",
    "read_members",
    "remove_lost_members",
    "remove_member",
    "rendezvous",
    "stop_hosting",
]


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` from the module that defines it. Raises `AttributeError` for any other name."""
    if name == "join":
        from farcall.rendezvous.fixed_group import join

        return join
    if name in ("Rendezvous", "rendezvous"):
        from farcall.rendezvous import group_entry

        return getattr(group_entry, name)
    if name in __all__:
        from farcall.rendezvous import open_group

        return getattr(open_group, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""`rendezvous`: from a URL to a store that all workers of a group share. In a fixed group rank 0 hosts it and the
others look for it; in an open group (no world size) whoever finds none there does.

Which place a URL means is `urls`' business, finding the store `locate`'s, hosting it `hosting`'s; here they are put
together, and it is decided at which address this worker should listen for the others.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from farcall.rendezvous.client import StoreClient
from farcall.rendezvous.hosting import candidates_of, host
from farcall.rendezvous.locate import find_store
from farcall.rendezvous.open_store import OpenStore
from farcall.rendezvous.store import Store
from farcall.rendezvous.urls import Plan, read_plan
from farcall.security import Credentials
from farcall.transports.network import interface_address, is_loopback, numeric_host

_RUN_KEY: Final = "rendezvous/run"


@dataclass(eq=False)
class Rendezvous:
    """The way into a group."""

    store: Store
    """Shared by the group. Close it at the end: at rank 0 of a fixed group that ends it for all."""
    rank: int
    """In an open group -1 if nobody said one."""
    world_size: int | None
    """None: the group is open."""
    host: str
    """The address of this machine at which the others can reach this worker."""
    group: str
    """An id of this run: the same at all its workers, another one for every other run.

    In an open group it is settled when `join_open` has returned: until then the group may vanish, and another begin.
    """


def rendezvous(
    init_method: str,
    name: str,
    rank: int,
    world_size: int | None,
    timeout: float,
    interface: str | None = None,
    credentials: Credentials | None = None,
) -> Rendezvous:
    """Meets the other workers' store; does not wait for the other workers, only for the one that hosts it.

    `rank` -1 and `world_size` None are taken from the URL or the environment; without any world size the group is open.
    The `credentials` are by default those of this user.
    Raises `UsageError` if what was said is wrong or not enough; `RendezvousTimeoutError` if rank 0 does not come, or
    nobody can host the store of an open group; `RendezvousError` if the store cannot be hosted here, or refuses this
    worker.
    """
    credentials = credentials or Credentials()
    deadline = time.monotonic() + timeout
    plan = read_plan(init_method, rank, world_size, os.environ)
    chosen = None if interface is None else interface_address(interface)
    if plan.world_size is None:
        return _meet_openly(plan, name, chosen, timeout, credentials)
    with ExitStack() as undo:
        candidates, only_one = candidates_of(plan)
        hosted = host(plan, name, chosen, timeout, credentials) if plan.rank == 0 else None
        if hosted is not None:
            undo.callback(hosted.close)
            reached_at = hosted.reached_at
            candidates, only_one = (lambda: reached_at), False
        left = deadline - time.monotonic()
        sock, welcome = find_store(
            candidates, only_one, str(plan.place), name, plan.rank, max(0.0, left), credentials=credentials
        )
        peer, own = numeric_host(sock.getpeername()), numeric_host(sock.getsockname())
        # Closing the store closes what was opened for it here, as often as it is closed.
        if hosted is None:
            store = StoreClient(sock, welcome)
        else:
            store = StoreClient(sock, welcome, hosted.close, hosted.server)
        undo.pop_all()
    try:
        run = store.set_new(_RUN_KEY, uuid.uuid4().hex.encode()).decode()
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, plan.rank, plan.world_size, chosen or _good_for_others(peer, own), run)


def _meet_openly(plan: Plan, name: str, chosen: str | None, timeout: float, credentials: Credentials) -> Rendezvous:
    store = OpenStore(plan, name, chosen, credentials)
    try:
        group = store.enter(timeout)
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, plan.rank, None, chosen or _good_for_others(store.peer, store.own), group)


def _good_for_others(peer: str, own: str) -> str:
    """Of the two ends of a connection to the store, the address at which others reach this worker."""
    return peer if is_loopback(peer) else own

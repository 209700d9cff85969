"""`rendezvous`: from a URL to a connection to the store that all workers of a group share.

In a fixed group rank 0 hosts the store and the others look for it. In an open group a worker that finds no store hosts
it.

`urls` reads the URL, `client` finds the store and `hosted_store` hosts it. This module connects the three, and decides
at which address this worker listens for other workers.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from farcall.rendezvous.client import StoreClient, find_store
from farcall.rendezvous.hosted_store import host_fixed, store_candidates
from farcall.rendezvous.location_file import check_path, explain_unusable_path
from farcall.rendezvous.open_group_store import OpenStore
from farcall.rendezvous.store import Store
from farcall.rendezvous.urls import FilePlace, Plan, read_plan
from farcall.security import Credentials
from farcall.transports.network import interface_address, is_loopback, numeric_host

_RUN_KEY: Final = "rendezvous/run"


@dataclass(eq=False)
class Rendezvous:
    """A worker's connection to the store of its group, and what it learned by connecting. `rendezvous` returns one.

    `store` is the store; close it at the end. `rank` is the rank of this worker, -1 in an open group if none was given.
    `world_size` is the number of workers, None for an open group. `host` is the address at which other workers reach
    this worker. `group` is the id of this run of the group, which no other run has.
    """

    store: Store
    """The group's store. Close it at the end. In rank 0 of a fixed group that ends the store for all workers."""
    rank: int
    """The rank of this worker; -1 in an open group if none was given."""
    world_size: int | None
    """The number of workers; None for an open group."""
    host: str
    """The address of this machine at which other workers can reach this worker."""
    group: str
    """The id of this run of the group: the same in all its workers, and different in every other run.

    In an open group the id is final when `join_open` has returned. Until then the group may end, and another one start.
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
    """Connects to the group's store, and hosts it if that is this worker's task.

    Rank 0 hosts the store of a fixed group. The first worker hosts that of an open group. Waits for the store only;
    `join` and `join_open` wait for other workers.

    Args:
        init_method: The rendezvous URL: `env://`, `tcp://host:port` or `file:///path`.
        name: The name of this worker. Not checked here.
        rank: The rank of this worker; -1 takes it from the URL or the environment.
        world_size: The number of workers; None takes it from the URL or the environment. If those have none either, the
            group is open.
        timeout: How many seconds to look for the store. 0 tries each address once in a fixed group, and always fails in
            an open one.
        interface: The network interface, or its address, that other workers should use; None chooses one.
        credentials: The secret and the encryption of this worker; None means those of this user.

    Returns:
        The connection to the store. Close its `store` when done.

    Raises:
        UsageError: The arguments, the URL or the environment are wrong or incomplete.
        RendezvousTimeoutError: Rank 0 did not start its store in time, or no worker can host the store of an open
            group.
        RendezvousError: The store cannot be hosted here, or it refuses this worker.
    """
    credentials = credentials or Credentials()
    deadline = time.monotonic() + timeout
    plan = read_plan(init_method, rank, world_size, os.environ)
    place = plan.place
    if isinstance(place, FilePlace):
        check_path(place.path)
    chosen = None if interface is None else interface_address(interface)
    if plan.world_size is None:
        return _enter_open_group(plan, name, chosen, timeout, credentials)
    with ExitStack() as undo:
        candidates, only_one = store_candidates(plan)
        hosted = host_fixed(plan, name, chosen, timeout, credentials) if plan.rank == 0 else None
        if hosted is not None:
            undo.callback(hosted.close)
            reached_at = hosted.reached_at
            candidates, only_one = (lambda: reached_at), False
        sock, welcome = find_store(
            candidates,
            only_one,
            str(place),
            name,
            plan.rank,
            max(0.0, deadline - time.monotonic()),
            credentials=credentials,
            diagnose=lambda: explain_unusable_path(place.path) if isinstance(place, FilePlace) else "",
        )
        peer, own = numeric_host(sock.getpeername()), numeric_host(sock.getsockname())
        # From here on closing the store closes the hosted server as well, so `undo` is no longer needed.
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
    return Rendezvous(store, plan.rank, plan.world_size, chosen or _choose_own_address(peer, own), run)


def _enter_open_group(
    plan: Plan, name: str, chosen: str | None, timeout: float, credentials: Credentials
) -> Rendezvous:
    """Connects to the store of an open group, or hosts it if there is none, and returns the connection.

    Args:
        plan: The group and the place of its store.
        name: The name of this worker.
        chosen: The address of the interface to use; None chooses one.
        timeout: How many seconds to look for the store, more than 0. 0 raises `RendezvousTimeoutError`.
        credentials: The secret and the encryption of this worker.

    Raises:
        RendezvousTimeoutError: No store was found in time, and this worker cannot host one.
        RendezvousError: The store refused this worker, or cannot be hosted here.
    """
    store = OpenStore(plan, name, chosen, credentials)
    try:
        group = store.enter(timeout)
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, plan.rank, None, chosen or _choose_own_address(store.peer, store.own), group)


def _choose_own_address(peer: str, own: str) -> str:
    """Returns the address at which other workers reach this one: `peer` if that is a loopback address, otherwise `own`.

    Args:
        peer: The numeric address of the store, as this worker's connection to the store has it.
        own: The numeric address of this worker in that connection.
    """
    return peer if is_loopback(peer) else own

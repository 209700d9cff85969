"""`rendezvous`: from a URL to a store that all workers of a group share. Rank 0 hosts it, the others look for it.

Which place a URL means is `urls`' business, finding the store `locate`'s; here the two are put together, and it is
decided at which address this worker should listen for the others.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from farcall.rendezvous.addresses import is_loopback, listen, reachable_addresses
from farcall.rendezvous.client import StoreClient
from farcall.rendezvous.embedded import EmbeddedStore
from farcall.rendezvous.locate import Candidate, find_store, is_alive
from farcall.rendezvous.location_file import Location, publish_location, read_location, remove_location
from farcall.rendezvous.store import Store
from farcall.rendezvous.urls import FilePlace, Plan, TcpPlace, read_plan
from farcall.transports.network import interface_address, numeric_host

_RUN_KEY: Final = "rendezvous/run"
_EVERYWHERE: Final = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Rendezvous:
    """The way into a group."""

    store: Store
    """Shared by the group. Close it at the end: at rank 0 that ends it for all."""
    rank: int
    world_size: int
    host: str
    """The address of this machine at which the others can reach this worker."""
    group: str
    """An id of this run: the same at all its workers, another one for every other run."""


def rendezvous(
    init_method: str, name: str, rank: int, world_size: int | None, timeout: float, interface: str | None = None
) -> Rendezvous:
    """Meets the other workers' store; does not wait for the other workers, only for rank 0.

    `rank` -1 and `world_size` None are taken from the URL or the environment. Raises `UsageError` if what was said is
    wrong or not enough; `RendezvousTimeoutError` if rank 0 does not come; `RendezvousError` if the store cannot be
    hosted here, or refuses this worker.
    """
    deadline = time.monotonic() + timeout
    plan = read_plan(init_method, rank, world_size, os.environ)
    chosen = None if interface is None else interface_address(interface)
    with ExitStack() as undo:
        candidates, only_one = _candidates(plan)
        server: EmbeddedStore | None = None
        if plan.rank == 0:
            server, reached_at = _host(plan, name, chosen, timeout, undo)
            candidates, only_one = (lambda: reached_at), False
        left = deadline - time.monotonic()
        sock, welcome = find_store(candidates, only_one, str(plan.place), name, plan.rank, max(0.0, left))
        peer, own = numeric_host(sock.getpeername()), numeric_host(sock.getsockname())
        # Closing the store closes what was opened for it here, last opened first: the file, then the server.
        store = StoreClient(sock, welcome, undo.pop_all().close, server)
    try:
        run = store.set_new(_RUN_KEY, uuid.uuid4().hex.encode()).decode()
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, plan.rank, plan.world_size, chosen or (peer if is_loopback(peer) else own), run)


def _candidates(plan: Plan) -> tuple[Callable[[], Sequence[Candidate]], bool]:
    """Where to look for the store, and whether that is one fixed place."""
    place = plan.place
    if isinstance(place, TcpPlace):
        group = _group(place.group, plan)
        fixed = [Candidate(place.host, port, group) for port in place.ports]
        return (lambda: fixed), len(fixed) == 1
    path = place.path

    def in_file() -> list[Candidate]:
        location = read_location(path)
        return [] if location is None else _located(location, plan)

    return in_file, False


def _host(
    plan: Plan, name: str, chosen: str | None, timeout: float, undo: ExitStack
) -> tuple[EmbeddedStore, list[Candidate]]:
    """Opens the store; gives also where it can be reached, the addresses that are good for others first."""
    place = plan.place
    if isinstance(place, FilePlace):
        return _host_for_file(place, plan, name, chosen, timeout, undo)
    listener = listen(place.host, place.ports)
    bound = numeric_host(listener.getsockname())
    group = _group(place.group, plan)
    server = EmbeddedStore(listener, group, plan.world_size, name)
    undo.callback(server.close)
    addresses = reachable_addresses() if bound in _EVERYWHERE else [bound]
    return server, [Candidate(address, server.port, group) for address in addresses]


def _host_for_file(
    place: FilePlace, plan: Plan, name: str, chosen: str | None, timeout: float, undo: ExitStack
) -> tuple[EmbeddedStore, list[Candidate]]:
    listener = listen(chosen or "", [0])
    addresses = (chosen,) if chosen else tuple(reachable_addresses())
    location = Location(uuid.uuid4().hex, listener.getsockname()[1], addresses)
    server = EmbeddedStore(listener, _group(location.run, plan), plan.world_size, name)
    undo.callback(server.close)
    publish_location(
        place.path, location, lambda earlier: any(is_alive(candidate) for candidate in _located(earlier, plan)), timeout
    )
    undo.callback(remove_location, place.path, location)
    return server, _located(location, plan)


def _located(location: Location, plan: Plan) -> list[Candidate]:
    group = _group(location.run, plan)
    return [Candidate(address, location.port, group) for address in location.addresses]


def _group(text: str, plan: Plan) -> str:
    # With the size in it, workers that were told different sizes are refused, and the refusal names both.
    return f"{text}, {plan.world_size} workers"

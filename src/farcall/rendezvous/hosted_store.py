"""Starts the store of a group in this process, and tells where workers have to look for it.

Rank 0 hosts the store of a fixed group, and fails with a reason if it cannot. Any worker may host the store of an open
group. If several try at the same time, the port or the location file lets one of them win, and the others connect to
the winner's store.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from farcall.errors import RendezvousError
from farcall.rendezvous.addresses import listen, listen_at_once, reachable_addresses
from farcall.rendezvous.client import Candidate, is_alive
from farcall.rendezvous.location_file import (
    HostedElsewhereError,
    Location,
    publish_location,
    read_location,
    remove_location,
)
from farcall.rendezvous.server import StoreServer
from farcall.rendezvous.server_state import OPEN_GROUP_SUFFIX
from farcall.rendezvous.urls import FilePlace, Plan, TcpPlace
from farcall.security import Credentials
from farcall.transports.network import numeric_host

_ALL_ADDRESSES: Final = ("0.0.0.0", "::")
_PROBE_TIMEOUT_S: Final = 0.75
"""How many seconds an earlier store has to answer, over all its addresses together."""


@dataclass(frozen=True)
class HostedStore:
    """A store that runs in this process: its server, where it can be reached, and its location file.

    `server` is the server. `reached_at` has the addresses of the store. `path` is the location file, the file behind a
    `file:///path` URL; it holds `location`, the address of the store. Both are None if the store has a fixed host and
    port. Call `close` at the end.
    """

    server: StoreServer
    """The server, which serves requests until it is closed."""
    reached_at: list[Candidate]
    """Where the store can be reached; addresses that other machines can use come first."""
    path: str | None = None
    """The location file that leads to the store; None if the store has a fixed host and port."""
    location: Location | None = None
    """What the location file says; None if there is none."""

    def close(self, keep_file: bool = False) -> None:
        """Removes the location file, if there is one, then ends the store. May be called again.

        Before it ends, the store of a fixed group waits up to `server.linger` seconds, 5 by default, for the workers to
        disconnect.

        Args:
            keep_file: True leaves the file in place. A worker that wants to join then knows that a member will host the
                store again soon.
        """
        if self.path is not None and self.location is not None and not keep_file:
            remove_location(self.path, self.location)
        self.server.close()


def store_candidates(plan: Plan) -> tuple[Callable[[], Sequence[Candidate]], bool]:
    """Returns where to look for the store of a group.

    Args:
        plan: The number of workers of the group, and the place of its store: ports of a host, or a file.

    Returns:
        A function that returns the addresses to try, and whether the store can only be at one address. For a file, the
        function reads the file at each call. It returns an empty list if the file holds no location, and raises
        `OSError` if the file cannot be read.
    """
    place = plan.place
    if isinstance(place, TcpPlace):
        group = _group_id(place.group, plan)
        fixed = [Candidate(place.host, port, group) for port in place.ports]
        return (lambda: fixed), len(fixed) == 1
    path = place.path

    def in_file() -> list[Candidate]:
        location = read_location(path)
        return [] if location is None else _candidates_at(location, plan)

    return in_file, False


def host_fixed(
    plan: Plan, name: str, chosen: str | None, timeout: float, credentials: Credentials | None = None
) -> HostedStore:
    """Hosts the store of a fixed group, in rank 0. Returns the running store, which the caller closes at the end.

    Args:
        plan: The number of workers of the group, and the place of its store: ports of a host, or a file.
        name: The name of this worker.
        chosen: The address to listen on, if the place is a file; None for all addresses.
        timeout: How many seconds to wait for the lock of a location file; 0 tries once.
        credentials: The secret and the encryption; None means those of this user.

    Raises:
        RendezvousError: The store cannot be hosted here: the address is not this machine's, the port is taken, the file
            cannot be written or stays locked, or the file leads to another store that is alive.
    """
    place = plan.place
    if isinstance(place, FilePlace):
        try:
            return _host_with_file(place, plan, name, chosen, timeout, None, credentials)
        except HostedElsewhereError as error:
            raise RendezvousError(str(error)) from None
    return _start_server(listen(place.host, place.ports), place, plan, name, None, credentials)


def host_open(
    plan: Plan,
    name: str,
    chosen: str | None,
    port: int,
    values: Mapping[str, bytes],
    timeout: float,
    credentials: Credentials | None = None,
    was_tried: Callable[[Location], bool] = lambda location: True,
) -> HostedStore:
    """Hosts the store of an open group. Returns the running store, which the caller closes at the end.

    A location in the file is replaced only if `was_tried` says that this worker has tried it in vain. A newer location
    belongs to a worker that has just started its store and may be slow to answer; replacing that would start a second
    group.

    Args:
        plan: The group, and the place of its store: ports of a host (a tcp place), or a file.
        name: The name of this worker.
        chosen: The address to listen on, if the place is a file; None for all addresses.
        port: The port to listen on at a tcp place; ignored for a file.
        values: The keys that the store has from the start, with their values; may be empty.
        timeout: How many seconds to wait for the lock of a location file; 0 tries once.
        credentials: The secret and the encryption; None means those of this user.
        was_tried: Returns True for a location that did not answer this worker.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
        HostedElsewhereError: The file leads to a store that is alive or was not tried yet.
        RendezvousError: The file cannot be used; `RendezvousTimeoutError` if it stays locked.
    """
    place = plan.place
    if isinstance(place, FilePlace):
        return _host_with_file(place, plan, name, chosen, timeout, values, credentials, was_tried)
    return _start_server(listen_at_once(place.host, port), place, plan, name, values, credentials)


def _start_server(
    listener: socket.socket,
    place: TcpPlace,
    plan: Plan,
    name: str,
    values: Mapping[str, bytes] | None,
    credentials: Credentials | None,
) -> HostedStore:
    """Starts the server of a store with a fixed host and port on a listening socket, and returns it with its addresses.

    Args:
        listener: The listening socket, which the server owns from now on.
        place: The host and the ports of the store.
        plan: The group.
        name: The name of this worker.
        values: The keys that the store has from the start, with their values; None for none.
        credentials: The secret and the encryption; None means those of this user.

    Raises:
        RuntimeError: The system cannot create a thread.
    """
    bound = numeric_host(listener.getsockname())
    group = _group_id(place.group, plan)
    server = StoreServer(listener, group, plan.world_size, name, values, credentials)
    addresses = reachable_addresses() if bound in _ALL_ADDRESSES else [bound]
    return HostedStore(server, [Candidate(address, server.port, group) for address in addresses])


def _host_with_file(
    place: FilePlace,
    plan: Plan,
    name: str,
    chosen: str | None,
    timeout: float,
    values: Mapping[str, bytes] | None,
    credentials: Credentials | None,
    was_tried: Callable[[Location], bool] = lambda location: True,
) -> HostedStore:
    """Starts the server on any free port, publishes its address in the location file, and returns it.

    Args:
        place: The path of the location file, which leads workers to the store.
        plan: The group.
        name: The name of this worker.
        chosen: The address to listen on; None for all addresses.
        timeout: How many seconds to wait for the lock of the file; 0 tries once.
        values: The keys that the store has from the start, with their values; None for none.
        credentials: The secret and the encryption; None means those of this user.
        was_tried: Returns True for a location in the file that did not answer this worker. Others are not replaced.

    Raises:
        HostedElsewhereError: The file leads to a store that is alive or was not tried yet. The new server is closed.
        RendezvousError: The file cannot be used; `RendezvousTimeoutError` if it stays locked. The new server is closed.
        OSError: In an open group, this machine cannot listen at `chosen`. In a fixed group that is a `RendezvousError`.
    """
    listener = listen(chosen or "", [0]) if plan.world_size is not None else listen_at_once(chosen or "", 0)
    addresses = (chosen,) if chosen else tuple(reachable_addresses())
    location = Location(uuid.uuid4().hex, listener.getsockname()[1], addresses)
    server = StoreServer(listener, _group_id(location.run, plan), plan.world_size, name, values, credentials)
    try:
        publish_location(
            place.path,
            location,
            lambda earlier: not was_tried(earlier) or _is_any_alive(_candidates_at(earlier, plan), credentials),
            timeout,
        )
    except BaseException:
        server.close()
        raise
    return HostedStore(server, _candidates_at(location, plan), place.path, location)


def _is_any_alive(candidates: Sequence[Candidate], credentials: Credentials | None) -> bool:
    """Returns True if a store with the right secret answers at one of these addresses; False for no candidates.

    All candidates lead to one store, so they share `_PROBE_TIMEOUT_S` seconds. `credentials` has the secret and the
    encryption; None means those of this user.
    """
    return any(is_alive(candidate, credentials, _PROBE_TIMEOUT_S / len(candidates)) for candidate in candidates)


def _candidates_at(location: Location, plan: Plan) -> list[Candidate]:
    """Returns one candidate for each address in a location file; an empty list if it has none.

    A candidate is an address with the id of the group that a store there must serve. `plan` describes the group.
    """
    group = _group_id(location.run, plan)
    return [Candidate(address, location.port, group) for address in location.addresses]


def _group_id(text: str, plan: Plan) -> str:
    """Returns the id of a group: `text`, and the number of workers in `plan`, or `OPEN_GROUP_SUFFIX` for an open group.

    A store refuses a worker with another id. So it refuses a worker with another world size, and the message shows both
    sizes.
    """
    return f"{text}, {OPEN_GROUP_SUFFIX}" if plan.world_size is None else f"{text}, {plan.world_size} workers"

"""Where the store of a group is looked for, and how this worker hosts it there.

A fixed group's is hosted by rank 0, which says why if it cannot. An open group's may be hosted by anyone, so whoever
cannot just looks on: the port or the file decides between those who try at once.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from farcall.errors import RendezvousError
from farcall.rendezvous.addresses import listen, listen_at_once, reachable_addresses
from farcall.rendezvous.embedded import EmbeddedStore
from farcall.rendezvous.locate import Candidate, is_alive
from farcall.rendezvous.location_file import (
    HostedElsewhereError,
    Location,
    publish_location,
    read_location,
    remove_location,
)
from farcall.rendezvous.table import OPEN
from farcall.rendezvous.urls import FilePlace, Plan, TcpPlace
from farcall.security import Credentials
from farcall.transports.network import numeric_host

_EVERYWHERE: Final = ("0.0.0.0", "::")
_ANSWER: Final = 0.75
"""Seconds for a store to answer at its addresses."""


@dataclass(frozen=True)
class Hosted:
    """A store that this worker hosts."""

    server: EmbeddedStore
    reached_at: list[Candidate]
    """The addresses that are good for others first."""
    path: str | None = None
    location: Location | None = None

    def close(self, keep_file: bool = False) -> None:
        """Ends it, and removes the file that leads to it: first the way there, then the store.

        With `keep_file` the file stays: whoever comes sees that somebody else should host the store soon.
        """
        if self.path is not None and self.location is not None and not keep_file:
            remove_location(self.path, self.location)
        self.server.close()


def candidates_of(plan: Plan) -> tuple[Callable[[], Sequence[Candidate]], bool]:
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


def host(plan: Plan, name: str, chosen: str | None, timeout: float, credentials: Credentials | None = None) -> Hosted:
    """Hosts the store of a fixed group; `chosen` is the address of the interface that was asked for.

    The `credentials` are by default those of this user, here and below.

    Raises `RendezvousError` if that cannot be here.
    """
    place = plan.place
    if isinstance(place, FilePlace):
        try:
            return _host_for_file(place, plan, name, chosen, timeout, None, credentials)
        except HostedElsewhereError as error:
            raise RendezvousError(str(error)) from None
    return _serve(listen(place.host, place.ports), place, plan, name, None, credentials)


def host_open(
    plan: Plan,
    name: str,
    chosen: str | None,
    port: int,
    values: Mapping[str, bytes],
    timeout: float,
    credentials: Credentials | None = None,
    was_tried: Callable[[Location], bool] = lambda location: True,
) -> Hosted:
    """Hosts the store of an open group, which begins with `values`; `port` counts at a tcp place only.

    What the file says is replaced only if the caller has tried it in vain. What came into it since is somebody's who
    has just begun, and may be slow to answer: who took that for dead would begin a second group.

    Raises `OSError` if this is not the machine or the port is taken; `HostedElsewhereError` if the file leads to a
    store that is alive; another `RendezvousError` if the file cannot be used.
    """
    place = plan.place
    if isinstance(place, FilePlace):
        return _host_for_file(place, plan, name, chosen, timeout, values, credentials, was_tried)
    return _serve(listen_at_once(place.host, port), place, plan, name, values, credentials)


def _serve(
    listener: socket.socket,
    place: TcpPlace,
    plan: Plan,
    name: str,
    values: Mapping[str, bytes] | None,
    credentials: Credentials | None,
) -> Hosted:
    bound = numeric_host(listener.getsockname())
    group = _group(place.group, plan)
    server = EmbeddedStore(listener, group, plan.world_size, name, values, credentials)
    addresses = reachable_addresses() if bound in _EVERYWHERE else [bound]
    return Hosted(server, [Candidate(address, server.port, group) for address in addresses])


def _host_for_file(
    place: FilePlace,
    plan: Plan,
    name: str,
    chosen: str | None,
    timeout: float,
    values: Mapping[str, bytes] | None,
    credentials: Credentials | None,
    was_tried: Callable[[Location], bool] = lambda location: True,
) -> Hosted:
    listener = listen(chosen or "", [0]) if plan.world_size is not None else listen_at_once(chosen or "", 0)
    addresses = (chosen,) if chosen else tuple(reachable_addresses())
    location = Location(uuid.uuid4().hex, listener.getsockname()[1], addresses)
    server = EmbeddedStore(listener, _group(location.run, plan), plan.world_size, name, values, credentials)
    try:
        publish_location(
            place.path,
            location,
            lambda earlier: not was_tried(earlier) or _is_any_alive(_located(earlier, plan), credentials),
            timeout,
        )
    except BaseException:
        server.close()
        raise
    return Hosted(server, _located(location, plan), place.path, location)


def _is_any_alive(candidates: Sequence[Candidate], credentials: Credentials | None) -> bool:
    """Whether the one store to which all of these lead answers. The file is locked meanwhile."""
    return any(is_alive(candidate, credentials, _ANSWER / len(candidates)) for candidate in candidates)


def _located(location: Location, plan: Plan) -> list[Candidate]:
    group = _group(location.run, plan)
    return [Candidate(address, location.port, group) for address in location.addresses]


def _group(text: str, plan: Plan) -> str:
    # With the size in it, workers that were told different sizes are refused, and the refusal names both.
    return f"{text}, {OPEN}" if plan.world_size is None else f"{text}, {plan.world_size} workers"

"""`join`: every worker brings something under its rank and gets what all the others brought.

It works over any `Store`. The rendezvous only finds the store; who is in the group is settled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from farcall.errors import RendezvousError, RendezvousTimeoutError, UsageError
from farcall.rendezvous.meeting import Rendezvous

_PREFIX: Final = "join/"
_ANSWER: Final = 1.0
"""Seconds that the store may take to answer when the time is over."""


class _Arrival(msgspec.Struct, frozen=True):
    name: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_Arrival] = msgspec.msgpack.Decoder(_Arrival)


def join(meeting: Rendezvous, name: str, payload: bytes, timeout: float) -> dict[int, bytes]:
    """Waits until all workers have joined, then gives their payloads by rank.

    Raises `RendezvousTimeoutError`, which says who came and who did not, and at the host of the store who was refused;
    `RendezvousError` if two workers have one
    name, if a worker is lost meanwhile, or if the store is gone; `UsageError` in an open group.
    """
    store, world_size = meeting.store, meeting.world_size
    if world_size is None:
        raise UsageError("an open group has no size to wait for; use `join_open` to join one")
    try:
        with store.within(timeout + _ANSWER):
            store.set(f"{_PREFIX}{meeting.rank}", _encode(_Arrival(name, payload)))
            arrivals = _arrivals(store.collect(_PREFIX, world_size, timeout))
    except RendezvousTimeoutError as error:
        try:
            with store.within(_ANSWER):
                came = _arrivals(store.read(_PREFIX))
        except RendezvousError:
            raise error from None  # the store has just gone; what the timeout says is the best there is
        refused = store.refusals()
        meanwhile = f". Meanwhile the store has refused {refused}" if refused else ""
        raise RendezvousTimeoutError(_who_came(came, world_size, timeout) + meanwhile, error.present) from None
    _refuse_double_names(arrivals)
    return {rank: arrivals[rank].payload for rank in sorted(arrivals)}


def _arrivals(entries: Mapping[str, bytes]) -> dict[int, _Arrival]:
    try:
        return {int(key.removeprefix(_PREFIX)): _decoder.decode(value) for key, value in entries.items()}
    except ValueError as error:
        raise RendezvousError(f"the store holds something under {_PREFIX!r} that no worker brought: {error}") from None


def _who_came(came: Mapping[int, _Arrival], world_size: int, timeout: float) -> str:
    names = ", ".join(f"{came[rank].name} (rank {rank})" for rank in sorted(came)) or "nobody"
    missing = [str(rank) for rank in range(world_size) if rank not in came]
    return (
        f"after {round(timeout, 2):g} s: {len(came)} of {world_size} workers came: {names}; "
        f"missing: rank{'s' if len(missing) != 1 else ''} {', '.join(missing)}"
    )


def _refuse_double_names(arrivals: Mapping[int, _Arrival]) -> None:
    first: dict[str, int] = {}
    for rank in sorted(arrivals):
        name = arrivals[rank].name
        if name in first:
            raise RendezvousError(
                f"the worker name {name!r} is not unique: rank {first[name]} and rank {rank} have it; "
                "give each worker a name of its own"
            )
        first[name] = rank

"""`join`: waits for all workers of a fixed group, and exchanges one payload per worker.

Each worker writes its name and payload under the key `join/<rank>`, then waits until there are as many keys as workers.
This works over any `Store`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from farcall.errors import ProtocolError, RendezvousError, RendezvousTimeoutError, UsageError
from farcall.protocol.fields import Name, check_name, quoted
from farcall.rendezvous.group_entry import Rendezvous

_JOIN_PREFIX: Final = "join/"
_ANSWER_GRACE_S: Final = 1.0
"""How many seconds longer than the timeout of `join` the store may take to answer."""


class _Arrival(msgspec.Struct, frozen=True):
    """The value that each worker writes into the store when it joins, under the key `join/<rank>`.

    `name` is the name of the worker. `payload` is what the other workers get from it; may be empty. The fields are
    checked when the value is decoded.
    """

    name: Name
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_Arrival] = msgspec.msgpack.Decoder(_Arrival)


def join(rendezvous: Rendezvous, name: str, payload: bytes, timeout: float) -> dict[int, bytes]:
    """Waits until all workers of a fixed group have joined, and returns their payloads.

    Args:
        rendezvous: This worker's connection to the store.
        name: The name of this worker, unique in the group, at most 255 printable characters.
        payload: What the other workers get from this one; may be empty.
        timeout: How many seconds to wait for the other workers. 0 succeeds only if all others have joined already.

    Returns:
        The payload of every worker, this one included, by rank.

    Raises:
        RendezvousTimeoutError: Not all workers came in time. The message names those that came and those that did not,
            and in the worker that hosts the store also the connections that were refused.
        RendezvousError: Two workers have one name, a name is not valid, a worker was lost meanwhile, or the store is
            gone.
        UsageError: The group is open; use `join_open`.
    """
    store, world_size = rendezvous.store, rendezvous.world_size
    if world_size is None:
        raise UsageError("`join` needs a world_size, and an open group has none; use `join_open` instead")
    try:
        with store.within(timeout + _ANSWER_GRACE_S):
            store.set(f"{_JOIN_PREFIX}{rendezvous.rank}", _encode(_Arrival(name, payload)))
            arrivals = _decode_arrivals(store.collect(_JOIN_PREFIX, world_size, timeout))
    except RendezvousTimeoutError as error:
        try:
            with store.within(_ANSWER_GRACE_S):
                came = _decode_arrivals(store.read(_JOIN_PREFIX))
        except RendezvousError:
            raise error from None  # the store is gone now: the timeout is the more useful error
        refused = store.refusals()
        meanwhile = f". Meanwhile the store refused {refused}" if refused else ""
        raise RendezvousTimeoutError(
            _missing_workers_message(came, world_size, timeout) + meanwhile, error.present
        ) from None
    _check_unique_names(arrivals)
    return {rank: arrivals[rank].payload for rank in sorted(arrivals)}


def _decode_arrivals(entries: Mapping[str, bytes]) -> dict[int, _Arrival]:
    """Decodes the entries of the store under `join/`, one for each worker that has joined, and returns them by rank.

    Returns an empty dict if there are none. Raises `RendezvousError` if an entry was not written by a worker's `join`.
    """
    try:
        arrivals = {int(key.removeprefix(_JOIN_PREFIX)): _decoder.decode(value) for key, value in entries.items()}
        for arrival in arrivals.values():
            check_name(arrival.name)
    except (ValueError, RecursionError, ProtocolError) as error:
        why = quoted(str(error))
        raise RendezvousError(
            f"the store holds something under {_JOIN_PREFIX!r} that is not from a worker: {why}"
        ) from None
    return arrivals


def _missing_workers_message(came: Mapping[int, _Arrival], world_size: int, timeout: float) -> str:
    """Returns the message that says which workers came in time and which ranks are missing.

    Args:
        came: The workers that came, each with its name, by rank; may be empty.
        world_size: How many workers there should be.
        timeout: How many seconds were waited.
    """
    names = ", ".join(f"{came[rank].name} (rank {rank})" for rank in sorted(came)) or "nobody"
    missing = [str(rank) for rank in range(world_size) if rank not in came]
    return (
        f"only {len(came)} of {world_size} workers joined in {round(timeout, 2):g} s: {names}; "
        f"missing: rank{'s' if len(missing) != 1 else ''} {', '.join(missing)}"
    )


def _check_unique_names(arrivals: Mapping[int, _Arrival]) -> None:
    """Raises `RendezvousError`, which names both ranks, if two workers have the same name. Does nothing otherwise.

    `arrivals` has the workers that have joined, each with its name, by rank; may be empty.
    """
    first: dict[str, int] = {}
    for rank in sorted(arrivals):
        name = arrivals[rank].name
        if name in first:
            raise RendezvousError(
                f"the worker name {name!r} is not unique: rank {first[name]} and rank {rank} have it; "
                "give each worker a name of its own"
            )
        first[name] = rank

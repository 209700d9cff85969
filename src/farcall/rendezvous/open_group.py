"""Open groups, whose workers join and leave at any time. The store needs only a few keys for that:

    open/run              the id of the run
    open/numbers          the last number that was assigned; no number is assigned twice
    open/here/<number>    the payload of the worker with this number
    open/name/<name>      the number of the worker that has this name

Rules
- A worker is a member if it has an entry under its number *and* its name leads to that number. It writes the entry
  first and claims the name second, so it becomes a member in one step. If two workers claim one name, `set_new` lets
  one of them win.
- A worker is no longer a member when the entry under its number is deleted. Any worker may do that, any number of
  times. A name that leads to a number without an entry is free. A worker that wants the name deletes it first, but only
  if it still leads to that number (`delete` with `expected`), so that it cannot take the name from its next owner.
- The store declares no worker lost. A worker that died keeps its name until a member calls `remove_member`.

All of this works over any `Store`. The functions that find the store again do something for an `OpenStore` only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from farcall.errors import RendezvousError
from farcall.rendezvous.group_entry import Rendezvous
from farcall.rendezvous.open_group_store import LAST_NUMBER_KEY, MEMBER_PREFIX, NAME_PREFIX, OpenStore
from farcall.rendezvous.store import Store

REMOVE_TIMEOUT_S: Final = 1.0
"""How many seconds removing members from the store, or reading them, may take."""

_MAX_NUMBER_DIGITS: Final = 10
"""The number of digits of the largest worker number, 2**32 - 1."""

ANSWER_GRACE_S: Final = 2.0
"""How many seconds longer than the timeout of `join_open` the store may take to answer.

`join_open` waits for a name until the last moment, and the requests that it makes then need time as well. Without this
grace, `join_open` would report a slow store as frozen instead of saying who has the name.
"""

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5

_log = logging.getLogger(__name__)


def join_open(
    rendezvous: Rendezvous,
    name: str,
    payload_of: Callable[[int], bytes],
    timeout: float,
    is_dead: Callable[[bytes], bool] = lambda payload: False,
) -> tuple[int, dict[int, bytes]]:
    """Joins an open group: gets a number from the store and claims the name.

    If another worker has the name, waits until the name is free: that worker may be dead without the group knowing it
    yet. If the store is lost meanwhile, looks for it again and starts over with another number.

    Args:
        rendezvous: This worker's connection to the store.
        name: The name of this worker. Only its uniqueness is checked.
        payload_of: Returns what the other workers get from this one, given the number of this worker. Called again
            after the store was lost.
        timeout: How many seconds joining may take. With 0 the name is claimed once, without waiting for it.
        is_dead: Called repeatedly, while the name is taken, with the payload of the worker that has it. If it returns
            True, that worker is removed and its name is taken over.

    Returns:
        The number of this worker (from 1 up), and the payloads of all members, this worker included, by number.

    Raises:
        RendezvousTimeoutError: The store was lost and not found again in time.
        RendezvousError: The name did not become free in time (the message says who has it), or the store is gone.

    If the store does not answer, this raises `ANSWER_GRACE_S` seconds after the timeout at the latest. If this raises,
    including for Ctrl-C and errors of the two callbacks, nothing of this worker is left in the store; cleaning up takes
    a second at most.
    """
    deadline = time.monotonic() + timeout
    store = rendezvous.store
    while True:
        number = 0
        try:
            with store.within(max(0.0, deadline - time.monotonic()) + ANSWER_GRACE_S):
                number = store.add(LAST_NUMBER_KEY, 1)
                payload = payload_of(number)
                store.set(_member_key(number), payload)
                holder = _claim_name(store, name, number, deadline, is_dead)
                if holder is None:
                    there = _read_members(store)
                else:
                    store.delete(_member_key(number))
            if holder is None and isinstance(store, OpenStore):
                store.remember_own_entries({_member_key(number): payload, NAME_PREFIX + name: b"%d" % number}, number)
        except RendezvousError as error:
            left = deadline - time.monotonic()
            if left <= 0 or not isinstance(store, OpenStore):
                raise
            _log.info("worker %r lost the store while joining, and looks for it again: %s", name, error)
            rendezvous.group = store.enter(left)
            continue
        except BaseException:  # Ctrl-C, most likely while waiting for the name: no other worker would delete our entry
            if number:
                leave_open(rendezvous, number)
            raise
        if holder is not None:
            raise RendezvousError(_name_taken_message(name, holder, timeout))
        return number, there


def leave_open(rendezvous: Rendezvous, number: int) -> None:
    """Removes this worker from the group, so that its name is free. Takes a second at most and raises nothing.

    If the store cannot be reached, the worker stays in it until another member removes it.

    Args:
        rendezvous: This worker's connection to the store.
        number: The number of this worker, which `join_open` returned. A number that is not there is no error.
    """
    forget_own_entries(rendezvous)
    remove_member(rendezvous, number)


def forget_own_entries(rendezvous: Rendezvous) -> None:
    """Makes this worker forget its own entries in the store (its number and its name).

    It then does not write them into stores that are started later. Called by a worker that leaves or was expelled. Does
    nothing if it has no entries. Sends nothing; raises nothing. `rendezvous` is this worker's connection to the store.
    """
    if isinstance(rendezvous.store, OpenStore):
        rendezvous.store.forget_own_entries()


def stop_hosting(rendezvous: Rendezvous) -> None:
    """Ends the store if it runs in this worker. This worker never hosts the store again; other members will.

    Called by a worker that is no longer a member but goes on running. May wait for another thread that is looking for
    the store. Raises nothing. `rendezvous` is this worker's connection to the store.
    """
    if isinstance(rendezvous.store, OpenStore):
        rendezvous.store.stop_hosting()


def remove_lost_members(rendezvous: Rendezvous, is_gone: Callable[[int], bool], names: Collection[str]) -> None:
    """Deletes the store's entries of all workers for which `is_gone` returns True, so that their names are free.

    Does nothing if the store is not hosted by this worker or one of `names`. After a network partition, the workers
    that this side considers lost may go on with a store of their own, whose entries are not ours to delete. Any member
    may call this, any number of times. Takes a second at most and raises nothing.

    Args:
        rendezvous: This worker's connection to the store.
        is_gone: Returns True for the number of a worker that has left or was lost.
        names: The names of the current members; may be empty.
    """
    store = rendezvous.store
    if not is_hosted_by(rendezvous, names):
        return
    try:
        with store.within(REMOVE_TIMEOUT_S):
            for key in store.read(MEMBER_PREFIX):
                number = _parse_number(key.removeprefix(MEMBER_PREFIX).encode())
                if number is None or is_gone(number):
                    store.delete(key)
    except RendezvousError as error:
        _log.info("workers that are gone could not be removed from the store: %s", error)


def remove_member(rendezvous: Rendezvous, number: int) -> bool:
    """Deletes the entry of one worker, so that its name is free. Any member may call this, any number of times.

    Takes a second at most and raises nothing.

    Args:
        rendezvous: This worker's connection to the store.
        number: The number of the worker that is gone. A number that is not there is no error.

    Returns:
        True if the store carried it out; False if the store could not be reached.
    """
    store = rendezvous.store
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    try:
        with store.within(REMOVE_TIMEOUT_S / 2):
            store.delete(_member_key(number))
        return True
    except RendezvousError as error:
        _log.debug("worker number %d could not be removed from the store at the first attempt: %s", number, error)
    if not isinstance(store, OpenStore) or not store.reconnect(REMOVE_TIMEOUT_S / 4):
        return False
    try:
        with store.within(max(0.0, deadline - time.monotonic())):
            store.delete(_member_key(number))
    except RendezvousError as error:
        _log.info("worker number %d could not be removed from the store: %s", number, error)
        return False
    return True


def read_members(rendezvous: Rendezvous) -> dict[int, bytes]:
    """Returns the payloads of all workers that the store has as members, by number.

    A payload is the bytes that a worker gave when it joined. Returns an empty dict if there are no members, or the
    store does not answer within a second. Raises nothing. `rendezvous` is this worker's connection to the store.
    """
    try:
        with rendezvous.store.within(REMOVE_TIMEOUT_S):
            return _read_members(rendezvous.store)
    except RendezvousError as error:
        _log.debug("the members could not be read from the store: %s", error)
        return {}


def is_hosted_by(rendezvous: Rendezvous, names: Collection[str]) -> bool:
    """Returns True if the store is hosted by this worker or by a worker with one of these names.

    Also returns True for a store that no worker hosts, such as one in memory.

    Args:
        rendezvous: This worker's connection to the store.
        names: The names of workers; may be empty.
    """
    store = rendezvous.store
    return not isinstance(store, OpenStore) or store.is_hosted_by(names)


def ensure_store(
    rendezvous: Rendezvous, here: Mapping[int, tuple[str, bytes]], next_number: int, gone: Collection[str] = ()
) -> bool:
    """Makes sure that the group has a store, after the worker that hosted it may have gone.

    Does nothing if the store still answers, unless its host is among `gone`. A worker that was declared lost by mistake
    may still host a store, but that is not the store of the group any more.

    Args:
        rendezvous: This worker's connection to the store.
        here: Name and payload (the bytes given when joining) of every current member, by number. A store that is
            started here begins with them.
        next_number: A store that is started here assigns numbers well above this one.
        gone: The names of workers that have left or were lost; none by default.

    Returns:
        True if the store is up: as before, on another member, or on this worker from now on; also for a store that
        cannot be lost, such as one in memory. False if no store is up yet, for example because its address is not this
        machine's or its port is still taken. Call again later.

    May take several seconds. Raises nothing. Must not be called on the thread that runs the function given to
    `call_when_store_lost`.
    """
    store = rendezvous.store
    if not isinstance(store, OpenStore):
        return True
    values: dict[str, bytes] = {}
    for number in sorted(here):  # of two workers with one name, the one with the higher number has it
        name, payload = here[number]
        values[_member_key(number)] = payload
        values[NAME_PREFIX + name] = b"%d" % number
    return store.ensure_store(values, {name for name, _ in here.values()}, next_number, gone)


def call_when_store_lost(rendezvous: Rendezvous, call: Callable[[], None]) -> None:
    """Sets a function to call whenever the connection to the store is lost: then it is time for `ensure_store`.

    Replaces an earlier function. Does nothing for a store that cannot be lost, such as one in memory.

    Args:
        rendezvous: This worker's connection to the store.
        call: Runs on a thread of the store. It must not block, and must leave all requests to the store to another
            thread.
    """
    if isinstance(rendezvous.store, OpenStore):
        rendezvous.store.on_lost = call


def _claim_name(store: Store, name: str, number: int, deadline: float, is_dead: Callable[[bytes], bool]) -> int | None:
    """Claims a name for the worker with a number, and waits until the deadline if another worker has the name.

    Args:
        store: The store.
        name: The name.
        number: The number of this worker, which the store has assigned.
        deadline: When to give up, in seconds of `time.monotonic`. A time in the past tries once.
        is_dead: Called with the payload of the worker that has the name. If it returns True, the name is taken over.

    Returns:
        None if the name belongs to this worker now, otherwise the number of the worker that has it.

    Raises:
        RendezvousError: The store is gone.
    """
    key, own = NAME_PREFIX + name, b"%d" % number
    pause = _FIRST_PAUSE_S
    while True:
        holder = store.set_new(key, own)
        if holder == own:
            return None
        theirs = _parse_number(holder)
        if theirs is None:  # not written by a worker
            store.delete(key, expected=holder)
            continue
        payload = store.read(_member_key(theirs)).get(_member_key(theirs))
        if payload is None or is_dead(payload):
            store.delete(_member_key(theirs))
            store.delete(key, expected=holder)
            continue
        left = deadline - time.monotonic()
        if left <= pause:
            return theirs
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _read_members(store: Store) -> dict[int, bytes]:
    """Returns the payloads of all members by number, in the order of the numbers; an empty dict if there are none.

    A payload is the bytes that a worker gave when it joined. Deletes names whose worker has no entry any more. Raises
    `RendezvousError` if the store is gone.
    """
    entries = store.read("open/")
    there: dict[int, bytes] = {}
    for key, holder in entries.items():
        if not key.startswith(NAME_PREFIX):
            continue
        number = _parse_number(holder)
        payload = entries.get(_member_key(number)) if number is not None else None
        if number is None or payload is None:
            store.delete(key, expected=holder)  # the worker is gone; names must not pile up
        else:
            there[number] = payload
    return dict(sorted(there.items()))


def _name_taken_message(name: str, holder: int, timeout: float) -> str:
    """Returns the message for a name that did not become free: who has it, and what to do.

    Args:
        name: The name.
        holder: The number of the worker that has it.
        timeout: How many seconds were waited.
    """
    return (
        f"the worker name {name!r} is not unique: the worker with number {holder} has it, and has neither left nor "
        f"been declared lost in {round(timeout, 2):g} s. Choose another name, end that worker, or allow more time "
        "(init_timeout): a worker that died keeps its name until the others have noticed"
    )


def _parse_number(text: bytes) -> int | None:
    """Returns the number in a value of the store; None if it is empty or not the number of a worker."""
    return int(text) if text.isdigit() and len(text) <= _MAX_NUMBER_DIGITS else None


def _member_key(number: int) -> str:
    """Returns the key under which the payload of the worker with this number is stored."""
    return f"{MEMBER_PREFIX}{number}"

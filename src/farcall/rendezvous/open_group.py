"""Open groups: workers come and go at any time. What the store does for them, in a few keys over any `Store`.

    open/run              the id of the run
    open/numbers          the last number that was given; numbers are never given twice
    open/here/<number>    what the worker of this number brought
    open/name/<name>      the number of the worker that has the name

Rules
- A worker is there if it has an entry under its number *and* its name leads to that number. It makes the first before
  it claims the name, so it comes in at one stroke: two that claim one name are decided by the store (`set_new`).
- A worker is gone when the entry under its number is: one request, and the same however often and by whomever it is
  made. A name that leads to a number without an entry is free; whoever wants it takes it away first, but only from that
  number (`delete` with `expected`), so that nobody takes it from the next one.
- The store declares nobody dead. A worker that died has its name until somebody says `mark_gone`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from farcall.errors import RendezvousError
from farcall.rendezvous.meeting import Rendezvous
from farcall.rendezvous.open_store import HERE, NAME, NUMBERS, OpenStore
from farcall.rendezvous.store import Store

FAREWELL: Final = 1.0
"""Seconds that saying who is gone may take."""

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5

_log = logging.getLogger(__name__)


def join_open(
    meeting: Rendezvous,
    name: str,
    payload_of: Callable[[int], bytes],
    timeout: float,
    is_dead: Callable[[bytes], bool] = lambda payload: False,
) -> tuple[int, dict[int, bytes]]:
    """Takes a number, from 1 on, and the name; gives the number and what all who are there brought, this worker too.

    `payload_of` is asked again with another number if the store is lost meanwhile. A name that another worker has is
    waited for: it may be dead, and the group not know it yet. `is_dead` may say so, of what that worker brought; it is
    asked again and again while this one waits.

    Raises `RendezvousError` if the name is not free in time, and says who has it; `RendezvousTimeoutError` or
    `RendezvousError` if the store is gone and not to be found again. Then nothing of this worker is left in the store;
    nor if it is interrupted (Ctrl-C) or `payload_of` or `is_dead` raise, which takes a second more at most.
    """
    deadline = time.monotonic() + timeout
    store = meeting.store
    while True:
        number = 0
        try:
            with store.within(max(0.0, deadline - time.monotonic())):
                number = store.add(NUMBERS, 1)
                payload = payload_of(number)
                store.set(_here(number), payload)
                holder = _claim(store, name, number, deadline, is_dead)
                if holder is None:
                    there = _who_is_there(store)
                else:
                    store.delete(_here(number))
            if holder is None and isinstance(store, OpenStore):
                store.settle({_here(number): payload, NAME + name: b"%d" % number}, number)
        except RendezvousError as error:
            left = deadline - time.monotonic()
            if left <= 0 or not isinstance(store, OpenStore):
                raise
            _log.info("worker %r lost the store while it joined, and looks again: %s", name, error)
            meeting.group = store.enter(left)
            continue
        except BaseException:  # Ctrl-C, most likely while it waited for the name: nobody else would clear this away
            if number:
                leave_open(meeting, number)
            raise
        if holder is not None:
            raise RendezvousError(_name_is_taken(name, holder, timeout))
        return number, there


def leave_open(meeting: Rendezvous, number: int) -> None:
    """This worker, of that number, says good-bye: its name is free. Takes a second at most and raises nothing."""
    settle_no_more(meeting)
    mark_gone(meeting, number)


def settle_no_more(meeting: Rendezvous) -> None:
    """This worker is out, or about to be: a store that is hosted anew does not get it from here. Asks nobody."""
    if isinstance(meeting.store, OpenStore):
        meeting.store.unsettle()


def hand_over(meeting: Rendezvous) -> None:
    """This worker is out, though it goes on: others host the store from now on. May wait for who looks for it here."""
    if isinstance(meeting.store, OpenStore):
        meeting.store.hand_over()


def clear_away(meeting: Rendezvous, is_gone: Callable[[int], bool], names: Collection[str]) -> None:
    """All those in the store are gone whom `is_gone` says so of: their names are free. Anyone may say so, and again.

    `names` are those who are here. If the store's host is not among them nothing happens: after a partition, those whom
    this side takes for dead go on with their store, and who has joined there is not ours to remove.
    Takes a second at most and raises nothing: where there is no store, there is nothing to be freed.
    """
    store = meeting.store
    if not is_hosted_by(meeting, names):
        return
    try:
        with store.within(FAREWELL):
            for key in store.read(HERE):
                if is_gone(int(key.removeprefix(HERE))):
                    store.delete(key)
    except RendezvousError as error:
        _log.info("the store was not told who is gone: %s", error)


def mark_gone(meeting: Rendezvous, number: int) -> bool:
    """The worker of that number is gone: its name is free. Anyone may say so, and again. Whether the store heard it.

    Takes a second at most and raises nothing: where there is no store, there is nothing to be freed.
    """
    store = meeting.store
    deadline = time.monotonic() + FAREWELL
    try:
        with store.within(FAREWELL / 2):
            store.delete(_here(number))
        return True
    except RendezvousError as error:
        _log.debug("the store was not told at once that number %d is gone: %s", number, error)
    if not isinstance(store, OpenStore) or not store.find_again(FAREWELL / 4):
        return False
    try:
        with store.within(max(0.0, deadline - time.monotonic())):
            store.delete(_here(number))
    except RendezvousError as error:
        _log.info("the store was not told that number %d is gone: %s", number, error)
        return False
    return True


def who_is_there(meeting: Rendezvous) -> dict[int, bytes]:
    """All that the store takes for members, by number: what they brought. Nobody if it does not answer in a second."""
    try:
        with meeting.store.within(FAREWELL):
            return _who_is_there(meeting.store)
    except RendezvousError as error:
        _log.debug("the store was not asked who is there: %s", error)
        return {}


def is_hosted_by(meeting: Rendezvous, names: Collection[str]) -> bool:
    """Whether the store is in this worker, or in one of those of these names; True of one that no worker hosts."""
    store = meeting.store
    return not isinstance(store, OpenStore) or store.is_hosted_by(names)


def host_again(
    meeting: Rendezvous, here: Mapping[int, tuple[str, bytes]], next_number: int, gone: Collection[str] = ()
) -> bool:
    """Sees to it that the group has its store, after somebody is gone who may have hosted it.

    Nothing happens if it still answers, unless it is in one of those who are `gone`: a host that was taken for dead
    lives on, until it hears of it, but its store is not the group's any more.

    `here` are those who are there, by number: name and what they brought; the new store begins with them, and gives
    numbers well above `next_number`. Gives True if this worker hosts the store now, or another one does; False if
    nobody does yet (this machine has not the address, or the port is still taken, perhaps by one who is gone): call it
    again later. Takes up to some seconds, and raises nothing. Not on the thread that calls `when_store_lost`.
    """
    store = meeting.store
    if not isinstance(store, OpenStore):
        return True
    values: dict[str, bytes] = {}
    for number in sorted(here):  # a name belongs to the highest number
        name, payload = here[number]
        values[_here(number)] = payload
        values[NAME + name] = b"%d" % number
    return store.host_again(values, {name for name, _ in here.values()}, next_number, gone)


def when_store_lost(meeting: Rendezvous, call: Callable[[], None]) -> None:
    """Has it called, on a thread of the store's, whenever the connection to the store is lost: time to `host_again`.

    It must not block, and must leave `host_again` and all else that asks the store to another thread.
    """
    if isinstance(meeting.store, OpenStore):
        meeting.store.when_lost = call


def _claim(store: Store, name: str, number: int, deadline: float, is_dead: Callable[[bytes], bool]) -> int | None:
    """Waits for the name. None if it is ours now, else the number of the worker that has it."""
    key, own = NAME + name, b"%d" % number
    pause = _FIRST_PAUSE
    while True:
        holder = store.set_new(key, own)
        if holder == own:
            return None
        their_entry = HERE + holder.decode()
        payload = store.read(their_entry).get(their_entry)
        if payload is None or is_dead(payload):
            store.delete(their_entry)
            store.delete(key, expected=holder)
            continue
        left = deadline - time.monotonic()
        if left <= pause:
            return int(holder)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _who_is_there(store: Store) -> dict[int, bytes]:
    entries = store.read("open/")
    there: dict[int, bytes] = {}
    for key, holder in entries.items():
        if not key.startswith(NAME):
            continue
        payload = entries.get(HERE + holder.decode())
        if payload is None:
            store.delete(key, expected=holder)  # of one that is gone; names shall not pile up
        else:
            there[int(holder)] = payload
    return dict(sorted(there.items()))


def _name_is_taken(name: str, holder: int, timeout: float) -> str:
    return (
        f"the name {name!r} belongs to the worker with number {holder}, which has neither left nor been found dead in "
        f"{round(timeout, 2):g} s. Choose another name, end that worker, or allow more time (init_timeout): a worker "
        "that died has its name until the others have noticed"
    )


def _here(number: int) -> str:
    return f"{HERE}{number}"

"""How a worker joins and leaves its group, and how an open group keeps its store for workers that join later.

In a fixed group all workers join at the start, and a worker's number is its rank. In an open group the store assigns
numbers and makes sure that no two workers have the same name. From then on the membership protocol tracks who is in the
group. The store runs in one of the workers. When that worker leaves or is lost, another one must host the store, or no
worker could join any more. When that worker is expelled, it must stop hosting: the group would not remove the names of
lost workers from its store.

Nothing here runs during a call. Requests to the store take time, so they run in threads of their own (`run_aside`).
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from farcall.errors import ProtocolError, RendezvousError
from farcall.protocol.ids import Worker
from farcall.protocol.membership_messages import Member, decode_member
from farcall.runtime.executor import Executor
from farcall.transports.network import network_identity

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous
    from farcall.runtime.cluster import Cluster

logger = logging.getLogger("farcall")

_REPORTERS: Final = 2
"""How many members, those with the lowest numbers, report to the store who is gone. Two, as one may be leaving."""
_HOST: Final = 0
"""The number of the worker that hosts the store of a fixed group."""
_PAUSE: Final = 0.5
"""Seconds between attempts to host the store."""

_encode = msgspec.msgpack.Encoder().encode


class GroupEntry:
    """Joins the group for one worker, and leaves it. Does nothing before `join` is called.

    In an open group, also makes sure that some worker hosts the store.

    Args:
        rendezvous: Where the workers of the group find each other, and the store behind it.
        name: The name of this worker.
        addresses: The addresses at which this worker listens.
        look_interval: Seconds between two comparisons of the store with the members of an open group.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, addresses: tuple[str, ...], look_interval: float) -> None:
        self._rendezvous = rendezvous
        self._name = name
        self._addresses = addresses
        self._group: Cluster | None = None
        self._executor: Executor | None = None
        self._number: Worker = -1
        self._look_interval = look_interval
        self._next_look = 0.0
        self._over = threading.Event()  # this worker left, or was expelled: other members look after the store
        self._has_left = False
        self._hosting = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the group is open: workers may join and leave at any time."""
        return self._rendezvous.world_size is None

    def join(self, timeout: float) -> tuple[Member, list[Member]]:
        """Joins the group. In a fixed group, waits until all workers have joined.

        Args:
            timeout: How many seconds to wait. With 0, a fixed group must be complete already, and in an open group the
                name must be free already.

        Returns:
            This worker, and the list of all members, this worker included. In an open group, entries of members that
            cannot be decoded are left out, with a warning in the log.

        Raises:
            RendezvousTimeoutError: The timeout expired.
            RendezvousError: The group could not be joined for another reason, such as a name that is taken.
        """
        from farcall.rendezvous import join, join_open  # not at the top of the file: see `farcall.rendezvous`

        rendezvous = self._rendezvous
        if self.is_open:
            self._number, payloads = join_open(
                rendezvous, self._name, lambda number: _encode(self._me(number)), timeout
            )
        else:
            self._number = rendezvous.rank
            payloads = join(rendezvous, self._name, _encode(self._me(rendezvous.rank)), timeout)
        members = []
        for number, payload in payloads.items():
            try:
                members.append(_member(number, payload))
            except ProtocolError as error:
                if not self.is_open:
                    raise RendezvousError(f"worker {self._name!r} cannot join: {error}") from error
                logger.warning("worker %r ignores an entry of the store: %s", self._name, error)
        return self._me(self._number), members

    def _me(self, number: Worker) -> Member:
        """Returns this worker as a member with the given number."""
        return Member(number, self._name, self._rendezvous.rank, network_identity(), self._addresses)

    def attach(self, group: Cluster, executor: Executor) -> None:
        """Connects this object with the parts that it needs after `join`. Call it once.

        In an open group, this worker helps from now on to keep the store available, so that other workers can join.

        Args:
            group: The group.
            executor: Starts the threads for requests to the store.
        """
        self._group, self._executor = group, executor
        if self.is_open:
            from farcall.rendezvous import call_when_store_lost

            call_when_store_lost(self._rendezvous, self._store_lost)
        else:
            self._rendezvous.store.leave_losses_to_group()

    def tick(self, now: float) -> None:
        """Compares the store of an open group with the members, every `look_interval` seconds, in another thread.

        Called at every heartbeat. Workers that only the store knows are added to the group. Workers that are gone are
        removed from the store. Only the two members with the lowest numbers do that. Does nothing in a fixed group,
        before `attach`, and after this worker has left or was expelled.

        The store may know a worker that is not a member here for two reasons. The first: the worker died while it
        joined. It is added, the heartbeats then find it lost, and its name becomes free. The second: this worker was
        stopped when the other one joined. The other one can then tell this worker that the group has expelled this
        worker.

        Args:
            now: The current time of the monotonic clock.
        """
        group, executor = self._group, self._executor
        if now < self._next_look or not self.is_open or group is None or executor is None or self._over.is_set():
            return
        self._next_look = now + self._look_interval
        if self._is_reporter(group):
            executor.run_aside(self._compare)

    def _compare(self) -> None:
        """Removes workers from the store that are gone, and adds workers to the group that only the store knows.

        Logs and skips entries that cannot be read.
        """
        from farcall.rendezvous import read_members

        self._clear_away()
        group = self._group
        if group is not None:
            for number, payload in read_members(self._rendezvous).items():
                if self._over.is_set() or group.is_gone(number):
                    continue
                try:
                    group.add_member(_member(number, payload))
                except ProtocolError as error:
                    logger.warning("worker %r ignores an entry of the store: %s", self._name, error)

    def member_gone(self, number: Worker, left: bool) -> None:
        """Called when a worker is not in the group any more: updates the store.

        In an open group, the store frees the name of the worker. If the worker hosted the store, another member hosts
        it from now on.

        In a fixed group, does nothing if the worker has left. If it was lost and hosted the store, every request to the
        store fails from now on. If it was lost and did not host the store, threads of this process that wait in the
        store for other workers get a `RendezvousError`, unless the group is shutting down.

        Args:
            number: The number of the worker.
            left: True if the worker has left, False if it was lost.
        """
        group, executor = self._group, self._executor
        # Once all are about to leave, only the loss of the host is reported: others may have left in order.
        if not (self.is_open or left or group is None) and (number == _HOST or not group.is_quiet):
            self._rendezvous.store.report_lost(number, f"worker {group.name_of(number)!r} was lost")
        if not self.is_open or group is None or executor is None or self._over.is_set():
            return
        from farcall.rendezvous import is_hosted_by

        if is_hosted_by(self._rendezvous, {group.name_of(number)}) and not is_hosted_by(
            self._rendezvous, _names(group)
        ):
            executor.run_aside(self._host_again)
        if self._is_reporter(group):
            executor.run_aside(self._clear_away)

    def _clear_away(self) -> None:
        """Removes all workers that are gone from the store of an open group. Raises nothing.

        Also removes those that an earlier attempt could not remove. Does nothing before `attach`, and after this worker
        has left or was expelled.
        """
        from farcall.rendezvous import remove_lost_members

        group = self._group
        if group is not None and not self._over.is_set():
            remove_lost_members(self._rendezvous, group.is_gone, _names(group))

    def _is_reporter(self, group: Cluster) -> bool:
        """Returns whether this worker must keep the store up to date: it has one of the `_REPORTERS` lowest numbers."""
        return self._number in sorted(group.members())[:_REPORTERS]

    def _store_lost(self) -> None:
        """Called when the connection to the store is lost: another thread makes sure that some member hosts the store.

        Does nothing before `attach`, and after this worker has left or was expelled.
        """
        if self._executor is not None and not self._over.is_set():
            self._executor.run_aside(self._host_again)

    def _host_again(self) -> None:
        """Makes sure that some member hosts the store; if necessary, this worker starts it.

        Tries again until that succeeds, or this worker has left or was expelled. Does nothing before `attach`.
        """
        from farcall.rendezvous import ensure_store

        group = self._group
        with self._hosting:  # one thread at a time: the second finds that the store is there
            while group is not None and not self._over.is_set():
                members = group.members()
                here = {number: (member.name, _encode(member)) for number, member in members.items()}
                if ensure_store(self._rendezvous, here, max(here, default=0) + 1, group.names_gone()):
                    self._clear_away()  # no store was told of workers that were lost meanwhile
                    return
                self._over.wait(_PAUSE)

    def expelled(self) -> None:
        """Called when this worker was expelled from an open group. Does nothing in a fixed group.

        If this worker hosts the store, another thread ends the store. This worker does not host it again, and does not
        enter itself into a store that is started later.
        """
        if self.is_open:
            from farcall.rendezvous import forget_own_entries, stop_hosting

            self._over.set()
            forget_own_entries(self._rendezvous)
            if self._executor is not None:
                self._executor.run_aside(lambda: stop_hosting(self._rendezvous))

    def leave(self) -> None:
        """Removes this worker from the store of an open group, so that its name is free. Raises nothing.

        Waits at most a second. If the store does not answer by then, another member removes this worker later. Does
        nothing in a fixed group, if this worker never joined, or if it has left already.
        """
        if self.is_open and self._number >= 0 and not self._has_left:
            self._over.set()
            from farcall.rendezvous import leave_open

            leave_open(self._rendezvous, self._number)
            self._has_left = True


def _member(number: Worker, payload: bytes) -> Member:
    """Decodes the entry of a worker in the store.

    Args:
        number: The number under which the store has the entry.
        payload: The encoded member.

    Raises:
        ProtocolError: The entry cannot be decoded, or is of a worker with another number.
    """
    member = decode_member(payload)
    if member.number != number:
        raise ProtocolError(
            f"the store has worker {member.name!r} with number {member.number} in the place of {number}"
        )
    return member


def _names(group: Cluster) -> set[str]:
    """Returns the names of all members of the group."""
    return {member.name for member in group.members().values()}

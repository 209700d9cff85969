"""How a worker comes into its group, and out of it again; and how the way in is kept for those who come later.

In a fixed group everybody meets at the start, and a worker's number is its rank. In an open group the store gives out
numbers and keeps names apart; who is there is the group's own business from then on. The store lives in one of the
workers. If that one goes another must host it, or nobody could join any more. If the group takes it for dead while it
lives, it must leave that to another one: nobody clears the names of the dead away in a store of one who is gone.

Nothing here is on the path of a call. What asks the store takes a while, so it runs aside, in the serving pool.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import msgspec

from farcall.agent.calls import ChoreJob
from farcall.agent.serving import Serving
from farcall.protocol.ids import Worker
from farcall.protocol.membership_messages import Member
from farcall.transports.network import host_identity

if TYPE_CHECKING:
    from farcall.agent.group import Group
    from farcall.rendezvous import Rendezvous

_TELLERS: Final = 2
"""So many of those who are there, the oldest, tell the store who is gone: one of them may be about to go as well."""
_HOST: Final = 0
"""The number of the worker that hosts the store of a fixed group."""
_PAUSE: Final = 0.5
"""Seconds between attempts to host the store."""

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Member] = msgspec.msgpack.Decoder(Member)


class Entrance:
    """The way of one worker into its group."""

    def __init__(self, rendezvous: Rendezvous, name: str, addresses: tuple[str, ...], patience: float) -> None:
        self._rendezvous = rendezvous
        self._name = name
        self._addresses = addresses
        self._group: Group | None = None
        self._serving: Serving | None = None
        self._number: Worker = -1
        self._patience = patience
        self._next_look = 0.0
        self._over = threading.Event()  # it left, or was expelled: the way in is the others' business
        self._has_left = False
        self._untold: dict[Worker, None] = {}  # who has gone, and the store does not know it
        self._hosting = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether workers may come and go."""
        return self._rendezvous.world_size is None

    def join(self, timeout: float) -> tuple[Member, list[Member]]:
        """Comes in; this worker, and all that are there. Raises `RendezvousError`, `RendezvousTimeoutError`."""
        from farcall.rendezvous import join, join_open  # not at the head: see `farcall.rendezvous`

        meeting = self._rendezvous
        if self.is_open:
            self._number, payloads = join_open(meeting, self._name, lambda number: _encode(self._me(number)), timeout)
        else:
            self._number = meeting.rank
            payloads = join(meeting, self._name, _encode(self._me(meeting.rank)), timeout)
        members = [_decoder.decode(payload) for payload in payloads.values()]
        return self._me(self._number), members

    def _me(self, number: Worker) -> Member:
        return Member(number, self._name, self._rendezvous.rank, host_identity(), self._addresses)

    def keep(self, group: Group, serving: Serving) -> None:
        """From now on, sees to it that others can come in."""
        self._group, self._serving = group, serving
        if self.is_open:
            from farcall.rendezvous import when_store_lost

            when_store_lost(self._rendezvous, self._store_lost)

    def tick(self, now: float) -> None:
        """Has some compare the store with the group once in a while, and meet those whom only the store knows.

        One of them may have died as it came in, and its name would be taken for ever: the group, once it knows that
        worker, finds out whether it lives. Or this worker was frozen for so long that all it knew are gone, and nobody
        is left to tell it that it was taken for dead: those who came meanwhile can.
        """
        group, serving = self._group, self._serving
        if now < self._next_look or not self.is_open or group is None or serving is None or self._over.is_set():
            return
        self._next_look = now + self._patience
        if self._is_teller(group):
            serving.run_aside(ChoreJob(self._compare))

    def _compare(self) -> None:
        from farcall.rendezvous import who_is_there

        self._clear_away()
        group = self._group
        if group is not None:
            for number, payload in who_is_there(self._rendezvous).items():
                if not self._over.is_set() and not group.is_gone(number):
                    group.met(_decoder.decode(payload))

    def member_gone(self, number: Worker, left: bool) -> None:
        """Somebody is gone. Its name is to be free for the next who wants it.

        If it hosted the store another one must, though the connection to it may still be open: it may be frozen. In a
        fixed group nobody else can: whoever asks the store, or waits for everybody by it, is told.
        """
        group, serving = self._group, self._serving
        # Once all are about to go, only of the host: of others it might be that they have gone in good order.
        if not (self.is_open or left or group is None) and (number == _HOST or not group.is_quiet):
            self._rendezvous.store.lost(number, f"worker {group.name_of(number)!r} was lost")
        if not self.is_open or group is None or serving is None or self._over.is_set():
            return
        from farcall.rendezvous import is_hosted_by

        if is_hosted_by(self._rendezvous, {group.name_of(number)}) and not is_hosted_by(
            self._rendezvous, _names(group)
        ):
            serving.run_aside(ChoreJob(self._host_again))
        if self._is_teller(group):
            serving.run_aside(ChoreJob(self._clear_away))

    def _clear_away(self) -> None:
        """Has the store forget everybody who is gone, not the last one only: it may have missed the others."""
        from farcall.rendezvous import clear_away

        group = self._group
        if group is not None and not self._over.is_set():
            clear_away(self._rendezvous, group.is_gone, _names(group))

    def _is_teller(self, group: Group) -> bool:
        return self._number in sorted(group.here())[:_TELLERS]

    def _store_lost(self) -> None:
        """Its host has gone, most likely."""
        if self._serving is not None and not self._over.is_set():
            self._serving.run_aside(ChoreJob(self._host_again))

    def _host_again(self) -> None:
        from farcall.rendezvous import host_again

        group = self._group
        with self._hosting:  # one after the other: the second finds that it is done
            while group is not None and not self._over.is_set():
                members = group.here()
                here = {number: (member.name, _encode(member)) for number, member in members.items()}
                if host_again(self._rendezvous, here, max(here, default=0) + 1, group.names_gone()):
                    self._clear_away()  # who was lost meanwhile was told to nobody
                    return
                self._over.wait(_PAUSE)

    def expelled(self) -> None:
        """This worker was taken for dead: a store that is hosted anew is not to have it again, nor to be in it."""
        if self.is_open:
            from farcall.rendezvous import hand_over, settle_no_more

            self._over.set()
            settle_no_more(self._rendezvous)
            if self._serving is not None:
                self._serving.run_aside(ChoreJob(lambda: hand_over(self._rendezvous)))

    def leave(self) -> None:
        """Goes out: the name is free. Takes a second at most. Does nothing in a fixed group, or if it never came in."""
        if self.is_open and self._number >= 0 and not self._has_left:
            self._over.set()
            from farcall.rendezvous import leave_open

            leave_open(self._rendezvous, self._number)
            self._has_left = True


def _names(group: Group) -> set[str]:
    return {member.name for member in group.here().values()}

"""The life of references: who owns a value, who holds a handle of it, and when it may go.

A reference has one owner, the worker where its value lives, and any number of handles, on any workers. The owner's own
handles are merely counted. Every handle elsewhere is a *fork*: it has an id, it is held by one worker, and the owner
keeps a table of who holds which. A worker that puts a handle into a message makes a fork for the receiver: it is the
fork's *parent*, the receiver holds the *child*. Nobody waits for any of this: handles are used at once.

    remote call    creator ──CreateRequest──▸ owner; confirmed by its delivery, as the owner never refuses it
    user to user   parent ──(child in a message)──▸ child, lent for a moment. If it is dropped by then:
                   child ──ChildAccepted──▸ parent, and the owner never hears of it. Else:
                   child ──ForkRequest──▸ owner ──ForkAccepted──▸ child ──ChildAccepted──▸ parent
    owner to user  counted by the owner as it is passed; confirmed as it arrives, and never asked for
    user to owner  becomes one of the owner's own handles; owner ──ChildAccepted──▸ parent
    the end        holder ──UserDeleted──▸ owner, once the handle was dropped, is confirmed, and has no child pending

Guarantees
- G1: the owner hears of the end of every fork, by `UserDeleted` or by the loss of its holder.
- G2: a parent's fork is not given up before the owner has counted its children, or they have come to their end.

Invariants, checked by name in the tests
- LIVE: no value is released while a confirmed handle of it lives.
- LENT: nor while a lent one lives, as long as everybody lives through whose hands it came from one that is confirmed.
- EMPTY: when all handles are gone and no message is under way, every table is empty.
- UNCHANGED: illegal input raises `ProtocolError` and changes nothing.
- SETTLED: the loss of a worker settles everything that waited for it; no table keeps anything of it.
- ANSWERED: every handle that is neither confirmed nor lent has a request under way, or noted at the owner.

Most handles that are passed on go to a function that uses them and ends. So the owner is asked only for what has been
kept for a moment (`HandleKept`), or whose parent has died: until then the parent's fork keeps the value for both.

It holds under any order of messages. Two things make that so. A delete is not sent before the fork is confirmed, so it
can't arrive before the request. And a request for a reference that the owner does not know is told apart: numbers of
references count up for each creator and owner, so one that was created before is *released* and the request is refused;
one that was not is *not yet created*, because the creator's own request is still under way, and the fork is noted. If
the creator is lost first, whatever was noted is refused.

What is refused leads nowhere, and can be so only if somebody died: then the handle raises on use. The owner's own
handles, and the forks that it has passed on, are counted to their end all the same: those who hold them have been
promised an owner that knows them, and find an error in place of the value.

What it needs from below: messages are taken once each (`delivery.py`); none of a worker after its loss; none that names
a worker (sender, owner, creator, maker of a fork) before that worker has joined here, because one that is not there is
taken for one that was lost.

Pure: events in, effects out. It holds no value, sends nothing, and knows no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, Worker, new_tuple
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    ConfirmHandle,
    CreateDelivered,
    CreateRequest,
    Effect,
    Event,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    HandleDropped,
    HandleKept,
    HandlePassed,
    HandleReceived,
    Message,
    MessageReceived,
    OrphanHandle,
    PassingFailed,
    PeerJoined,
    PeerLost,
    RefuseHandle,
    ReleaseValue,
    RemoteCalled,
    SendMessage,
    UserDeleted,
    ValueMade,
)
from farcall.protocol.reference_tables import CONFIRMED, LENT, UNCONFIRMED, Held, Owned, new_held, new_owned
from farcall.protocol.watermark import Watermark


class References:
    """All references of one worker, `me`."""

    def __init__(self, me: Worker) -> None:
        self.me = me
        self.owned: dict[RRefId, Owned] = {}
        self.held: dict[ForkId, Held] = {}
        self.lent: dict[ForkId, Held] = {}
        """Those of the held that the owner was not asked for yet."""
        self.peers: dict[Worker, Watermark] = {}
        """The workers that are there, and which references each has created here."""
        self.parents: dict[ForkId, ForkId] = {}  # of the children that are pending
        self.numbers: dict[Worker, int] = {}  # how many references at each worker have got ids so far
        self.forks = 0
        self._handlers: dict[type[Any], Callable[..., list[Effect]]] = {
            PeerJoined: self.peer_joined,
            PeerLost: self.peer_lost,
            ValueMade: self.value_made,
            RemoteCalled: self.remote_called,
            CreateDelivered: self.create_delivered,
            HandlePassed: self.handle_passed,
            PassingFailed: self.passing_failed,
            HandleReceived: self.handle_received,
            HandleKept: self.handle_kept,
            HandleDropped: self.handle_dropped,
            MessageReceived: self.message_received,
        }
        self._message_handlers: dict[type[Any], Callable[[Worker, RRefId, ForkId], list[Effect]]] = {
            CreateRequest: self.create_requested,
            ForkRequest: self._fork_requested,
            ForkAccepted: self._fork_accepted,
            ForkRefused: self._fork_refused,
            ChildAccepted: self._child_accepted,
            UserDeleted: self._user_deleted,
        }

    # Ids

    def new_reference(self, owner: Worker) -> RRefId:
        """An id for a reference that this worker is about to create at `owner`. Numbers leave no gap: use each.

        The number is 0, which no reference has, if the owner is lost: nothing may be kept of it.
        """
        if owner not in self.peers:
            return RRefId(owner, self.me, 0)
        number = self.numbers[owner] = self.numbers.get(owner, 0) + 1
        return RRefId(owner, self.me, number)

    def new_fork(self) -> ForkId:
        """An id for a fork that this worker is about to make."""
        self.forks += 1
        return new_tuple(ForkId, (self.me, self.forks))  # type: ignore[no-any-return]

    def ids_given(self, owner: Worker) -> tuple[int, int]:
        """How many references at `owner`, and how many forks, have got ids so far: for `take_back`."""
        return self.numbers.get(owner, 0), self.forks

    def take_back(
        self, to: Worker, before: tuple[int, int], passed: Sequence[tuple[RRefId, ForkId | None]]
    ) -> list[Effect]:
        """Undoes what nobody was told of since `ids_given(to)`: a `call_remote`, and the passing of handles to `to`."""
        number, forks = before
        effects: list[Effect] = []
        for child in [ForkId(self.me, each) for each in range(forks + 1, self.forks + 1)]:
            self.held.pop(child, None)
            for reference, parent in passed:
                effects += self.passing_failed(reference, parent, child)
        if number:
            self.numbers[to] = number
        else:
            self.numbers.pop(to, None)
        return effects

    def call_remote(self, owner: Worker) -> tuple[RRefId, ForkId]:
        """New ids, and `remote_called` with them, for an owner that is there. In one frame, for speed."""
        number = self.numbers[owner] = self.numbers.get(owner, 0) + 1
        forks = self.forks = self.forks + 1
        reference, fork = new_tuple(RRefId, (owner, self.me, number)), new_tuple(ForkId, (self.me, forks))
        held = self.held[fork] = new_held(Held)
        held.reference, held.standing, held.parent, held.dropped = reference, UNCONFIRMED, None, False
        held.children = {}
        return reference, fork

    # The door

    def handle(self, event: Event) -> list[Effect]:
        """Takes an event, gives what is to be done, as the method of its name does with what is in it.

        Raises `ProtocolError`, changing nothing, if it cannot be."""
        return self._handlers[type(event)](*event)

    def is_to_come(self, reference: RRefId) -> bool:
        """Whether its owner, this worker, has still to hear from its creator. (A use may overtake the creation.)"""
        owned = self.owned.get(reference)
        if owned is not None:
            return not owned.created and not owned.refused
        return self._may_be_created(reference)

    def is_empty(self) -> bool:
        """Whether nothing is owned, held or noted."""
        return not self.owned and not self.held

    # Workers come and go

    def peer_joined(self, worker: Worker) -> list[Effect]:
        """See `PeerJoined`."""
        if worker in self.peers:
            raise ProtocolError(f"worker {worker} is there already")
        self.peers[worker] = Watermark()
        return []

    def peer_lost(self, lost: Worker) -> list[Effect]:
        """See `PeerLost`."""
        if lost == self.me:
            raise ProtocolError(f"worker {lost} cannot lose itself")
        if self.peers.pop(lost, None) is None:
            raise ProtocolError(f"worker {lost} is not there")
        self.numbers.pop(lost, None)
        effects: list[Effect] = []
        for reference, owned in list(self.owned.items()):
            for fork in [fork for fork, holder in owned.forks.items() if holder == lost]:
                del owned.forks[fork]
            if not owned.created and reference.creator == lost:
                effects += self._refuse_noted(reference, owned)
            effects += self._release_if_unused(reference, owned)
        for fork, held in list(self.held.items()):
            if held.reference.owner == lost:
                self._forget(fork, held)
                effects.append(OrphanHandle(held.reference, fork))
                continue
            if held.parent == lost:
                held.parent = None  # the owner decides whether the fork counts; nobody waits for our word
                if held.standing is LENT:
                    effects += self._ask(fork, held)
            for child in [child for child, to in held.children.items() if to == lost]:
                self._settle_child(held, child)
            effects += self._delete_if_done(fork, held)
        return effects

    def _refuse_noted(self, reference: RRefId, owned: Owned) -> list[Effect]:
        """The creator is lost, and its request never came: whoever was noted holds a handle of nothing."""
        noted = [(fork, holder) for fork, holder in owned.forks.items() if fork.creator != self.me]
        for fork, _ in noted:
            del owned.forks[fork]
        effects: list[Effect] = [SendMessage(holder, ForkRefused(reference, fork)) for fork, holder in noted]
        if owned.handles or owned.forks:  # ours, and those that we have passed on
            owned.refused = True
            effects.append(RefuseHandle(reference, None))
        return effects

    # Handles are made, passed, received and dropped here

    def value_made(self, reference: RRefId) -> list[Effect]:
        """See `ValueMade`."""
        if not reference.owner == reference.creator == self.me:
            raise ProtocolError(f"{reference} is not ours to make")
        if not self._is_new(reference):
            raise ProtocolError(f"{reference} was made before")
        self.peers[self.me].add(reference.number)
        owned = self.owned[reference] = Owned(created=True)
        owned.handles = 1
        return []

    def remote_called(self, reference: RRefId, fork: ForkId) -> list[Effect]:
        """See `RemoteCalled`."""
        if not reference.creator == self.me == fork.creator:
            raise ProtocolError(f"{reference} is not ours to ask for")
        if fork in self.held:
            raise ProtocolError(f"{fork} is held already")
        if reference.owner not in self.peers:
            return [OrphanHandle(reference, fork)]
        self.held[fork] = Held(reference, UNCONFIRMED, None)
        return [SendMessage(reference.owner, CreateRequest(reference, fork))]

    def create_delivered(self, reference: RRefId, fork: ForkId) -> list[Effect]:
        """See `CreateDelivered`."""
        held = self.held.get(fork)
        if held is None or held.standing is not UNCONFIRMED or held.reference != reference:
            raise ProtocolError(f"{reference} was delivered, which {fork} did not ask for")
        if not reference[1] == self.me == fork[0] or held.parent is not None:
            raise ProtocolError(f"{reference} was not asked for by {fork}")
        held.standing = CONFIRMED
        return self._delete_if_done(fork, held) if held.dropped else [new_tuple(ConfirmHandle, (reference, fork))]

    def handle_passed(self, reference: RRefId, parent: ForkId | None, child: ForkId, to: Worker) -> list[Effect]:
        """See `HandlePassed`."""
        if child[0] != self.me:
            raise ProtocolError(f"{child} is not ours to make")
        held = self._passable(reference, parent)
        owned = self.owned.get(reference)
        if child in self.parents or (owned is not None and child in owned.forks):
            raise ProtocolError(f"{child} was passed before")
        if to not in self.peers:
            return []  # it never arrives, and nobody will hold it
        if reference[0] == self.me:  # counted at once, even if it comes from a fork that we hold of our own value
            self.owned.setdefault(reference, Owned(created=False)).forks[child] = to
        elif held is not None and parent is not None:
            held.children[child] = to
            self.parents[child] = parent
        return []

    def _passable(self, reference: RRefId, parent: ForkId | None) -> Held | None:
        if parent is None:
            owned = self.owned.get(reference)
            if owned is None or not owned.handles:
                raise ProtocolError(f"this worker has no handle of its own of {reference} to pass")
            return None
        held = self.held.get(parent)
        if held is None or held.dropped or held.reference != reference:
            raise ProtocolError(f"this worker does not hold {parent} of {reference}, and cannot pass it")
        return held

    def passing_failed(self, reference: RRefId, parent: ForkId | None, child: ForkId) -> list[Effect]:
        """See `PassingFailed`."""
        if reference.owner == self.me:
            owned = self.owned.get(reference)
            if owned is None or owned.forks.pop(child, None) is None:
                return []  # its receiver was lost meanwhile
            return self._release_if_unused(reference, owned)
        held = self.held.get(parent) if parent is not None else None
        if parent is None or held is None or child not in held.children:
            return []
        self._settle_child(held, child)
        return self._delete_if_done(parent, held)

    def handle_received(self, carried: Carried, sender: Worker) -> list[Effect]:
        """See `HandleReceived`."""
        reference, fork = carried
        owner = reference[0]
        if sender != fork[0]:
            raise ProtocolError(f"{fork} came from worker {sender}, who cannot have made it")
        if fork in self.held:
            raise ProtocolError(f"{fork} is held already")
        if owner == self.me:
            return self._own_handle_received(reference, fork, sender)
        if owner not in self.peers:
            return [OrphanHandle(reference, fork)]
        if sender == owner:
            self.held[fork] = Held(reference, CONFIRMED, None)
            return [ConfirmHandle(reference, fork)]
        parent = sender if sender in self.peers else None  # who keeps it for us
        self.held[fork] = self.lent[fork] = held = Held(reference, LENT, parent)
        return self._ask(fork, held) if parent is None else []

    def _own_handle_received(self, reference: RRefId, fork: ForkId, sender: Worker) -> list[Effect]:
        owned = self.owned.get(reference)
        if owned is None:
            owned = self.owned[reference] = Owned(created=False)
            owned.refused = not self._may_be_created(reference)
        owned.handles += 1
        effects: list[Effect] = [RefuseHandle(reference, None)] if owned.refused else []
        if sender == self.me:  # the owner passed it to itself
            owned.forks.pop(fork, None)
            return effects
        return effects + self._tell_parent(sender, reference, fork)

    def handle_kept(self, reference: RRefId, fork: ForkId) -> list[Effect]:
        """See `HandleKept`."""
        held = self.lent.get(fork)
        if held is None or held.dropped or held.reference != reference:
            raise ProtocolError(f"{fork} of {reference} is not lent to this worker")
        return self._ask(fork, held)

    def _ask(self, fork: ForkId, held: Held) -> list[Effect]:
        held.standing = UNCONFIRMED
        del self.lent[fork]
        return [SendMessage(held.reference.owner, ForkRequest(held.reference, fork))]

    def handle_dropped(self, reference: RRefId, fork: ForkId | None) -> list[Effect]:
        """See `HandleDropped`."""
        if fork is None:
            owned = self.owned.get(reference)
            if owned is None or not owned.handles:
                raise ProtocolError(f"this worker has no handle of its own of {reference} to drop")
            owned.handles -= 1
            return self._release_if_unused(reference, owned)
        held = self.held.get(fork)
        if held is None:
            return []  # refused, or its owner is lost
        if held.dropped:
            raise ProtocolError(f"{fork} was dropped before")
        held.dropped = True
        return self._delete_if_done(fork, held)

    # Messages

    def message_received(self, sender: Worker, message: Message) -> list[Effect]:
        """See `MessageReceived`."""
        if sender not in self.peers:
            raise ProtocolError(f"a message of worker {sender} came, who is not there")
        return self._message_handlers[type(message)](sender, *message)

    def create_requested(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """See `CreateRequest`; its sender must be there."""
        owner, creator, number = reference
        if owner != self.me:
            raise ProtocolError(f"{reference} is not ours to make")
        if not creator == fork[0] == sender:
            raise ProtocolError(f"{reference} is not worker {sender}'s to ask for")
        owned = self.owned.get(reference)
        if owned is not None and fork in owned.forks:
            raise ProtocolError(f"{fork} is counted already")
        created = self.peers[sender]
        if number == created.mark + 1 and not created.beyond:  # the rule, without a frame
            created.mark = number
        elif not created.add(number):
            raise ProtocolError(f"{reference} was made before")
        if owned is None:
            owned = self.owned[reference] = new_owned(Owned)
            owned.created, owned.refused, owned.handles, owned.forks = True, False, 0, {fork: sender}
            return []
        owned.created = True
        # Those that we have passed on ourselves were counted then, and did not ask.
        noted = [(other, holder) for other, holder in owned.forks.items() if other.creator != self.me]
        owned.forks[fork] = sender
        return [SendMessage(holder, ForkAccepted(reference, other)) for other, holder in noted]

    def _fork_requested(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        if reference.owner != self.me:
            raise ProtocolError(f"{reference} is not ours")
        if fork.creator == self.me:
            raise ProtocolError(f"{fork} was counted when it was passed")
        owned = self.owned.get(reference)
        if owned is not None and fork in owned.forks:
            raise ProtocolError(f"{fork} is counted already")
        if owned is None and self._may_be_created(reference):
            owned = self.owned[reference] = Owned(created=False)
        if owned is None or owned.refused:
            return [SendMessage(sender, ForkRefused(reference, fork))]
        owned.forks[fork] = sender
        return [SendMessage(sender, ForkAccepted(reference, fork))] if owned.created else []

    def _fork_accepted(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        held = self._answered(sender, reference, fork)
        held.standing = CONFIRMED
        parent, held.parent = held.parent, None
        effects: list[Effect] = [ConfirmHandle(reference, fork)]
        if parent is not None:
            effects += self._tell_parent(parent, reference, fork)
        return effects + self._delete_if_done(fork, held) if held.dropped else effects

    def _fork_refused(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        held = self._answered(sender, reference, fork)
        self._forget(fork, held)
        told = self._tell_parent(held.parent, reference, fork) if held.parent is not None else []
        return [RefuseHandle(reference, fork), *told]

    def _answered(self, sender: Worker, reference: RRefId, fork: ForkId) -> Held:
        held = self.held.get(fork)
        if held is None or held.standing is not UNCONFIRMED or held.reference != reference:
            raise ProtocolError(f"an answer came for {fork} of {reference}, which did not ask")
        if held.parent is None and fork.creator == self.me:
            raise ProtocolError(f"an answer came for {fork} of {reference}, which asked to make it")
        if sender != reference.owner:
            raise ProtocolError(f"worker {sender} answered for {reference}, which it does not own")
        return held

    def _child_accepted(self, sender: Worker, _: RRefId, fork: ForkId) -> list[Effect]:
        if fork.creator != self.me:
            raise ProtocolError(f"{fork} was not made here")
        parent = self.parents.get(fork)
        if parent is None:
            return []  # the parent was refused or orphaned meanwhile, and gave its children up
        held = self.held[parent]
        if held.children[fork] != sender:
            raise ProtocolError(f"{fork} was not made for worker {sender}")
        self._settle_child(held, fork)
        return self._delete_if_done(parent, held)

    def _user_deleted(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        owned = self.owned.get(reference)
        if owned is None or owned.forks.get(fork) != sender:
            raise ProtocolError(f"worker {sender} gave up {fork} of {reference}, which it does not hold")
        del owned.forks[fork]
        return self._release_if_unused(reference, owned)

    # What follows

    def _tell_parent(self, parent: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        told = new_tuple(ChildAccepted, (reference, fork))
        return [new_tuple(SendMessage, (parent, told))] if parent in self.peers else []

    def _delete_if_done(self, fork: ForkId, held: Held) -> list[Effect]:
        if not held.dropped or held.children or held.standing is UNCONFIRMED:
            return []  # G2, and: a delete must not overtake its own request
        self._forget(fork, held)
        if held.parent is not None:  # it was lent, and is given back
            return self._tell_parent(held.parent, held.reference, fork)
        return [new_tuple(SendMessage, (held.reference.owner, new_tuple(UserDeleted, (held.reference, fork))))]

    def _forget(self, fork: ForkId, held: Held) -> None:
        del self.held[fork]
        if held.standing is LENT:
            del self.lent[fork]
        for child in held.children:
            del self.parents[child]

    def _settle_child(self, held: Held, child: ForkId) -> None:
        del held.children[child]
        del self.parents[child]

    def _release_if_unused(self, reference: RRefId, owned: Owned) -> list[Effect]:
        if owned.handles or owned.forks:
            return []
        del self.owned[reference]
        return [new_tuple(ReleaseValue, (reference,))]

    def _is_new(self, reference: RRefId) -> bool:
        return reference not in self.owned and self._may_be_created(reference)

    def _may_be_created(self, reference: RRefId) -> bool:
        """Whether a reference that is unknown here is still to come; else it was released, or will never be made."""
        created = self.peers.get(reference.creator)
        return created is not None and reference.number not in created

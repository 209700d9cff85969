"""Distributed reference counting: who owns a value, who holds references to it, and when the value is released.

A reference has one *owner*, the worker on which its value lives, and any number of *handles* on any workers. The
owner only counts its own handles. Every handle on another worker is a *fork*: it has an id, one worker holds it, and
the owner has a table of all forks and their holders. A worker that puts a handle into a message makes a fork for the
receiver: the handle's own fork is the *parent*, the new one the *child*. No worker waits for any of this: handles can
be used at once.

    remote call    creator --CreateRequest--> owner. Its delivery confirms it, because the owner never refuses it
    user to user   parent --(child in a message)--> child, which is *unreported* at first. If it is dropped soon:
                   child --ChildAccepted--> parent, and the owner never learns of it. Otherwise:
                   child --ForkRequest--> owner --ForkAccepted--> child --ChildAccepted--> parent
    owner to user  counted by the owner when it is passed, confirmed when it arrives
    user to owner  becomes one of the owner's own handles; owner --ChildAccepted--> parent
    the end        holder --UserDeleted--> owner, once the handle was dropped, is confirmed, and has no child pending

Guarantees
- G1: the owner learns of the end of every fork that it counts, by `UserDeleted` or by the loss of the holder.
- G2: a parent is not deleted before the owner has counted its children, or the children have ended.

Invariants, checked by name in tests/simulation
- LIVE: no value is released while a confirmed handle of it exists.
- UNREPORTED: no value is released while an unreported handle of it exists, as long as all workers live that have passed
  it on since it was a confirmed handle.
- EMPTY: when all handles are gone and no message is on its way, every table is empty.
- UNCHANGED: illegal input raises `ProtocolError` and changes nothing.
- SETTLED: after the loss of a worker, nothing waits for it, and no table contains anything of it.
- ANSWERED: for every fork that is neither confirmed nor unreported, a request is on its way, or the owner has noted it.

Most handles in calls go to functions that use them and return. So the owner is asked to count a fork only if the fork
was kept for a while (`report_fork`), or if the parent's worker was lost. Until then the parent keeps the value alive
for both.

Messages may arrive in any order, for two reasons. A delete is not sent before the fork is confirmed, so it cannot
overtake the request. And the owner can distinguish a reference that is *not yet created* from one that was *released*,
because each creator numbers its references at each owner. A request about a released reference is refused. A request
about a reference that is not yet created is noted until the creator's request arrives, and refused if the creator is
lost first.

A request of an honest worker is refused only if another worker was lost. Every use of the handle then raises. The
owner's own handles, and the forks that the owner has passed on, are counted until they end: an error takes the place of
the value.

Members may be malicious. The creator of a reference draws a random *token*, which is part of the id, so only workers
that were given the reference can name it. A message with a wrong token names a reference that does not exist here. The
owner refuses it like a released one, so no worker can find out which references exist. A reference that is named before
its creator's request has arrived is noted with its token, and refused if the creator then creates it with another
token. The owner keeps at most `MAX_CLAIMS` such notes for each worker. Each message is also checked against its sender:
only the creator creates, only the holder of a fork ends it, only the owner accepts or refuses, and only the worker for
which a fork was made reports to its parent. A message that fails a check raises `ProtocolError` and changes nothing.

The caller must make sure of this: the sender of each message is authenticated; each message is processed once
(`delivery`); no message of a worker is processed after its loss; and no message names a worker that has not joined here
yet, because such a worker would be considered lost.

Pure: the methods are the events. They return effects for the caller to carry out (`reference_messages`), and an empty
list if there is nothing to do. No value is stored, no message is sent, and no clock is read here. The runtime's
reference store and the simulators call the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, Worker, new_tuple
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    ConfirmHandle,
    CreateRequest,
    Effect,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    Message,
    OrphanHandle,
    RefuseHandle,
    ReleaseValue,
    SendMessage,
    UserDeleted,
)
from farcall.protocol.watermark import Watermark


class OwnedEntry:
    """What an owner knows about one of its references: whether it was created, and who has handles and forks of it.

    A new entry has no handles and no forks.

    Args:
        created: Whether the reference was created. False if another worker has used the reference before its creator's
            request arrived.
    """

    __slots__ = ("created", "forks", "handles", "refused")

    def __init__(self, created: bool) -> None:
        self.created = created
        """False while the creator's request has not arrived."""
        self.refused = False
        """Whether the reference has no value and never will have one, so that each use of it raises an error."""
        self.handles = 0
        """How many handles (`RRef` objects) of the reference the owner itself has."""
        self.forks: dict[ForkId, Worker] = {}
        """The forks, that is copies of the reference on other workers, that count, each with the worker that holds
        it."""


class ForkState(Enum):
    """Whether the owner counts a fork that this worker holds: it was not asked, was asked, or has confirmed it."""

    UNREPORTED = "unreported"
    """The owner was not asked yet. The parent keeps the value alive, and waits for `ChildAccepted`."""
    REQUESTED = "requested"
    """The owner was asked to count the fork, or to create the reference, and has not answered."""
    CONFIRMED = "confirmed"
    """The owner counts the fork."""


UNREPORTED: Final = ForkState.UNREPORTED
REQUESTED: Final = ForkState.REQUESTED
CONFIRMED: Final = ForkState.CONFIRMED


class UserFork:
    """A fork that this worker holds: its copy of a reference whose value lives on another worker.

    A new object says that the program has not dropped the fork, and has not passed it on to other workers.

    Args:
        reference: The reference of which this is a fork.
        state: Whether the owner counts the fork.
        parent: The worker that passed the reference to this one. It keeps its own fork until this worker sends it
            `ChildAccepted`. None if no worker waits for `ChildAccepted`: this worker created the reference, the owner
            passed it, the worker that passed it is gone, or `ChildAccepted` was sent already.
    """

    __slots__ = ("children", "dropped", "parent", "reference", "state")

    def __init__(self, reference: RRefId, state: ForkState, parent: Worker | None) -> None:
        self.reference = reference
        self.state = state
        self.parent = parent
        """The worker that waits for this worker's `ChildAccepted`; None if no worker does."""
        self.dropped = False
        """Whether the program has dropped the handle."""
        self.children: dict[ForkId, Worker] = {}
        """The forks that were made from this one for other workers, each with its worker, as long as they are not
        settled: the owner does not count them yet, and they have not ended."""


MAX_CLAIMS: Final = 100_000
"""The most references that one worker may name at their owner before they are created. An honest worker names one only
while the creator's request is on its way. Without a limit, a malicious worker could fill the owner's memory."""
NO_CLAIMANT: Final = -1
"""Stands for a worker that is lost, and for an unknown worker that has named a reference."""


class ReferenceCounts:
    """The reference counts of one worker: for the values that it owns, and for the forks that it holds.

    A *handle* is an `RRef` object of the program. A *fork* is one worker's copy of a reference that another worker
    owns. A *child* is a fork that was passed on from another fork, its *parent*. A child is *settled* when the owner
    counts it or it has ended. A reference is *noted* if it was named here before its creator's request arrived; the
    worker that named it is the *claimant*.

    Each method processes one event. Most return a list of effects, such as messages to send and values to release. The
    caller must carry them out in the order of the list.

    The tables are empty at first. `add_worker` must be called for all workers of the group, including this one.

    Args:
        me: The number of this worker.
        new_token: Returns the secret token of a new reference: `TOKEN_SIZE` bytes that nobody can guess.
    """

    def __init__(self, me: Worker, new_token: Callable[[], bytes]) -> None:
        self.me = me
        self.new_token = new_token
        self.owned: dict[RRefId, OwnedEntry] = {}
        """The references whose values live here."""
        self.held: dict[ForkId, UserFork] = {}
        """The forks that this worker holds of references whose values live elsewhere."""
        self.unreported: dict[ForkId, UserFork] = {}
        """Those of the held forks that are unreported."""
        self.workers: dict[Worker, Watermark] = {}
        """The workers of the group, each with the numbers of the references that it has created here."""
        self.parents: dict[ForkId, ForkId] = {}
        """The parent of each child that is not settled."""
        self.noted: dict[tuple[Worker, int], dict[RRefId, Worker]] = {}
        """The references of this owner that were named before their creator's request arrived, by creator and number,
        each with the worker that named it first."""
        self.claims: dict[Worker, int] = {}
        """For each worker, the number of noted references that it was the first to name."""
        self.numbers: dict[Worker, int] = {}
        """For each owner, the number of ids of references that this worker has made so far."""
        self.forks_made = 0
        """The number of ids of forks that this worker has made so far."""
        self._message_handlers: dict[type[Any], Callable[[Worker, RRefId, ForkId], list[Effect]]] = {
            CreateRequest: self.accept_create,
            ForkRequest: self._fork_requested,
            ForkAccepted: self._fork_accepted,
            ForkRefused: self._fork_refused,
            ChildAccepted: self._child_accepted,
            UserDeleted: self._user_deleted,
        }

    # Ids

    def new_reference(self, owner: Worker) -> RRefId:
        """Returns the id for a reference that this worker is about to create.

        The ids for one owner are numbered without a gap, so each id must be used.

        Args:
            owner: The worker on which the value will live, which may be this worker. If it is not in the group, the id
                has the number 0, which no reference has, and nothing is counted.
        """
        if owner not in self.workers:
            return RRefId(owner, self.me, 0)
        token = self.new_token()
        number = self.numbers[owner] = self.numbers.get(owner, 0) + 1
        return RRefId(owner, self.me, number, token)

    def new_fork(self) -> ForkId:
        """Returns a new id for a fork that this worker is about to make. It need not be used."""
        self.forks_made += 1
        return new_tuple(ForkId, (self.me, self.forks_made))  # type: ignore[no-any-return]

    def create_remote(self, owner: Worker) -> tuple[RRefId, ForkId]:
        """Makes the ids for a reference that another worker is asked to create, and adds this worker's fork of it.

        The caller must send the `CreateRequest`, or call `cancel_create`.

        Args:
            owner: The worker that is asked: another worker of the group, which is not checked.

        Returns:
            The id of the reference, and the id of the fork that this worker holds.
        """
        number = self.numbers.get(owner, 0) + 1
        reference, fork = new_tuple(RRefId, (owner, self.me, number, self.new_token())), self.new_fork()
        held = UserFork(reference, REQUESTED, None)
        # No call from here on: a signal handler that raises comes before both of these, or after.
        self.numbers[owner] = number
        self.held[fork] = held
        return reference, fork

    def cancel_create(self, fork: ForkId) -> None:
        """Undoes `create_remote`, because nothing about the reference was sent.

        No id of another reference of the same owner may have been made since then. That is not checked.

        Args:
            fork: The fork that `create_remote` returned.

        Raises:
            KeyError: This worker does not hold the fork.
        """
        reference = self.held.pop(fork).reference
        self.numbers[reference.owner] -= 1  # numbers must leave no gap

    # Looking

    def may_still_be_created(self, reference: RRefId, claimant: Worker = NO_CLAIMANT) -> bool:
        """Returns whether a reference of this owner does not exist yet, but can still be created.

        To be called for a message that uses a reference and arrives before the creator's request.

        Args:
            reference: The reference.
            claimant: The worker that uses the reference; `NO_CLAIMANT` if that is not known.

        Returns:
            True if the reference can still be created. Then it is remembered, so that it is refused later if its
            creator creates it with another token. False if the reference exists, was released or refused, if its
            creator is not in the group, or if `claimant` has named `MAX_CLAIMS` references that do not exist yet.
        """
        owned = self.owned.get(reference)
        if owned is not None:
            return not owned.created and not owned.refused
        if claimant not in self.workers:  # it is lost, and nothing may be kept of it
            claimant = NO_CLAIMANT
        return self._may_be_created(reference) and self._add_claim(reference, claimant)

    def is_empty(self) -> bool:
        """Returns whether this worker owns no reference, holds no fork, and has noted no reference.

        A noted reference is one that was named here before its creator's request arrived.
        """
        return not self.owned and not self.held and not self.noted

    # Workers come and go

    def add_worker(self, worker: Worker) -> list[Effect]:
        """Adds a worker, which may be this one, to the group. Returns an empty list.

        Raises:
            ProtocolError: The worker is in the group already.
        """
        if worker in self.workers:
            raise ProtocolError(f"worker {worker} is there already")
        self.workers[worker] = Watermark()
        return []

    def remove_worker(self, lost: Worker) -> list[Effect]:
        """Removes a worker that was lost or has left, so that nothing waits for it any more.

        Args:
            lost: The worker.

        Returns:
            `ReleaseValue` for each value of this worker that only `lost` held. `ForkRefused` and `RefuseHandle` for
            each reference of this worker that has handles or forks, but that `lost` has not created yet. `OrphanHandle`
            for each fork held here of a value of `lost`. `ForkRequest` for each fork that `lost` passed to this worker,
            unless the owner was asked already to count that fork. `UserDeleted` or `ChildAccepted` for each dropped
            fork that only waited for `lost`. An empty list if nothing depends on `lost`.

        Raises:
            ProtocolError: The worker is not in the group, or is this worker. Nothing is changed.
        """
        if lost == self.me:
            raise ProtocolError(f"worker {lost} cannot lose itself")
        if self.workers.pop(lost, None) is None:
            raise ProtocolError(f"worker {lost} is not there")
        self.numbers.pop(lost, None)
        for key in [key for key in self.noted if key[0] == lost]:
            self._forget_claims(key)
        effects: list[Effect] = []
        for reference, owned in list(self.owned.items()):
            for fork in [fork for fork, holder in owned.forks.items() if holder == lost]:
                del owned.forks[fork]
            if not owned.created and reference.creator == lost:
                effects += self._refuse_noted(reference, owned)
            effects += self._release_if_unused(reference, owned)
        if lost in self.claims:
            effects += self._disown_claims(lost)
        for fork, held in list(self.held.items()):
            if held.reference.owner == lost:
                self._forget(fork, held)
                effects.append(OrphanHandle(held.reference, fork))
                continue
            if held.parent == lost:
                held.parent = None  # the owner decides whether the fork counts; nobody waits for our word
                if held.state is UNREPORTED:
                    effects += self._ask(fork, held)
            for child in [child for child, to in held.children.items() if to == lost]:
                self._settle_child(held, child)
            effects += self._delete_if_done(fork, held)
        return effects

    def _refuse_noted(self, reference: RRefId, owned: OwnedEntry) -> list[Effect]:
        """Marks a reference that was named before its creation as refused, because it will never be created.

        Returns `ForkRefused` to the holders of forks that wait for it, and `RefuseHandle` for all uses at this worker.
        """
        noted = [(fork, holder) for fork, holder in owned.forks.items() if fork.creator != self.me]
        for fork, _ in noted:
            del owned.forks[fork]
        owned.refused = True
        effects: list[Effect] = [SendMessage(holder, ForkRefused(reference, fork)) for fork, holder in noted]
        return [*effects, RefuseHandle(reference, None)]

    # Handles are made, passed, received and dropped here

    def create_value(self, reference: RRefId) -> list[Effect]:
        """Creates a reference to a value of this worker, and counts one handle of this worker.

        Args:
            reference: The id, from `new_reference`.

        Returns:
            Nearly always an empty list. If other workers have used the number of the reference with another token
            before: `ForkRefused` to the holders of such forks, `RefuseHandle`, and perhaps `ReleaseValue`.

        Raises:
            ProtocolError: This worker is not both owner and creator of the reference, or the reference was created
                before. Nothing is changed.
        """
        if not reference.owner == reference.creator == self.me:
            raise ProtocolError(f"{reference} is not ours to make")
        if not self._is_new(reference):
            raise ProtocolError(f"{reference} was made before")
        self.workers[self.me].add(reference.number)
        owned = self.owned[reference] = OwnedEntry(created=True)
        owned.handles = 1
        return self._refuse_other_tokens(reference) if self.noted else []

    def add_own_handle(self, reference: RRefId) -> None:
        """Counts another handle of this worker for a reference that it owns.

        Raises:
            KeyError: This worker does not own such a reference, or it was released.
        """
        self.owned[reference].handles += 1

    def confirm_created(self, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Confirms a fork of `create_remote`, because the owner has received the `CreateRequest`.

        Args:
            reference: The reference that `create_remote` returned.
            fork: The fork that `create_remote` returned.

        Returns:
            `ConfirmHandle` if the program still has the handle. If it has dropped the handle: `UserDeleted` to the
            owner. But an empty list while there is a fork made from this one that the owner does not count yet.

        Raises:
            ProtocolError: This worker has not asked to create this reference with this fork, or the fork was confirmed
                before. Nothing is changed.
        """
        held = self.held.get(fork)
        if held is None or held.state is not REQUESTED or held.reference != reference:
            raise ProtocolError(f"{reference} was delivered, which {fork} did not ask for")
        if not reference[1] == self.me == fork[0] or held.parent is not None:
            raise ProtocolError(f"{reference} was not asked for by {fork}")
        held.state = CONFIRMED
        return self._delete_if_done(fork, held) if held.dropped else [new_tuple(ConfirmHandle, (reference, fork))]

    def pass_handle(self, reference: RRefId, parent: ForkId | None, child: ForkId, to: Worker) -> list[Effect]:
        """Notes that a handle of this worker is put into a message to another worker.

        Args:
            reference: The reference of the handle.
            parent: The fork of the handle; None for a handle of the owner itself.
            child: A new id (`new_fork`) for the fork that the receiver will hold.
            to: The receiver. If it is not in the group, nothing is noted.

        Returns:
            An empty list.

        Raises:
            ProtocolError: This worker does not have the handle or has dropped it, or `child` was made by another worker
                or passed before. Nothing is changed.
        """
        if child[0] != self.me:
            raise ProtocolError(f"{child} is not ours to make")
        held = self._passable(reference, parent)
        owned = self.owned.get(reference)
        if child in self.parents or (owned is not None and child in owned.forks):
            raise ProtocolError(f"{child} was passed before")
        if to not in self.workers:
            return []  # it never arrives, and nobody will hold it
        if reference[0] == self.me:  # counted at once, even if it comes from a fork that we hold of our own value
            (self.owned.get(reference) or self._note(reference, self.me)).forks[child] = to
        elif held is not None and parent is not None:
            held.children[child] = to
            self.parents[child] = parent
        return []

    def cancel_pass(self, reference: RRefId, parent: ForkId | None, child: ForkId) -> None:
        """Undoes `pass_handle`, because the message was not sent. The arguments are those of `pass_handle`.

        The handle must still exist. Does nothing if `pass_handle` has not noted the child.

        Raises:
            KeyError: This worker is the owner, and the reference was released.
        """
        if reference.owner == self.me:
            self.owned[reference].forks.pop(child, None)
        elif parent is not None and child in self.parents:
            self._settle_child(self.held[parent], child)

    def _passable(self, reference: RRefId, parent: ForkId | None) -> UserFork | None:
        """Returns the fork of a handle that is to be passed; None for a handle of the owner itself (`parent` is None).

        Raises `ProtocolError` if this worker does not have the handle, or has dropped it.
        """
        if parent is None:
            owned = self.owned.get(reference)
            if owned is None or not owned.handles:
                raise ProtocolError(f"this worker has no handle of its own of {reference} to pass")
            return None
        held = self.held.get(parent)
        if held is None or held.dropped or held.reference != reference:
            raise ProtocolError(f"this worker does not hold {parent} of {reference}, and cannot pass it")
        return held

    def receive_handle(self, carried: Carried, sender: Worker) -> list[Effect]:
        """Adds a handle that has arrived in a message.

        Args:
            carried: The reference, and the fork that the sender made for this worker.
            sender: The worker that sent the message.

        Returns:
            If this worker owns the reference: first `RefuseHandle`, if the reference has no value and never will have
            one; then `ChildAccepted` to the sender, if the sender is another worker of the group. If the owner is not
            in the group any more: `OrphanHandle`. If the sender owns the reference: `ConfirmHandle`. Otherwise, if the
            sender is gone: `ForkRequest` to the owner. In all other cases an empty list: the owner is not asked yet to
            count the fork.

        Raises:
            ProtocolError: The sender did not make that fork, or this worker holds it already. Nothing is changed.
        """
        reference, fork = carried
        owner = reference[0]
        if sender != fork[0]:
            raise ProtocolError(f"{fork} came from worker {sender}, who cannot have made it")
        if fork in self.held:
            raise ProtocolError(f"{fork} is held already")
        if owner == self.me:
            return self._own_handle_received(reference, fork, sender)
        if owner not in self.workers:
            return [OrphanHandle(reference, fork)]
        if sender == owner:
            self.held[fork] = UserFork(reference, CONFIRMED, None)
            return [ConfirmHandle(reference, fork)]
        parent = sender if sender in self.workers else None  # who keeps it for us
        self.held[fork] = self.unreported[fork] = held = UserFork(reference, UNREPORTED, parent)
        return self._ask(fork, held) if parent is None else []

    def _own_handle_received(self, reference: RRefId, fork: ForkId, sender: Worker) -> list[Effect]:
        """Adds a handle of a reference that this worker owns. `fork` is the fork that `sender` made for it.

        Returns `RefuseHandle` if the reference has no value and never will have one. Also returns `ChildAccepted` to
        the sender if the sender is another worker of the group. Returns an empty list if neither is so.
        """
        owned = self.owned.get(reference)
        if owned is None:
            owned = self._note(reference, sender)
        owned.handles += 1
        effects: list[Effect] = [RefuseHandle(reference, None)] if owned.refused else []
        if sender == self.me:  # the owner passed it to itself
            owned.forks.pop(fork, None)
            return effects
        return effects + self._tell_parent(sender, reference, fork)

    def report_fork(self, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Asks the owner to count a fork that another worker passed to this one.

        To be called when the program has kept the handle of the fork for a while.

        Args:
            reference: The reference of the fork.
            fork: The fork.

        Returns:
            `ForkRequest` to the owner.

        Raises:
            ProtocolError: This worker does not hold such a fork, the owner was asked before, or the handle was dropped.
                Nothing is changed.
        """
        held = self.unreported.get(fork)
        if held is None or held.dropped or held.reference != reference:
            raise ProtocolError(f"{fork} of {reference} is not an unreported fork of this worker")
        return self._ask(fork, held)

    def _ask(self, fork: ForkId, held: UserFork) -> list[Effect]:
        """Notes that the owner is asked to count a fork, and returns the `ForkRequest` to the owner.

        Raises `KeyError` if the owner was asked before.
        """
        held.state = REQUESTED
        del self.unreported[fork]
        return [SendMessage(held.reference.owner, ForkRequest(held.reference, fork))]

    def drop_handle(self, reference: RRefId, fork: ForkId | None) -> list[Effect]:
        """Processes that the program has dropped a handle.

        Args:
            reference: The reference of the handle.
            fork: The fork of the handle; None for a handle of the owner itself.

        Returns:
            For the last handle of a reference at its owner, if there are no forks: `ReleaseValue`. For a fork that the
            owner has confirmed: `UserDeleted` to the owner. For a fork that the owner was not asked to count:
            `ChildAccepted` to the worker that passed it. An empty list if other handles or forks exist, if the fork was
            passed on and must wait for that, or if the owner has not answered yet. Also an empty list if this worker
            does not hold the fork, for example because it was refused or its owner is lost.

        Raises:
            ProtocolError: The owner has no handle of its own to drop, or the fork was dropped before. Nothing is
                changed.
        """
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

    def receive_message(self, sender: Worker, message: Message) -> list[Effect]:
        """Processes a message of another worker. The caller must make sure that each message is processed only once.

        Args:
            sender: The worker that sent the message.
            message: The message.

        Returns:
            The effects, perhaps none.

        Raises:
            ProtocolError: The sender is not in the group, or may not send this message. Nothing is changed.
        """
        if sender not in self.workers:
            raise ProtocolError(f"a message of worker {sender} came, who is not there")
        return self._message_handlers[type(message)](sender, *message)

    def accept_create(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Creates a reference that this worker owns, because another worker asks for it, and counts that worker's fork.

        Args:
            sender: The worker that asks, which must be in the group.
            reference: The id of the reference.
            fork: The fork of it that the sender holds.

        Returns:
            An empty list, if no worker has used the number of `reference` before. If workers have already asked to
            count forks of `reference`: `ForkAccepted` to each of them. If workers have used its number with another
            token: `ForkRefused` to the holders of such forks, `RefuseHandle`, and perhaps `ReleaseValue`.

        Raises:
            ProtocolError: This worker is not the owner, the sender is not the creator, or the reference was created
                before. Nothing is changed.
            KeyError: The sender is not in the group.
        """
        owner, creator, number, _ = reference
        if owner != self.me:
            raise ProtocolError(f"{reference} is not ours to make")
        if not creator == fork[0] == sender:
            raise ProtocolError(f"{reference} is not worker {sender}'s to ask for")
        owned = self.owned.get(reference)
        if owned is not None and fork in owned.forks:
            raise ProtocolError(f"{fork} is counted already")
        created = self.workers[sender]
        if number == created.mark + 1 and not created.beyond:  # as nearly always, and cheaper than `add`
            created.mark = number
        elif not created.add(number):
            raise ProtocolError(f"{reference} was made before")
        effects = self._refuse_other_tokens(reference) if self.noted else []
        if owned is None:
            owned = self.owned[reference] = OwnedEntry(created=True)
            owned.forks[fork] = sender
            return effects
        owned.created = True
        # Those that we have passed on ourselves were counted then, and did not ask.
        noted = [(other, holder) for other, holder in owned.forks.items() if other.creator != self.me]
        owned.forks[fork] = sender
        return effects + [SendMessage(holder, ForkAccepted(reference, other)) for other, holder in noted]

    def _note(self, reference: RRefId, claimant: Worker) -> OwnedEntry:
        """Adds and returns an entry for a reference that `claimant` has used and that this owner does not know.

        Normally adds the reference to `noted`, where it stays until its creator's request arrives. If the reference
        cannot be created any more, or `claimant` has `MAX_CLAIMS` references in `noted`, marks the entry as refused.
        """
        owned = self.owned[reference] = OwnedEntry(created=False)
        owned.refused = not (self._may_be_created(reference) and self._add_claim(reference, claimant))
        return owned

    def _add_claim(self, reference: RRefId, claimant: Worker) -> bool:
        """Adds a reference to `noted`, the references that were used before their creation.

        `claimant` is the worker that uses the reference. Returns True if the reference was added, or was in `noted`
        before. Returns False, and adds nothing, if `claimant` has `MAX_CLAIMS` references in `noted` already.
        """
        noted = self.noted.get(reference[1:3])
        if noted is not None and reference in noted:
            return True
        count = self.claims.get(claimant, 0)
        if count >= MAX_CLAIMS:
            return False
        self.claims[claimant] = count + 1
        self.noted.setdefault(reference[1:3], {})[reference] = claimant
        return True

    def _forget_claim(self, reference: RRefId) -> None:
        """Removes a reference from `noted`, the references that were named before their creation.

        Does nothing if it is not there.
        """
        noted = self.noted.get(reference[1:3], {})
        if reference in noted:
            self._uncount_claim(noted.pop(reference))
            if not noted:
                del self.noted[reference[1:3]]

    def _forget_claims(self, key: tuple[Worker, int]) -> dict[RRefId, Worker]:
        """Removes some references from `noted`, the references that were named before their creation.

        `key` is the creator and the number of the references to remove. They differ in their tokens. Returns them, each
        with the worker that named it first, or `NO_CLAIMANT`; an empty dictionary if there are none.
        """
        noted = self.noted.pop(key, {})
        for claimant in noted.values():
            self._uncount_claim(claimant)
        return noted

    def _uncount_claim(self, claimant: Worker) -> None:
        """Subtracts one from the number of references that `claimant` has named before their creation.

        The number must be at least 1.
        """
        self.claims[claimant] -= 1
        if not self.claims[claimant]:
            del self.claims[claimant]

    def _disown_claims(self, lost: Worker) -> list[Effect]:
        """Replaces `lost` by `NO_CLAIMANT` in `noted`, the references that were used before their creation.

        The references stay there, because other workers may wait for them as well. But `NO_CLAIMANT` can have only
        `MAX_CLAIMS` references. Those of `lost` beyond this limit are refused. Returns the effects of refusing them,
        from `_refuse_claim`; an empty list if none is refused.
        """
        effects: list[Effect] = []
        named = [each for noted in self.noted.values() for each, claimant in noted.items() if claimant == lost]
        for reference in named:
            self._forget_claim(reference)
            if not self._add_claim(reference, NO_CLAIMANT):
                effects += self._refuse_claim(reference)
        return effects

    def _refuse_other_tokens(self, created: RRefId) -> list[Effect]:
        """Refuses the references that have the creator and number of `created`, but another token.

        Called when `created` is created. Removes them and `created` from `noted`, the references that were used before
        their creation. Returns `ForkRefused` to the holders of forks of the refused references, `RefuseHandle` for each
        of these references, and `ReleaseValue` for each that nothing holds. Returns an empty list if none is refused.
        """
        effects: list[Effect] = []
        for reference in self._forget_claims(created[1:3]):
            if reference != created:
                effects += self._refuse_claim(reference)
        return effects

    def _refuse_claim(self, reference: RRefId) -> list[Effect]:
        """Refuses a reference that was named before its creation and will not be created.

        Returns `ForkRefused` to the holders of its forks, `RefuseHandle`, and `ReleaseValue` if nothing holds the
        reference. The caller has removed the reference from `noted`.
        """
        owned = self.owned.get(reference)
        if owned is None:  # it was only used, and somebody may be waiting for its value
            return [RefuseHandle(reference, None), ReleaseValue(reference)]
        return self._refuse_noted(reference, owned) + self._release_if_unused(reference, owned)

    def _fork_requested(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Counts a fork that the sender holds, because the sender asks for it with `ForkRequest`.

        Returns `ForkAccepted` to the sender if the reference exists. Returns an empty list if the reference is not
        created yet: the answer follows later. Returns `ForkRefused`, and counts nothing, if the reference was released
        or refused, or cannot be created any more, or if the sender has named `MAX_CLAIMS` references that do not exist.
        Raises `ProtocolError` if this worker is not the owner, or has made or counted the fork before.
        """
        if reference.owner != self.me:
            raise ProtocolError(f"{reference} is not ours")
        if fork.creator == self.me:
            raise ProtocolError(f"{fork} was counted when it was passed")
        owned = self.owned.get(reference)
        if owned is not None and fork in owned.forks:
            raise ProtocolError(f"{fork} is counted already")
        if owned is None and self._may_be_created(reference) and self._add_claim(reference, sender):
            owned = self.owned[reference] = OwnedEntry(created=False)
        if owned is None or owned.refused:
            return [SendMessage(sender, ForkRefused(reference, fork))]
        owned.forks[fork] = sender
        return [SendMessage(sender, ForkAccepted(reference, fork))] if owned.created else []

    def _fork_accepted(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Confirms a fork that this worker holds, because its owner counts it now.

        Returns `ConfirmHandle`, and `ChildAccepted` to the worker that passed the fork, unless that worker is gone. If
        the fork was dropped, and need not wait for forks made from it, also returns `UserDeleted` to the owner. Raises
        `ProtocolError` if this worker did not ask the owner to count the fork, or the sender is not the owner.
        """
        held = self._answered(sender, reference, fork)
        held.state = CONFIRMED
        parent, held.parent = held.parent, None
        effects: list[Effect] = [ConfirmHandle(reference, fork)]
        if parent is not None:
            effects += self._tell_parent(parent, reference, fork)
        return effects + self._delete_if_done(fork, held) if held.dropped else effects

    def _fork_refused(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Removes a fork that the owner refuses to count.

        Returns `RefuseHandle`, and `ChildAccepted` to the worker that passed the fork. Raises `ProtocolError` if this
        worker did not ask the owner to count the fork, or the sender is not the owner.
        """
        held = self._answered(sender, reference, fork)
        self._forget(fork, held)
        told = self._tell_parent(held.parent, reference, fork) if held.parent is not None else []
        return [RefuseHandle(reference, fork), *told]

    def _answered(self, sender: Worker, reference: RRefId, fork: ForkId) -> UserFork:
        """Returns the entry of a fork that this worker holds, after an answer of `sender` to its `ForkRequest`.

        Raises `ProtocolError` if this worker has sent no `ForkRequest` for the fork, or has an answer already, or if
        `sender` is not the owner.
        """
        held = self.held.get(fork)
        if held is None or held.state is not REQUESTED or held.reference != reference:
            raise ProtocolError(f"an answer came for {fork} of {reference}, which did not ask")
        if held.parent is None and fork.creator == self.me:
            raise ProtocolError(f"an answer came for {fork} of {reference}, which asked to make it")
        if sender != reference.owner:
            raise ProtocolError(f"worker {sender} answered for {reference}, which it does not own")
        return held

    def _child_accepted(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Processes a message that says that the owner counts `fork`, or that `fork` has ended.

        This worker had made `fork` for the sender, from a fork of its own, the parent. The parent need not wait for
        `fork` any more. Returns `UserDeleted` or `ChildAccepted` for the parent if the parent was dropped and only
        waited for this. Returns an empty list otherwise, also if the parent has ended already. Raises `ProtocolError`
        if this worker did not make `fork`, or made it for another worker.
        """
        if fork.creator != self.me:
            raise ProtocolError(f"{fork} was not made here")
        parent = self.parents.get(fork)
        if parent is None:
            return []  # the parent was refused or orphaned meanwhile, and gave its children up
        held = self.held[parent]
        if held.children[fork] != sender or held.reference != reference:
            raise ProtocolError(f"{fork} of {reference} was not made for worker {sender}")
        self._settle_child(held, fork)
        return self._delete_if_done(parent, held)

    def _user_deleted(self, sender: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Removes a counted fork, because its holder has dropped it.

        Returns `ReleaseValue` if no handle and no fork of the reference is left; else an empty list.

        Raises `ProtocolError` if the sender does not hold the fork.
        """
        owned = self.owned.get(reference)
        if owned is None or owned.forks.get(fork) != sender:
            raise ProtocolError(f"worker {sender} gave up {fork} of {reference}, which it does not hold")
        del owned.forks[fork]
        return self._release_if_unused(reference, owned)

    # What follows

    def _tell_parent(self, parent: Worker, reference: RRefId, fork: ForkId) -> list[Effect]:
        """Returns the effect that sends `ChildAccepted` to `parent`, the worker that has passed the fork on.

        After that message, `parent` need not wait for the fork. Returns an empty list if `parent` is not in the group
        any more.
        """
        told = new_tuple(ChildAccepted, (reference, fork))
        return [new_tuple(SendMessage, (parent, told))] if parent in self.workers else []

    def _delete_if_done(self, fork: ForkId, held: UserFork) -> list[Effect]:
        """Ends a held fork if it was dropped and need not wait for anything.

        A fork must wait for the owner's answer if the owner was asked to count it. It must also wait for each fork made
        from it, until the owner counts that fork or that fork has ended. Returns an empty list, and changes nothing, if
        the fork was not dropped or must wait. Otherwise returns `UserDeleted` to the owner if the owner counts the
        fork. If the owner was never asked, returns `ChildAccepted` to the worker that passed the fork.
        """
        if not held.dropped or held.children or held.state is REQUESTED:
            return []  # G2, and: a delete must not overtake its own request
        self._forget(fork, held)
        if held.parent is not None:  # it is unreported: the parent waits, and the owner knows nothing
            return self._tell_parent(held.parent, held.reference, fork)
        return [new_tuple(SendMessage, (held.reference.owner, new_tuple(UserDeleted, (held.reference, fork))))]

    def _forget(self, fork: ForkId, held: UserFork) -> None:
        """Removes a held fork from all tables.

        Also removes the forks that were made from it from `parents`. That table has the parent of each fork for which
        the parent still waits. Raises `KeyError` if this worker does not hold the fork.
        """
        del self.held[fork]
        if held.state is UNREPORTED:
            del self.unreported[fork]
        for child in held.children:
            del self.parents[child]

    def _settle_child(self, held: UserFork, child: ForkId) -> None:
        """Removes `child` from the forks that its parent `held` waits for. Raises `KeyError` if it is not there."""
        del held.children[child]
        del self.parents[child]

    def _release_if_unused(self, reference: RRefId, owned: OwnedEntry) -> list[Effect]:
        """Removes the entry of an owned reference if it has no handles and no forks.

        Returns `ReleaseValue` if the entry was removed and there is a value or an error to release; else an empty list.
        """
        if owned.handles or owned.forks:
            return []
        del self.owned[reference]
        if not owned.created and not owned.refused:
            return []  # it stays noted: a use may wait for the value, which is still to be created
        return [new_tuple(ReleaseValue, (reference,))]

    def _is_new(self, reference: RRefId) -> bool:
        """Returns whether this owner has no entry for a reference, and the reference was not created before."""
        return reference not in self.owned and self._may_be_created(reference)

    def _may_be_created(self, reference: RRefId) -> bool:
        """Returns whether a reference that this owner has no entry for can still be created.

        Returns False if it was created before, and so was released, or if its creator is not in the group.
        """
        created = self.workers.get(reference.creator)
        return created is not None and reference.number not in created

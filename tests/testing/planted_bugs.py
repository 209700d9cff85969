"""Protocols with one bug each, to know that the checks bite. Each names the rule that it leaves out."""

from __future__ import annotations

from typing import Any, NamedTuple

from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import RRefId, Worker
from farcall.protocol.reference_messages import (
    ConfirmHandle,
    CreateRequest,
    Effect,
    ForkAccepted,
    ForkRequest,
    HandlePassed,
    HandleReceived,
    PeerLost,
    SendMessage,
    UserDeleted,
)
from farcall.protocol.references import Held, Owned, References, Standing

ELSEWHERE: Worker = -1


class G2Dropped(References):
    """A parent's fork is given up while its children are not counted."""

    def _delete_if_done(self, fork: Any, held: Held) -> list[Effect]:
        if not held.dropped or held.standing is not Standing.CONFIRMED:
            return []
        self._forget(fork, held)
        return [SendMessage(held.reference.owner, UserDeleted(held.reference, fork))]


class DeleteBeforeAccept(References):
    """A delete does not wait for the confirmation, and may overtake the request."""

    def _delete_if_done(self, fork: Any, held: Held) -> list[Effect]:
        if not held.dropped or held.children:
            return []
        self._forget(fork, held)
        return [SendMessage(held.reference.owner, UserDeleted(held.reference, fork))]


class NoReaping(References):
    """The owner keeps counting the forks of a lost worker."""

    def _peer_lost(self, event: PeerLost) -> list[Effect]:
        hidden = [
            (owned.forks, fork) for owned in self.owned.values() for fork, w in owned.forks.items() if w == event.worker
        ]
        return _hidden_while(hidden, event.worker, lambda: References._peer_lost(self, event))


class ChildrenOfTheLostKept(References):
    """A parent goes on waiting for a child that went to a lost worker."""

    def _peer_lost(self, event: PeerLost) -> list[Effect]:
        hidden = [
            (held.children, child) for held in self.held.values() for child, w in held.children.items()
            if w == event.worker
        ]  # fmt: skip
        return _hidden_while(hidden, event.worker, lambda: References._peer_lost(self, event))


class OrphansKept(References):
    """The forks of a lost owner are not orphaned."""

    def _peer_lost(self, event: PeerLost) -> list[Effect]:
        kept = {fork: held for fork, held in self.held.items() if held.reference.owner == event.worker}
        parents = dict(self._parents)
        effects = super()._peer_lost(event)
        self.held.update(kept)
        self._parents = parents
        return [effect for effect in effects if getattr(effect, "fork", None) not in kept]


class NotedNotRefused(References):
    """What was noted is forgotten, not refused, when the creator is lost."""

    def _refuse_noted(self, reference: RRefId, owned: Owned) -> list[Effect]:
        owned.forks.clear()
        return []


class NoHighWaterMark(References):
    """A reference that was released is taken for one not yet created."""

    def _may_be_created(self, reference: RRefId) -> bool:
        return reference.creator in self.peers


class HolderNotRecorded(References):
    """A fork is taken to be held by the worker that made it."""

    def _fork_requested(self, sender: Worker, message: ForkRequest) -> list[Effect]:
        effects = super()._fork_requested(sender, message)
        owned = self.owned.get(message.reference)
        if owned is not None and owned.created and message.fork in owned.forks and message.fork.creator in self.peers:
            owned.forks[message.fork] = message.fork.creator
        return effects

    def _user_deleted(self, sender: Worker, message: UserDeleted) -> list[Effect]:
        owned = self.owned[message.reference]
        if message.fork not in owned.forks:
            return []  # be kind, so that only what follows from the bug is found
        owned.forks[message.fork] = sender
        return super()._user_deleted(sender, message)


class OwnersPassNotCounted(References):
    """A handle that the owner passes on is counted by nobody."""

    def _handle_passed(self, event: HandlePassed) -> list[Effect]:
        return [] if event.reference.owner == self.me else super()._handle_passed(event)

    def _user_deleted(self, sender: Worker, message: UserDeleted) -> list[Effect]:
        owned = self.owned.get(message.reference)
        return super()._user_deleted(sender, message) if owned and message.fork in owned.forks else []


class ParentNotTold(References):
    """A child that was accepted does not tell its parent."""

    def _tell_parent(self, parent: Worker, reference: RRefId, fork: Any) -> list[Effect]:
        return []


class AllNotedAccepted(References):
    """On creation the owner confirms also the forks that it has passed on itself, which never asked."""

    def _create_requested(self, sender: Worker, message: CreateRequest) -> list[Effect]:
        super()._create_requested(sender, message)
        forks = self.owned[message.reference].forks
        return [SendMessage(holder, ForkAccepted(message.reference, fork)) for fork, holder in forks.items()]


class OwnForkPassedAsUsers(References):
    """The owner, holding a fork of its own value, passes it on as a user would; its receiver does not ask."""

    def _handle_passed(self, event: HandlePassed) -> list[Effect]:
        reference, parent, child, to = event
        if parent is None or reference.owner != self.me or to == self.me:
            return super()._handle_passed(event)
        self.held[parent].children[child] = to
        self._parents[child] = parent
        return []


class ConfirmedByAnybody(References):
    """A handle is taken for confirmed whoever it came from, as if each sender were the owner."""

    def _handle_received(self, event: HandleReceived) -> list[Effect]:
        reference, fork = event.carried
        effects = super()._handle_received(event)
        if fork in self.held and self.held[fork].standing is Standing.UNCONFIRMED:
            self.held[fork].standing = Standing.CONFIRMED
            effects.append(ConfirmHandle(reference, fork))
        return effects

    def _fork_accepted(self, sender: Worker, message: ForkAccepted) -> list[Effect]:
        held = self.held.get(message.fork)
        if held is not None:
            held.standing = Standing.UNCONFIRMED
            return super()._fork_accepted(sender, message)
        return []


class NoDeduplication(Delivery[Any]):
    """Whatever arrives is taken."""

    def receive(self, peer: Worker, number: int) -> bool:
        super().receive(peer, number)
        return peer in self._links


class AcknowledgedTooEarly(Delivery[Any]):
    """The highest number that came is acknowledged, not the one up to which all came."""

    def acknowledgement(self, peer: Worker) -> int:
        link = self._links.get(peer)
        return max(link.received.beyond, default=link.received.mark) if link is not None else 0


class ForgottenOnceSent(Delivery[Any]):
    """What was sent is not kept until it is acknowledged."""

    def send(self, peer: Worker, message: Any) -> int:
        number = super().send(peer, message)
        self._links[peer].unacknowledged.clear()
        return number


class KeptForTheLost(Delivery[Any]):
    """What a lost worker did not acknowledge is kept for ever."""

    def lost(self, peer: Worker) -> None:
        pass


def _hidden_while(hidden: list[tuple[dict[Any, Worker], Any]], worker: Worker, then: Any) -> list[Effect]:
    """Leaves some entries for a worker as they are while `then` removes the others."""
    for table, key in hidden:
        table[key] = ELSEWHERE
    effects: list[Effect] = then()
    for table, key in hidden:
        if key in table:
            table[key] = worker
    return effects


class Planted(NamedTuple):
    """A bug: its name, and the classes to simulate."""

    name: str
    classes: dict[str, Any]


def _all() -> list[Planted]:
    found = []
    for bug in [
        G2Dropped, DeleteBeforeAccept, NoReaping, ChildrenOfTheLostKept, OrphansKept, NotedNotRefused, NoHighWaterMark,
        HolderNotRecorded, OwnersPassNotCounted, ParentNotTold, AllNotedAccepted, OwnForkPassedAsUsers,
        ConfirmedByAnybody, NoDeduplication, AcknowledgedTooEarly, ForgottenOnceSent, KeptForTheLost,
    ]:  # fmt: skip
        kind = "references" if issubclass(bug, References) else "delivery"
        found.append(Planted(bug.__name__, {kind: bug}))
    return found


PLANTED = _all()

"""Protocols with one bug each, to know that the checks bite. Each names the rule that it leaves out."""

from __future__ import annotations

from typing import Any, NamedTuple

from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import RRefId, Worker
from farcall.protocol.reference_messages import (
    Effect,
    ForkAccepted,
    SendMessage,
    UserDeleted,
)
from farcall.protocol.reference_tables import Held, Owned, Standing
from farcall.protocol.references import References

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

    def peer_lost(self, lost: Worker) -> list[Effect]:
        hidden = [(owned.forks, fork) for owned in self.owned.values() for fork, w in owned.forks.items() if w == lost]
        return _hidden_while(hidden, lost, lambda: References.peer_lost(self, lost))


class ChildrenOfTheLostKept(References):
    """A parent goes on waiting for a child that went to a lost worker."""

    def peer_lost(self, lost: Worker) -> list[Effect]:
        hidden = [
            (held.children, child) for held in self.held.values() for child, w in held.children.items()
            if w == lost
        ]  # fmt: skip
        return _hidden_while(hidden, lost, lambda: References.peer_lost(self, lost))


class OrphansKept(References):
    """The forks of a lost owner are not orphaned."""

    def peer_lost(self, lost: Worker) -> list[Effect]:
        kept = {fork: held for fork, held in self.held.items() if held.reference.owner == lost}
        parents = dict(self.parents)
        effects = super().peer_lost(lost)
        self.held.update(kept)
        self.parents = parents
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
    """A fork is taken to be held by the worker that made it, so it goes with its maker."""

    def peer_lost(self, lost: Worker) -> list[Effect]:
        forks = [
            (owned.forks, fork) for owned in self.owned.values() for fork in owned.forks if fork.creator != self.me
        ]
        holders = [table[fork] for table, fork in forks]
        for table, fork in forks:
            table[fork] = fork.creator
        try:
            return super().peer_lost(lost)
        finally:
            for (table, fork), holder in zip(forks, holders, strict=True):
                if fork in table:
                    table[fork] = holder


class OwnersPassNotCounted(References):
    """A handle that the owner passes on is counted by nobody."""

    def handle_passed(self, reference: RRefId, parent: Any, child: Any, to: Worker) -> list[Effect]:
        effects = super().handle_passed(reference, parent, child, to)
        _uncount(self, reference, child)
        return effects


class ParentNotTold(References):
    """A child that was accepted does not tell its parent."""

    def _tell_parent(self, parent: Worker, reference: RRefId, fork: Any) -> list[Effect]:
        return []


class AllNotedAccepted(References):
    """On creation the owner confirms also the forks that it has passed on itself, which never asked."""

    def create_requested(self, sender: Worker, reference: RRefId, fork: Any) -> list[Effect]:
        super().create_requested(sender, reference, fork)
        forks = self.owned[reference].forks
        return [SendMessage(holder, ForkAccepted(reference, each)) for each, holder in forks.items()]


class OwnForkPassedAsUsers(References):
    """The owner, holding a fork of its own value, passes it on as a user would; its receiver does not ask."""

    def handle_passed(self, reference: RRefId, parent: Any, child: Any, to: Worker) -> list[Effect]:
        effects = super().handle_passed(reference, parent, child, to)
        if parent is not None and to != self.me and _uncount(self, reference, child):
            self.held[parent].children[child] = to
            self.parents[child] = parent
        return effects


class LentNotGivenBack(References):
    """What was lent, and is dropped, is forgotten without a word to the parent."""

    def _delete_if_done(self, fork: Any, held: Held) -> list[Effect]:
        lent = held.standing is Standing.LENT
        effects = super()._delete_if_done(fork, held)
        return [] if lent else effects


class LentGivenBackWithChildren(References):
    """What was lent is given back though it was passed on meanwhile, and nobody keeps the value for the children."""

    def _delete_if_done(self, fork: Any, held: Held) -> list[Effect]:
        if held.standing is Standing.LENT and held.dropped and held.parent is not None:
            self._forget(fork, held)
            return self._tell_parent(held.parent, held.reference, fork)
        return super()._delete_if_done(fork, held)


class LentDeletedAtTheOwner(References):
    """The end of what was lent is told to the owner, who never heard of its beginning."""

    def _delete_if_done(self, fork: Any, held: Held) -> list[Effect]:
        if held.standing is Standing.LENT and held.dropped and not held.children:
            self._forget(fork, held)
            return [SendMessage(held.reference.owner, UserDeleted(held.reference, fork))]
        return super()._delete_if_done(fork, held)


class LentOfTheLostNotAskedFor(References):
    """Who was lent a handle by a worker that is lost goes on as if that kept the value."""

    def peer_lost(self, lost: Worker) -> list[Effect]:
        lent = [(fork, held) for fork, held in self.lent.items() if held.parent == lost != held.reference.owner]
        for _, held in lent:
            held.parent = ELSEWHERE
        try:
            return super().peer_lost(lost)
        finally:
            for _, held in lent:
                held.parent = lost


class PassedBeforeItIsKept(References):
    """The children of what is lent are not waited for."""

    def handle_passed(self, reference: RRefId, parent: Any, child: Any, to: Worker) -> list[Effect]:
        effects = super().handle_passed(reference, parent, child, to)
        if parent in self.lent and child in self.lent[parent].children:
            self._settle_child(self.lent[parent], child)
        return effects


class NoDeduplication(Delivery[Any]):
    """Whatever arrives is taken."""

    def receive(self, peer: Worker, number: int) -> bool:
        super().receive(peer, number)
        return peer in self.links


class AcknowledgedTooEarly(Delivery[Any]):
    """The highest number that came is acknowledged, not the one up to which all came."""

    def acknowledgement(self, peer: Worker) -> int:
        link = self.links.get(peer)
        return max(link.received.beyond, default=link.received.mark) if link is not None else 0


class ForgottenOnceSent(Delivery[Any]):
    """What was sent is not kept until it is acknowledged."""

    def send(self, peer: Worker, message: Any) -> int:
        number = super().send(peer, message)
        self.links[peer].unacknowledged.clear()
        return number


class KeptForTheLost(Delivery[Any]):
    """What a lost worker did not acknowledge is kept for ever."""

    def lost(self, peer: Worker) -> None:
        pass


def _hidden_while(hidden: list[tuple[dict[Any, Worker], Any]], worker: Worker, then: Any) -> list[Effect]:
    """Leaves some entries for a worker as they are while `then` removes the others."""
    for table, key in hidden:
        table[key] = ELSEWHERE
    try:
        effects: list[Effect] = then()
    finally:
        for table, key in hidden:
            if key in table:
                table[key] = worker
    return effects


def _uncount(references: References, reference: RRefId, child: Any) -> bool:
    """Takes back the count of a handle that the owner has passed on; whether there was one."""
    owned = references.owned.get(reference)
    if owned is None or owned.forks.pop(child, None) is None:
        return False
    if not owned.created and not owned.handles and not owned.forks:
        del references.owned[reference]
    return True


class Planted(NamedTuple):
    """A bug: its name, and the classes to simulate."""

    name: str
    classes: dict[str, Any]


def _all() -> list[Planted]:
    found = []
    for bug in [
        G2Dropped, DeleteBeforeAccept, NoReaping, ChildrenOfTheLostKept, OrphansKept, NotedNotRefused, NoHighWaterMark,
        HolderNotRecorded, OwnersPassNotCounted, ParentNotTold, AllNotedAccepted, OwnForkPassedAsUsers,
        LentNotGivenBack, LentGivenBackWithChildren, LentDeletedAtTheOwner, LentOfTheLostNotAskedFor,
        PassedBeforeItIsKept, NoDeduplication, AcknowledgedTooEarly, ForgottenOnceSent, KeptForTheLost,
    ]:  # fmt: skip
        kind = "references" if issubclass(bug, References) else "delivery"
        found.append(Planted(bug.__name__, {kind: bug}))
    return found


PLANTED = _all()

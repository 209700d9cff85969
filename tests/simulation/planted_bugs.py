"""Known mistakes, to know that the checks find them. Each leaves out one rule of the code that runs.

A bug is a piece of the source of a class, written otherwise. The methods of the class are replaced while it is planted,
so every user of the class has the bug: the simulation, the exploration, and subclasses.
"""

from __future__ import annotations
import __future__

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import NamedTuple

from farcall.protocol.delivery import Delivery
from farcall.protocol.refcount import ReferenceCounts
from farcall.runtime.reference_outbox import Outboxes, OutboxSender
from farcall.runtime.reference_store import ReferenceStore


class Bug(NamedTuple):
    """One bug: its name, the class that has it, and the pieces of source with what they become."""

    name: str
    where: type
    changes: tuple[tuple[str, str], ...]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Plants a bug for as long as the context lasts."""
    source = inspect.getsource(bug.where)
    for right, wrong in bug.changes:
        assert source.count(right) == 1, f"{bug.name}: {right!r} is there {source.count(right)} times"
        source = source.replace(right, wrong)
    code = compile(source, f"<{bug.name}>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    made: dict[str, type] = {}
    exec(code, vars(sys.modules[bug.where.__module__]), made)
    before = {name: each for name, each in vars(bug.where).items() if isinstance(each, FunctionType)}
    try:
        for name in before:
            setattr(bug.where, name, vars(made[bug.where.__name__])[name])
        yield
    finally:
        for name, function in before.items():
            setattr(bug.where, name, function)


def _bugs(where: type, /, **pieces: tuple[str, ...]) -> list[Bug]:
    """Returns bugs of a class by name. The pieces of each are: what is there, what it becomes, and so on."""
    return [Bug(name, where, tuple(zip(each[::2], each[1::2], strict=True))) for name, each in pieces.items()]


_DELETE_IF_DONE = "if not held.dropped or held.children or held.state is REQUESTED:"
_TELL_PARENT_OF_END = (
    "        if held.parent is not None:  # it is unreported: the parent waits, and the owner knows nothing\n"
    "            return self._tell_parent(held.parent, held.reference, fork)\n"
)
_REMOVE_HELD_BY_LOST = "for fork in [fork for fork, holder in owned.forks.items() if holder == lost]:"

COUNTING = _bugs(
    ReferenceCounts,
    G2Dropped=(
        _DELETE_IF_DONE,
        "if not held.dropped or held.state is REQUESTED:",
    ),
    DeleteBeforeAccept=(
        _DELETE_IF_DONE,
        "if not held.dropped or held.children:",
        _TELL_PARENT_OF_END,
        "",
    ),
    DeletedThoughNotDropped=(
        _DELETE_IF_DONE,
        "if held.children or held.state is REQUESTED:",
    ),
    DropForgotten=(
        "        held.dropped = True\n",
        "",
    ),
    HeldThoughDeleted=(
        "        del self.held[fork]\n",
        "",
    ),
    ForkKept=(
        "        del owned.forks[fork]\n        return",
        "        return",
    ),
    OwnHandlesForgotten=(
        "if owned.handles or owned.forks:",
        "if owned.forks:",
    ),
    OtherForksForgotten=(
        "if owned.handles or owned.forks:",
        "if owned.handles:",
    ),
    DeliveredAfterDrop=(
        "return self._delete_if_done(fork, held) if held.dropped else [new_tuple(ConfirmHandle, (reference, fork))]",
        "return [new_tuple(ConfirmHandle, (reference, fork))]",
    ),
    AllNotedAccepted=(
        "noted = [(other, holder) for other, holder in owned.forks.items() if other.creator != self.me]\n"
        "        owned.forks[fork] = sender",
        "noted = list(owned.forks.items())\n        owned.forks[fork] = sender",
    ),
    NoHighWaterMark=(
        "return created is not None and reference.number not in created",
        "return created is not None",
    ),
    CreatedOutOfTurn=(
        "if number == created.mark + 1 and not created.beyond:",
        "if True:",
    ),
    OwnersPassNotCounted=(
        "(self.owned.get(reference) or self._note(reference, self.me)).forks[child] = to",
        "pass",
    ),
    ParentNotTold=(
        "return [new_tuple(SendMessage, (parent, told))] if parent in self.workers else []",
        "return []",
    ),
    ParentOfChildKept=(
        "del held.children[child]\n        del self.parents[child]",
        "del held.children[child]",
    ),
    UnreportedNotGivenBack=(
        _TELL_PARENT_OF_END,
        "        if held.parent is not None:\n            return []\n",
    ),
    UnreportedGivenBackWithChildren=(
        _DELETE_IF_DONE,
        "if not held.dropped or (held.children and held.state is not UNREPORTED) or held.state is REQUESTED:",
    ),
    UnreportedDeletedAtTheOwner=(
        _TELL_PARENT_OF_END,
        "",
    ),
    UnreportedOfTheLostNotAskedFor=(
        "            if held.parent == lost:\n",
        "            if held.parent == lost and held.state is not UNREPORTED:\n",
    ),
    ChildrenOfUnreportedForgotten=(
        "elif held is not None and parent is not None:",
        "elif held is not None and parent is not None and held.state is not UNREPORTED:",
    ),
    NoReaping=(
        _REMOVE_HELD_BY_LOST,
        "for fork in ():",
    ),
    HolderNotRecorded=(
        _REMOVE_HELD_BY_LOST,
        "for fork in [each for each, holder in owned.forks.items()\n"
        "                         if (holder if each.creator == self.me else each.creator) == lost]:",
    ),
    ChildrenOfTheLostKept=(
        "for child in [child for child, to in held.children.items() if to == lost]:",
        "for child in ():",
    ),
    OrphansKept=(
        "            if held.reference.owner == lost:\n",
        "            if False:\n",
    ),
    NotedNotRefused=(
        "effects += self._refuse_noted(reference, owned)\n            effects",
        "owned.forks.clear()\n            effects",
    ),
    TokenNotChecked=(
        "return self._message_handlers[type(message)](sender, *message)",
        "found = next((each for each in self.owned if each[:3] == message[0][:3]), message[0])\n"
        "        return self._message_handlers[type(message)](sender, found, message[1])",
        "        reference, fork = carried\n        owner = reference[0]\n",
        "        reference, fork = carried\n"
        "        owner = reference[0]\n"
        "        reference = next((each for each in self.owned if each[:3] == reference[:3]), reference)\n",
    ),
    ClaimsKept=(
        "for reference in self._forget_claims(created[1:3]):",
        "for reference in ():",
    ),
    DeletedByAnybody=(
        "if owned is None or owned.forks.get(fork) != sender:",
        "if owned is None or fork not in owned.forks:",
    ),
    SettledByAnybody=(
        "if held.children[fork] != sender or held.reference != reference:",
        "if held.reference != reference:",
    ),
    AnsweredByAnybody=(
        "        if sender != reference.owner:\n",
        "        if False:\n",
    ),
)
COUNTING += _bugs(
    Delivery,
    NoDeduplication=(
        "return received.add(number)",
        "return received.add(number) or True",
    ),
    OutOfTurn=(
        "if number == received.mark + 1 and not received.beyond:",
        "if number > received.mark:",
    ),
    OutOfTurnWithGaps=(
        "if number == received.mark + 1 and not received.beyond:",
        "if number == received.mark + 1:",
    ),
    AcknowledgedTooEarly=(
        "return link.received.mark if link is not None else 0",
        "return max(link.received.beyond, default=(0, link.received.mark))[1] if link is not None else 0",
    ),
    ForgottenOnceSent=(
        "link.unacknowledged[link.last] = message\n",
        "link.unacknowledged.clear()\n",
    ),
    KeptForTheLost=(
        "self.links.pop(peer, None)",
        "pass",
    ),
)
"""Bugs that the simulation and the exploration must find."""

COUNTING_AT_SELF = _bugs(
    ReferenceCounts,
    OwnForkPassedAsUsers=(
        "if reference[0] == self.me:  # counted",
        "if reference[0] == self.me and (parent is None or to == self.me):  # counted",
    ),
)
"""Bugs in remote calls of a worker to itself, which the exploration must find. The store makes no such calls."""

STORE = _bugs(
    ReferenceStore,
    ValueKept=(
        "self._released.append(self._values.pop(effect.reference, None))",
        "self._released.append(self._values.get(effect.reference))",
    ),
    ValueReleasedWithOwnHandle=(
        "self._own_handles.discard(entry)",
        "self._own_handles.discard(entry), self._values.pop(entry.reference, None)",
    ),
    ValueOfUseReplaced=(
        "value = self._values.get(reference)  # not None if a request for the value came first",
        "value = None",
    ),
    UseNotRefused=(
        "            self._refused += [",
        "            _ = [",
    ),
    HandleNotConfirmed=(
        "handle.confirmed = True",
        "pass",
    ),
    OrphanNotFailed=(
        "self._handles.fail(effect.fork, partial(owner_lost, effect.reference, owner))",
        "pass",
    ),
    DropNotSaid=(
        "self._decide(counts.drop_handle(entry.reference, fork))",
        "counts.drop_handle(entry.reference, fork)",
    ),
    HandleKeptOnDrop=(
        "                self._handles.pop(fork, None)\n                held = ",
        "                held = ",
    ),
    UnreportedNeverReported=(
        "self._decide(self._counts.report_fork(reference, fork))",
        "pass",
    ),
    CallNotMarked=(
        "if not delivery.receive(sender, number):",
        "if sender not in delivery.links or number in delivery.links[sender].received:",
    ),
    ReplyNotConfirmed=(
        "            self._confirm(owner, number)\n        if",
        "            self._outboxes.delivery.taken(owner, number)\n        if",
    ),
    AcknowledgedNotConfirmed=(
        "self._confirm(sender, number)",
        "self._outboxes.delivery.taken(sender, number)",
    ),
    DroppedNotConfirmed=(
        "if isinstance(unacked, UnackedKeep) and unacked.fork in self._counts.held:",
        "if False:",
    ),
    ResentCallNotAcknowledged=(
        "        with self._lock:\n            self._owe_acknowledgement(sender)\n        self.work_soon()\n",
        "        pass\n",
    ),
    GapNotAcknowledged=(
        "if delivery.acknowledgement(sender) > number:",
        "if False:",
    ),
    EndNotScheduled=(
        "        if self._to_end or self._outboxes.unsent:\n            self.work_soon()\n",
        "",
    ),
    AcknowledgementNotOwed=(
        "self._outboxes.owed[sender] = None",
        "pass",
    ),
    NotNumberedInTime=(
        "number = self._outboxes.delivery.send(to, UnackedReferences(carried, via))",
        "number = self._outboxes.delivery.links[to].last + 1",
    ),
    PassedOnLostLink=(
        "if via.is_lost():  # messages may",
        "if False:  # messages may",
    ),
    WorkNotScheduled=(
        "        if is_due or self._released or self._counts.unreported:\n            self.work_soon()\n",
        "",
    ),
    WorkScheduledOnce=(
        "            self._is_scheduled = False\n            self.look_for_work()\n",
        "            self.look_for_work()\n",
    ),
    RefusalNotCounted=(
        "self.refusals.add(sender, error)\n                continue",
        "continue",
    ),
    RefusedForkNotCounted=(
        "self.refusals.add(effect.to, no_such_reference(effect.message.reference))",
        "pass",
    ),
    RefusedHandleNotCounted=(
        "self.refusals.add(sender, no_such_reference(each.reference))",
        "pass",
    ),
    RefusedUseNotCounted=(
        "self.refusals.add(worker if claimant is not None else NOBODY_KNOWN, no_such_reference(reference))",
        "pass",
    ),
    ValueOfWrongToken=(
        "        value = self._values.get(reference)\n"
        "        if value is not None:\n"
        "            return value\n"
        "        worker",
        "        value = next((each for key, each in self._values.items() if key[:3] == reference[:3]), None)\n"
        "        if value is not None:\n"
        "            return value\n"
        "        worker",
    ),
    LostStillTold=(
        "            self._outboxes.remove_worker(worker)\n",
        "            self._outboxes.delivery.lost(worker)\n",
    ),
)
STORE += _bugs(
    Outboxes,
    EndNotPosted=(
        "self.unsent.setdefault(to, []).append((self.delivery.send(to, message), message))",
        "self.delivery.send(to, message)",
    ),
    UnsentDropped=(
        "            messages = []\n        elif",
        "            messages = []\n        elif len(messages) > 1:\n            del messages[1:]\n        elif",
    ),
    AcknowledgementForgotten=(
        "pack_control(self.delivery.acknowledgement(to), messages)",
        "pack_control(0, messages)",
    ),
)
STORE += _bugs(
    OutboxSender,
    CallNotResent=(
        "connection.send(pack_again(unacked.frame, unacked.seconds_left()), list(unacked.buffers))",
        "pass",
    ),
    CallResentToBeAnswered=(
        "pack_again(unacked.frame, unacked.seconds_left())",
        "unacked.frame",
    ),
    ReferencesNotResent=(
        "connection.send(pack_message(REFERENCES, pack_references(number, unacked.carried)))",
        "pass",
    ),
    MessagesNotResent=(
        "                messages.append((number, unacked))\n",
        "                pass\n",
    ),
    AcknowledgementNotResent=(
        "acknowledged = self._source.take_acknowledgement(self._peer.number)",
        "acknowledged = 0",
    ),
    StuckForEver=(
        "                self.is_stuck = False\n",
        "",
    ),
    NotStuck=(
        "        self.is_stuck = True\n",
        "",
    ),
)
STORE += _bugs(
    ReferenceCounts,
    ReleasedBeforeCreation=(
        "if not owned.created and not owned.refused:",
        "if False:",
    ),
)
"""Bugs in what the store and its senders add, or in what only they use. The simulation must find them."""

BUGS = {bug.name: bug for bug in COUNTING + COUNTING_AT_SELF + STORE}
"""All of them, by name."""

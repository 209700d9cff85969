"""What workers tell each other about references, and what happens to references at one worker: the vocabulary.

Messages are what travels. Events are facts about this worker, in the past tense. Effects are what this worker is to do,
as imperatives. `references.py` turns one into the other.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from farcall.protocol.ids import ForkId, RRefId, Worker

# Messages


class CreateRequest(NamedTuple):
    """Creator to owner, with a remote call: make this reference, I hold this fork of it."""

    reference: RRefId
    fork: ForkId


class ForkRequest(NamedTuple):
    """Child to owner: somebody passed me this fork, count me."""

    reference: RRefId
    fork: ForkId


class ForkAccepted(NamedTuple):
    """Owner to holder: your fork is counted."""

    reference: RRefId
    fork: ForkId


class ForkRefused(NamedTuple):
    """Owner to holder: the value is gone, because those died who should have kept it for you."""

    reference: RRefId
    fork: ForkId


class ChildAccepted(NamedTuple):
    """Child to parent: the owner has counted the fork you made for me, or it is no more; do not hold on for it."""

    reference: RRefId
    fork: ForkId


class UserDeleted(NamedTuple):
    """Holder to owner: this fork is no more."""

    reference: RRefId
    fork: ForkId


Message: TypeAlias = CreateRequest | ForkRequest | ForkAccepted | ForkRefused | ChildAccepted | UserDeleted


class Carried(NamedTuple):
    """A handle inside a user's message: the fork that its sender made for its receiver."""

    reference: RRefId
    fork: ForkId


# Events


class PeerJoined(NamedTuple):
    """A worker is there that was not, this one included."""

    worker: Worker


class PeerLost(NamedTuple):
    """A worker is gone for good; it will never be heard of under this number again."""

    worker: Worker


class ValueMade(NamedTuple):
    """A value got a reference at its owner, this worker, which has a handle of it now."""

    reference: RRefId


class RemoteCalled(NamedTuple):
    """This worker asks the owner, another worker or itself, to make a reference, and holds a fork of it."""

    reference: RRefId
    fork: ForkId


class CreateDelivered(NamedTuple):
    """The owner has taken this worker's request to make a reference: its delivery has acknowledged it."""

    reference: RRefId
    fork: ForkId


class HandlePassed(NamedTuple):
    """A handle of this worker went into a message to another. `parent` is its fork, None for the owner's own handle."""

    reference: RRefId
    parent: ForkId | None
    child: ForkId
    to: Worker


class PassingFailed(NamedTuple):
    """The message into which a handle went was certainly never sent."""

    reference: RRefId
    parent: ForkId | None
    child: ForkId


class HandleReceived(NamedTuple):
    """A handle came in a message."""

    carried: Carried
    sender: Worker


class HandleKept(NamedTuple):
    """The program has not dropped a handle that came in a message, and was lent to it, for longer than a moment."""

    reference: RRefId
    fork: ForkId


class HandleDropped(NamedTuple):
    """The program let go of a handle. `fork` is None for the owner's own handle."""

    reference: RRefId
    fork: ForkId | None


class MessageReceived(NamedTuple):
    """A message of the protocol came, for the first time."""

    sender: Worker
    message: Message


Event: TypeAlias = (
    PeerJoined
    | PeerLost
    | ValueMade
    | RemoteCalled
    | CreateDelivered
    | HandlePassed
    | PassingFailed
    | HandleReceived
    | HandleKept
    | HandleDropped
    | MessageReceived
)

# Effects


class SendMessage(NamedTuple):
    """Send this, reliably."""

    to: Worker
    message: Message


class ReleaseValue(NamedTuple):
    """Nobody holds this reference any more: let go of whatever is kept for it, be it a value, an error or nothing yet.

    Of nothing yet, if all that was noted has gone before the creator's request came: the value may still be made.
    """

    reference: RRefId


class ConfirmHandle(NamedTuple):
    """The owner counts this fork of ours."""

    reference: RRefId
    fork: ForkId


class RefuseHandle(NamedTuple):
    """This handle of ours leads nowhere: its use must raise.

    `fork` is None for the owner: all its own handles of the reference, and each fetch by a fork that it passed on, meet
    an error. They are still counted: their drops are to be reported, and `ReleaseValue` comes in the end.
    """

    reference: RRefId
    fork: ForkId | None


class OrphanHandle(NamedTuple):
    """The owner of this fork of ours is lost, and the value with it: its use must raise."""

    reference: RRefId
    fork: ForkId


Effect: TypeAlias = SendMessage | ReleaseValue | ConfirmHandle | RefuseHandle | OrphanHandle

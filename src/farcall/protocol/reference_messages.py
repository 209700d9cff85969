"""The messages and effects of distributed reference counting (`refcount`).

A *message* travels from one worker to another. Every message is about one fork of one reference. An *effect* is what a
method of `ReferenceCounts` asks its caller to do: send a message, release a value, or change a handle.

Pure data: named tuples without methods. Two named tuples of different types are equal if their fields are equal.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from farcall.protocol.ids import ForkId, RRefId, Worker

# Messages


class CreateRequest(NamedTuple):
    """Creator to owner, with a remote call: create this reference. The creator holds this fork of it."""

    reference: RRefId
    fork: ForkId


class ForkRequest(NamedTuple):
    """Holder to owner: count this fork, which another worker passed to the holder."""

    reference: RRefId
    fork: ForkId


class ForkAccepted(NamedTuple):
    """Owner to holder: the owner counts the fork now."""

    reference: RRefId
    fork: ForkId


class ForkRefused(NamedTuple):
    """Owner to holder: the fork is not counted. The value is gone with the workers that kept it for the holder."""

    reference: RRefId
    fork: ForkId


class ChildAccepted(NamedTuple):
    """Holder of a child to holder of its parent: the child is counted or has ended, so the parent need not wait."""

    reference: RRefId
    fork: ForkId


class UserDeleted(NamedTuple):
    """Holder to owner: the holder has dropped the fork, so the owner counts one less."""

    reference: RRefId
    fork: ForkId


class CancelCreate(NamedTuple):
    """Creator to owner: nobody wants the value of this remote call any more. Changes no count.

    The owner stops the function if it still runs, and an error takes the place of the value. The reference lives on:
    every use of it raises that error.
    """

    reference: RRefId
    fork: ForkId


Message: TypeAlias = (
    CreateRequest | ForkRequest | ForkAccepted | ForkRefused | ChildAccepted | UserDeleted | CancelCreate
)


class Carried(NamedTuple):
    """A handle inside a call or a reply: the fork that the sender made for the receiver."""

    reference: RRefId
    fork: ForkId


# Effects


class SendMessage(NamedTuple):
    """Send the message. It must arrive once, unless one of the two workers is lost."""

    to: Worker
    message: Message


class ReleaseValue(NamedTuple):
    """Release the value of this reference, or the error in its place: no worker holds the reference any more."""

    reference: RRefId


class ConfirmHandle(NamedTuple):
    """The owner counts this fork, which this worker holds."""

    reference: RRefId
    fork: ForkId


class RefuseHandle(NamedTuple):
    """There is no value behind this handle: using it must raise.

    With a fork: the owner has refused that fork, which this worker holds. Without a fork (None): this worker is the
    owner, and every use of the reference must raise, of its own handles and of the forks that it has passed on. These
    are still counted: their ends must be reported, and `ReleaseValue` follows in the end.
    """

    reference: RRefId
    fork: ForkId | None


class OrphanHandle(NamedTuple):
    """The owner of this fork, which this worker holds, was lost with the value: using the handle must raise."""

    reference: RRefId
    fork: ForkId


Effect: TypeAlias = SendMessage | ReleaseValue | ConfirmHandle | RefuseHandle | OrphanHandle

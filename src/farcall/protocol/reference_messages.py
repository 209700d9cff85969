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
    """Creator to owner, with a call made by `remote`: create this reference. The creator holds this fork of it."""

    reference: RRefId
    fork: ForkId


class ForkRequest(NamedTuple):
    """Holder to owner: count this fork of the reference. The holder got the fork from another worker."""

    reference: RRefId
    fork: ForkId


class ForkAccepted(NamedTuple):
    """Owner to holder: the owner counts this fork of the reference now. The answer to `ForkRequest`."""

    reference: RRefId
    fork: ForkId


class ForkRefused(NamedTuple):
    """Owner to holder: this fork of the reference is not counted, because there is no value.

    It answers a `ForkRequest`. From then on, every use of the holder's handle raises.
    """

    reference: RRefId
    fork: ForkId


class ChildAccepted(NamedTuple):
    """Holder to the worker that passed it this fork of the reference: the owner counts the fork now.

    The message is also sent if the fork has ended without being counted. Until the message comes, the worker that
    passed the fork keeps its own fork, so that the value lives.
    """

    reference: RRefId
    fork: ForkId


class UserDeleted(NamedTuple):
    """Holder to owner: the holder has dropped this fork of the reference, so the owner counts one less."""

    reference: RRefId
    fork: ForkId


class CancelCreate(NamedTuple):
    """Creator to owner: nobody wants the value of a call made by `remote` any more. Changes no count.

    `reference` is that of the value, and `fork` the fork of it that the creator holds. The owner stops the function if
    it still runs, and an error takes the place of the value. The reference lives on: every use of it raises that error.
    """

    reference: RRefId
    fork: ForkId


Message: TypeAlias = (
    CreateRequest | ForkRequest | ForkAccepted | ForkRefused | ChildAccepted | UserDeleted | CancelCreate
)


class Carried(NamedTuple):
    """A handle inside a call or a reply: the reference, and the fork that the sender made for the receiver."""

    reference: RRefId
    fork: ForkId


# Effects


class SendMessage(NamedTuple):
    """Tells the reference store of this worker to send `message` to the worker `to`.

    The message must be processed there exactly once, unless the sender or the receiver is lost.
    """

    to: Worker
    message: Message


class ReleaseValue(NamedTuple):
    """Tells the reference store of this worker, the owner, to release the value of `reference`.

    No worker holds the reference any more. If an error took the place of the value, the error is released.
    """

    reference: RRefId


class ConfirmHandle(NamedTuple):
    """Tells the reference store of this worker that the owner counts `fork`, which this worker holds."""

    reference: RRefId
    fork: ForkId


class RefuseHandle(NamedTuple):
    """Tells the reference store of this worker that `reference` has no value, so that every use of it must raise.

    If `fork` is not None, this worker holds that fork, and the owner has refused it.

    If `fork` is None, this worker is the owner. Uses by other workers must raise too. The owner still counts its own
    handles and the forks that it has passed on. `ReleaseValue` follows when all of them have ended.
    """

    reference: RRefId
    fork: ForkId | None


class OrphanHandle(NamedTuple):
    """Tells the reference store of this worker to make every use of a handle raise: the owner is gone.

    The value has gone with the owner. The handle is that of `fork`, which this worker holds.
    """

    reference: RRefId
    fork: ForkId


Effect: TypeAlias = SendMessage | ReleaseValue | ConfirmHandle | RefuseHandle | OrphanHandle

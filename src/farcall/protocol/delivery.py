"""Numbers control messages so that each is processed exactly once, as long as both workers live.

The reference protocol relies on it: a late duplicate of a fork request would leak a reference, and so would a lost
`UserDeleted`. The messages to a peer are numbered from 1. The receiver processes each number once, and acknowledges the
highest number up to which it has all. The sender keeps unacknowledged messages, and sends them again after a reconnect
(or, where the network loses messages, after a while). Messages may be processed out of order: the protocols above allow
it.

Pure: nothing is sent here, and no clock is read.

Invariants
- D1: a message is processed at most once, however often it arrives.
- D2: a message is kept until it is acknowledged or its receiver is lost.
- D3: nothing is kept for a peer that is lost.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from farcall.errors import ProtocolError
from farcall.protocol.ids import Worker
from farcall.protocol.watermark import Watermark

M = TypeVar("M")


class Link(Generic[M]):
    """The messages to and from one peer. Used by `Delivery`, and directly where a method call would be too slow."""

    __slots__ = ("last", "received", "unacknowledged")

    def __init__(self) -> None:
        self.last = 0
        """The number of the last message to the peer; 0 before the first."""
        self.unacknowledged: dict[int, M] = {}
        """The messages that the peer has not acknowledged, by number, in ascending order."""
        self.received = Watermark()
        """The numbers of the messages that were received from the peer."""

    def kept_upto(self, upto: int) -> list[int]:
        """Returns the numbers of the kept messages up to the number `upto`, ascending; an empty list if none."""
        numbers = []
        for number in self.unacknowledged:  # in the order of their numbers
            if number > upto:
                break
            numbers.append(number)
        return numbers


class Delivery(Generic[M]):
    """The numbered messages between this worker and its peers, kept until they are acknowledged."""

    def __init__(self) -> None:
        self.links: dict[Worker, Link[M]] = {}
        """The links to the peers that have joined and are not lost."""

    def joined(self, peer: Worker) -> None:
        """Adds a peer. Must be called once for each peer, and not again after a reconnect.

        Raises:
            ProtocolError: The peer was added before.
        """
        if peer in self.links:
            raise ProtocolError(f"worker {peer} is there already, and its messages are counted")
        self.links[peer] = Link()

    def lost(self, peer: Worker) -> None:
        """Removes a peer that is gone for good, with its messages. Does nothing if there is no such peer."""
        self.links.pop(peer, None)

    def next_number(self, peer: Worker) -> int:
        """Returns the number of the next message to the peer. Raises `KeyError` if the peer is lost or unknown."""
        return self.links[peer].last + 1

    def send(self, peer: Worker, message: M) -> int:
        """Keeps a message, and returns the number to send it with. Raises `KeyError` if the peer is lost or unknown."""
        link = self.links[peer]
        link.last += 1
        link.unacknowledged[link.last] = message
        return link.last

    def receive(self, peer: Worker, number: int) -> bool:
        """Marks a message as received. Returns whether to process it.

        Returns False if it was received before, the number is below 1, or the sender is lost or unknown.
        """
        link = self.links.get(peer)
        if link is None:
            return False
        received = link.received
        if number == received.mark + 1 and not received.beyond:  # the rule, without a frame
            received.mark = number
            return True
        return received.add(number)

    def acknowledgement(self, peer: Worker) -> int:
        """Returns the number up to which all messages of the peer were received; 0 if none, or if the peer is lost."""
        link = self.links.get(peer)
        return link.received.mark if link is not None else 0

    def acknowledged(self, peer: Worker, upto: int) -> list[M]:
        """Processes the acknowledgement of all messages up to the number `upto`, which are not kept any longer.

        Returns the messages that were unacknowledged before, in the order of their numbers; an empty list if there are
        none, or if the peer is lost.

        Raises:
            ProtocolError: No message with that number was sent. Nothing is changed.
        """
        return [self.links[peer].unacknowledged.pop(number) for number in self.kept_upto(peer, upto)]

    def kept_upto(self, peer: Worker, upto: int) -> list[int]:
        """Returns the numbers of the messages that an acknowledgement is about. They are still kept.

        Returns an empty list if there are none, or if the peer is lost. Raises what `acknowledged` raises.
        """
        link = self.links.get(peer)
        if link is None:
            return []
        if upto > link.last:
            raise ProtocolError(f"worker {peer} acknowledged message {upto}; the last one sent is {link.last}")
        return link.kept_upto(upto)

    def find(self, peer: Worker, number: int) -> M | None:
        """Returns the message that `taken` would return. It is still kept."""
        link = self.links.get(peer)
        return link.unacknowledged.get(number) if link is not None else None

    def taken(self, peer: Worker, number: int) -> M | None:
        """Processes the acknowledgement of a single message, and returns that message.

        Returns None if it was acknowledged before or never sent, or if the peer is lost.
        """
        link = self.links.get(peer)
        return link.unacknowledged.pop(number, None) if link is not None else None

    def unacknowledged(self, peer: Worker) -> list[tuple[int, M]]:
        """Returns what to send again after a reconnect, with numbers, ascending; an empty list if the peer is lost."""
        link = self.links.get(peer)
        return list(link.unacknowledged.items()) if link is not None else []

    def awaits(self, peer: Worker) -> bool:
        """Returns whether the peer has messages to acknowledge; False if it is lost."""
        link = self.links.get(peer)
        return link is not None and bool(link.unacknowledged)

    def sent(self) -> int:
        """Returns how many messages were sent to the peers that are not lost, without those that were sent again."""
        return sum(link.last for link in self.links.values())

    def is_quiet(self) -> bool:
        """Returns whether all peers have acknowledged all messages."""
        return not any(link.unacknowledged for link in self.links.values())

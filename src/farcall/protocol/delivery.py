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
    """What `Delivery` knows of one peer: which messages were sent to it, and which have arrived from it.

    This is no connection, and sends nothing. A new object has no messages.
    """

    __slots__ = ("last", "received", "unacknowledged")

    def __init__(self) -> None:
        """Creates the state for a new peer: nothing was sent to it, and nothing has arrived from it."""
        self.last = 0
        """The number of the last message to the peer; 0 before the first."""
        self.unacknowledged: dict[int, M] = {}
        """The messages that the peer has not acknowledged, by their numbers in ascending order."""
        self.received = Watermark()
        """The numbers of the messages that have arrived from the peer."""

    def kept_upto(self, upto: int) -> list[int]:
        """Returns the numbers of the unacknowledged messages up to and including `upto`, ascending; may be empty."""
        numbers = []
        for number in self.unacknowledged:  # in the order of their numbers
            if number > upto:
                break
            numbers.append(number)
        return numbers


class Delivery(Generic[M]):
    """Numbers the messages to each peer, and keeps each message until the peer has acknowledged it.

    Also recognizes messages that arrive a second time. Nothing is sent here. A peer is *lost* after `lost` was called
    for it, and *unknown* before `joined`.
    """

    def __init__(self) -> None:
        """Creates the state of a worker without peers."""
        self.links: dict[Worker, Link[M]] = {}
        """The links to the peers that have joined and are not lost."""

    def joined(self, peer: Worker) -> None:
        """Adds a peer, so that messages to and from it are numbered from 1. Must not be called again after a reconnect.

        Raises:
            ProtocolError: The peer was added before and is not lost.
        """
        if peer in self.links:
            raise ProtocolError(f"worker {peer} is there already, and its messages are counted")
        self.links[peer] = Link()

    def lost(self, peer: Worker) -> None:
        """Removes a peer that is gone for good, and drops all messages to it.

        Does nothing if the peer is unknown or lost already.
        """
        self.links.pop(peer, None)

    def next_number(self, peer: Worker) -> int:
        """Returns the number that `send` will return for the next message to this peer. Changes nothing.

        Raises:
            KeyError: The peer is lost or unknown.
        """
        return self.links[peer].last + 1

    def send(self, peer: Worker, message: M) -> int:
        """Assigns the next number to `message`, and keeps it until `peer` has acknowledged it. Does not send it.

        The caller must send the message together with the number.

        Returns:
            The number of the message: 1 for the first message to this peer, then 2, and so on.

        Raises:
            KeyError: The peer is lost or unknown.
        """
        link = self.links[peer]
        link.last += 1
        link.unacknowledged[link.last] = message
        return link.last

    def receive(self, peer: Worker, number: int) -> bool:
        """Notes that a message with this number has arrived from a peer.

        Returns:
            Whether to process the message. False if it has arrived before, if `number` is below 1, or if the peer is
            lost or unknown.

        Raises:
            ProtocolError: More than `MAX_RANGES` gaps would be in the numbers that have arrived. No correct peer causes
                that. Nothing is changed.
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
        """Returns the number to acknowledge to a peer: all its messages up to this one have arrived.

        Returns:
            The number; 0 if the first message has not arrived, or if the peer is lost or unknown.
        """
        link = self.links.get(peer)
        return link.received.mark if link is not None else 0

    def acknowledged(self, peer: Worker, upto: int) -> list[M]:
        """Processes a peer's acknowledgement of all messages up to a number. These are not kept any longer.

        Args:
            peer: The peer that acknowledges.
            upto: The number of the last acknowledged message; 0 if none is acknowledged.

        Returns:
            The messages that were acknowledged for the first time, in the order of their numbers. An empty list if
            there are none, or if the peer is lost or unknown.

        Raises:
            ProtocolError: `upto` is higher than the number of the last message sent. Nothing is changed.
        """
        return [self.links[peer].unacknowledged.pop(number) for number in self.kept_upto(peer, upto)]

    def kept_upto(self, peer: Worker, upto: int) -> list[int]:
        """Returns the numbers of the unacknowledged messages to a peer up to and including `upto`. Changes nothing.

        The numbers are ascending. Returns an empty list if there are none, or if the peer is lost or unknown.

        Raises:
            ProtocolError: `upto` is higher than the number of the last message sent.
        """
        link = self.links.get(peer)
        if link is None:
            return []
        if upto > link.last:
            raise ProtocolError(f"worker {peer} acknowledged message {upto}; the last one sent is {link.last}")
        return link.kept_upto(upto)

    def find(self, peer: Worker, number: int) -> M | None:
        """Returns the message to a peer with this number. Changes nothing.

        Returns None if the message was acknowledged or never sent, or if the peer is lost or unknown.
        """
        link = self.links.get(peer)
        return link.unacknowledged.get(number) if link is not None else None

    def taken(self, peer: Worker, number: int) -> M | None:
        """Processes a peer's acknowledgement of one message, which is not kept any longer.

        Returns:
            The message; None if it was acknowledged before or never sent, or if the peer is lost or unknown.
        """
        link = self.links.get(peer)
        return link.unacknowledged.pop(number, None) if link is not None else None

    def unacknowledged(self, peer: Worker) -> list[tuple[int, M]]:
        """Returns the messages that a peer has not acknowledged, to be sent again after a reconnect.

        Returns:
            Pairs of number and message, in ascending order. An empty list if there are none, or if the peer is lost or
            unknown.
        """
        link = self.links.get(peer)
        return list(link.unacknowledged.items()) if link is not None else []

    def awaits(self, peer: Worker) -> bool:
        """Returns whether a peer has not acknowledged all messages to it; False if the peer is lost or unknown."""
        link = self.links.get(peer)
        return link is not None and bool(link.unacknowledged)

    def sent(self) -> int:
        """Returns how many messages `send` has numbered: the sum for all peers that are not lost.

        A message that is sent again keeps its number, so it counts once. Returns 0 if there are no peers.
        """
        return sum(link.last for link in self.links.values())

    def is_quiet(self) -> bool:
        """Returns whether no message to any peer waits for its acknowledgement; True if there are no peers."""
        return not any(link.unacknowledged for link in self.links.values())

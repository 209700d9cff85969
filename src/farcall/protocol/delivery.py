"""Control messages arrive exactly once, as long as both workers live: sequence, acknowledgement, resend, deduplication.

The reference protocol stands on it: a late duplicate of a fork request would leak a reference, a lost delete too. Each
message to a peer has a number, from 1 on. The receiver takes each number once and acknowledges all up to which it has
every one. What is not acknowledged is kept, and sent again after a reconnect (or, where the network loses messages,
after a while). Order is not restored: the protocols above do not need it.

Pure: it sends nothing itself, and knows no time.

Invariants
- D1: a message is taken at most once, however often it arrives.
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
    """What went to one peer, and what came from it. For `Delivery`, and those for whom a frame more would be felt."""

    __slots__ = ("last", "received", "unacknowledged")

    def __init__(self) -> None:
        self.last = 0
        self.unacknowledged: dict[int, M] = {}
        self.received = Watermark()

    def kept_upto(self, upto: int) -> list[int]:
        """The numbers of the messages that are kept, up to that one."""
        numbers = []
        for number in self.unacknowledged:  # in the order of their numbers
            if number > upto:
                break
            numbers.append(number)
        return numbers


class Delivery(Generic[M]):
    """The numbered messages between this worker and its peers."""

    def __init__(self) -> None:
        self.links: dict[Worker, Link[M]] = {}
        """Of the peers that are there."""

    def joined(self, peer: Worker) -> None:
        """A peer is there; once for each, not after each reconnect. Raises `ProtocolError` if it was there."""
        if peer in self.links:
            raise ProtocolError(f"worker {peer} is there already, and its messages are counted")
        self.links[peer] = Link()

    def lost(self, peer: Worker) -> None:
        """A peer is gone for good. Nothing is kept of it."""
        self.links.pop(peer, None)

    def send(self, peer: Worker, message: M) -> int:
        """Keeps the message and gives the number to send it with. Raises `KeyError` for a peer that is lost."""
        link = self.links[peer]
        link.last += 1
        link.unacknowledged[link.last] = message
        return link.last

    def take_back(self, peer: Worker, message: M) -> None:
        """Gives back the number of a message that was the last to get one, and was not sent. Else does nothing."""
        link = self.links[peer]
        if link.unacknowledged.get(link.last) is message:
            del link.unacknowledged[link.last]
            link.last -= 1

    def receive(self, peer: Worker, number: int) -> bool:
        """Whether the message of that number is to be taken: it is new, and its sender is not lost."""
        link = self.links.get(peer)
        if link is None:
            return False
        received = link.received
        if number == received.mark + 1 and not received.beyond:  # the rule, without a frame
            received.mark = number
            return True
        return received.add(number)

    def acknowledgement(self, peer: Worker) -> int:
        """The number up to which all messages of the peer have come; 0 for none, or if it is lost."""
        link = self.links.get(peer)
        return link.received.mark if link is not None else 0

    def acknowledged(self, peer: Worker, upto: int) -> list[M]:
        """The peer has taken all up to that number: they need not be kept. Those of which that was not known.

        Raises `ProtocolError` if it was not sent.
        """
        messages: list[M] = []
        link = self.links.get(peer)
        if link is not None:
            if upto > link.last:
                raise ProtocolError(f"worker {peer} acknowledged message {upto}; the last one sent is {link.last}")
            messages = [link.unacknowledged.pop(number) for number in link.kept_upto(upto)]
        return messages

    def taken(self, peer: Worker, number: int) -> M | None:
        """The peer has taken the message of that number, whatever became of others. None if that was known."""
        link = self.links.get(peer)
        return link.unacknowledged.pop(number, None) if link is not None else None

    def unacknowledged(self, peer: Worker) -> list[tuple[int, M]]:
        """What to send again after a reconnect, in the order in which it was sent first."""
        link = self.links.get(peer)
        return list(link.unacknowledged.items()) if link is not None else []

    def awaits(self, peer: Worker) -> bool:
        """Whether the peer has something to acknowledge still."""
        link = self.links.get(peer)
        return link is not None and bool(link.unacknowledged)

    def sent(self) -> int:
        """How many messages the peers that are there have been sent."""
        return sum(link.last for link in self.links.values())

    def is_quiet(self) -> bool:
        """Whether every peer has acknowledged everything."""
        return not any(link.unacknowledged for link in self.links.values())

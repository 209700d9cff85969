"""What the references of one agent have to say to each peer, and what each peer has still to say.

The book decides what is said; here it lies until it goes out, with a call or in a letter of its own, and the numbered
messages (`protocol.delivery`) until the peer has acknowledged them.

Rules
- The lock is the book's: a message gets its number under the same lock as the decision to send it. The methods take it
  by themselves, unless they say otherwise.
- The book reaches into the tables, as what it does there is part of every remote call, and a method more would be felt.
"""

from __future__ import annotations

import threading
from typing import Final

from farcall.agent.parcels import Letter, Parcel
from farcall.protocol.control import pack_control
from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import Worker
from farcall.protocol.reference_messages import ForkAccepted, ForkRefused, Message

ANSWERS: Final = (ForkAccepted, ForkRefused)
"""What an owner answers to a `ForkRequest`, once each."""


class Mailboxes:
    """One for each peer. The attributes are for the book, under its lock."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.delivery: Delivery[Parcel] = Delivery()
        self.outboxes: dict[Worker, list[tuple[int, Message]]] = {}
        """What has its number and is not sent yet."""
        self.owed: dict[Worker, None] = {}
        """Peers that do not know yet what of theirs has come."""
        self.asked: dict[Worker, int] = {}
        """How many of our forks each owner has still to answer for."""

    # Under the book's lock

    def lost(self, worker: Worker) -> None:
        """A worker is gone for good: nothing is said to it any more, nothing awaited."""
        self.delivery.lost(worker)
        self.outboxes.pop(worker, None)
        self.owed.pop(worker, None)
        self.asked.pop(worker, None)

    def addressees(self) -> list[Worker]:
        """Who is to be told something."""
        return [*self.outboxes, *(worker for worker in self.owed if worker not in self.outboxes)]

    def letter(self, to: Worker) -> bytes | None:
        """All that is to be said to a peer, taken out of its box; None if nothing."""
        messages = self.outboxes.pop(to, None)
        if messages is None:
            if to not in self.owed:
                return None
            messages = []
        self.owed.pop(to, None)
        return pack_control(self.delivery.acknowledgement(to), messages)

    def clear(self) -> Delivery[Parcel]:
        """Empties all; gives what was kept, whose end may be felt by others: to be let go outside the lock."""
        kept, self.delivery = self.delivery, Delivery()
        self.outboxes.clear()
        self.owed.clear()
        self.asked.clear()
        return kept

    # From any thread

    def mail(self, to: Worker) -> bytes | None:
        """As `outbox`, for what is sent along with a call; None also if there is nothing but an acknowledgement."""
        if to not in self.outboxes:
            return None
        with self._lock:
            return self.letter(to)

    def outbox(self, to: Worker) -> Letter | None:
        """The control message for a peer: what it has not been sent yet, and an acknowledgement. None if nothing."""
        with self._lock:
            messages = self.outboxes.get(to, ())
            only_answers = bool(messages) and all(type(message) in ANSWERS for _, message in messages)
            body = self.letter(to)
        return Letter(body, only_answers, not messages) if body is not None else None

    def acknowledgement(self, to: Worker) -> int:
        """Up to which number the messages of a peer have come."""
        with self._lock:
            self.owed.pop(to, None)
            return self.delivery.acknowledgement(to)

    def unacknowledged(self, to: Worker) -> list[tuple[int, Parcel]]:
        """What is to be sent again after a reconnect. What waited in the outbox is among it, and no longer there."""
        with self._lock:
            self.outboxes.pop(to, None)
            return self.delivery.unacknowledged(to)

    def awaits(self, worker: Worker) -> bool:
        """Whether a worker has something to acknowledge or to answer."""
        with self._lock:
            return self.delivery.awaits(worker) or bool(self.asked.get(worker))

    def messages_sent(self) -> int:
        """How many messages about references have been sent so far."""
        with self._lock:
            return self.delivery.sent()

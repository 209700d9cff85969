"""The tables of the references of one agent, and what the protocol's decisions change in them.

Under the book's lock the tables are changed, and what is left to do is noted; without it, that is done (`book.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from farcall.agent.handle import Handles, Made, owner_lost, refused
from farcall.agent.mailboxes import Mailboxes
from farcall.agent.values import Value
from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_messages import (
    ConfirmHandle,
    Effect,
    ForkRequest,
    OrphanHandle,
    ReleaseValue,
    SendMessage,
)
from farcall.protocol.references import References

logger = logging.getLogger("farcall")


class Tables:
    """What a book of references keeps."""

    def __init__(self, me: Worker, work_soon: Callable[[], None], name_of: Callable[[Worker], str]) -> None:
        self.me = me
        self.work_soon = work_soon
        """Has what is noted here done by the serving pool."""
        self._name_of = name_of
        self._lock = threading.RLock()  # so that a finalizer that comes in its midst is refused, not stuck
        self._references = References(me)
        self.mailboxes = Mailboxes(self._lock)
        """What is to be said to each peer."""
        self._values: dict[RRefId, Value] = {}
        self._uncounted: deque[tuple[Worker, RRefId, ForkId]] = deque()  # remote calls that are counted in a moment
        self._handles = Handles()  # until a drop is worked off
        self._origins: dict[RRefId, Made] = {}  # where values of this worker got their reference
        self._refused: list[tuple[RRefId, Value]] = []  # values that never come, to be settled outside the lock
        self._released: list[Value | None] = []  # values that may go, in the serving pool

    def _count_created(self) -> None:
        """Counts the remote calls of which that was put off until they are answered. Under the lock.

        To be called before anything that has to do with what this worker owns.
        """
        uncounted, references = self._uncounted, self._references
        while uncounted:
            sender, reference, fork = uncounted.popleft()
            try:
                effects = references.create_requested(sender, reference, fork)
            except ProtocolError as error:
                logger.warning("worker %r: %s", self._name_of(self.me), error)
                continue
            if effects:
                self._decide(effects)
                self.work_soon()

    def _decide(self, effects: Iterable[Effect]) -> None:
        """Does what must be done under the lock, and notes the rest for `_act`."""
        for effect in effects:
            if isinstance(effect, SendMessage):
                to, message = effect
                if to in self._references.peers:
                    boxes = self.mailboxes
                    outbox = boxes.outboxes.get(to)
                    if outbox is None:
                        outbox = boxes.outboxes[to] = []
                    outbox.append((boxes.delivery.send(to, message), message))
                    if type(message) is ForkRequest:
                        boxes.asked[to] = boxes.asked.get(to, 0) + 1
            elif isinstance(effect, ReleaseValue):
                (reference,) = effect
                self._released.append(self._values.pop(reference, None))
                if self._origins:
                    self._origins.pop(reference, None)
            elif isinstance(effect, ConfirmHandle):
                known = self._handles.get(effect[1])
                if known is not None and (handle := known()) is not None:
                    handle.confirmed = True
            elif isinstance(effect, OrphanHandle):
                self._handles.fail(
                    effect.fork, partial(owner_lost, effect.reference, self._name_of(effect.reference.owner))
                )
            elif effect.fork is not None:
                self._handles.fail(effect.fork, partial(refused, effect.reference))
            else:  # an error stands for the value until all that were promised one have gone
                value = self._values.get(effect.reference)
                if value is None:
                    value = self._values[effect.reference] = Value()
                self._refused.append((effect.reference, value))

    def _act(self) -> None:
        """Does what was decided, by this thread or another. Without the lock, but for a moment."""
        if self.mailboxes.outboxes or self.mailboxes.owed or self._released:
            self.work_soon()
        if self._refused:
            with self._lock:
                without, self._refused = self._refused, []
            for reference, value in without:
                value.refuse(partial(refused, reference))

"""What an agent waits for: the others, at a meeting or before it goes, and what is under way here.

How that is agreed upon is `departure`'s; here are the answers that it asks of an agent (`Leaver`).
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from farcall.agent.book import ReferenceBook
from farcall.agent.calling import Calling
from farcall.agent.calls import ToldCall
from farcall.agent.counting import Counting
from farcall.agent.departure import Occasion, deadline_of, meet, say_farewell, wait_for_everybody, wait_until_idle
from farcall.agent.entrance import Entrance
from farcall.agent.group import Group
from farcall.agent.incoming import Incoming
from farcall.agent.inventory import Inventory
from farcall.agent.outgoing import Outgoing
from farcall.agent.serving import Serving
from farcall.agent.under_way import describe_under_way
from farcall.backends.interface import RpcAgent
from farcall.errors import ExpelledError, UsageError
from farcall.protocol.ids import WorkerInfo

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

logger = logging.getLogger("farcall")


class WaitingAgent(RpcAgent):
    """The part of `Agent` that waits; what it looks at is made there."""

    book: ReferenceBook
    calling: Calling
    group: Group
    left: Inventory | None = None
    """What was left when everybody was about to go, and nobody had gone yet."""
    _connections: dict[Outgoing, object]
    _counting: Counting
    _entrance: Entrance
    _incoming: set[Incoming]
    _lock: threading.Lock
    _lost: list[str]
    _meetings: int
    _rendezvous: Rendezvous
    _serving: Serving

    # Waiting for the others

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """See `RpcAgent`."""
        if self._entrance.is_open:
            wait_until_idle(self, deadline_of(timeout))
        else:
            wait_for_everybody(self, self._rendezvous, deadline_of(timeout), self._next_meeting("join()"))
        if shutdown:
            self.group.is_quiet = True

    def sync(self, timeout: float = 0.0) -> None:
        """See `RpcAgent`."""
        if self._entrance.is_open:
            raise UsageError("in an open group nobody knows for whom to wait: use _barrier(names) for some workers")
        meet(self, self._rendezvous, deadline_of(timeout), self._next_meeting("sync()"))

    def _next_meeting(self, where: str) -> Occasion:
        with self._lock:
            self._meetings += 1
            number = self._meetings
        return Occasion(f"meeting/{number}/", where, f"in {where}", f"gave up in {where}", "this worker goes on")

    # What is under way

    def is_idle(self) -> bool:
        """Nothing runs here for others, and nothing is awaited from others."""
        return (
            not self._serving.is_busy()
            and not any(connection.pending and _has_calls(connection) for connection in list(self._connections))
            and not any(incoming.has_unsent() for incoming in list(self._incoming))
            and self.book.is_quiet()
        )

    def under_way(self) -> str:
        """What keeps this worker from being idle, in words."""
        return describe_under_way(self._serving.thread_idents(), list(self._connections))

    def is_expelled(self) -> bool:
        """See `Leaver`."""
        return isinstance(self.closed, ExpelledError)

    def calls_started(self) -> int:
        """How many calls this worker has made so far, and messages about references: a release may lead to others."""
        now = sum(connection.calls_started for connection in list(self._connections))
        return self._counting.calls_before() + now + self.book.mailboxes.messages_sent()

    # Who is there

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        """See `Leaver`."""
        peers = sorted(self.calling.numbered.values(), key=lambda peer: peer.info.id)
        return [(peer.info, peer.is_lost) for peer in peers]

    def lost(self) -> list[str]:
        """See `Leaver`."""
        return list(self._lost)

    # Before it goes

    def part(self, timeout: float) -> None:
        """Waits until everybody in a fixed group may go, and all know it. Raises `ShutdownError`."""
        deadline = deadline_of(timeout)
        wait_for_everybody(self, self._rendezvous, deadline)
        self.group.is_quiet = True
        self.left = self._report_what_is_left()
        say_farewell(self, self._rendezvous, deadline)

    def wind_up(self, timeout: float) -> None:
        """Makes ready to leave an open group: what is under way here ends, and what is held is handed back.

        Raises `ShutdownError`.
        """
        deadline = deadline_of(timeout)
        wait_until_idle(self, deadline)
        self.book.give_up_handles(f"worker {self.info.name!r} (this one) has left the group")
        wait_until_idle(self, deadline)
        self._report_what_is_left()

    def _report_what_is_left(self) -> Inventory:
        inventory = self.book.inventory()
        left = inventory.between_workers()
        if left.owned or left.held:
            logger.warning("worker %r shuts down with references left: it %s", self.info.name, left)
        return inventory


def _has_calls(connection: Outgoing) -> bool:
    """Whether somebody may wait for an answer, and not only for what is told without being asked."""
    return any(not isinstance(future, ToldCall) for future in list(connection.pending.values()))

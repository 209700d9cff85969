"""What an agent has counted: calls, errors, bytes.

Nothing is counted for its own sake on the path of a call. Connections know how many calls they have numbered, how many
failed, and how many bytes the system has taken and given; a connection that goes leaves its counts here. The rest is
looked up when somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, cast

from farcall.agent.group import Group
from farcall.agent.incoming import Incoming
from farcall.agent.outgoing import Outgoing
from farcall.backends.interface import Metrics, PeerMetrics
from farcall.protocol.ids import Worker

Counts = Counter[str]

_ALL_GONE: Final = -1
"""The key of all workers that have gone for good."""


class Counting:
    """The counts of connections that are gone, for each peer, and the reports about all."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer that ends a connection may come in its midst
        self._gone: dict[Worker, Counts] = {}

    def outgoing_gone(self, connection: Outgoing) -> None:
        """A connection of ours has ended. What is pending on it fails in a moment."""
        counts = _of_outgoing(connection)
        counts["calls_failed"] += counts.pop("calls_pending")
        self._keep(connection.number, counts)

    def incoming_gone(self, peer: Worker, connection: Incoming) -> None:
        """A connection of a peer has ended."""
        self._keep(peer, _of_incoming(connection))

    def peer_gone(self, peer: Worker) -> None:
        """That worker has gone for good: what was counted of it counts only in the sum from now on."""
        with self._lock:
            counts = self._gone.pop(peer, None)
            if counts is not None:
                self._gone.setdefault(_ALL_GONE, Counter()).update(counts)

    def _keep(self, peer: Worker, counts: Counts) -> None:
        counts.pop("bytes_waiting")  # they will never be sent
        with self._lock:
            self._gone.setdefault(peer, Counter()).update(counts)

    def calls_before(self) -> int:
        """How many calls were made on connections that are gone."""
        with self._lock:
            return sum(counts["calls_made"] for counts in self._gone.values())

    def report(
        self,
        outgoing: Iterable[Outgoing],
        group: Group,
        serving: Mapping[str, int],
    ) -> Metrics:
        """All counts, for each of the workers and in sum, with what the serving pool says of itself."""
        ends = group.ends()
        with self._lock:
            counts = {peer: Counter(gone) for peer, gone in self._gone.items()}
        for connection in outgoing:
            counts.setdefault(connection.number, Counter()).update(_of_outgoing(connection))
        for peer, (incoming, post) in ends.items():
            if incoming is not None:
                counts.setdefault(peer, Counter()).update(_of_incoming(incoming))
            counts.setdefault(peer, Counter())["resends"] = post.resends
        total: Counts = Counter()
        for each in counts.values():
            total.update(each)
        peers = {group.name_of(peer): _as_metrics(counts.get(peer, Counter())) for peer in ends}
        for name, seconds in group.silences().items():
            if name in peers:  # else it has joined since the first look
                peers[name]["heartbeat_age"] = seconds
        return cast(Metrics, {**_as_metrics(total), **serving, "peers": peers})


def _of_outgoing(connection: Outgoing) -> Counts:
    return Counter(
        calls_made=connection.calls_started,
        calls_failed=connection.calls_failed,
        calls_pending=len(connection.pending),
        **connection.traffic.counted(),
    )


def _of_incoming(connection: Incoming) -> Counts:
    return Counter(calls_served=connection.calls_served, **connection.traffic.counted())


def _as_metrics(counts: Counts) -> PeerMetrics:
    return cast(PeerMetrics, {name: counts[name] for name in PeerMetrics.__annotations__})

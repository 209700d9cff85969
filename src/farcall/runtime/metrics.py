"""The metrics of a worker: numbers of calls, errors and bytes.

To keep calls fast, no counters are kept for metrics alone. Connections count their calls, and links count their bytes.
When a connection ends, its counts are added here. Everything else is collected when a report is made.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from farcall.backends.interface import Metrics, PeerMetrics
from farcall.protocol.ids import Worker

if TYPE_CHECKING:
    from farcall.runtime.client import ClientConnection
    from farcall.runtime.cluster import Cluster
    from farcall.runtime.server import ServerConnection

Counts: TypeAlias = Counter[str]

_ALL_GONE: Final = -1
"""The key for all workers that have left or were lost."""


class MetricsCounter:
    """Counts calls, bytes and so on for each other worker, by the names of `PeerMetrics`, and makes reports.

    It keeps the numbers of connections that have ended. A connection that has not ended has its own numbers, which
    `report` adds.
    """

    def __init__(self) -> None:
        """Creates a counter in which all numbers are 0."""
        self._lock = threading.RLock()  # a finalizer may end a connection while its thread holds the lock
        self._ended: dict[Worker, Counts] = {}

    def add_client(self, connection: ClientConnection) -> None:
        """Adds the numbers of a connection for our own calls, which has ended. Its pending calls count as failed.

        Call it once for each connection.
        """
        counts = _count_client(connection)
        counts["calls_failed"] += counts.pop("calls_pending")
        self._add(connection.number, counts)

    def add_server(self, connection: ServerConnection) -> None:
        """Adds the numbers of a connection from another worker, which has ended. Call it once for each connection."""
        self._add(connection.number, _count_server(connection))

    def remove_worker(self, worker: Worker) -> None:
        """Removes a worker that has left or was lost. Its numbers still count in the total.

        Does nothing if there are no numbers of this worker.
        """
        with self._lock:
            counts = self._ended.pop(worker, None)
            if counts is not None:
                self._ended.setdefault(_ALL_GONE, Counter()).update(counts)

    def _add(self, worker: Worker, counts: Counts) -> None:
        """Adds the numbers of one connection to those of a worker."""
        counts.pop("bytes_waiting")  # they will never be sent
        with self._lock:
            self._ended.setdefault(worker, Counter()).update(counts)

    def calls_made(self) -> int:
        """Returns the number of calls that were made on connections that have ended.

        Calls made by `remote` do not count.
        """
        with self._lock:
            return sum(counts["calls_made"] for counts in self._ended.values())

    def report(
        self,
        clients: Iterable[ClientConnection],
        cluster: Cluster,
        executor: Mapping[str, int],
        refusals: Mapping[Worker, int],
    ) -> Metrics:
        """Returns the metrics of this worker, for each other worker and in total.

        Args:
            clients: The connections for our own calls that have not ended.
            cluster: The group, which knows the connections from other workers.
            executor: The numbers of the executor, by the names of `Metrics`.
            refusals: How many messages about references were refused, by the worker that sent them.
        """
        connections = cluster.connections_of()
        with self._lock:
            counts = {worker: Counter(ended) for worker, ended in self._ended.items()}
        for client in clients:
            counts.setdefault(client.number, Counter()).update(_count_client(client))
        for worker, (server, sender) in connections.items():
            if server is not None:
                counts.setdefault(worker, Counter()).update(_count_server(server))
            counts.setdefault(worker, Counter())["resends"] = sender.resends
        for worker, times in refusals.items():
            counts.setdefault(worker, Counter())["references_refused"] = times
        total: Counts = Counter()
        for each in counts.values():
            total.update(each)
        peers = {cluster.name_of(worker): _as_metrics(counts.get(worker, Counter())) for worker in connections}
        for name, seconds in cluster.silences().items():
            if name in peers:  # else it has joined since `connections_of` was called
                peers[name]["heartbeat_age"] = seconds
        return cast(Metrics, {**_as_metrics(total), **executor, "peers": peers})


def _count_client(connection: ClientConnection) -> Counts:
    """Returns the current numbers of a connection for our own calls, by the names of `PeerMetrics`."""
    return Counter(
        calls_made=connection.calls_made,
        calls_failed=connection.calls_failed,
        calls_pending=connection.calls_pending(),
        bytes_waiting=connection.link.unsent_bytes(),
        **connection.link.counts()._asdict(),
    )


def _count_server(connection: ServerConnection) -> Counts:
    """Returns the current numbers of a connection from another worker, by the names of `PeerMetrics`."""
    return Counter(
        calls_served=connection.calls_served,
        calls_expired=connection.calls_expired,
        calls_cancelled=connection.calls_cancelled,
        bytes_waiting=connection.link.unsent_bytes(),
        **connection.link.counts()._asdict(),
    )


def _as_metrics(counts: Counts) -> PeerMetrics:
    """Returns all keys of `PeerMetrics`; those that are not in `counts` are 0."""
    return cast(PeerMetrics, {name: counts[name] for name in PeerMetrics.__annotations__})

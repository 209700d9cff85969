"""One embedded store with its clients, for tests."""

from __future__ import annotations

import socket

from farcall.rendezvous.addresses import listen
from farcall.rendezvous.client import Candidate, StoreClient, try_candidate
from farcall.rendezvous.server import StoreServer
from farcall.security import Credentials, Limits

GROUP = "the group"


class Stage:
    """One store and clients of it."""

    def __init__(self, world_size: int = 4, patience: float = 10.0, most: int = 256) -> None:
        self.credentials = Credentials(limits=Limits(most, patience))
        self.server = StoreServer(listen("127.0.0.1", [0]), GROUP, world_size, "host", credentials=self.credentials)
        self.clients: list[StoreClient] = []

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=10)

    def hello(self, rank: int, name: str | None = None, group: str = GROUP) -> socket.socket:
        """A connection that was welcomed. Raises what the greeting raises."""
        candidate = Candidate("127.0.0.1", self.server.port, group)
        return try_candidate(candidate, name or f"worker{rank}", rank, 10, self.credentials)[0]

    def client(self, rank: int, name: str | None = None, grace: float = 5.0) -> StoreClient:
        candidate = Candidate("127.0.0.1", self.server.port, GROUP)
        sock, welcome = try_candidate(candidate, name or f"worker{rank}", rank, 10, self.credentials)
        self.clients.append(StoreClient(sock, welcome, grace=grace))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close(linger=0)


def wait_for_end(sock: socket.socket) -> bytes:
    """All that still comes. Raises `TimeoutError` if the other side does not end it."""
    received = b""
    try:
        while data := sock.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received

"""Stores, threads and ports for the tests of the rendezvous: loopback only, and all of it is closed again."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from rendezvous_stage import Stage


@pytest.fixture
def stages() -> Iterator[Callable[..., Stage]]:
    """Makes stages; they are closed at the end."""
    made: list[Stage] = []

    def make(world_size: int = 4, patience: float = 10.0, most: int = 256) -> Stage:
        made.append(Stage(world_size, patience, most))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def stage(stages: Callable[..., Stage]) -> Stage:
    return stages()


@pytest.fixture
def occupied() -> Iterator[Callable[[int], socket.socket]]:
    """Listens on a port and never answers."""
    sockets: list[socket.socket] = []

    def occupy(port: int = 0) -> socket.socket:
        sockets.append(socket.create_server(("127.0.0.1", port)))
        return sockets[-1]

    yield occupy
    for sock in sockets:
        sock.close()


@pytest.fixture
def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port

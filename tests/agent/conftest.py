"""Groups of workers, and the stages of books, peers, serving pools and lanes, for the tests of the agent."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from book_stage import Books
from lanes_stage import NewPair, count_from_here, pairs
from membership_stage import SLOW_HEART
from peer_stage import World
from serving_stage import Stage

from eventually import eventually
from farcall.agent import serving
from farcall.options import RpcBackendOptions
from farcall.testing import LocalGroup, local
from farcall.transports.unix import UnixTransport
from group_stage import NewGroup, connect_all, local_groups


@pytest.fixture
def new_group() -> Iterator[NewGroup]:
    """Makes groups with these options; they are taken down at the end."""
    with local_groups() as new:
        yield lambda size=2, **options: new(size, RpcBackendOptions(**options))


@pytest.fixture
def new_open_group() -> Iterator[NewGroup]:
    """Makes open groups with these options; they are taken down at the end."""
    with local_groups() as new:

        def new_group(size: int, **options: Any) -> LocalGroup:
            group = new(size, RpcBackendOptions(**{**SLOW_HEART, **options}), is_open=True)
            eventually(lambda: all(len(agent.group.here()) == size for agent in group))
            return group

        yield new_group


@pytest.fixture
def group(new_group: NewGroup) -> LocalGroup:
    """Three workers with the usual options."""
    return new_group(3)


@pytest.fixture
def warm(group: LocalGroup) -> LocalGroup:
    """Three workers, all connected with all."""
    connect_all(group)
    return group


@pytest.fixture
def books() -> Books:
    """The books of three workers that know each other."""
    return Books()


@pytest.fixture
def world() -> Iterator[World]:
    """What a peer is to be found in; closed at the end."""
    world = World()
    yield world
    world.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """For pools of the test's own. What is slow is for the test to say, not for a machine that is busy otherwise."""
    monkeypatch.setattr(serving, "SLOW", 1000.0)
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def unix_transport() -> Iterator[UnixTransport]:
    with TemporaryDirectory(prefix="fc-", dir="/tmp") as root:
        yield UnixTransport([root])


@pytest.fixture
def new_pair(unix_transport: UnixTransport, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewPair]:
    """Two workers in this process, which is its own peer, over Unix sockets."""
    monkeypatch.setattr(local, "MemoryTransport", lambda network: unix_transport)
    with pairs() as new:
        yield new


@pytest.fixture
def memfds_from_here() -> None:
    """`memfds` counts only what the test makes."""
    count_from_here()

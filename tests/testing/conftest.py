"""Groups of faulty agents, and the faults of an agent that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall.testing import Faults, FaultyRpcBackendOptions
from group_stage import NewGroup, local_groups


@pytest.fixture
def new_group() -> Iterator[NewGroup]:
    """Makes groups of faulty agents with these options; they are taken down at the end."""
    with local_groups() as new:
        yield lambda size=3, **options: new(size, FaultyRpcBackendOptions(**options))


@pytest.fixture
def faults() -> Iterator[Faults]:
    """What goes wrong at worker0: nothing, unless the test says so."""
    faults = Faults("worker0", FaultyRpcBackendOptions(), lambda name: None)
    yield faults
    faults.relay.close()

"""Groups of workers and worker processes for the tests of behaviour.

A test gets every group in this process from `make_group`, `make_faulty_group` or `group`. They are connected by Unix
sockets and rings, as most users' workers are; `make test-transports` runs the same tests over the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall import RpcBackendOptions
from farcall.testing import FaultyRpcBackendOptions, LocalGroup
from group_stage import NewGroup, local_groups
from worker_processes import StartWorkers, starting_workers


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """Returns what connects the workers of a group in this process: the option `--transport`."""
    return str(request.config.getoption("--transport"))


@pytest.fixture
def make_group(transport: str) -> Iterator[NewGroup]:
    """Returns a function `make_group(size=2, *, is_open=False, **options)` that makes a group with these options.

    All groups are shut down at the end of the test, not gracefully.
    """
    with local_groups() as new:

        def make(size: int = 2, *, is_open: bool = False, **options: Any) -> LocalGroup:
            return new(size, RpcBackendOptions(**options), is_open=is_open, transport=transport)

        yield make


@pytest.fixture
def make_faulty_group(transport: str) -> Iterator[NewGroup]:
    """Returns a function like `make_group` that makes faulty agents, so that `farcall.testing.faults` works on them."""
    with local_groups() as new:

        def make(size: int = 2, *, is_open: bool = False, **options: Any) -> LocalGroup:
            return new(size, FaultyRpcBackendOptions(**options), is_open=is_open, transport=transport)

        yield make


@pytest.fixture
def group(make_group: NewGroup) -> LocalGroup:
    """Returns a fixed group of three workers with default options."""
    return make_group(3)


@pytest.fixture
def group_of_this_worker(make_group: NewGroup) -> LocalGroup:
    """Returns a group of three. Its worker0 is the worker of this process: `farcall.remote` and the like use it."""
    return make_group(3)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[StartWorkers]:
    """Returns a function that runs a script on several worker processes; see `worker_processes.starting_workers`."""
    with starting_workers(tmp_path) as start:
        yield start

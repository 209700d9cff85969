"""The fixture that runs a script on several real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_processes import StartWorkers, starting_workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[StartWorkers]:
    """Starts a script on several workers; see `worker_processes.starting_workers`."""
    with starting_workers(tmp_path) as start:
        yield start

"""Stores, ports and files for the tests of the rendezvous: loopback only, and all of it is closed again."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from open_stage import OpenStage
from rendezvous_stage import Stage


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs the tests may be a worker of something else."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def stages() -> Iterator[Callable[..., Stage]]:
    """Makes stages; they are closed at the end."""
    with ExitStack() as made:
        yield lambda *args, **kwargs: made.enter_context(closing(Stage(*args, **kwargs)))


@pytest.fixture
def stage(stages: Callable[..., Stage]) -> Stage:
    return stages()


@pytest.fixture
def occupied() -> Iterator[Callable[..., socket.socket]]:
    """Listens on a port and never answers."""
    with ExitStack() as made:
        yield lambda port=0: made.enter_context(socket.create_server(("127.0.0.1", port)))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A place for the file that says where the store is; there is none yet."""
    return str(tmp_path / "location")


@pytest.fixture(params=["tcp", "file"])
def open_stage(request: pytest.FixtureRequest, free_port: int, tmp_path: Path) -> Iterator[OpenStage]:
    """For workers of an open group, with a store of either kind."""
    url = f"tcp://127.0.0.1:{free_port}" if request.param == "tcp" else f"file://{tmp_path}/location"
    made = OpenStage(url)
    yield made
    made.close()
    assert [name for name in os.listdir(tmp_path) if name != "location"] == []  # no drafts

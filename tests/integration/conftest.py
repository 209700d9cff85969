"""The fixture that runs a script on several real workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from worker_processes import LIMIT, StartWorkers, Workers

from ports import free_port


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[StartWorkers]:
    """Starts a script on several workers, in the order of `order`, or on all but those that are left out of it.

    `url` is where they meet: "tcp" (the default), "env", "file", or a whole URL.
    """
    started: list[Workers] = []

    def workers(
        script: str,
        n: int = 2,
        url: str = "tcp",
        transports: Sequence[str] = (),
        order: Sequence[int] | None = None,
        limit: float = LIMIT,
        environment: dict[str, str] | None = None,
    ) -> Workers:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        settings = {"PYTHONFAULTHANDLER": "1"}
        port = free_port()
        if url == "env":
            settings |= {"STAGE_URL": "env://", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        else:
            urls = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{directory}/meeting"}
            settings["STAGE_URL"] = urls.get(url, url)
        if transports:
            settings["STAGE_TRANSPORTS"] = ",".join(transports)
        group = Workers(directory, script, n, settings | (environment or {}), limit)
        started.append(group)
        for rank in order if order is not None else range(n):
            group.start(rank)
        return group

    yield workers
    for group in started:
        group.kill_all()

"""The web service of the examples under load: 200 clients at once, a third of which disconnect.

The work of those that have gone stops, and neither the service nor its worker keeps memory for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ports import free_port

pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
CLIENTS = 200
ROUNDS = 8
WARM_ROUNDS = 3
"""After so many rounds, the memory that a round needs is there."""
WORK_S = 0.05
LEAVE_AFTER_S = 0.3
MAX_GROWTH_BYTES = 8 << 20
"""Of one process in all later rounds together, which have a thousand requests."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


async def ask(port: int, path: str, leave_after: float | None = None) -> Any:
    """Returns the answer of the service; None if this client has left without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await asyncio.wait_for(reader.read(), leave_after)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return json.loads(body)
    except TimeoutError:
        return None
    finally:
        writer.close()


async def one_round(port: int) -> list[Any]:
    """Lets all clients ask at once: every third one for work without end, which it does not wait for."""
    requests = [
        ask(port, "/score?text=hello&seconds=3600", LEAVE_AFTER_S)
        if number % 3 == 0
        else ask(port, f"/score?text=hello&seconds={WORK_S}")
        for number in range(CLIENTS)
    ]
    return await asyncio.gather(*requests)


async def until_at_rest(port: int) -> dict[str, int]:
    """Returns the counts of the worker when none of its calls runs any more."""
    deadline = time.monotonic() + 30
    while True:
        counts: dict[str, int] = await ask(port, "/counts")
        if counts["started"] == counts["finished"] + counts["stopped"]:
            return counts
        assert time.monotonic() < deadline, counts
        await asyncio.sleep(0.05)


def processes(root: int) -> list[int]:
    """Returns the process and its children, whichever thread has started them."""
    children = [file.read_text().split() for file in Path(f"/proc/{root}/task").glob("*/children")]
    return [root, *(int(child) for some in children for child in some)]


def memory(process: int) -> int:
    """Returns how much memory a process has that is its own."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (kibibytes,) = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return kibibytes << 10


async def load(port: int, server: subprocess.Popen[bytes]) -> None:
    while True:
        assert server.poll() is None
        try:
            await ask(port, "/counts")
            break
        except OSError:
            await asyncio.sleep(0.05)
    stayed = CLIENTS - len(range(0, CLIENTS, 3))
    before: dict[int, int] = {}
    for number in range(1, ROUNDS + 1):
        answers = await one_round(port)
        assert sorted(answers, key=str) == [0.5] * stayed + [None] * (CLIENTS - stayed)
        counts = await until_at_rest(port)
        assert counts["finished"] == stayed * number
        assert 0 < counts["stopped"] <= (CLIENTS - stayed) * number
        if number == WARM_ROUNDS:
            before = {process: memory(process) for process in processes(server.pid)}
    growth = {process: memory(process) - at_first for process, at_first in before.items()}
    assert len(growth) >= 2  # the service and its worker
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth


def test_work_of_clients_that_have_gone_stops_and_nothing_is_kept(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", "--port", str(port), "web_service:app"]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--log-level", "warning"], cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "error"}, stderr=log
        )
        try:
            asyncio.run(load(port, server))
        finally:
            server.terminate()
            server.wait(30)
    assert (tmp_path / "log").read_text() == ""

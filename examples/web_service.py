"""A web service whose work stops when the client that asked for it has gone.

    python examples/web_service.py                         # two clients: one waits, one disconnects
    uvicorn --app-dir examples web_service:app             # the service itself

Needs `pip install 'farcall[web]'`. docs/web-services.md explains it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response

import farcall

# What runs on the worker

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def score(text: str, seconds: float) -> float:
    """Computes for so many seconds, and looks again and again whether anybody still wants the result."""
    end = time.monotonic() + seconds
    with _lock:
        _counts["started"] += 1
    while time.monotonic() < end:
        if farcall.cancelled():
            with _lock:
                _counts["stopped"] += 1
            return 0.0
        time.sleep(0.005)
    with _lock:
        _counts["finished"] += 1
    return len(text) / 10


def counts() -> dict[str, int]:
    """Returns how many calls of `score` this worker has started, finished and stopped."""
    with _lock:
        return {name: _counts[name] for name in ("started", "finished", "stopped")}


# The service


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with farcall.engines.local(1, name="scorer"):
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/score")
async def get_score(request: Request, text: str, seconds: float = 0.1) -> float:
    future = farcall.worker("scorer0").options(timeout=60).submit(score, text, seconds)
    async with farcall.asgi.cancel_on_disconnect(request, future):
        return await future


@app.exception_handler(farcall.CallCancelledError)
async def client_has_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; without this handler, the error would be logged


@app.get("/counts")
async def get_counts() -> dict[str, int]:
    return await farcall.worker("scorer0").submit(counts)


# Two clients


async def ask(port: int, path: str, leave_after: float | None = None) -> str:
    """Returns what the service answers; empty if this client leaves after so many seconds without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), leave_after)
        return answer.partition(b"\r\n\r\n")[2].decode()
    except TimeoutError:
        return ""
    finally:
        writer.close()


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    print("a client that waits gets", await ask(port, "/score?text=hello"))
    began = time.monotonic()
    await ask(port, "/score?text=hello&seconds=60", leave_after=0.5)
    while '"stopped":1' not in await ask(port, "/counts"):
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 30
    print("a client has gone, and its work has stopped:", await ask(port, "/counts"))
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())

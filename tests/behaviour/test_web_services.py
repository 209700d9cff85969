"""An endpoint whose client disconnects: the remote work of the request stops, whatever kind of function does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall.asgi import cancel_on_disconnect
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate
from group_stage import echo

fastapi = pytest.importorskip("fastapi")

pytestmark = pytest.mark.timeout(60)

ended: list[str] = []


def poll(name: str) -> None:
    """Runs until nobody wants its result."""
    arrived[name].set()
    eventually(farcall.cancelled)
    ended.append(name)


async def sleep_long(name: str) -> None:
    arrived[name].set()
    try:
        await asyncio.sleep(2 * SOON)
    finally:
        ended.append(name)


def nested(name: str, to: str) -> None:
    farcall.worker(to).call(poll, name)


class Connection:
    """One request to an application, by the ASGI protocol."""

    def __init__(self, app: Callable[..., Awaitable[None]], path: str) -> None:
        self._app = app
        self._path = path
        self._from_client: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_client.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.status = 0
        self.body = b""

    async def run(self) -> None:
        """Returns when the application has answered."""
        path, _, query = self._path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self._app(scope, self._from_client.get, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    def disconnect(self) -> None:
        self._from_client.put_nowait({"type": "http.disconnect"})


def service(group: LocalGroup) -> Any:
    """An application with an endpoint for each kind of remote work."""
    app = fastapi.FastAPI()

    async def endpoint(request: Any, kind: str, name: str) -> Any:
        worker = group.worker("worker1")
        calls: dict[str, Callable[[], farcall.Future[Any]]] = {
            "echo": lambda: worker.submit(echo, name),
            "poll": lambda: worker.submit(poll, name),
            "sleep": lambda: worker.submit(sleep_long, name),
            "nested": lambda: worker.submit(nested, name, "worker2"),
            "reference": lambda: worker.keep(list).submit(_poll_on, name),
        }
        future = calls[kind]()
        async with cancel_on_disconnect(request, future):
            return await future

    endpoint.__annotations__["request"] = fastapi.Request
    app.get("/work")(endpoint)

    @app.exception_handler(farcall.CallCancelledError)
    async def client_has_gone(request: Any, error: Exception) -> Any:
        return fastapi.Response(status_code=499)

    return app


def _poll_on(_: list[Any], name: str) -> None:
    poll(name)


@pytest.mark.parametrize("kind", ["poll", "sleep", "nested", "reference"])
def test_a_client_that_disconnects_stops_its_remote_work(group: LocalGroup, kind: str) -> None:
    async def main() -> int:
        connection = Connection(service(group), f"/work?kind={kind}&name={kind}")
        task = asyncio.create_task(connection.run())
        assert await asyncio.to_thread(arrived[kind].wait, SOON)
        assert not task.done()
        connection.disconnect()
        await asyncio.wait_for(task, SOON)
        return connection.status

    ended.clear()
    new_gate(kind)
    assert asyncio.run(main()) == 499
    eventually(lambda: ended == [kind])


def test_a_client_that_waits_gets_its_answer(group: LocalGroup) -> None:
    async def main() -> tuple[int, bytes]:
        connection = Connection(service(group), "/work?kind=echo&name=tea")
        await asyncio.wait_for(connection.run(), SOON)
        return connection.status, connection.body

    assert asyncio.run(main()) == (200, b'"tea"')

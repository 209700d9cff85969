"""`cancel_on_disconnect`: which messages cancel which calls, and that nothing is left after the block."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import farcall
from farcall import CallCancelledError, Future, Futures, UsageError
from farcall.asgi import cancel_on_disconnect


class Client:
    """A request whose client sends what the test puts into its queue; an exception is raised by `receive`."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[str | Exception] = asyncio.Queue()
        self.readers = 0

    async def receive(self) -> dict[str, Any]:
        self.readers += 1
        try:
            message = await self.sent.get()
        finally:
            self.readers -= 1
        if isinstance(message, Exception):
            raise message
        return {"type": message}


@pytest.mark.parametrize("kind", ["http.disconnect", "websocket.disconnect"])
def test_a_client_that_disconnects_cancels_the_calls_and_those_of_many_workers(kind: str) -> None:
    async def main() -> None:
        client = Client()
        one, done = Future[int](), Future[int]()
        many = Futures({"a": Future[int](), "b": Future[int]()})
        done.set_result(3)
        client.sent.put_nowait(kind)
        async with cancel_on_disconnect(client, done, one, many):
            with pytest.raises(CallCancelledError):
                await one
        assert many["a"].cancelled()
        assert many["b"].cancelled()
        assert done.value() == 3

    asyncio.run(main())


def test_what_a_client_sends_before_it_disconnects_cancels_nothing() -> None:
    async def main() -> None:
        client, call = Client(), Future[int]()
        async with cancel_on_disconnect(client, call):
            for _ in range(3):
                client.sent.put_nowait("http.request")
            while not client.sent.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not call.done()
            assert client.readers == 1
            client.sent.put_nowait("http.disconnect")
            with pytest.raises(CallCancelledError):
                await call

    asyncio.run(main())


@pytest.mark.parametrize("error", [None, KeyError("of the endpoint")])
def test_after_the_block_nobody_receives_and_nothing_is_cancelled(error: Exception | None) -> None:
    async def endpoint(client: Client, call: Future[int]) -> str:
        async with cancel_on_disconnect(client, call):
            await asyncio.sleep(0)
            assert client.readers == 1
            if error is not None:
                raise error
            return "the answer"

    async def main() -> None:
        client, call = Client(), Future[int]()
        if error is None:
            assert await endpoint(client, call) == "the answer"
        else:
            with pytest.raises(KeyError):
                await endpoint(client, call)
        assert client.readers == 0
        client.sent.put_nowait("http.disconnect")
        await asyncio.sleep(0)
        assert not call.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_task_that_is_cancelled_in_the_block_leaves_nothing_behind() -> None:
    async def endpoint(client: Client, call: Future[int]) -> int:
        async with cancel_on_disconnect(client, call):
            return await call

    async def main() -> None:
        client, call = Client(), Future[int]()
        task = asyncio.create_task(endpoint(client, call))
        while not client.readers:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_an_error_of_receive_is_raised_at_the_end_unless_the_block_raises_one() -> None:
    async def endpoint(error: Exception | None) -> None:
        client = Client()
        async with cancel_on_disconnect(client):
            client.sent.put_nowait(OSError("the server is broken"))
            while not client.sent.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            if error is not None:
                raise error

    with pytest.raises(OSError, match="broken"):
        asyncio.run(endpoint(None))
    with pytest.raises(KeyError):
        asyncio.run(endpoint(KeyError("of the endpoint")))


def test_wrong_uses_are_refused() -> None:
    client: Any = Client
    with pytest.raises(UsageError, match="`receive`"):
        cancel_on_disconnect(object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="farcall futures"):
        cancel_on_disconnect(client(), asyncio.sleep)  # type: ignore[arg-type]

    async def twice() -> None:
        block = cancel_on_disconnect(client())
        async with block:
            pass
        with pytest.raises(UsageError, match="entered once"):
            await block.__aenter__()

    asyncio.run(twice())


def test_it_is_found_without_a_further_import() -> None:
    assert farcall.asgi.cancel_on_disconnect is cancel_on_disconnect

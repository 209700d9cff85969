"""Right uses of the typed interface: type checkers must accept all of them, and find these types."""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator
from typing import Any, Protocol, assert_type

import farcall
from farcall import Future, Futures, Group, MapStream, Outcome, RRef, RRefs, Stream, Target, Worker, Workers


def f(a: int, b: str = "") -> float:
    return 0.0


async def g(a: int) -> str:
    return ""


@farcall.functions.async_execution
def later(a: int) -> Future[bytes]:
    return Future()


class Shelf:
    def __init__(self, *items: str, size: int = 3) -> None: ...

    def put(self, item: str) -> int:
        return 1

    async def aput(self, item: str) -> bytes:
        return b""

    @farcall.exposed
    @farcall.idempotent
    def marked(self, n: int) -> set[int]:
        return set()

    @farcall.functions.async_execution
    def answered_later(self, n: int) -> Future[complex]:
        return Future()


async def agen(n: int) -> AsyncIterator[int]:
    yield n


class SupportsPut(Protocol):
    def put(self, item: str, /) -> int: ...


class Sub(Shelf): ...


def helper(s: Shelf, k: int) -> bool:
    return True


w = farcall.worker("w1")
assert_type(w, Worker)
assert_type(w.call(f, 1), float)
assert_type(w.options(timeout=None).call(f, 1, b="x"), float)
assert_type(w.call(g, 1), str)
assert_type(w.call(later, 1), bytes)
assert_type(w.submit(f, 1), Future[float])
assert_type(w.submit(g, 1), Future[str])
assert_type(w.submit(later, 1), Future[bytes])
assert_type(w.keep(g, 1), RRef[str])
assert_type(w.keep(Shelf, "a", size=2), RRef[Shelf])
assert_type(w.call(max, 3, 4), int)
assert_type(w.call(sorted, [3, 1, 2], reverse=True), list[int])
assert_type(w.call(int, "3"), int)
assert_type(w.wait_joined(3), Worker)

r = w.keep(Shelf, "a")
assert_type(r.call(Shelf.put, "x"), int)
assert_type(r.call(Shelf.aput, "x"), bytes)
assert_type(r.call(Shelf.marked, 3), set[int])
assert_type(r.call(Shelf.answered_later, 3), complex)
assert_type(r.call("put", 3), Any)
assert_type(r.submit(Shelf.put, "x"), Future[int])
assert_type(r.keep(Shelf.put, "x"), RRef[int])
assert_type(r.options(timeout=3).call(Shelf.put, "x"), int)
assert_type(r.call(helper, 3), bool)
wide: RRef[SupportsPut] = r
up: RRef[Shelf] = RRef(Sub())
assert_type(wide.call(SupportsPut.put, "x"), int)
n = w.keep(list[int], (3, 1, 2))
n.call(list.append, 4)
assert_type(n.call(len), int)
assert_type(n.to_here(), list[int])


def either(target: Target[Shelf]) -> int:
    return target.call(Shelf.put, "x")


either(r)
either(r.options(timeout=1))

assert_type(farcall.rpc_sync("w1", f, args=(1,)), float)
assert_type(farcall.rpc_sync("w1", g, args=(1,)), str)
assert_type(farcall.rpc_sync(w, later, args=(1,)), bytes)
assert_type(farcall.rpc_async("w1", g, args=(1,)), Future[str])
assert_type(farcall.remote("w1", Shelf, args=("a",)), RRef[Shelf])

ws = farcall.workers("rollout*", others=True)
assert_type(ws, Workers)
assert_type(ws.call(f, 1), dict[str, float])
assert_type(ws.call(g, 1), dict[str, str])
assert_type(ws.call(later, 1), dict[str, bytes])
assert_type(ws.submit(g, 1), Futures[str])
assert_type(ws.submit(f, 1).result(3), dict[str, float])
assert_type(ws.submit(f, 1).first(2), Future[dict[str, float]])
assert_type(ws.submit(f, 1)["w1"], Future[float])
assert_type(ws.keep(Shelf, "a"), RRefs[Shelf])
assert_type(ws.any().call(f, 1), float)
assert_type(ws.any().options(timeout=2).submit(g, 1), Future[str])
assert_type(ws.map(f, [1, 2]), MapStream[int, float])
assert_type(ws.map(g, [1, 2], per_worker=4), MapStream[int, str])
assert_type(ws.map(later, agen(3)), MapStream[int, bytes])
assert_type(list(ws.map(f, range(3))), list[float])
assert_type(ws.options(timeout=None, idempotent=True).wait_joined(3).call(f, 1), dict[str, float])
for each in ws:
    assert_type(each, Worker)
for outcome in ws.map(g, [1, 2]).outcomes():
    assert_type(outcome, Outcome[int, str])
    assert_type(outcome.item, int)
    assert_type(outcome.result(), str)
    assert_type(outcome.error, Exception | None)
rs = ws.keep(Shelf, "a")
assert_type(rs.call(Shelf.put, "x"), dict[str, int])
assert_type(rs.call(Shelf.aput, "x"), dict[str, bytes])
assert_type(rs.submit(Shelf.put, "x"), Futures[int])
assert_type(rs["w1"], RRef[Shelf])
assert_type(rs.map(Shelf.put, ["x"]), MapStream[str, int])
assert_type(rs.any().call(Shelf.put, "x"), int)
assert_type(farcall.Futures({"a": w.submit(f, 1)}).result(), dict[str, float])
done, late = farcall.wait([w.submit(f, 1)], timeout=3, return_when=farcall.FIRST_COMPLETED)
assert_type(done, set[Future[float]])
assert_type(farcall.as_completed([w.submit(f, 1)]), Stream[Future[float]])
assert_type(w.submit(f, 1).as_concurrent(), concurrent.futures.Future[float])
concurrent.futures.wait([w.submit(f, 1).as_concurrent()])
try:
    ws.call(f, 1)
except* farcall.WorkerLostError as some:
    print([error.worker for error in some.exceptions if isinstance(error, farcall.WorkerLostError)])
try:
    ws.call(f, 1)
except farcall.GroupCallError as failed:
    assert_type(failed.errors, dict[str, Exception])
    assert_type(failed.results, dict[str, Any])


async def in_asyncio() -> None:
    assert_type(await w.submit(f, 1), float)
    assert_type(await r, Shelf)
    assert_type(await asyncio.gather(w.submit(f, 1), w.submit(g, 1)), tuple[float, str])
    assert_type(await asyncio.wait_for(w.submit(g, 1), 3), str)
    assert_type(await asyncio.shield(w.submit(g, 1)), str)
    assert_type(await ws.submit(g, 1), dict[str, str])
    assert_type(await ws.submit(g, 1).first(3), dict[str, str])
    async for future in farcall.as_completed([w.submit(f, 1)]):
        assert_type(await future, float)
    async for result in ws.map(g, agen(3)):
        assert_type(result, str)
    async with farcall.Group("w0") as group:
        assert_type(group, Group)
        assert_type(group.worker("w1").call(f, 1), float)


with farcall.Group(url="tcp://10.0.0.1:4000") as joined:
    assert_type(joined.worker().name, str)
    assert_type(joined.workers("w*").call(f, 1), dict[str, float])
with farcall.engines.local(3) as local:
    assert_type(local, Group)
try:
    w.call(f, 1)
except farcall.WorkerLostError as lost:
    assert_type(lost.worker, str | None)

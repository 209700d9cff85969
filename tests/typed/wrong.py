"""Wrong uses of the typed interface: type checkers must report every line that is marked, and no other."""

from right import Shelf, Sub, f, g, later, n, r, rs, w, ws

import farcall
from farcall import RRef

w.call(f, "no")  # E
w.call(f)  # E
w.call(f, 1, c=3)  # E
w.call(g, "no")  # E
w.call(later, "no")  # E
w.submit(f, "no")  # E
w.keep(Shelf, 3)  # E
w.call(f, 1, timeout=3)  # E
x1: int = w.call(g, 1)  # E
x2: float = w.submit(f, 1)  # E
x3: bytes = w.call(f, 1)  # E
r.call(Shelf.put, 3)  # E
r.call(Shelf.aput)  # E
r.call(f, 3)  # E
r.submit(Shelf.put, 3)  # E
r.keep(Shelf.put)  # E
r.options(timeout=3).call(Shelf.put, 3)  # E
n.call(Shelf.put, "x")  # E
down: RRef[Sub] = r  # E
w.options(timeout="3")  # E
w.options(timout=3)  # E
r.options(timeout="3")  # E
farcall.worker(1.0)  # E
farcall.worker(b"w1")  # E
farcall.rpc_sync(1.0, f)  # E
farcall.Group(3)  # E
farcall.engines.local("3")  # E
z1: str = farcall.rpc_sync("w1", f, args=(1,))  # E
z3: bytes = farcall.rpc_sync("w1", g, args=(1,))  # E
ws.call(f, "no")  # E
ws.call(f, 1, timeout=3)  # E
ws.submit(g, "no")  # E
ws.keep(Shelf, 3)  # E
ws.map(f, ["no"])  # E
ws.map(f, [1], per_worker="2")  # E
ws.submit(f, 1).first("2")  # E
ws.options(timeout="3")  # E
ws.options(idempotent="yes")  # E
w.options(idempotent=True)  # E
y1: float = ws.call(f, 1)  # E
y2: dict[str, int] = ws.call(g, 1)  # E
rs.call(Shelf.put, 3)  # E
rs.map(Shelf.put, [3])  # E
rs.any().call(Shelf.put, 3)  # E
rs.call(f, 3)  # E
farcall.workers(3)  # E
farcall.workers(where=3)  # E
farcall.wait([w.submit(f, 1)], return_when="SOON")  # E
farcall.as_completed([3])  # E
farcall.Futures([w.submit(f, 1)])  # E


async def wrong() -> None:
    await w.call(f, 1)  # E
    z2: int = await w.submit(g, 1)  # E
    print(z2)
    async with farcall.engines.local(1) as group:
        group.worker(1.0)  # E


@farcall.functions.async_execution  # E
def not_later(a: int) -> int:
    return a

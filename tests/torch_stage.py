"""Workers for the tests of the torch edge: one in the process of the test, or several that are forked from it.

`one_worker` makes this process a group of one: what it calls on itself goes through a socket all the same. `run_group`
forks a process for each worker; closures of the test may run there, and what they return comes back. Functions that
workers call on each other must have names.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import farcall.pytorch as rpc
from farcall.pytorch import api
from gates import gates, new_gate

LIMIT: Final = 30.0
"""Seconds that a forked group has for everything."""
SOON: Final = 10.0
"""Seconds in which whatever is to happen has happened."""
FORK: Final = multiprocessing.get_context("fork")


class Died:
    """What comes back from a worker that ended without a word."""

    def __repr__(self) -> str:
        return "DIED"


DIED: Final = Died()


def options(directory: Path, **given: Any) -> rpc.TensorPipeRpcBackendOptions:
    """Options of workers that meet in a file of that directory."""
    given = {"rpc_timeout": SOON, "init_timeout": SOON, "num_worker_threads": 4, **given}
    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory / 'store'}", **given)


@contextmanager
def one_worker(directory: Path, name: str = "alone", **given: Any) -> Iterator[str]:
    """This process is a group of one inside; the worker's name. The test may have shut it down itself."""
    rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options(directory, **given))
    try:
        yield name
    finally:
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)


def run_group(
    directory: Path,
    body: Callable[[int], Any],
    count: int = 2,
    *,
    graceful: bool = True,
    init: bool = True,
    **given: Any,
) -> list[Any]:
    """What `body(rank)` returned in each of so many forked workers, `worker0` and so on; `DIED` of one that died.

    The body may shut down by itself; without `init` it does everything itself. Fails with the tracebacks of those that
    raised; and, with what came until then, if it takes too long. Nothing is left running.
    """

    home = tempfile.mkdtemp(prefix="g-")  # of their sockets: who dies leaves its own behind

    def work(rank: int, tell: Any) -> None:
        tempfile.tempdir = home
        try:
            if init:
                rpc.init_rpc(
                    f"worker{rank}", rank=rank, world_size=count, rpc_backend_options=options(directory, **given)
                )
            result = body(rank)
            if init and api._is_current_rpc_agent_set():
                rpc.shutdown(graceful=graceful)
            tell.send((True, result))
        except BaseException:
            tell.send((False, traceback.format_exc()))
        finally:
            tell.close()
            os._exit(0)  # nothing of pytest's is to be done here

    heard: dict[int, Any] = {}
    workers = []
    for rank in range(count):
        hear, tell = FORK.Pipe(duplex=False)
        process = FORK.Process(target=work, args=(rank, tell))
        process.start()
        tell.close()
        workers.append((process, hear))
    deadline = time.monotonic() + LIMIT
    try:
        while len(heard) < count:
            waited = [hear for rank, (_, hear) in enumerate(workers) if rank not in heard]
            left = deadline - time.monotonic()
            assert left > 0, f"the group did not end within {LIMIT:g} s; heard of: {heard}"
            for ready in multiprocessing.connection.wait(waited, left):
                rank = next(rank for rank, (_, hear) in enumerate(workers) if hear is ready)
                try:
                    heard[rank] = workers[rank][1].recv()
                except EOFError:
                    heard[rank] = (True, DIED)
    finally:
        for process, hear in workers:
            if len(heard) < count:
                process.kill()
            process.join()
            process.close()
            hear.close()
        shutil.rmtree(home)
    failures = [f"worker{rank}:\n{heard[rank][1]}" for rank in range(count) if not heard[rank][0]]
    assert not failures, "\n".join(failures)
    return [heard[rank][1] for rank in range(count)]


def die() -> None:
    """Ends the process at once, as a crash does."""
    os._exit(7)


def file_store(directory: Path, name: str = "store", world_size: int = 1) -> Any:
    """A store of torch's in a file of that directory."""
    return dist.FileStore(str(directory / name), world_size)


def echo(value: Any = None) -> Any:
    return value


def add(left: Any, right: Any) -> Any:
    return left + right


def fail(message: str = "no") -> Any:
    raise ValueError(message)


def make_gate(name: str) -> None:
    """On another worker: a gate for `wait_at`."""
    new_gate(name)


def open_gate(name: str) -> None:
    """On another worker: opens that gate."""
    gates[name].set()

"""Workers without descriptors or memory: no call is lost for it, and shared memory is used again when that is over.

Two real processes on one host. `get_metrics` says how many bytes went through shared memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import farcall

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PREAMBLE = """
import json, os, resource, sys, time
import farcall as rpc

RANK = int(sys.argv[1])
SIZE = 1 << 20
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def take_descriptors(leave=0):
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(leave):
        os.close(held.pop())

def give_descriptors_back():
    while held:
        os.close(held.pop())

def size_of(data):
    return len(bytes(data))

def make(size):
    return bytearray(b"x" * size)

def send_one():
    assert rpc.rpc_sync("w1", size_of, args=(bytearray(SIZE),)) == SIZE

def fetch_one():
    assert rpc.rpc_sync("w1", make, args=(SIZE,)) == b"x" * SIZE

def is_shared(call, name):
    before = rpc.get_metrics()[name]
    call()
    return rpc.get_metrics()[name] - before == SIZE

def is_shared_again(call, name):
    deadline = time.monotonic() + 30
    while not is_shared(call, name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

def report(**facts):
    print(json.dumps(facts), flush=True)

def start():
    options = rpc.RpcBackendOptions(init_method=sys.argv[2], init_timeout=30, transports=("unix",))
    rpc.init_rpc(f"w{RANK}", rank=RANK, world_size=2, rpc_backend_options=options)
"""


def run_pair(directory: Path, script: str) -> dict[str, Any]:
    """Runs the script as w0 and w1; what w0 has reported."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(script))
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), str(rank), f"file://{directory}/meeting"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(map("\n".join, said))
    facts: dict[str, Any] = {}
    for line in said[0][0].splitlines():
        facts.update(json.loads(line))
    return facts


def test_large_data_is_shared_again_after_the_sender_was_out_of_descriptors(tmp_path: Path) -> None:
    facts = run_pair(
        tmp_path,
        """
        start()
        if RANK == 0:
            rpc.rpc_sync("w1", int)
            take_descriptors()
            report(without=is_shared(send_one, "bytes_shared_out"))
            give_descriptors_back()
            report(again=is_shared_again(send_one, "bytes_shared_out"))
        rpc.shutdown()
        """,
    )
    assert not facts["without"], "another way meanwhile"
    assert facts["again"]


def test_results_are_shared_again_after_the_callee_was_out_of_descriptors(tmp_path: Path) -> None:
    facts = run_pair(
        tmp_path,
        """
        start()
        if RANK == 0:
            rpc.rpc_sync("w1", take_descriptors)
            report(without=is_shared(fetch_one, "bytes_shared_in"))
            rpc.rpc_sync("w1", give_descriptors_back)
            report(again=is_shared_again(fetch_one, "bytes_shared_in"))
        rpc.shutdown()
        """,
    )
    assert not facts["without"]
    assert facts["again"]


def test_a_connection_made_without_descriptors_gets_shared_memory_later(tmp_path: Path) -> None:
    facts = run_pair(
        tmp_path,
        """
        start()
        if RANK == 0:
            take_descriptors(leave=2)  # for the connection, and for one of w1's; shared memory takes two more
            rpc.rpc_sync("w1", int)
            report(without=is_shared(send_one, "bytes_shared_out"))
            give_descriptors_back()
            report(sends=is_shared_again(send_one, "bytes_shared_out"))
            report(fetches=is_shared_again(fetch_one, "bytes_shared_in"))
        rpc.shutdown()
        """,
    )
    assert not facts["without"]
    assert facts["sends"]
    assert facts["fetches"]


def test_a_connection_to_a_worker_without_descriptors_gets_shared_memory_later(tmp_path: Path) -> None:
    facts = run_pair(
        tmp_path,
        """
        ready = os.path.join(os.path.dirname(__file__), "ready")
        start()
        if RANK == 0:
            while not os.path.exists(ready):
                time.sleep(0.01)
            rpc.rpc_sync("w1", int)
            report(without=is_shared(send_one, "bytes_shared_out"))
            rpc.rpc_sync("w1", give_descriptors_back)
            report(sends=is_shared_again(send_one, "bytes_shared_out"))
            report(fetches=is_shared_again(fetch_one, "bytes_shared_in"))
        else:
            take_descriptors(leave=2)
            os.mkdir(ready)  # which takes no descriptor
        rpc.shutdown()
        """,
    )
    assert not facts["without"]
    assert facts["sends"]
    assert facts["fetches"]


def test_calls_to_a_worker_that_cannot_open_their_memory_arrive(tmp_path: Path) -> None:
    facts = run_pair(
        tmp_path,
        """
        start()
        if RANK == 0:
            rpc.rpc_sync("w1", take_descriptors)
            sizes = [size * 50_000 for size in range(1, 30)]
            futures = [rpc.rpc_async("w1", size_of, args=(bytearray(size),)) for size in sizes]
            report(called=[future.wait() for future in futures] == sizes)
            kept = [rpc.remote("w1", size_of, args=(bytearray(size),)) for size in sizes]
            report(kept=[rref.to_here() for rref in kept] == sizes)
            several = {str(size): bytearray(size) for size in sizes}
            report(several=rpc.rpc_sync("w1", len, args=(several,)))
            report(failed=rpc.get_metrics()["calls_failed"])
            del kept
            rpc.rpc_sync("w1", give_descriptors_back)
            report(again=is_shared_again(send_one, "bytes_shared_out"))
        rpc.shutdown()
        """,
    )
    assert facts == {"called": True, "kept": True, "several": 29, "failed": 0, "again": True}


def test_results_that_the_caller_cannot_open_arrive(tmp_path: Path) -> None:
    facts = run_pair(
        tmp_path,
        """
        start()
        if RANK == 0:
            rpc.rpc_sync("w1", int)
            take_descriptors()
            sizes = [size * 50_000 for size in range(1, 30)]
            futures = [rpc.rpc_async("w1", make, args=(size,)) for size in sizes]
            report(called=[len(future.wait()) for future in futures] == sizes)
            kept = [rpc.remote("w1", make, args=(size,)) for size in sizes]
            report(kept=[len(rref.to_here()) for rref in kept] == sizes)
            report(failed=rpc.get_metrics()["calls_failed"])
            del kept
            give_descriptors_back()
            report(again=is_shared_again(fetch_one, "bytes_shared_in"))
        rpc.shutdown()
        """,
    )
    assert facts == {"called": True, "kept": True, "failed": 0, "again": True}


def test_large_data_is_shared_again_after_the_sender_was_out_of_memory(tmp_path: Path) -> None:
    """Its address space is limited: it has the data, and no room for a copy in shared memory."""
    facts = run_pair(
        tmp_path,
        """
        start()
        if RANK == 0:
            rpc.rpc_sync("w1", int)
            data = bytearray(64 << 20)
            with open("/proc/self/statm") as statm:
                taken = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20), resource.RLIM_INFINITY))
            report(got=rpc.rpc_sync("w1", size_of, args=(data,)), failed=rpc.get_metrics()["calls_failed"])
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            report(again=is_shared_again(send_one, "bytes_shared_out"))
        rpc.shutdown()
        """,
    )
    assert facts == {"got": 64 << 20, "failed": 0, "again": True}


def test_many_small_calls_to_a_worker_without_descriptors_arrive(tmp_path: Path) -> None:
    """Also to one that has none when the connection is made."""
    facts = run_pair(
        tmp_path,
        """
        ready = os.path.join(os.path.dirname(__file__), "ready")
        start()
        if RANK == 0:
            while not os.path.exists(ready):
                time.sleep(0.01)
            report(before=sum(rpc.rpc_sync("w1", abs, args=(number,)) for number in range(1000)))
            rpc.rpc_sync("w1", take_descriptors)
            report(sum=sum(rpc.rpc_sync("w1", abs, args=(number,)) for number in range(1000)))
            report(failed=rpc.get_metrics()["calls_failed"])
            rpc.rpc_sync("w1", give_descriptors_back)
        else:
            take_descriptors(leave=2)
            os.mkdir(ready)  # which takes no descriptor
        rpc.shutdown()
        """,
    )
    assert facts == {"before": sum(range(1000)), "sum": sum(range(1000)), "failed": 0}


RINGS = """
def rings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:farcall-ring" in line for line in maps)

def sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            pass
    return found

def call_back():
    return rpc.rpc_sync("w0", int)

def becomes(wanted, count):
    deadline = time.monotonic() + 40
    while count() != wanted:
        rpc.rpc_sync("w1", call_back)
        if time.monotonic() > deadline:
            return count()
        time.sleep(0.05)
    return wanted
"""


@pytest.mark.long
@pytest.mark.skipif(not farcall.native_available(), reason="there are no rings without the C extension")
@pytest.mark.parametrize("short", [0, 1], ids=["at the caller", "at the callee"])
def test_connections_made_without_descriptors_get_rings_later(tmp_path: Path, short: int) -> None:
    """No call fails meanwhile, and the connections that had no rings are closed."""
    script = f"""
    ready = os.path.join(os.path.dirname(__file__), "ready")
    start()
    if RANK == {short}:
        take_descriptors(leave=3)  # for two sockets, and one by which a waiting thread is woken
        os.mkdir(ready)  # which takes no descriptor
    if RANK == 0:
        while not os.path.exists(ready):
            time.sleep(0.01)
        rpc.rpc_sync("w1", call_back)
        if {short} == 1:
            rpc.rpc_sync("w1", give_descriptors_back)
        else:
            give_descriptors_back()
        report(before=rings())
        links = sockets()
        report(after=becomes(2, rings), is_closed=becomes(links, sockets) == links)
        report(there=rpc.rpc_sync("w1", rings), failed=rpc.get_metrics()["calls_failed"])
    rpc.shutdown()
    """
    facts = run_pair(tmp_path, RINGS + textwrap.dedent(script))
    assert facts == {"before": 0, "after": 2, "is_closed": True, "there": 2, "failed": 0}

"""A worker with the option `allow` sees the data that it has checked, whatever the sender does to its own memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytestmark = pytest.mark.timeout(60)

_WORKER = '''
import mmap, os, sys, time
import numpy as np
import farcall as rpc

kind, port, path = sys.argv[1:]

def wait_for(name):
    deadline = time.monotonic() + 30
    while not os.path.exists(path + name):
        assert time.monotonic() < deadline, name
        time.sleep(0.005)

def look_twice(array):
    before = int(array[0])
    open(path + "looked", "w").close()
    wait_for("changed")
    return before, int(array[0])

def rewrite(old, new):
    """Changes these bytes in all shared memory of this process; how often they were found."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if "memfd" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                continue
            with mmap.mmap(int(descriptor), 0) as memory:
                at = memory.find(old)
                if at >= 0:
                    memory[at : at + len(old)] = new
                    found += 1
        except OSError:
            continue
    return found

options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", allow=["__main__.look_twice"])
if kind == "restricted":
    rpc.init_rpc("restricted", rank=0, world_size=2, rpc_backend_options=options)
    rpc.shutdown()
else:
    rpc.init_rpc("hostile", rank=1, world_size=2, rpc_backend_options=options)
    array = np.full(1 << 20, 90, np.uint8)
    for _ in range(3):  # the first ones may go through the socket, until both sides share memory
        for name in ("looked", "changed"):
            if os.path.exists(path + name):
                os.unlink(path + name)
        future = rpc.rpc_async("restricted", look_twice, args=(array,), timeout=40)
        wait_for("looked")
        changed = rewrite(bytes([90]) * 4096, bytes([77]) * 4096)
        open(path + "changed", "w").close()
        print(changed > 0, *future.wait(), flush=True)
    rpc.shutdown()
'''


def test_a_lender_cannot_change_an_array_after_it_was_checked(free_port: int, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    command = [sys.executable, str(script)]
    restricted, hostile = (
        subprocess.Popen(
            [*command, kind, str(free_port), f"{tmp_path}/"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for kind in ("restricted", "hostile")
    )
    try:
        said, errors = hostile.communicate(timeout=50)
    finally:
        for process in (restricted, hostile):
            process.kill()
            process.communicate()
    lines = [line.split() for line in said.splitlines()]
    assert len(lines) == 3, errors
    assert any(line[0] == "True" for line in lines), "nothing went through shared memory"
    assert [line[1:] for line in lines] == [["90", "90"]] * 3

"""Greetings that strangers begin and never finish: their memory is bounded, with and without the garbage collector."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import own_network
import pytest

pytestmark = pytest.mark.timeout(90)

FLOODED = """
import gc, json, os, socket, struct, sys
import farcall as rpc

PORT = int(sys.argv[1])
ROUNDS, MOST, SIZE = 1500, 16, 64 * 1024

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def listening():
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]

options = rpc.RpcBackendOptions(
    init_method=f"tcp://127.0.0.1:{PORT}", secret="the secret of this test", max_strangers=MOST, proof_timeout=600
)
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
gc.disable()
version = int(sys.argv[2])
(worker,) = set(listening()) - {PORT}
grown = {}
for kind, port, purpose in (("worker", worker, 1), ("store", PORT, 2)):
    hello = struct.pack("<8sHHI", b"farcall\\0", version, purpose, SIZE) + bytes(SIZE - 1)
    before = resident()
    crowd = []
    for _ in range(ROUNDS):
        sock = socket.create_connection(("127.0.0.1", port), 20)
        sock.sendall(hello)
        crowd.append(sock)
        if len(crowd) > MOST:
            oldest = crowd.pop(0)
            try:
                while oldest.recv(65536):  # until it is turned out to make room
                    pass
            except ConnectionError:
                pass
            oldest.close()
    grown[kind] = resident() - before
    for sock in crowd:
        sock.close()
assert rpc.rpc_sync("w0", abs, args=(-1,)) == 1
rpc.shutdown()
print(json.dumps(grown))
"""


def protocol_version() -> int:
    """What a farcall worker of this release writes behind its magic bytes."""
    from farcall.protocol.handshake import VERSION

    return VERSION


def test_unfinished_greetings_take_bounded_memory_without_the_garbage_collector(tmp_path: Path) -> None:
    from ports import free_port

    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(FLOODED))
    done = subprocess.run(
        [sys.executable, str(path), str(free_port()), str(protocol_version())],
        env=own_network.environment(),
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    grown = json.loads(done.stdout.splitlines()[-1])
    # 16 strangers with 64 KiB each are 1 MiB; all 1,500 of them would be 94 MiB.
    assert max(grown.values()) < 20 << 20, grown

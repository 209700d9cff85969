"""Two workers in two network namespaces that dial 127.0.0.1, and somebody without the secret who relays between them.

The relay cannot be told from the other worker by its address: both loopbacks have the same ones. What it gets to see
must be encrypted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import own_network
import pytest

pytestmark = pytest.mark.timeout(90)

WORKER = """
import sys, time
import farcall as rpc

rank = int(sys.argv[1])
options = rpc.RpcBackendOptions(
    init_method="tcp://127.0.0.1:4711", transports=("tcp",), secret="the secret of this test", init_timeout=40
)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
marker = f"said by worker {rank}".encode()
assert rpc.rpc_sync(f"w{1 - rank}", bytes.upper, args=(marker,)) == marker.upper()
rpc.shutdown()
"""

RELAY = """
import ctypes, json, os, socket, subprocess, sys, threading

libc = ctypes.CDLL(None, use_errno=True)
recorded = bytearray()
lock = threading.Lock()
relayed = set()


def within(process, function):
    # What the function returns, run in the network namespace of that process. Only that thread enters it.
    found = []

    def run():
        with open(f"/proc/{process}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), 0x40000000):
                raise OSError(ctypes.get_errno(), "setns")
        found.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def listening(process):
    with open(f"/proc/{process}/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def mirror():
    # Whatever listens in one namespace is reached at the same port of the other, before anybody hears of it there.
    with lock:
        for here, there in (workers, workers[::-1]):
            done = {port for _, port in relayed}
            for port in listening(here) - done:
                listener = within(there, lambda: socket.create_server(("127.0.0.1", port)))
                relayed.add((there, port))
                threading.Thread(target=accept, args=(listener, here, port), daemon=True).start()


def accept(listener, target, port):
    while True:
        near, _ = listener.accept()
        try:
            far = within(target, lambda: socket.create_connection(("127.0.0.1", port)))
        except IndexError:
            near.close()
            continue
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def pump(source, sink):
    try:
        while data := source.recv(65536):
            recorded.extend(data)
            mirror()
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


command = json.loads(sys.argv[1])
started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
for each in started:
    assert each.stdout.readline() == "ready\\n"
workers = [each.pid for each in started]
while not listening(workers[0]):  # the store
    assert started[0].poll() is None
mirror()
codes = [each.wait() for each in started]
print(json.dumps({"codes": codes, "recorded": len(recorded), "clear": [
    marker for marker in ("said by worker", "SAID BY WORKER", "bytes") if marker.encode() in recorded
]}))
sys.stdout.flush()
os._exit(0)  # the threads that relay are in the middle of it
"""


def test_what_is_relayed_between_two_loopbacks_is_encrypted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the relay of this test enters network namespaces, which takes root")
    for name, script in (("worker.py", WORKER), ("relay.py", RELAY)):
        (tmp_path / name).write_text(textwrap.dedent(script))
    inside = 'ip link set lo up && echo ready && exec "$@"'
    worker = [*own_network.unshare(), "sh", "-c", inside, "sh", sys.executable, str(tmp_path / "worker.py")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "relay.py"), json.dumps(worker)],
        cwd=tmp_path,
        env=own_network.environment(),
        capture_output=True,
        text=True,
        timeout=80,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["codes"] == [0, 0], done.stderr
    assert found["recorded"] > 1000
    assert found["clear"] == []

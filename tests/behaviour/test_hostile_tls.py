"""TLS connections that keep a worker busy without saying anything: they are closed, long before their time is over.

`proof_timeout` is 600 s in these tests. So whatever is closed here was closed for what it sent.
"""

from __future__ import annotations

from pathlib import Path

import own_network
import pytest

pytestmark = pytest.mark.timeout(90)

ATTACKED_GROUP = """
import json, os, socket, subprocess, sys
import farcall as rpc
from hostile_tls import ALERT, HostileTls, hello_in_fragments

ADDRESS = os.environ["OWN_ADDRESS"]
PORT = 4711
rank = int(sys.argv[1]) if len(sys.argv) > 1 else 0
options = rpc.RpcBackendOptions(
    init_method=f"tcp://{ADDRESS}:{PORT}", transports=("tcp",), secret="the secret of this test", proof_timeout=600
)

def listening():
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    return sorted(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A")

def key_updates(sock):
    sock.sendall(HostileTls(sock).key_updates(200))

def key_updates_that_want_an_answer(sock):
    sock.sendall(HostileTls(sock).key_updates(200, wants_answer=True))

def key_updates_between_bytes(sock):
    tls = HostileTls(sock)
    for byte in b"farcall":
        sock.sendall(tls.key_updates(5) + tls.data(bytes([byte])))

def empty_records(sock):
    tls = HostileTls(sock)
    sock.sendall(b"".join(tls.data(b"") for _ in range(20)))

def close_notify_and_more(sock):
    tls = HostileTls(sock)
    sock.sendall(tls.record(ALERT, bytes([1, 0])) + tls.key_updates(20))

def tiny_handshake_records(sock):
    sock.sendall(hello_in_fragments(2))

def endless_change_cipher_specs(sock):
    sock.sendall(bytes([20, 3, 3, 0, 1, 1]) * 200)

def half_closed(sock):
    HostileTls(sock)
    sock.shutdown(socket.SHUT_WR)

def half_closed_in_the_handshake(sock):
    sock.sendall(hello_in_fragments(1 << 14)[:100])
    sock.shutdown(socket.SHUT_WR)

ATTACKS = [
    key_updates, key_updates_that_want_an_answer, key_updates_between_bytes, empty_records, close_notify_and_more,
    tiny_handshake_records, endless_change_cipher_specs, half_closed, half_closed_in_the_handshake,
]

def is_closed(port, attack):
    with socket.create_connection((ADDRESS, port), 10) as sock:
        try:
            attack(sock)
            while sock.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
    return True

child = None
if rank == 0:
    child = subprocess.Popen([sys.executable, __file__, "1"])
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
found = {}
if rank == 0:
    assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1
    ports = listening()
    assert PORT in ports and len(ports) == 3, ports
    for attack in ATTACKS:
        found[attack.__name__] = [is_closed(port, attack) for port in ports]
        assert rpc.rpc_sync("w1", abs, args=(-1,)) == 1
rpc.shutdown()
if child is not None:
    assert child.wait(20) == 0
    print(json.dumps(found))
"""


def test_connections_that_send_tls_records_without_data_are_closed(tmp_path: Path) -> None:
    found = own_network.run(tmp_path, ATTACKED_GROUP, limit=80)
    errors = found.pop("errors")
    assert found
    assert {attack: closed for attack, closed in found.items() if not all(closed)} == {}
    assert "TLS records without data" in errors  # the operator reads why


HOSTILE_STORE = """
import json, os, socket, threading
import farcall as rpc
from hostile_tls import HostileTls

ADDRESS = os.environ["OWN_ADDRESS"]

def serve(sock):
    with sock:
        try:
            tls = HostileTls(sock, is_server=True)
            tls.read()
            while True:
                sock.sendall(tls.key_updates(1000))
        except OSError:
            pass  # it was closed

def accept(listener):
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.settimeout(10)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()

with socket.create_server((ADDRESS, 0)) as listener:
    port = listener.getsockname()[1]
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    options = rpc.RpcBackendOptions(
        init_method=f"tcp://{ADDRESS}:{port}", init_timeout=5, secret="the secret of this test"
    )
    try:
        rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
    except rpc.RendezvousError as error:
        message = str(error)
    print(json.dumps({"message": message}))
"""


def test_a_store_that_sends_nothing_but_key_updates_is_given_up(tmp_path: Path) -> None:
    found = own_network.run(tmp_path, HOSTILE_STORE, limit=80)
    assert "TLS records without data" in found["message"]


HOSTILE_WORKER = """
import json, os, socket, threading
import farcall as rpc
from hostile_member import CALLS, HandMade
from hostile_tls import HostileTls
from test_hostile_members import SECRET, OpenGroup

ADDRESS = os.environ["OWN_ADDRESS"]

def serve(sock):
    with sock:
        try:
            tls = HostileTls(sock, is_server=True)
            while True:
                sock.sendall(tls.key_updates(1000))
        except OSError:
            pass  # it was closed

def accept(listener):
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.settimeout(10)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()

group = OpenGroup()
with socket.create_server((ADDRESS, 0)) as listener, HandMade(group.worker, CALLS, SECRET) as hand:
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    address = f"tcp:{ADDRESS}:{listener.getsockname()[1]}"
    assert group.greet_worker(hand, host="elsewhere", addresses=[address])["type"] == "welcome"
    while "x" not in group.names():
        pass
    try:
        rpc.rpc_sync("x", abs, args=(-1,), timeout=30)
    except rpc.RpcError as error:
        message = str(error)
    print(json.dumps({"message": message}))
rpc.shutdown(graceful=False)
"""


def test_a_worker_that_sends_nothing_but_key_updates_is_given_up(tmp_path: Path) -> None:
    """Whoever has taken over the address of a worker need not know the secret for it."""
    found = own_network.run(tmp_path, HOSTILE_WORKER, limit=60)
    assert "TLS records without data" in found["message"]

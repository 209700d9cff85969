"""What another user of the host can do to a group, by files in the directory for temporary files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import msgspec
import own_network
import pytest
from hostile_member import VERSION

import farcall as rpc
from ports import free_port

pytestmark = pytest.mark.timeout(60)

SOMEBODY_ELSE = 65534

SQUATTER = """
import fcntl, os, sys, time

user, root, *names = sys.argv[1:]
os.setgroups([])
os.setuid(int(user))
locked = []
for name in names:
    path = os.path.join(root, name)
    os.makedirs(os.path.dirname(path), 0o777, exist_ok=True)
    file = open(path, "a")
    os.chmod(path, 0o666)
    fcntl.flock(file, fcntl.LOCK_EX)
    locked.append(file)
print("locked", flush=True)
sys.stdin.read()
"""

WORKER = """
import sys
import farcall as rpc

options = rpc.RpcBackendOptions(
    init_method=f"tcp://127.0.0.1:{sys.argv[1]}", init_timeout=8, secret="the secret of this test"
)
rpc.init_rpc("w0", rpc_backend_options=options)
rpc.shutdown(graceful=False)
print("joined")
"""


def test_another_user_who_locks_files_in_tmp_does_not_keep_a_group_from_starting(tmp_path: Path) -> None:
    """The group would take that user's lock for members of its own, and wait for them to host the store again."""
    if os.geteuid() != 0:
        pytest.skip("a process of another user can be started by root only")
    for directory in (*tmp_path.parents, tmp_path):
        if directory.stat().st_uid == 0 and directory != Path("/") and "pytest" in str(directory):
            directory.chmod(0o755)
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    port, user = free_port(), os.geteuid()
    digest = hashlib.sha256(f"tcp 127.0.0.1:{port}".encode()).hexdigest()[:16]
    names = [f"farcall-{user}-{digest}.open", f"farcall-{user}/{digest}.open"]
    squatter = subprocess.Popen(
        [sys.executable, "-I", "-c", textwrap.dedent(SQUATTER), str(SOMEBODY_ELSE), str(shared), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "locked\n"
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(port)],
            env={**own_network.environment(), "TMPDIR": str(shared)},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        squatter.kill()
        squatter.communicate()
    assert done.stdout == "joined\n", done.stderr[-3000:]


PREAMBLE = struct.Struct("<8sHHI")
STORE = 2


class StrangersStore:
    """Listens where a file says that a store is, and does not know the secret."""

    def __init__(self, path: Path, answers: list[dict[str, Any]]) -> None:
        """To each message, the next of `answers` is given."""
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.was_asked = threading.Event()
        port = self._listener.getsockname()[1]
        path.write_text(json.dumps({"run": "0" * 32, "port": port, "addresses": ["127.0.0.1"]}))
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> StrangersStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.was_asked.set()
            sock.settimeout(20)
            with sock, contextlib.suppress(OSError):
                for answer in self._answers:
                    (length,) = struct.unpack("<I", self._exactly(sock, PREAMBLE.size)[-4:])
                    self._exactly(sock, length)
                    body = msgspec.msgpack.encode(answer)
                    sock.sendall(PREAMBLE.pack(b"farcall\0", VERSION, STORE, len(body)) + body)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):  # until the other side has read the answer
                    pass

    @staticmethod
    def _exactly(sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("it hung up")
            data += piece
        return data


@pytest.mark.parametrize(
    "answers",
    [
        [{"type": "refused", "reason": "go away"}],
        [{"type": "refused", "reason": "go away", "final": True}],
        [{"type": "refused", "reason": "go away", "other_size": True}],
        [{"type": "refused", "reason": "go away", "stranger": True}],
        [{"type": "refused", "reason": "go away", "encrypt": True}],
        [{"type": "challenge", "nonce": bytes(32)}, {"type": "proof", "mac": bytes(32)}],
    ],
    ids=lambda answers: "-".join(key for answer in answers for key in answer),
)
def test_who_does_not_know_the_secret_is_not_taken_for_the_store_of_a_file(
    tmp_path: Path, answers: list[dict[str, Any]]
) -> None:
    """An earlier run has left its file behind, and somebody else has got its port."""
    path = tmp_path / "meeting"
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", secret="the secret of this test")
    with StrangersStore(path, answers) as store:
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
        rpc.shutdown()
        assert store.was_asked.is_set()


def test_a_pipe_in_place_of_the_file_of_a_group_does_not_hold_up_its_workers(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", init_timeout=3, secret="the secret of this test")
    failures: list[BaseException] = []

    def join() -> None:
        try:
            rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options)
        except rpc.RpcError as error:
            failures.append(error)

    joining = threading.Thread(target=join)
    with StrangersStore(path, []) as store:
        joining.start()
        assert store.was_asked.wait(30)  # so the file was looked at, and found good
        os.mkfifo(tmp_path / "pipe")
        os.replace(tmp_path / "pipe", path)
        joining.join(30)
    is_held_up = joining.is_alive()
    if is_held_up:
        os.close(os.open(path, os.O_RDWR))  # lets the thread go on
        joining.join()
    assert not is_held_up
    assert isinstance(failures[0], rpc.RendezvousError)

"""The secret where it is kept: files of any bytes, options that are copied and pickled."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import own_network
import pytest

import farcall as rpc
from ports import free_port

pytestmark = pytest.mark.timeout(60)

WORKER = """
import sys
import farcall as rpc

rank = int(sys.argv[1])
options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[2]}", init_timeout=20)
try:
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
except rpc.RendezvousError as error:
    print(type(error.__cause__).__name__)
else:
    rpc.shutdown()
    print("joined")
"""


def outcomes(directory: Path, contents: list[bytes]) -> list[str]:
    """What becomes of two workers whose secret files have these contents."""
    port = free_port()
    workers = []
    for rank, content in enumerate(contents):
        file = directory / str(rank) / "farcall" / "secret"
        file.parent.mkdir(0o700, parents=True)
        file.touch(0o600)
        file.write_bytes(content)
        environment = {**own_network.environment(), "XDG_STATE_HOME": str(directory / str(rank))}
        environment.pop("FARCALL_SECRET", None)
        command = [sys.executable, "-c", WORKER, str(rank), str(port)]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = [workers[1].communicate(timeout=50)[0].strip()]
        if said == ["joined"]:
            said.insert(0, workers[0].communicate(timeout=50)[0].strip())
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return said


def test_binary_secrets_that_differ_are_different(tmp_path: Path) -> None:
    """Bytes that are no text were all read as one and the same replacement character once."""
    assert outcomes(tmp_path, [bytes(range(128, 160)), bytes(range(160, 192))]) == ["AuthenticationError"]


def test_a_binary_secret_that_is_the_same_lets_workers_in(tmp_path: Path) -> None:
    secret = bytes(range(255, 155, -1))
    assert outcomes(tmp_path, [secret, secret]) == ["joined", "joined"]


def test_options_with_a_secret_are_not_pickled() -> None:
    options = rpc.RpcBackendOptions(secret="the secret of this test")
    with pytest.raises(rpc.UsageError, match="FARCALL_SECRET"):
        pickle.dumps(options)
    with pytest.raises(rpc.UsageError, match="FARCALL_SECRET"):
        pickle.dumps(options, 2)
    assert "the secret" not in repr(options)


def test_copies_of_options_within_the_process_keep_the_secret() -> None:
    options = rpc.RpcBackendOptions(secret="the secret of this test", device_maps={"w1": {0: 1}})
    for copied in (copy.copy(options), copy.deepcopy(options)):
        assert copied == options
        assert type(copied) is type(options)
    assert copy.deepcopy(options).device_maps is not options.device_maps


def test_options_without_a_secret_are_pickled() -> None:
    options = rpc.RpcBackendOptions(rpc_timeout=7, allow=["service"])
    assert pickle.loads(pickle.dumps(options)) == options

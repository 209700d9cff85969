"""The faulty agent as a backend, and in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farcall as rpc
from farcall.backends.registry import BackendType
from farcall.errors import BackendError, NotInitializedError, RendezvousError, UsageError, WorkerLostError
from farcall.rendezvous import Rendezvous
from farcall.testing import FaultyAgent, FaultyRpcBackendOptions, LocalGroup, MemoryStore, faults
from farcall.transports.memory import MemoryNetwork, MemoryTransport

PAIR = """
import os, sys
import farcall as rpc
from farcall.testing import FaultyRpcBackendOptions, faults


def add(rref, value):
    return rref.to_here() + value


options = FaultyRpcBackendOptions(
    init_method=sys.argv[2],
    transports=(sys.argv[3],),
    num_fail_sends=3,
    messages_to_fail=["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"],
)
rank = int(sys.argv[1])
rpc.init_rpc(f"worker{rank}", rpc.BackendType.FAULTY_TENSORPIPE, rank, 3, options)
if rank == 0:
    rref = rpc.remote("worker1", int, args=(20,))
    print(rpc.rpc_sync("worker2", add, args=(rref, 22)))
    faults().cut("worker1")
    try:
        rref.to_here(timeout=5)
    except rpc.WorkerLostError as error:
        print(error.worker)
    faults().heal()
    print(rref.to_here())
    del rref
rpc.shutdown(timeout=30)
"""


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


@pytest.fixture
def alone(meeting: str) -> Iterator[None]:
    """This process is a worker that is alone in its group."""
    options = FaultyRpcBackendOptions(init_method=meeting, messages_to_fail=["PYTHON_CALL"])
    rpc.init_rpc("alone", BackendType.FAULTY_TENSORPIPE, 0, 1, options)
    yield
    rpc.shutdown()


def test_it_is_a_backend(alone: None) -> None:
    with pytest.raises(WorkerLostError, match=r"worker 'alone' was not asked for `builtins\.max`"):
        rpc.rpc_sync("alone", max, args=(1, 2))
    assert rpc.rpc_sync("alone", max, args=(1, 2)) == 2
    faults().fail("PYTHON_CALL", 0)
    assert rpc.rpc_sync("alone", max, args=(1, 3)) == 3


def test_its_options_alone_choose_it(meeting: str, caplog: pytest.LogCaptureFixture) -> None:
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=FaultyRpcBackendOptions(init_method=meeting))
    faults()
    rpc.shutdown()
    assert "options of BackendType.FAULTY_TENSORPIPE" in caplog.text


def test_it_takes_no_other_options(meeting: str) -> None:
    with pytest.raises(BackendError, match="must be a `FaultyRpcBackendOptions`"):
        rpc.init_rpc("a", BackendType.FAULTY_TENSORPIPE, 0, 1, rpc.RpcBackendOptions(init_method=meeting))


def test_only_a_faulty_agent_has_faults() -> None:
    with pytest.raises(NotInitializedError):
        faults()
    with LocalGroup(1) as group, pytest.raises(UsageError, match="worker 'worker0' has no faulty agent: start it with"):
        faults(group.agents[0])


def test_with_usual_options_nothing_fails_until_it_is_told() -> None:
    agent = FaultyAgent(
        "a",
        Rendezvous(MemoryStore(), 0, 1, "", "group"),
        rpc.RpcBackendOptions(),
        {"memory": MemoryTransport(MemoryNetwork())},
    )
    agent.start()
    assert agent.call("a", max, (1, 2), None, 5).wait() == 2
    agent.faults.fail("PYTHON_CALL")
    with pytest.raises(WorkerLostError):
        agent.call("a", max, (1, 2), None, 5).wait()
    agent.shutdown()
    agent.shutdown()


def test_one_that_cannot_start_leaves_nothing() -> None:
    store = MemoryStore()
    store.close()
    with pytest.raises(RendezvousError):
        FaultyAgent(
            "a",
            Rendezvous(store, 0, 1, "", "group"),
            FaultyRpcBackendOptions(),
            {"memory": MemoryTransport(MemoryNetwork())},
        )


def test_a_forked_child_leaves_it_alone(meeting: str) -> None:
    before = open_descriptors()
    rpc.init_rpc("alone", BackendType.FAULTY_TENSORPIPE, 0, 1, FaultyRpcBackendOptions(init_method=meeting))
    assert rpc.rpc_sync("alone", max, args=(1, 2)) == 2
    assert open_descriptors() > before
    child = os.fork()
    if not child:
        code = 1
        try:
            rpc.rpc_sync("alone", max, args=(1, 2))
        except rpc.ForkedProcessError:
            code = 0 if open_descriptors() == before else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert rpc.rpc_sync("alone", max, args=(3, 4)) == 4
    rpc.shutdown()


def open_descriptors() -> int:
    """How many sockets there are, epolls and their like."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return sum(target.startswith(("socket:", "anon_inode:")) for target in targets)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_workers_in_processes_of_their_own(tmp_path: Path, meeting: str, transport: str) -> None:
    """What torch's own test does, and more."""
    script = tmp_path / "pair.py"
    script.write_text(PAIR)
    workers = [start_worker(script, str(rank), meeting, transport) for rank in range(3)]
    outputs = [worker.communicate(timeout=50)[0] for worker in workers]
    assert outputs == ["42\nworker1\n20\n", "", ""]
    assert [worker.returncode for worker in workers] == [0, 0, 0]


def start_worker(script: Path, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

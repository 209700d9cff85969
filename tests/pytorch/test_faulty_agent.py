"""FAULTY_TENSORPIPE: how it is registered, which rule means which call, and what becomes of references that failed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script_stage import script
from worker_stage import one_worker

import farcall.pytorch as rpc
from farcall.errors import RpcTimeoutError, WorkerLostError
from farcall.pytorch._testing import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions, is_available

pytestmark = pytest.mark.timeout(60)

ONE = torch.ones(1)


@script
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def doubled(x: Any) -> Any:
    return 2 * x


class Holder:
    def get(self) -> int:
        return 7


def worker(directory: Path, fail: list[str] = [], delay: dict[str, float] = {}, sends: int = 3) -> Any:  # noqa: B006
    return one_worker(
        directory,
        rpc.backend_registry.BackendType.FAULTY_TENSORPIPE,
        messages_to_fail=fail,
        messages_to_delay=delay,
        num_fail_sends=sends,
    )


@pytest.fixture
def sound(tmp_path: Path) -> Iterator[Any]:
    with worker(tmp_path) as agent:
        yield agent


def test_it_is_registered_only_when_torch_s_module_is_imported() -> None:
    program = """if True:
        import farcall.pytorch
        farcall.pytorch.install()
        import torch.distributed.rpc as rpc
        assert not rpc.backend_registry.backend_registered("FAULTY_TENSORPIPE")
        import torch.distributed.rpc._testing
        import torch.distributed.rpc._testing.faulty_agent_backend_registry as registry
        import farcall.pytorch._testing as ours
        assert torch.distributed.rpc._testing is ours
        assert registry is ours.faulty_agent_backend_registry
        assert rpc.backend_registry.backend_registered("FAULTY_TENSORPIPE")
        assert not hasattr(rpc.BackendType, "FAULTY_TENSORPIPE")
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_its_options_are_those_that_were_given(sound: FaultyTensorPipeAgent) -> None:
    assert is_available()
    options = FaultyTensorPipeRpcBackendOptions(messages_to_fail=["PYTHON_CALL"], messages_to_delay={"SCRIPT_CALL": 1})
    assert options.messages_to_fail == ["PYTHON_CALL"]
    assert options.messages_to_delay == {"SCRIPT_CALL": 1}
    assert isinstance(sound, FaultyTensorPipeAgent)
    assert rpc.rpc_sync(0, doubled, (3,)) == 6


@pytest.mark.parametrize("rule", ["PYTHON_CALL", "SCRIPT_CALL"])
def test_operators_and_script_functions_are_told_apart_from_python_functions(tmp_path: Path, rule: str) -> None:
    with worker(tmp_path, fail=[rule]):
        for function, family in ((torch.neg, "SCRIPT_CALL"), (tripled, "SCRIPT_CALL"), (doubled, "PYTHON_CALL")):
            if family == rule:
                with pytest.raises(WorkerLostError, match=rule):
                    rpc.rpc_sync(0, function, (ONE,))
            else:
                rpc.rpc_sync(0, function, (ONE,))


def test_what_rides_along_takes_a_call_out_of_the_rules(tmp_path: Path) -> None:
    with worker(tmp_path, fail=["PYTHON_CALL"]), torch.autograd.profiler_legacy.profile():
        assert rpc.rpc_sync(0, doubled, (3,)) == 6


def test_a_call_that_is_late_runs_out_of_time_as_torch_says_it(tmp_path: Path) -> None:
    with worker(tmp_path, delay={"SCRIPT_CALL": 0.3}):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync(0, torch.neg, (ONE,), timeout=0.05)
        assert rpc.rpc_sync(0, torch.neg, (ONE,)) == -1


def test_a_remote_call_that_fails_is_not_made_again(tmp_path: Path) -> None:
    with worker(tmp_path, fail=["PYTHON_REMOTE_CALL"]):
        rref = rpc.remote(0, doubled, (3,))
        for use in (rref.to_here, rref._serialize, rref._get_future().wait, rref.rpc_sync().bit_length):
            with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
                use()
        with pytest.raises(RuntimeError, match="RRef creation"):
            rpc.rpc_async(0, doubled, (rref,))
        assert rref.owner().name == "alone"
        assert rpc.remote(0, torch.neg, (ONE,)).to_here() == -1


def test_so_is_one_of_an_operator_by_its_own_name(tmp_path: Path) -> None:
    with worker(tmp_path, fail=["SCRIPT_REMOTE_CALL"]):
        with pytest.raises(RpcTimeoutError, match="SCRIPT_REMOTE_CALL of `run_builtin`"):
            rpc.remote(0, torch.neg, (ONE,), timeout=5).to_here()
        holder = rpc.remote(0, Holder)
        assert holder.remote().get().to_here() == 7


def test_one_on_a_reference_fails_as_well(tmp_path: Path) -> None:
    with worker(tmp_path, fail=["PYTHON_REMOTE_CALL"]):
        mine = rpc.RRef(Holder())
        with pytest.raises(RpcTimeoutError, match="PYTHON_REMOTE_CALL of `get`"):
            mine.remote().get().to_here()


def test_none_fails_if_no_send_shall(tmp_path: Path) -> None:
    with worker(tmp_path, fail=["PYTHON_REMOTE_CALL"], sends=0):
        assert rpc.remote(0, doubled, (3,)).to_here() == 6


def test_a_remote_call_of_a_worker_to_itself_can_be_late(tmp_path: Path) -> None:
    with worker(tmp_path, delay={"SCRIPT_REMOTE_CALL": 1}):
        rref = rpc.remote(0, torch.neg, (ONE,), timeout=0.02)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref._get_future().wait()
        with pytest.raises(RuntimeError, match="RRef creation"):
            rref.to_here()
        late = rpc.remote(0, torch.neg, (ONE,))
        rpc.rpc_sync(0, doubled, (1,))  # which begins after what was to be run before
        assert not late._value_here().done()
        assert late.to_here() == -1

"""A handful of PyTorch's own tests, where torch is installed. `make conformance` runs all of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANDFUL = ["-k", "TensorPipeRpcTest.test_add", "-k", "test_nested_rref_stress"]
OF_THE_FAULTY_AGENT = ["-k", "test_custom_messages_to_delay"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="torch is not installed here; `make conformance` has an environment with it, and runs all tests",
    ),
]


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "conformance", "--jobs", "2", *arguments],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_handful_passes_on_torch_itself() -> None:
    done = conformance("--impl", "none", *HANDFUL, *OF_THE_FAULTY_AGENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


def test_a_handful_passes_on_farcall() -> None:
    if importlib.util.find_spec("farcall.pytorch") is None:
        pytest.skip("this version of farcall has no farcall.pytorch")
    done = conformance(*HANDFUL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


def test_what_passes_on_torchs_own_agent_has_failed(pids: Callable[[int], list[int]]) -> None:
    done = conformance("--impl", "fake_implementation:replace_nothing", *HANDFUL, *OF_THE_FAULTY_AGENT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("ran on torch's own C++ agent") == 6
    assert "0 passed" in done.stdout


def test_a_module_that_cannot_be_imported_leaves_the_others_be(pids: Callable[[int], list[int]]) -> None:
    arguments = ["-k", "RemoteModuleTest.test_bad_module", "-k", "test_cannot_infer_backend_from_options"]
    done = conformance("--impl", "fake_implementation:take_a_name_away", *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "remote_module_test cannot be imported: ImportError" in done.stdout
    assert "1 passed, 1 failed" in done.stdout


def test_an_implementation_that_is_not_there() -> None:
    done = conformance("--impl", "nowhere")
    assert done.returncode == 2
    assert "module:function" in done.stderr

"""Timeouts as programs written for `torch.distributed.rpc` read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

import torch.distributed.rpc as theirs

import farcall.pytorch as ours
from torch_stage import one_worker


@pytest.mark.parametrize("module", [theirs, ours], ids=["torch", "farcall"])
def test_the_timeout_of_options_is_a_float(module: Any) -> None:
    options = module.TensorPipeRpcBackendOptions(rpc_timeout=3)
    assert repr(options.rpc_timeout) == "3.0"
    options.rpc_timeout = 4
    assert repr(options.rpc_timeout) == "4.0"


def test_the_timeout_of_a_worker_is_a_float(tmp_path: Path) -> None:
    with one_worker(tmp_path, rpc_timeout=5):
        assert repr(ours.get_rpc_timeout()) == "5.0"

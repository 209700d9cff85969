"""At the torch edge, too, a worker that knows only the ids of a reference gets nothing from its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.pytorch import rref as edge
from torch_stage import run_group

HERE = __name__


def make() -> torch.Tensor:
    return torch.full((2,), 7.0)


def value_of(reference: Any) -> Any:
    return reference.local_value()


def refused() -> int:
    from farcall import get_metrics

    return int(get_metrics()["references_refused"])


class Forged:
    """Arrives as a reference that its sender was never given."""

    def __init__(self, *named: Any) -> None:
        self.named = named

    def __reduce__(self) -> tuple[Any, ...]:
        return edge._receive_here, (self.named, 0)


@pytest.mark.parametrize(
    "allow", [{}, {"allow": [f"{HERE}.{name}" for name in ("make", "value_of", "refused")]}], ids=["all", "allow"]
)
def test_a_reference_named_by_its_ids_leads_nowhere(tmp_path: Path, allow: dict[str, Any]) -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            reference = rpc.remote("worker1", make)
            assert reference.to_here().tolist() == [7, 7]
            assert reference.confirmed_by_owner()
            assert rpc.rpc_sync("worker1", value_of, (reference,)).tolist() == [7, 7], "who was given it, uses it"
            rpc.api._barrier({"worker0", "worker2"})
            rpc.api._barrier({"worker0", "worker2"})
            assert reference.to_here().tolist() == [7, 7]
        elif rank == 2:
            rpc.api._barrier({"worker0", "worker2"})
            with pytest.raises(RuntimeError, match="does not have its token"):
                rpc.rpc_sync("worker1", value_of, (Forged(1, 0, 1, bytes(16)),))
            with pytest.raises((RuntimeError, TypeError)):
                rpc.rpc_sync("worker1", value_of, (Forged(1, 0, 1),))
            count = rpc.rpc_sync("worker1", refused)
            rpc.api._barrier({"worker0", "worker2"})
            return count
        return None

    assert run_group(tmp_path, body, 3, **allow)[2] >= 1

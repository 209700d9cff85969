"""Distributed autograd: the API of `torch.distributed.autograd`."""

from __future__ import annotations


def _init(worker_id: int) -> None:
    """This process is that worker."""


def _get_debug_info() -> dict[str, str]:
    """Counters of the contexts that are here."""
    return {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}

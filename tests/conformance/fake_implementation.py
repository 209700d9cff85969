"""Implementations of torch's RPC that are none."""

from __future__ import annotations

import sys
from types import ModuleType


def replace_nothing() -> None:
    """Leaves everything to torch."""


def take_rref_away() -> None:
    """Leaves a module without what tests import from it."""
    sys.modules["torch.distributed.nn.api.remote_module"] = ModuleType("torch.distributed.nn.api.remote_module")

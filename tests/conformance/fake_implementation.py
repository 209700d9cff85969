"""Implementations of torch's RPC that are none."""

from __future__ import annotations

from importlib import import_module


def replace_nothing() -> None:
    """Leaves everything to torch."""


def take_a_name_away() -> None:
    """Leaves a module without something that one module of tests imports from it."""
    delattr(import_module("torch.distributed.nn.api.remote_module"), "_REMOTE_MODULE_PICKLED_ATTRIBUTES")

"""A backend of one's own, registered for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import farcall as rpc
from backends.in_process import BACKEND


@pytest.fixture
def backend() -> Iterator[rpc.BackendType]:
    """The one of `in_process.py`; the worker that a test has made of it ends, too."""
    yield rpc.register_backend("IN_PROCESS", *BACKEND)
    rpc.shutdown(graceful=False)
    rpc.backend_registry.unregister_backend("IN_PROCESS")

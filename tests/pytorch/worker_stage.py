"""A group of one worker in this process, for tests of what only torch's own agent does: it calls itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import farcall.pytorch as rpc


@contextmanager
def one_worker(directory: Path, backend: Any = None, **options: Any) -> Iterator[Any]:
    """The agent of a worker "alone", of rank 0."""
    backend = backend or rpc.backend_registry.BackendType.TENSORPIPE
    chosen = rpc.backend_registry.construct_rpc_backend_options(
        backend, init_method=f"file://{directory}/store", **options
    )
    rpc.init_rpc("alone", backend, rank=0, world_size=1, rpc_backend_options=chosen)
    try:
        yield rpc.api._get_current_rpc_agent()
    finally:
        rpc.shutdown(graceful=False)

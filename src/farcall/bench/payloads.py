"""What is sent to and fro: a numpy array of bytes if numpy is installed, otherwise plain bytes.

The contents are a block of random bytes, repeated. Memory that was never written costs nothing to read, and zeros may
be compressed, so neither would be a fair payload.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Final

_BLOCK_BYTES: Final = 1 << 16
"""The size of the block of random bytes that is repeated in a payload."""


def plain(size: int) -> bytes:
    """Returns `size` bytes: a block of random bytes, repeated; empty for 0. A negative size raises `ValueError`."""
    return (os.urandom(min(size, _BLOCK_BYTES)) * (size // _BLOCK_BYTES + 1))[:size]


def array(size: int) -> Any:
    """Returns a numpy array of `size` random bytes, which may be 0; plain bytes if numpy is not installed."""
    if not has_arrays():
        return plain(size)
    import numpy as np

    return np.frombuffer(plain(size), np.uint8).copy()


def has_arrays() -> bool:
    """Returns True if numpy is installed, so that `array` returns arrays; else False."""
    return importlib.util.find_spec("numpy") is not None

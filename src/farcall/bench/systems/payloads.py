"""What is sent there and back: so many bytes as a numpy array where numpy is installed, else as plain bytes.

A block of random bytes, repeated: memory that was never written to costs nothing to read, and zeros may be compressed.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Final

_BLOCK: Final = 1 << 16


def plain(size: int) -> bytes:
    """So many bytes."""
    return (os.urandom(min(size, _BLOCK)) * (size // _BLOCK + 1))[:size]


def array(size: int) -> Any:
    """The same as an array of bytes; as `plain` without numpy."""
    if not has_arrays():
        return plain(size)
    import numpy as np

    return np.frombuffer(plain(size), np.uint8).copy()


def has_arrays() -> bool:
    """Whether `array` makes arrays."""
    return importlib.util.find_spec("numpy") is not None

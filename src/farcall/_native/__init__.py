"""The C extension: rings in shared memory, and the wait for them. Optional.

It is compiled when farcall is installed on a machine with a C compiler and Python's headers, and it is part of the
wheels. Without it, workers on one host exchange small messages over Unix sockets; everything works, and calls take a
few times longer. `farcall.native_available()` tells which it is, and `FARCALL_NATIVE=0` in the environment turns the
extension off. Only `farcall.transports` uses what is here. `module.c` describes the interface, `ring.h` the memory.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _load() -> Any:
    """Returns the extension module; None if it cannot be imported, or is turned off by `FARCALL_NATIVE=0`."""
    if os.environ.get("FARCALL_NATIVE", "1") == "0":
        return None
    try:
        return importlib.import_module("farcall._native._rings")
    except ImportError:  # it was not built, or for another kind of machine
        return None


rings: Any = _load()
"""The extension module, with `RingPair`, `Waiter`, `mapping_size` and `DamagedError`. None if it is not available."""


def native_available() -> bool:
    """Returns whether this process uses farcall's C extension.

    With the extension, workers on one host exchange small messages through shared memory. Without it they use Unix
    sockets: everything works, and small calls take a few times longer. Both workers need the extension.

    The extension is part of the wheels. When farcall is installed from source, it is compiled if there are a C compiler
    and Python's headers. `FARCALL_NATIVE=0` in the environment of a worker turns it off.

    Returns:
        False if the extension was not built, cannot be loaded on this machine, or was turned off.
    """
    return rings is not None

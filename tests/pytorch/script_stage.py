"""`torch.jit.script` for tests: warnings are errors there, and it warns that it is deprecated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quietly() -> Iterator[None]:
    """Script things may be defined inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def script(function: Any) -> Any:
    """The same as a script function or class."""
    with quietly():
        return torch.jit.script(function, _frames_up=1)

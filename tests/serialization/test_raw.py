"""Plain memory as arguments and results: it comes out as it went in, and not through the pickle where it is large."""

from __future__ import annotations

import ctypes
import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.errors import SerializationError
from farcall.serialization import dumps_arguments, dumps_result, loads_arguments, loads_result
from farcall.serialization.pickler import OUT_OF_BAND_SIZE
from farcall.serialization.raw import LEAST, has_raw, lifted

from pickler_stage import train


def received(buffers: Sequence[memoryview]) -> list[bytearray]:
    """What comes at the other end: memory that may be written, and is nobody else's."""
    return [bytearray(buffer) for buffer in buffers]


def there(value: Any) -> Any:
    """A result as it arrives."""
    body, buffers = dumps_result(train, value)
    return loads_result(body, received(buffers))


def arguments_there(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    body, buffers = dumps_arguments(train, args, kwargs)
    return loads_arguments(body, received(buffers))

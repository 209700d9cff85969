"""Plain memory as arguments and results: it comes out as it went in, and not through the pickle where it is large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pickler_stage import train

from farcall.serialization import dumps_arguments, dumps_result, loads_arguments, loads_result


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

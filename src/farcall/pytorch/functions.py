"""`async_execution` for functions that return torch's futures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from farcall import functions as _functions
from farcall.futures import Future
from farcall.pytorch.futures import adopted


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Says that the function returns a `torch.futures.Future`, and that its caller gets what that is settled with.

    Goes beneath `staticmethod` and `classmethod`. A script function may be marked, too: its caller waits for the
    future that it returns.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    _functions.mark_async(wrapper, fn, _future_of)
    return wrapper


def _future_of(name: str, result: Any) -> Future[Any]:
    future = adopted(result)
    if future is None:
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
            f"`{name}` returned a {type(result).__name__}: return the future of a call, or one that you settle yourself"
        )
    return future

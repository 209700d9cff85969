"""`async_execution` for functions that return torch's futures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from farcall import functions as _functions
from farcall.futures import Future
from farcall.pytorch.futures import to_farcall_future


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function returns a future, and its remote caller gets the result of that future.

    The thread that ran the function is free meanwhile. Put this decorator below `staticmethod` and `classmethod`.
    Script functions can be decorated too.

    Args:
        fn: A function that returns a `torch.futures.Future`. If it returns anything else, the remote caller gets a
            `RuntimeError`.

    Example:
        @rpc.functions.async_execution
        def add_twice(to, x):
            return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda future: future.wait() + 1)
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    _functions.mark_async(wrapper, fn, _returned_future)
    return wrapper


def _returned_future(name: str, result: Any) -> Future[Any]:
    """Returns the future that a decorated function returned, as one of farcall.

    Raises `RuntimeError`, which names the function `name`, if `result` is not a future.
    """
    future = to_farcall_future(result)
    if future is None:
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
            f"`{name}` returned a {type(result).__name__}: return the future of a call, or one that you set yourself"
        )
    return future


_functions.set_default_converter(_returned_future)

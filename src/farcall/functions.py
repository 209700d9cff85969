"""Marks on functions that others call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from farcall.futures import Future

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Callable[..., Any])

EXPOSED = "_farcall_exposed"
"""The attribute by which `exposed` marks."""
_NOTHING = object()
_MARK = "_wrapped_async_rpc_function"  # torch's name, which some programs look at


def async_execution(function: Callable[P, Future[T]]) -> Callable[P, Future[T]]:
    """Says that the function returns a `Future`, and that its caller gets what that future is settled with.

    The thread that ran the function is free meanwhile. Goes beneath `staticmethod` and `classmethod`:

        class Server:
            @staticmethod
            @farcall.functions.async_execution
            def add_later(x, y): ...

    Raises `TypeError` for an `async def` function, which needs no mark.
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"`{function.__qualname__}` is an `async def` function: leave async_execution out, as its caller gets what "
            "it returns when its coroutine ends, or make it a plain function that returns a Future"
        )

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return function(*args, **kwargs)

    setattr(wrapper, _MARK, function)
    return wrapper


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Whether it, or what a partial or bound method stands for, is marked by `async_execution`."""
    if hasattr(function, _MARK):
        return True
    while isinstance(function, functools.partial):
        function = function.func
        if hasattr(function, _MARK):
            return True
    return False


@overload
def exposed(target: E) -> E: ...


@overload
def exposed() -> Callable[[E], E]: ...


def exposed(target: Any = _NOTHING) -> Any:
    """Marks a function, a method or a class as one that others may call, where the option `allow` restricts that.

        @farcall.exposed
        def predict(batch): ...

    A worker with `allow=[]` lets others call what is marked, and nothing else. A class that is marked may be made, and
    its public methods called. Goes beneath `staticmethod` and `classmethod`, or above. Without `allow` it changes
    nothing. Parentheses behind it may be there or not. Raises `TypeError` for what cannot carry the mark.
    """
    if target is _NOTHING:
        return exposed
    carrier = target.__func__ if isinstance(target, (staticmethod, classmethod)) else target
    try:
        setattr(carrier, EXPOSED, True)
    except (AttributeError, TypeError):
        raise TypeError(
            f"{target!r} cannot be marked as exposed: mark a function or class of your own, or name it in the option "
            "allow"
        ) from None
    return target

"""Marks on functions that others call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from farcall.futures import Future

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Callable[..., Any])

FutureOf: TypeAlias = Callable[[str, Any], Future[Any]]
"""Makes a future of a function's name and what it returned."""

EXPOSED = "_farcall_exposed"
"""The attribute by which `exposed` marks."""
_NOTHING = object()
_MARK = "_wrapped_async_rpc_function"  # torch's name, which some programs look at
_FUTURE_OF = "_farcall_future_of"


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

    mark_async(wrapper, function, _future_of)
    return wrapper


def mark_async(wrapper: Any, function: Callable[..., Any], future_of: FutureOf) -> None:
    """Marks a wrapper of a function as `async_execution` does.

    `future_of` makes a `Future` of the function's name and what it returned, which may be another kind of future; or
    raises what the caller is told.
    """
    setattr(wrapper, _MARK, function)
    setattr(wrapper, _FUTURE_OF, future_of)


def async_result(function: Callable[..., Any]) -> FutureOf | None:
    """If it, or what a partial or bound method stands for, is marked by `async_execution`: what makes a future of its
    result, or raises `TypeError`."""
    while not hasattr(function, _MARK):
        if not isinstance(function, functools.partial):
            return None
        function = function.func
    return getattr(function, _FUTURE_OF, _future_of)


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Whether it, or what a partial or bound method stands for, is marked by `async_execution`."""
    return async_result(function) is not None


def _future_of(name: str, result: Any) -> Future[Any]:
    if not isinstance(result, Future):
        raise TypeError(
            f"functions decorated with async_execution must return a Future, but what `{name}` returned is of type "
            f"{type(result).__name__}"
        )
    return result


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

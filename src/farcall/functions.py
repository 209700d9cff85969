"""Decorators for functions that other workers call: `async_execution`, `exposed` and `idempotent`.

`async_execution` marks a function that returns a `Future`; its caller gets the result of that future. `exposed` marks
a function or class that other workers may call where the option `allow` restricts calls. `idempotent` marks a function
that may run more than once.

Theory of operation: `async_execution` sets two attributes on a wrapper of the function. The first has the name that
torch's decorator of the same name uses, so a function decorated by either is recognised by both. The second holds a
*converter*, which turns what the function returned into a `farcall.Future`. The executor asks `async_result` for the
converter after the function has returned. Functions without the second attribute were decorated by torch itself; the
converter for them is set by `set_default_converter`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

from farcall.futures import Future

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Callable[..., Any])

FutureConverter: TypeAlias = Callable[[str, Any], Future[Any]]
"""A function of a marked function's name and its return value that returns a `Future`, or raises `TypeError`."""

EXPOSED = "_farcall_exposed"
"""The name of the attribute that `exposed` sets to True on functions and classes."""

_IDEMPOTENT = "_farcall_idempotent"
"""The name of the attribute that `idempotent` sets to True on functions."""

_MISSING = object()
"""The default of `exposed`'s parameter, to tell `@exposed` from `@exposed()`."""

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute that marks a function as asynchronous. The name is torch's; some programs look at it."""

_CONVERTER = "_farcall_future_converter"
"""The attribute that holds the `FutureConverter` of a function marked by `mark_async`."""


def async_execution(function: Callable[P, Future[T]]) -> Callable[P, Future[T]]:
    """Marks a function that returns a `Future`: its remote caller gets the result of that future.

    The thread that ran the function is free for other requests until the future is done. A call from the same process,
    not through farcall, returns the future as it is.

    Args:
        function: The function to mark. Put the decorator below `staticmethod` and `classmethod`. Whether it is callable
            is not checked.

    Returns:
        A wrapper with the same signature, name and documentation. If the function returns anything but a
        `farcall.Future`, the remote caller gets a `TypeError`.

    Raises:
        TypeError: `function` is an `async def` function. These are asynchronous without the decorator.

    Example:
        >>> class Server:
        ...     @staticmethod
        ...     @farcall.functions.async_execution
        ...     def add_later(x, y):
        ...         return farcall.rpc_async("adder", operator.add, args=(x, y))
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"`{function.__qualname__}` is an `async def` function: leave async_execution out, because its caller gets "
            "what it returns when its coroutine ends, or make it a plain function that returns a Future"
        )

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return function(*args, **kwargs)

    mark_async(wrapper, function, _check_future)
    return wrapper


def mark_async(wrapper: Any, function: Callable[..., Any], converter: FutureConverter) -> None:
    """Marks `wrapper` as an asynchronous function, with a converter for its return values.

    `async_execution` marks functions that return a `farcall.Future`. This is for packages with another kind of future,
    such as torch's. Marking a function again replaces the mark.

    Args:
        wrapper: The function that is called; it gets the mark.
        function: The function that `wrapper` calls, which may be `wrapper` itself.
        converter: Called with the function's name and its return value; returns a `farcall.Future`, whose result the
            remote caller gets. What it raises becomes the outcome of the call. Its type is not checked.

    Raises:
        AttributeError, TypeError: `wrapper` does not accept new attributes, as builtin functions and classes do not.
    """
    setattr(wrapper, ASYNC_MARK, function)
    setattr(wrapper, _CONVERTER, converter)


def async_result(function: Callable[..., Any]) -> FutureConverter | None:
    """Returns the converter for the return values of an asynchronous function; None if `function` is not marked as one.

    The converter is called with the name of the function and its return value. It returns a `farcall.Future`, or raises
    `TypeError`. A function is marked by `async_execution`, by `mark_async` or by torch's decorator. A
    `functools.partial` and a bound method count as marked if their function is. An object that is not callable counts
    as not marked.
    """
    while not hasattr(function, ASYNC_MARK):
        if not isinstance(function, functools.partial):
            return None
        function = function.func
    return getattr(function, _CONVERTER, _default_converter)


def set_default_converter(converter: FutureConverter) -> None:
    """Sets the converter for functions that torch's own decorator has marked, and that have no converter of their own.

    These are functions that were marked before `farcall.pytorch.install()` replaced torch's decorator. Until this is
    called, they must return a `farcall.Future`; otherwise their caller gets a `TypeError`.

    Args:
        converter: Called with a function's name and its return value; returns a `farcall.Future`, or raises
            `TypeError`. Replaces an earlier one. Its type is not checked.
    """
    global _default_converter
    _default_converter = converter


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Returns True if `function` is marked by `async_execution`, itself or in a partial or bound method; else False.

    Functions marked by `mark_async` or by torch's own decorator count as well.
    """
    return async_result(function) is not None


def _check_future(name: str, result: Any) -> Future[Any]:
    """Returns `result` if it is a `Future`, else raises `TypeError`. `name` is the function's, for the message."""
    if not isinstance(result, Future):
        raise TypeError(
            f"functions decorated with async_execution must return a Future, but `{name}` returned a "
            f"{type(result).__name__}"
        )
    return result


_default_converter: FutureConverter = _check_future


@overload
def exposed(target: E) -> E: ...


@overload
def exposed() -> Callable[[E], E]: ...


def exposed(target: Any = _MISSING) -> Any:
    """Marks a function, method or class that other workers may call where the option `allow` restricts calls.

    A worker with `allow=[]` accepts calls of marked functions and nothing else. Of a marked class, other workers may
    create instances and call the public methods. On a worker without `allow` the mark has no effect. Both `@exposed`
    and `@exposed()` work, above or below `staticmethod` and `classmethod`. Marking again has no effect.

    Args:
        target: The function or class to mark. Without it, the decorator itself is returned.

    Returns:
        `target` itself, unchanged but for the mark.

    Raises:
        TypeError: `target` does not accept attributes, as None and builtin functions and classes do not.

    Example:
        >>> @farcall.exposed
        ... def predict(batch):
        ...     return model(batch)
    """
    if target is _MISSING:
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


def idempotent(function: E) -> E:
    """Marks a function or method that may run more than once: `map` tries again after a lost worker.

    Args:
        function: The function to mark.

    Returns:
        `function` itself, unchanged but for the mark.

    Raises:
        TypeError: `function` does not accept attributes, as a builtin does not. Use the option `idempotent` of a
            selection.

    Example:
        >>> @farcall.idempotent
        ... def thumbnail(path):
        ...     return shrink(path.read_bytes())
    """
    carrier = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    try:
        setattr(carrier, _IDEMPOTENT, True)
    except (AttributeError, TypeError):
        raise TypeError(
            f"{function!r} cannot be marked as idempotent: mark a function of your own, or say it by "
            "farcall.workers(...).options(idempotent=True)"
        ) from None
    return function


def is_idempotent(function: Callable[..., Any]) -> bool:
    """Returns whether `function` is marked by `idempotent`, directly or inside a partial or bound method."""
    while isinstance(function, functools.partial):
        function = function.func
    return bool(getattr(function, _IDEMPOTENT, False))

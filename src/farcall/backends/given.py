"""What a program has given to a call: is it a function, are those arguments, is that a timeout?

Every agent refuses the same in the same words, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farcall.errors import UsageError


def checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself. Raises `UsageError` for what cannot be called."""
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called: give a function, a class or another callable")
    return function


def bad_arguments(args: object) -> UsageError:
    """What is raised for `args` that are neither a tuple nor a list."""
    return UsageError(f"`args` must be a tuple or list of arguments, not a {type(args).__name__}; write args=(value,)")


def bad_callee(to: object) -> UsageError:
    """What is raised for a `to` that cannot mean any worker."""
    return UsageError(f"`to` must be a worker's name, rank or WorkerInfo, not {to!r}")


def check_timeout(timeout: float) -> None:
    """Raises `UsageError` for what is no timeout: not a number, or less than 0."""
    try:
        if timeout >= 0:
            return
    except TypeError:
        raise UsageError(f"a timeout must be a number of seconds (0 is none), not {timeout!r}") from None
    raise UsageError(f"a timeout must be 0 (none) or more seconds, not {timeout}")

"""What may be called besides Python functions: torch's builtin operators, and script functions.

Each is found by its name at the other end, by a function of this module; its name and all of its arguments are the
arguments of that.

A script function has to be defined at both ends, under the same name. How many arguments it takes, and which, its
caller is told before anything is sent, as in torch; what types they have, the callee checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.jit._builtins import _find_builtin

from farcall.functions import mark_async
from farcall.futures import Future
from farcall.pytorch.futures import adopted

Call: TypeAlias = tuple[Callable[..., Any], Sequence[Any] | None, Mapping[str, Any] | None]
"""A function and its arguments."""

_MARK = "_wrapped_async_rpc_function"


def callee_of(
    function: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> Call:
    """What to call in place of it, and with what. A Python function is called itself, with its own arguments.

    Raises `RuntimeError` if it is a script function, and not with these arguments.
    """
    builtin = _find_builtin(function)
    if builtin is not None:
        return builtin_call(builtin, args, kwargs)
    marked = getattr(function, _MARK, None)
    script = function if marked is None else marked
    if not isinstance(script, torch.jit.ScriptFunction):
        return function, args, kwargs
    _check_arguments(script, args or (), kwargs or {})
    return script_call(torch._jit_internal._qualified_name(script), args, kwargs, marked is not None)


# Builtin operators


def builtin_call(name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Call:
    """The call of a builtin operator: `aten::add`, say."""
    return run_builtin, (name, tuple(args or ()), dict(kwargs or {})), None


def run_builtin(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a builtin operator. Raises `RuntimeError` if it has no version for such arguments."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)


# Script functions


def script_call(
    name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, is_async_execution: bool
) -> Call:
    """The call of the script function of that qualified name; with `is_async_execution`, it gives a future."""
    run = run_async_script if is_async_execution else run_script
    return run, (name, tuple(args or ()), dict(kwargs or {})), None


def run_script(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a script function. Raises what it raises, `RuntimeError` if there is none of that name here."""
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        module = name.removeprefix("__torch__.").rpartition(".")[0] or "the script"
        raise RuntimeError(
            f"there is no script function `{name}` here: {module} has to be imported on this worker as on its caller, "
            "before it is called"
        )
    return function(*args, **kwargs)


def run_async_script(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a script function whose caller waits for the future that it returns."""
    return run_script(name, args, kwargs)


def _future_of(name: str, result: Any) -> Future[Any]:
    future = adopted(result)
    if future is None:
        inferred = torch._C._jit_try_infer_type(result)
        kind = inferred.type().kind().removesuffix("Type") if inferred.success() else type(result).__name__
        raise RuntimeError(f"Async functions must return an IValue of Future type, but got {kind}")
    return future


mark_async(run_async_script, run_async_script, _future_of)


def _check_arguments(script: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    schema = script.schema
    wanted = [argument.name for argument in schema.arguments]
    if len(args) > len(wanted):
        raise RuntimeError(
            f"{script.name}() expected at most {len(wanted)} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {schema}"
        )
    for name in kwargs:
        if name not in wanted:
            raise RuntimeError(f"Unknown keyword argument '{name}' for operator '{script.name}'. Schema: {schema}")
        if name in wanted[: len(args)]:
            raise RuntimeError(
                f"{script.name}() got argument '{name}' twice, by its place and by its name. Declaration: {schema}"
            )
    for argument in schema.arguments[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            raise RuntimeError(
                f"{script.name}() is missing value for argument '{argument.name}'. Declaration: {schema}"
            )

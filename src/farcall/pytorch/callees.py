"""What may be called besides Python functions: torch's builtin operators, script functions, and calls that a program
pickles itself.

Operators and script functions are found by name at the other end, by a function of this module; the name and all
arguments are the arguments of that.

A script function has to be defined at both ends, under the same name. How many arguments it takes, and which, its
caller is told before anything is sent, as in torch; what types they have, the callee checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.jit import _builtins

from farcall.backends.running import run_here
from farcall.functions import mark_async
from farcall.futures import Future
from farcall.pytorch import internal
from farcall.pytorch.futures import adopted
from farcall.pytorch.guarding import check_kinds, find_operator, judge_function, judge_script, may_be_called
from farcall.pytorch.internal import PythonUDF

Call: TypeAlias = tuple[Callable[..., Any], Sequence[Any] | None, Mapping[str, Any] | None]
"""A function and its arguments."""

_MARK = "_wrapped_async_rpc_function"


def callee_of(
    function: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    pickler: Any = internal._internal_rpc_pickler,
) -> Call:
    """What to call in place of it, and with what. A Python function is called itself, with its own arguments.

    `pickler`: what pickles the call of a Python function, if it is not ours.
    Raises `RuntimeError` if it is a script function, and not with these arguments.
    """
    # As `_find_builtin`, which is a frame in a frame, on the path of every call:
    builtin = (_builtins._builtin_table or _builtins._get_builtin_table()).get(id(function))
    if builtin is not None:
        return builtin_call(builtin, args, kwargs)
    marked = getattr(function, _MARK, None)
    script = function if marked is None else marked
    if not isinstance(script, torch.jit.ScriptFunction):
        if pickler is not internal._internal_rpc_pickler:
            return (
                run_pickled,
                (_PickledCall(pickler, PythonUDF(function, tuple(args or ()), dict(kwargs or {}))),),
                None,
            )
        return function, args, kwargs
    _check_arguments(script, args or (), kwargs or {})
    return script_call(torch._jit_internal._qualified_name(script), args, kwargs, marked is not None)


# Builtin operators


def builtin_call(name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Call:
    """The call of a builtin operator: `aten::add`, say."""
    return run_builtin, (name, tuple(args or ()), dict(kwargs or {})), None


@may_be_called
def run_builtin(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a builtin operator. Raises `RuntimeError` if there is none, or no version of it for such arguments.

    `NotAllowedError` if others may not call it here.
    """
    return find_operator(name)(*args, **kwargs)


# Script functions


def script_call(
    name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, is_async_execution: bool
) -> Call:
    """The call of the script function of that qualified name; with `is_async_execution`, it gives a future."""
    run = run_async_script if is_async_execution else run_script
    return run, (name, tuple(args or ()), dict(kwargs or {})), None


@may_be_called
def run_script(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a script function. Raises `RuntimeError` with what it raises, and if there is none of that name here.

    `NotAllowedError` if others may not call it here.
    """
    check_kinds((name, str))
    judge_script(name)
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        module = name.removeprefix("__torch__.").rpartition(".")[0] or "the script"
        raise RuntimeError(
            f"there is no script function `{name}` here: {module} has to be imported on this worker as on its caller, "
            "before it is called"
        )
    try:
        return function(*args, **kwargs)
    except torch.jit.Error as error:  # what its own code raised; torch tells callers of that as of all else
        raise RuntimeError(str(error)) from None


@may_be_called
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


# Calls that a program pickles itself


class _PickledCall:
    """A call that is pickled by a pickler of the program's: late, as references are counted in a message only."""

    def __init__(self, pickler: Any, udf: PythonUDF) -> None:
        self._pickler = pickler
        self.udf = udf

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return internal.deserialize, tuple(self._pickler.serialize(self.udf))


def pickled_call(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Call:
    """The call of what is pickled already."""
    return run_bytes, (pickled, list(tensors)), None


def run_pickled(call: _PickledCall | PythonUDF | AttributeError) -> Future[Any]:
    """Runs a call that came. Raises `AttributeError` if it names what is not defined here.

    `NotAllowedError` if others may not call that function here.
    """
    if isinstance(call, AttributeError):
        raise call
    udf = call.udf if isinstance(call, _PickledCall) else call
    judge_function(udf.func)
    return run_here(udf.func, udf.args, udf.kwargs)


def run_bytes(pickled: bytes, tensors: list[torch.Tensor]) -> Future[Any]:
    """Runs a call whose pickle came. Raises as `run_pickled`."""
    return run_pickled(internal.deserialize(pickled, tensors))


for _function in (run_pickled, run_bytes):
    mark_async(_function, _function, lambda name, result: result)

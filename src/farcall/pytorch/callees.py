"""Calls of anything but Python functions: torch's builtin operators, script functions, and calls that programs pickle.

An operator or script function cannot be pickled, so it is sent by name. A function of this module (`run_builtin`,
`run_script`) is called in its place, with the name and all arguments, and finds the operator or script function there.

A script function must be defined on both workers under the same name. As in torch, the caller checks the number and the
names of its arguments before anything is sent, and the callee checks their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.jit import _builtins

from farcall.backends.interface import run_here
from farcall.functions import mark_async
from farcall.futures import Future
from farcall.pytorch import internal
from farcall.pytorch.allow_list import check_function, check_kinds, check_script, find_operator, may_be_called
from farcall.pytorch.futures import to_farcall_future
from farcall.pytorch.internal import PythonUDF

Call: TypeAlias = tuple[Callable[..., Any], Sequence[Any] | None, Mapping[str, Any] | None]
"""The function to call, and its positional and keyword arguments."""

_ASYNC_EXECUTION_ATTRIBUTE = "_wrapped_async_rpc_function"
"""torch's `async_execution` stores the decorated function under this attribute."""


def make_call(
    function: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    pickler: Any = internal._internal_rpc_pickler,
) -> Call:
    """Returns what to call remotely in place of `function`: a function, its positional and its keyword arguments.

    Every call uses this. For a Python function and the default pickler, these are `function`, `args` and `kwargs`. For
    an operator or a script function, it is a function of this module, which finds it by name on the other worker.

    Args:
        function: A Python function, a builtin operator, or a script function. It is not checked.
        args: The positional arguments; None for none.
        kwargs: The keyword arguments; None for none.
        pickler: Pickles calls of Python functions. With the default, farcall pickles them itself. With another one,
            `run_pickled` is returned, and as its argument a call that this pickler pickles.

    Raises:
        RuntimeError: A script function does not accept these arguments.
    """
    # The same as torch's `_find_builtin`, without its two nested function calls.
    builtin = (_builtins._builtin_table or _builtins._get_builtin_table()).get(id(function))
    if builtin is not None:
        return builtin_call(builtin, args, kwargs)
    marked = getattr(function, _ASYNC_EXECUTION_ATTRIBUTE, None)
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


# -- builtin operators


def builtin_call(name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> Call:
    """Returns what to call remotely in place of a builtin operator.

    That is `run_builtin`, its positional arguments, and None for no keyword arguments. Nothing is checked.

    Args:
        name: The name of the operator, for example `aten::add`.
        args: The positional arguments of the operator; None for none.
        kwargs: Its keyword arguments; None for none.
    """
    return run_builtin, (name, tuple(args or ()), dict(kwargs or {})), None


@may_be_called
def run_builtin(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Called remotely: runs a builtin operator of torch, and returns its result.

    Args:
        name: The name of the operator, for example `aten::add`.
        args: Its positional arguments, a tuple.
        kwargs: Its keyword arguments, a dict.

    Raises:
        RuntimeError: There is no such operator, or no overload for these arguments.
        NotAllowedError: The allow-list of this worker does not have it.
        TypeError: `name`, `args` or `kwargs` has the wrong type.
    """
    check_kinds((name, str), (args, tuple), (kwargs, dict))  # `*args` would expand a `range` of any length
    return find_operator(name)(*args, **kwargs)


# -- script functions


def script_call(
    name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, is_async_execution: bool
) -> Call:
    """Returns what to call remotely in place of a script function.

    That is `run_async_script` if `is_async_execution` is True, else `run_script`; its positional arguments; and None
    for no keyword arguments. Nothing is checked.

    Args:
        name: The qualified name of the script function, for example `__torch__.service.predict`.
        args: Its positional arguments; None for none.
        kwargs: Its keyword arguments; None for none.
        is_async_execution: True if the function returns a future, whose result the caller gets.
    """
    run = run_async_script if is_async_execution else run_script
    return run, (name, tuple(args or ()), dict(kwargs or {})), None


@may_be_called
def run_script(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Called remotely: runs a script function, and returns its result.

    Args:
        name: The qualified name of the function, for example `__torch__.service.predict`.
        args: Its positional arguments, a tuple.
        kwargs: Its keyword arguments, a dict.

    Raises:
        RuntimeError: The function raised, or there is none of this name here.
        NotAllowedError: The allow-list of this worker does not have it.
        TypeError: `name`, `args` or `kwargs` has the wrong type.
    """
    check_kinds((name, str), (args, tuple), (kwargs, dict))
    check_script(name)
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        module = name.removeprefix("__torch__.").rpartition(".")[0] or "the script"
        raise RuntimeError(
            f"there is no script function `{name}` on this worker: import {module} here, as on the caller, before the "
            "function is called"
        )
    try:
        return function(*args, **kwargs)
    except torch.jit.Error as error:  # raised by the function's own code; torch's callers get a RuntimeError as well
        raise RuntimeError(str(error)) from None


@may_be_called
def run_async_script(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Called remotely: runs a script function that returns a future. The caller gets the result of the future.

    Args:
        name: The qualified name of the function, for example `__torch__.service.predict`.
        args: Its positional arguments, a tuple.
        kwargs: Its keyword arguments, a dict.

    Raises:
        RuntimeError: The function raised, or there is none of this name here. If it returns no future, the caller gets
            a `RuntimeError` as well.
        NotAllowedError: The allow-list of this worker does not have it.
        TypeError: `name`, `args` or `kwargs` has the wrong type.
    """
    return run_script(name, args, kwargs)


def _returned_future(name: str, result: Any) -> Future[Any]:
    """Returns the future that a script function returned, as one of farcall.

    Raises `RuntimeError` if `result` is not a future. `name` is ignored.
    """
    future = to_farcall_future(result)
    if future is None:
        inferred = torch._C._jit_try_infer_type(result)
        kind = inferred.type().kind().removesuffix("Type") if inferred.success() else type(result).__name__
        raise RuntimeError(f"Async functions must return an IValue of Future type, but got {kind}")
    return future


mark_async(run_async_script, run_async_script, _returned_future)


def _check_arguments(script: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Returns None if a script function accepts these arguments, else raises `RuntimeError` in torch's words.

    Only the number and the names of the arguments are checked, not their types.

    Args:
        script: The script function.
        args: The positional arguments; empty for none.
        kwargs: The keyword arguments; empty for none.
    """
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
                f"{script.name}() got argument '{name}' twice, by position and by name. Declaration: {schema}"
            )
    for argument in schema.arguments[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            raise RuntimeError(
                f"{script.name}() is missing value for argument '{argument.name}'. Declaration: {schema}"
            )


# -- calls that a program pickles itself


class _PickledCall:
    """A call of a Python function that the program's own pickler pickles. It is the argument of `run_pickled`.

    The pickler runs while the message is pickled, because references can only be counted then.

    Args:
        pickler: The program's pickler: its `serialize(value)` returns a pickle and a list of tensors. It is not
            checked.
        udf: The function and its arguments.
    """

    def __init__(self, pickler: Any, udf: PythonUDF) -> None:
        self._pickler = pickler
        self.udf = udf

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return internal.deserialize, tuple(self._pickler.serialize(self.udf))


def pickled_call(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Call:
    """Returns what to call remotely in place of a call that a program has pickled.

    That is `run_bytes`, its positional arguments, and None for no keyword arguments. Nothing is checked.

    Args:
        pickled: The pickle of a `PythonUDF`, a function with its arguments.
        tensors: The tensors of the pickle; may be empty.
    """
    return run_bytes, (pickled, list(tensors)), None


def run_pickled(call: _PickledCall | PythonUDF | AttributeError) -> Future[Any]:
    """Called remotely: runs a call that the program's pickler has pickled, and returns a future of its result.

    The future fails with what the function raises.

    Args:
        call: The function and its arguments. An `AttributeError`, which says that the function is not defined here, is
            raised.

    Raises:
        NotAllowedError: The allow-list of this worker does not have the function.
    """
    if isinstance(call, AttributeError):
        raise call
    udf = call.udf if isinstance(call, _PickledCall) else call
    check_function(udf.func)
    return run_here(udf.func, udf.args, udf.kwargs, internal.runner_of(udf.func))


def run_bytes(pickled: bytes, tensors: list[torch.Tensor]) -> Future[Any]:
    """Called remotely: unpickles a call and runs it, and returns a future of its result.

    The future fails with what the function raises.

    Args:
        pickled: The pickle of a `PythonUDF`, a function with its arguments.
        tensors: The tensors of the pickle; may be empty.

    Raises:
        SerializationError: The pickle is damaged.
        AttributeError: The function is not defined here.
        NotAllowedError: The allow-list of this worker forbids it.
    """
    return run_pickled(internal.deserialize(pickled, tensors))


for _function in (run_pickled, run_bytes):
    mark_async(_function, _function, lambda name, result: result)

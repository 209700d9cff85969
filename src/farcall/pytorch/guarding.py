"""The option `allow` at the torch edge: pickles inside of calls, functions inside of envelopes, operators, scripts.

A worker that restricts what others may do (`farcall.security`) judges the function of a request and the pickle of its
arguments. Here some arguments hold more: a pickle of their own, a function, the name of an operator. They are judged by
the same list, whoever may call the function that they are handed to.

Rules
- The list is that of this process's agent; there is no other agent at this edge. A thread that serves others and finds
  no agent any more loads nothing.
- A function in an envelope is judged by the name of where it is defined.
- An operator is judged as `torch.ops.<namespace>.<name>`. One that opens files has to be on the list by that very name.
- A script function is judged by its qualified name without torch's prefix: `service.predict`.
- The functions by which this edge's workers talk among themselves may be called always (`may_be_called`); each of them
  looks at its arguments, or does no harm with any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, TypeVar

import torch

from farcall.api import current_agent, is_initialized
from farcall.errors import NotAllowedError
from farcall.security.allowed import Allowed, register_own
from farcall.serialization import find_guarded, loads, loads_guarded, resolve_function
from farcall.sleeping import on_serving_thread

F = TypeVar("F", bound=Callable[..., Any])

_SCRIPTS: Final = "__torch__."
_FILES: Final = ("file", "path")
"""Parts of the names of texts that an operator opens."""

_guards: Final[weakref.WeakKeyDictionary[Any, Allowed]] = weakref.WeakKeyDictionary()


def guard_here() -> Allowed | None:
    """The list of this worker; None if it has none. Raises `NotInitializedError` if it serves, and has ended."""
    if not on_serving_thread() and not is_initialized():
        return None
    return _guard_of(current_agent())


def _guard_of(agent: Any) -> Allowed | None:
    options = getattr(agent, "options", None)
    if options is None or options.allow is None:
        return None
    guard = _guards.get(agent)
    if guard is None:
        guard = _guards[agent] = Allowed(options.allow, agent.info.name)
    return guard


def load(pickled: bytes) -> Any:
    """What was pickled. Raises `SerializationError`; `NotAllowedError` for what this worker does not allow."""
    guard = guard_here()
    return loads(pickled) if guard is None else loads_guarded(pickled, (), guard)


def judge_function(function: Any) -> None:
    """Raises `NotAllowedError` if others may not call that here: a function that came inside of something else."""
    guard = guard_here()
    if guard is None:
        return
    if not isinstance(function, (FunctionType, BuiltinFunctionType, type)) or not isinstance(function.__module__, str):
        guard.check_by_value()
    module, name = function.__module__, function.__qualname__
    guard.check_function(module, name)
    if find_guarded(module, name, guard) is not function:
        raise NotAllowedError(f"`{module}.{name}` is not allowed: something else has that name")


def find_function(named: bytes, agent: Any) -> Any:
    """The function that these bytes name (`encode_function`). Raises `SerializationError` if there is none here.

    `NotAllowedError` if others may not call it at that agent, which is this worker's.
    """
    guard = _guard_of(agent) if agent.options.allow is not None else None
    if guard is None:
        return resolve_function(named)
    module, _, name = named.decode(errors="replace").partition("\0")
    guard.check_function(module, name)
    return find_guarded(module, name, guard)


def judge_script(name: str) -> None:
    """Raises `NotAllowedError` if others may not run the script function of that qualified name here."""
    guard = guard_here()
    if guard is not None:
        module, _, function = name.removeprefix(_SCRIPTS).rpartition(".")
        guard.check_listed(f"{module}.{function}")


def find_operator(name: str) -> Callable[..., Any]:
    """The operator of that name: `aten::add`, say. Raises `RuntimeError` if there is none.

    `NotAllowedError` if others may not call it here.
    """
    namespace, _, operator = name.partition("::")
    full = f"torch.ops.{namespace}.{operator}"
    guard = guard_here()
    if guard is not None and not guard.has(full):
        guard.check_listed(full)
        if any(word in argument.name for argument in _texts(name) for word in _FILES):
            raise NotAllowedError(
                f"it is not allowed to call `{full}` here, as it opens files: for that, this very name has to be in "
                "the option allow"
            )
    # Asked for by name first: torch.ops has other attributes, too, one of which loads libraries.
    found: Any = getattr(getattr(torch.ops, namespace), operator) if torch._C._jit_get_operation(name)[0] else None
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise RuntimeError(f"there is no operator `{name}` here; import what defines it on this worker, too")
    packet: Callable[..., Any] = found
    return packet


def _texts(name: str) -> list[Any]:
    """The arguments of all versions of an operator that may be texts."""
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return [argument for schema in schemas for argument in schema.arguments if "str" in str(argument.type)]


def may_be_called(function: F) -> F:
    """Marks a function of this edge as one that other workers may call on any worker."""
    register_own(function)
    return function


def check_kinds(*expected: tuple[Any, type]) -> None:
    """Raises `TypeError` if one of these values is not exactly of its type: it came from another worker."""
    for value, kind in expected:
        if type(value) is not kind:
            raise TypeError(f"a {type(value).__name__} came from another worker in place of a {kind.__name__}")


def check_numbers(*numbers: Any) -> None:
    """Raises `TypeError` if one of these is no number of a context or message: it came from another worker."""
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 64:
            raise TypeError("what came from another worker in place of the number of a context or message is none")


def check_tensors(tensors: Any) -> None:
    """Raises `TypeError` for anything but a list of tensors."""
    check_kinds((tensors, list))
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a {type(tensor).__name__} came from another worker in place of a tensor")

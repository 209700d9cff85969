"""The option `allow` in this package: checks what calls of torch programs contain besides plain data.

A worker with an allow-list (`farcall.security`) checks the function of a request, and unpickles its arguments as plain
data only. Calls of this package can contain more in their arguments: a pickle of their own, a function, the name of an
operator. These are checked against the same list, whichever function they are passed to.

Rules
- The list is that of this process's agent. A thread that serves others after the agent was closed loads nothing.
- A function in an argument is checked by the module and the name of its definition.
- An operator is checked as `torch.ops.<namespace>.<name>`. An operator that opens files must be on the list by exactly
  that name.
- A script function is checked by its qualified name without torch's prefix: `service.predict`.
- The functions by which workers of this package talk to each other may always be called (`may_be_called`). Each of them
  checks its arguments, or does no harm whatever they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, TypeVar

import torch

from farcall.api import current_agent, is_initialized
from farcall.errors import NotAllowedError
from farcall.gate import on_serving_thread
from farcall.security.allowed import AllowList, register_internal_function
from farcall.serialization import find_allowed, loads, loads_restricted, resolve_function

F = TypeVar("F", bound=Callable[..., Any])

_SCRIPT_PREFIX: Final = "__torch__."
_FILE_ARGUMENT_WORDS: Final = ("file", "path")
"""An operator with a text argument whose name contains one of these words opens files."""

_allow_lists: Final[weakref.WeakKeyDictionary[Any, AllowList]] = weakref.WeakKeyDictionary()


def current_allow_list() -> AllowList | None:
    """Returns the allow-list of this worker; None if it has none, or if this process is not a worker.

    In a function that runs for another worker, raises `NotInitializedError` if this process has no agent any more.
    """
    if not on_serving_thread() and not is_initialized():
        return None
    return _allow_list_of(current_agent())


def _allow_list_of(agent: Any) -> AllowList | None:
    """Returns the allow-list of an agent, made from its option `allow`; None if the option is None or missing."""
    options = getattr(agent, "options", None)
    if options is None or options.allow is None:
        return None
    allow_list = _allow_lists.get(agent)
    if allow_list is None:
        allow_list = _allow_lists[agent] = AllowList(options.allow, agent.info.name)
    return allow_list


def load(pickled: bytes) -> Any:
    """Unpickles a pickle that came from another worker; on a worker with an allow-list, as plain data only.

    Raises `SerializationError` if the pickle is damaged, and `NotAllowedError` if it needs something that the
    allow-list does not have.
    """
    allow_list = current_allow_list()
    return loads(pickled) if allow_list is None else loads_restricted(pickled, (), allow_list)


def check_function(function: Any) -> None:
    """Returns None if other workers may call this function here, else raises `NotAllowedError`.

    On a worker without an allow-list, they may call any. With one, a function or class is checked by its module and
    name; any other callable object is refused.
    """
    allow_list = current_allow_list()
    if allow_list is None:
        return
    if not isinstance(function, (FunctionType, BuiltinFunctionType, type)) or not isinstance(function.__module__, str):
        allow_list.check_by_value()
    module, name = function.__module__, function.__qualname__
    allow_list.check_function(module, name)
    if find_allowed(module, name, allow_list) is not function:
        raise NotAllowedError(f"`{module}.{name}` is not allowed: that name stands for something else on this worker")


def find_function(named: bytes, agent: Any) -> Any:
    """Returns the function that a request names.

    Args:
        named: The module and the name of the function, with a zero byte between them.
        agent: The agent of this worker.

    Raises:
        SerializationError: `named` is malformed, or there is no such function on this worker.
        NotAllowedError: The allow-list of this worker does not have it.
    """
    allow_list = _allow_list_of(agent) if agent.options.allow is not None else None
    if allow_list is None:
        return resolve_function(named)
    module, _, name = named.decode(errors="replace").partition("\0")
    allow_list.check_function(module, name)
    return find_allowed(module, name, allow_list)


def check_script(name: str) -> None:
    """Returns None if other workers may run this script function here, else raises `NotAllowedError`.

    On a worker without an allow-list, they may run any; whether it exists is not checked.

    Args:
        name: The qualified name of the function, for example `__torch__.service.predict`. The list has it without the
            prefix: `service.predict`.
    """
    allow_list = current_allow_list()
    if allow_list is not None:
        module, _, function = name.removeprefix(_SCRIPT_PREFIX).rpartition(".")
        allow_list.check_listed(f"{module}.{function}")


def find_operator(name: str) -> Callable[..., Any]:
    """Returns a builtin operator of torch by its name, for example `aten::add`.

    Raises `RuntimeError` if there is none, and `NotAllowedError` if the allow-list of this worker does not have it.
    """
    namespace, _, operator = name.partition("::")
    full = f"torch.ops.{namespace}.{operator}"
    allow_list = current_allow_list()
    if allow_list is not None and not allow_list.has(full):
        allow_list.check_listed(full)
        if any(word in argument.name for argument in _text_arguments(name) for word in _FILE_ARGUMENT_WORDS):
            raise NotAllowedError(
                f"it is not allowed to call `{full}` here, because it opens files: put exactly this name into the "
                "option allow of this worker"
            )
    # Check the name first: torch.ops also has attributes that are no operators, one of which loads libraries.
    found: Any = getattr(getattr(torch.ops, namespace), operator) if torch._C._jit_get_operation(name)[0] else None
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise RuntimeError(f"there is no operator `{name}` on this worker; import the module that defines it here, too")
    packet: Callable[..., Any] = found
    return packet


def _text_arguments(name: str) -> list[Any]:
    """Returns torch's descriptions of the arguments of the operator `name` that can be a str, in all its overloads.

    A description has the `name` and the `type` of one argument. Returns an empty list if no argument can be a str, or
    if there is no such operator.
    """
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return [argument for schema in schemas for argument in schema.arguments if "str" in str(argument.type)]


def may_be_called(function: F) -> F:
    """Decorator: lets other workers call this function on any worker, whatever its allow-list. Returns the function."""
    register_internal_function(function)
    return function


def check_kinds(*expected: tuple[Any, type]) -> None:
    """Returns None if each value is exactly of its type, else raises `TypeError`. For values from other workers.

    An object of a subclass is refused. Without pairs it returns None.

    Args:
        *expected: Pairs of a value and its type.
    """
    for value, kind in expected:
        if type(value) is not kind:
            raise TypeError(f"a {type(value).__name__} came from another worker in place of a {kind.__name__}")


def check_numbers(*numbers: Any) -> None:
    """Returns None if each value is an integer from 0 to 2**64 - 1, else raises `TypeError`.

    It is for values from other workers. A bool is refused. Without values it returns None.
    """
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 64:
            raise TypeError("something else came from another worker in place of the number of a context or message")


def check_tensors(tensors: Any) -> None:
    """Returns None if the value is a list of tensors, else raises `TypeError`. For values from other workers.

    The list may be empty.
    """
    check_kinds((tensors, list))
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a {type(tensor).__name__} came from another worker in place of a tensor")

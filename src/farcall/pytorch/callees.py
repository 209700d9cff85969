"""What may be called besides Python functions: torch's builtin operators, and script functions.

Each is found by its name at the other end, by a function of this module; its name and all of its arguments are the
arguments of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

_MARK = "_wrapped_async_rpc_function"


def callee_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to call in its place, and the first arguments of that; they are followed by its own as a tuple and a dict.

    A Python function is called itself, with its own arguments, and there are no first ones.
    """
    builtin = _find_builtin(function)
    if builtin is not None:
        return run_builtin, (builtin,)
    return function, ()


def run_builtin(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a builtin operator. Raises `RuntimeError` if it has no version for such arguments."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)

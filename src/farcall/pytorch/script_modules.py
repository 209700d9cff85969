"""Script modules as values: how they travel, and what a reference to one has to be told.

They travel as `torch.jit.save` writes them, so that the other end needs none of their Python classes; what arrives is a
`RecursiveScriptModule`, as with torch. Script classes are Python classes, too, and their objects travel as any.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from farcall.serialization import register_family_reducer


def reduce_script_module(module: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """What pickle makes of a script module. Raises `RuntimeError` if it cannot be saved."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return load_script_module, (file.getvalue(),)


def load_script_module(saved: bytes) -> Any:
    """The module again."""
    return torch.jit.load(io.BytesIO(saved))


# torch's own switches of whether its C++ references may be pickled with a script module; ours are in none.
_enable_jit_rref_pickle: Any = torch._C._distributed_rpc._enable_jit_rref_pickle
_disable_jit_rref_pickle: Any = torch._C._distributed_rpc._disable_jit_rref_pickle

register_family_reducer(torch.jit.ScriptModule, reduce_script_module)


def check_type_hint(value: Any, type_hint: Any) -> None:
    """Whether a reference may be made to this value, with this hint at its type.

    Compiled code has to know the interface of a script module, and torch wants it told for each; so do we, that a
    program which runs here runs there. Raises `RuntimeError` if the hint is missing, wrong, or there for anything else.
    """
    if not isinstance(value, torch.jit.ScriptModule):
        if type_hint is not None:
            raise RuntimeError(
                "type_hint should only be specified when the RRef being created contains a ScriptModule."
            )
        return
    if type_hint is None:
        raise RuntimeError(
            "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint."
        )
    name = torch._jit_internal._qualified_name(type_hint)
    kind = value._c._type()
    if not _is_interface_of(name, kind):
        raise RuntimeError(
            f"{kind.annotation_str} is not a subtype of the type hint: {name}, did you pass a valid interface type?"
        )


def _is_interface_of(name: str, kind: Any) -> bool:
    try:
        interface = torch._C.InterfaceType(name)
    except TypeError:  # there is none of that name
        return False
    return bool(kind.isSubtypeOf(interface))

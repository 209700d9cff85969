"""TorchScript modules as values: how they are serialized, and the type hint that a reference to one needs.

They are serialized with `torch.jit.save`, so the other worker does not need their Python classes. What arrives is a
`RecursiveScriptModule`, as in torch. Script classes are Python classes, and their objects are pickled as usual.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from farcall.pytorch.internal import _internal_rpc_pickler
from farcall.serialization import register_family_reducer

# Looked up now, because `install` replaces torch's module later.
_enable_in_torch: Final = torch._C._distributed_rpc._enable_jit_rref_pickle
_disable_in_torch: Final = torch._C._distributed_rpc._disable_jit_rref_pickle


def _enable_jit_rref_pickle() -> None:
    """Lets TorchScript pickle references of torch's own agent in this thread, outside of calls.

    It has no effect on references of farcall, which cannot be in script modules.
    """
    _enable_in_torch()


def _disable_jit_rref_pickle() -> None:
    """Forbids TorchScript again to pickle references of torch's own agent in this thread, outside of calls."""
    _disable_in_torch()


register_family_reducer(torch.jit.ScriptModule, _internal_rpc_pickler._script_module_reducer)


def check_type_hint(value: Any, type_hint: Any) -> None:
    """Checks the type hint of a reference to a value; returns None if it is right.

    Compiled code must know the interface of a script module, so torch requires a hint for each. farcall does the same,
    so that a program behaves alike on both.

    Args:
        value: The value of the reference.
        type_hint: An interface decorated with `torch.jit.interface`; None for a value that is not a script module.

    Raises:
        RuntimeError: The hint is missing or wrong for a script module, or was given for anything else.
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
    """Returns True if `name` is the name of a TorchScript interface that the type `kind` implements.

    Returns False if no interface has this name. `kind` is a type of TorchScript's.
    """
    try:
        interface = torch._C.InterfaceType(name)
    except TypeError:  # no interface has this name
        return False
    return bool(kind.isSubtypeOf(interface))

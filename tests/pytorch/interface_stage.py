"""`python interface_stage.py (torch | farcall) module ...`: what these modules of torch's define, as JSON.

With `farcall`, after `install()`. A process of its own for each, as one cannot go back. With `keywords`, for modules
that are C++: the parameters that can be given by name, of all functions and methods, as their documentation has them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import sys
from types import ModuleType
from typing import Any

OF_RPC = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.optim.optimizer",
    "torch.distributed.nn.api",
    "torch.distributed.nn.jit",
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
)
"""Where torch defines what belongs to RPC."""

Parameters = list[tuple[str, str, str]]
"""Name, kind and default of each; "" for none."""


def parameters(function: Any) -> Parameters | None:
    """Those of a function; None for anything else, and for what C++ does not tell."""
    if type(function).__name__ == "ScriptFunction":
        return [("compiled", "", "")]
    if not callable(function) or isinstance(function, type):
        return None
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    if [each.kind.name for each in found] == ["POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "VAR_KEYWORD"]:
        return None  # a method that hands everything on to one of C++
    return [
        (each.name, each.kind.name, "" if each.default is inspect.Parameter.empty else repr(each.default))
        for each in found
    ]


def belongs_to_rpc(module: ModuleType, value: Any) -> bool:
    """Whether it is of one of torch's modules of RPC, not something that a module has imported from elsewhere."""
    if isinstance(value, ModuleType):
        return value.__name__.startswith(module.__name__ + ".")
    if isinstance(value, logging.Logger):
        return False
    if type(value).__name__ == "ScriptFunction":
        return True
    home = getattr(value, "__module__", None)
    if home is None or home == "_thread":  # a constant, or a lock
        return not inspect.isroutine(value)
    return str(home).startswith(OF_RPC)


def members(value: Any) -> list[str]:
    """The names that a class has, for its objects and for itself."""
    fields = getattr(value, "__dataclass_fields__", {})
    names = {*dir(value), *fields} - {"_pybind11_conduit_v1_"}
    return sorted(name for name in names if not name.startswith("__"))


def interface(module: ModuleType, everything: bool) -> dict[str, Any]:
    """The names that a module has, and those of its classes' members, with their parameters."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("__") or name == "TYPE_CHECKING":
            continue
        if not everything and not belongs_to_rpc(module, value):
            continue
        found[name] = parameters(value)
        if isinstance(value, type) and (everything or str(value.__module__).startswith(OF_RPC)):
            found |= {f"{name}.{each}": parameters(getattr(value, each, None)) for each in members(value)}
    return found


def torchs_own(module: ModuleType) -> list[str]:
    """The names of functions and classes that are still those of torch's RPC."""
    values = {name: value for name, value in vars(module).items() if not isinstance(value, ModuleType)}
    return [name for name, value in values.items() if str(getattr(value, "__module__", None)).startswith(OF_RPC)]


SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\)(?: -> .*)?$", re.MULTILINE)
KEYWORD = re.compile(r"(?:^|, )(?!arg\d|self)(\w+): ")


def keywords(value: Any) -> list[str]:
    """What pybind11 says of a function's parameters; `arg0` and so on have no names."""
    found = {name for line in SIGNATURE.findall(value.__doc__ or "") for name in KEYWORD.findall(line)}
    return sorted(found)


def documented(module: ModuleType) -> dict[str, list[str]]:
    """All functions and methods of a module."""
    found: dict[str, list[str]] = {}
    for name, value in vars(module).items():
        if isinstance(value, type):
            methods = {f"{name}.{each}": method for each, method in vars(value).items() if callable(method)}
            found |= {each: keywords(method) for each, method in methods.items()}
        elif callable(value):
            found[name] = keywords(value)
    return found


def main(whose: str, *names: str) -> None:
    importlib.import_module("torch.distributed.rpc")
    if whose == "keywords":
        importlib.import_module("torch.distributed.rpc._testing")
        json.dump({name: documented(importlib.import_module(name)) for name in names}, sys.stdout)
        return
    if whose == "farcall":
        importlib.import_module("farcall.pytorch").install()
    modules = {name: importlib.import_module(name) for name in names}
    found = {name: interface(module, everything=whose == "farcall") for name, module in modules.items()}
    if whose == "farcall":
        own = (f"{name}.{each}" for name, module in modules.items() for each in torchs_own(module))
        found["torch's own"] = dict.fromkeys(own)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

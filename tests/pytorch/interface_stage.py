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
import typing
from types import ModuleType
from typing import Any

OF_RPC = ("torch.distributed.rpc", "torch.distributed.autograd", "torch._C._distributed_", "farcall.pytorch")
"""Where what belongs to RPC is defined."""

Parameters = list[tuple[str, str, str]]
"""Name, kind and default of each; "" for none."""


def parameters(function: Any) -> Parameters | None:
    """Those of a function; None for anything else, and for what C++ does not tell."""
    if not callable(function) or isinstance(function, type):
        return None
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    return [
        (each.name, each.kind.name, "" if each.default is inspect.Parameter.empty else repr(each.default))
        for each in found
    ]


def is_defined_by(module: ModuleType, value: Any) -> bool:
    """Whether it is the module's own, not something that it has imported from outside of RPC."""
    if isinstance(value, ModuleType):
        return value.__name__.startswith(module.__name__ + ".")
    if isinstance(value, (typing.TypeVar, typing.ParamSpec, logging.Logger)):
        return False
    home = getattr(value, "__module__", None)
    if not isinstance(value, type) and not inspect.isroutine(value):
        return home is None or home == "_thread" or str(home).startswith(OF_RPC)
    # A package hands out what its modules define; a module is asked for what is its own.
    return str(home).startswith(OF_RPC) if hasattr(module, "__path__") else home == module.__name__


def interface(module: ModuleType, everything: bool) -> dict[str, Parameters | None]:
    """The names that a module has, with their parameters."""
    return {
        name: parameters(value)
        for name, value in vars(module).items()
        if not name.startswith("__") and name != "TYPE_CHECKING" and (everything or is_defined_by(module, value))
    }


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
    found = {name: interface(importlib.import_module(name), everything=whose == "farcall") for name in names}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

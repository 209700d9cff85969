"""`install`: puts farcall in the place of `torch.distributed.rpc`, for programs that import that.

Modules are replaced as a whole, in `sys.modules` and as attributes of their parents. What torch has imported from them
by name before, it has bound: those names are replaced, too.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Final

import torch

from farcall.pytorch.children import install_in_children
from farcall.pytorch.later import substitute_later

_MODULES: Final = {
    "torch.distributed.rpc": "farcall.pytorch",
    "torch.distributed.rpc._utils": "farcall.pytorch._utils",
    "torch.distributed.rpc.api": "farcall.pytorch.api",
    "torch.distributed.rpc.backend_registry": "farcall.pytorch.backend_registry",
    "torch.distributed.rpc.constants": "farcall.pytorch.constants",
    "torch.distributed.rpc.functions": "farcall.pytorch.functions",
    "torch.distributed.rpc.internal": "farcall.pytorch.internal",
    "torch.distributed.rpc.options": "farcall.pytorch.options",
    "torch.distributed.rpc.rref_proxy": "farcall.pytorch.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": "farcall.pytorch.server_process_global_profiler",
    "torch.distributed.autograd": "farcall.pytorch.autograd",
    "torch._C._distributed_rpc": "farcall.pytorch.native",
}
"""What stands for which module of torch's."""

_LATER: Final = {
    "torch.distributed.rpc._testing": ("farcall.pytorch._testing", None),
    "torch.distributed.rpc._testing.faulty_agent_backend_registry": (
        "farcall.pytorch._testing.faulty_agent_backend_registry",
        None,
    ),
    "torch.distributed.optim.optimizer": ("farcall.pytorch.optim.optimizer", "DistributedOptimizer"),
    "torch.distributed.nn.api.remote_module": ("farcall.pytorch.nn.remote_module", "RemoteModule"),
    "torch.distributed.nn.jit.instantiator": ("farcall.pytorch.nn.instantiator", None),
}
"""The same for modules that torch imports only when asked to, and the name that the package of each has from it."""

_NAMES: Final = (
    ("torch._jit_internal", "RRef", "farcall.pytorch.rref", "RRef"),
    ("torch._jit_internal", "PyRRef", "farcall.pytorch.rref", "PyRRef"),
    ("torch.jit.annotations", "RRef", "farcall.pytorch.rref", "RRef"),
    ("torch.nn.parallel.distributed", "RRef", "farcall.pytorch.rref", "RRef"),
    ("torch.distributed", "Reducer", "farcall.pytorch.autograd.reducers", "Reducer"),
    ("torch.futures", "collect_all", "farcall.pytorch.futures", "collect_all"),
    ("torch.futures", "wait_all", "farcall.pytorch.futures", "wait_all"),
)
"""Where torch has bound a name of these modules when it was imported itself, and what stands for it."""


def install() -> None:
    """Puts farcall in the place of `torch.distributed.rpc`, its submodules, and what belongs to it. Twice is once.

    Call it before the program imports them. It starts nothing; processes that `multiprocessing` starts later have it,
    too. Raises `RuntimeError` if torch's own RPC is running.
    """
    native = sys.modules.get("torch._C._distributed_rpc")
    if native is not None and native.__name__ != "farcall.pytorch.native" and native._is_current_rpc_agent_set():
        raise RuntimeError("torch's own RPC is running in this process: call install() before init_rpc")
    for name, ours in _MODULES.items():
        _replace(name, importlib.import_module(ours))
    for module, name, ours, ours_name in _NAMES:
        setattr(importlib.import_module(module), name, getattr(importlib.import_module(ours), ours_name))
    substitute_later({name: ours for name, (ours, _) in _LATER.items()})
    for name, (ours, bound) in _LATER.items():
        if name in sys.modules:  # somebody has been earlier
            _replace(name, importlib.import_module(ours))
            if bound is not None:
                package = sys.modules[".".join(name.split(".")[:3])]
                setattr(package, bound, getattr(sys.modules[name], bound))
    install_in_children()


def _replace(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(torch._C if parent == "torch._C" else sys.modules[parent], child, module)

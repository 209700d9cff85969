"""`install`: puts farcall in place of `torch.distributed.rpc`, for programs that import torch's module.

Rules
- Modules are replaced as a whole, in `sys.modules` and as attributes of their parents.
- Modules that were imported earlier may hold torch's modules, classes and functions in global variables: torch itself
  does, the program may, and so may a fork server that has preloaded the program's packages. These variables are
  replaced as well, in all modules of the process.
- Other places where a program may keep torch's objects (a base class, an attribute, a default argument) cannot be
  found. For these, torch's own `init_rpc` is made to raise an error that says what to do.
- Some modules of torch take seconds to import, and most programs do not need them. `install` does not import them. A
  finder at the head of `sys.meta_path` replaces them when they are imported (`ReplacementFinder`).
- Processes that `multiprocessing` starts run on farcall as well: their preparation data contains an object that calls
  `install` when it is unpickled. Other processes must be started with `python -m farcall.pytorch`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from multiprocessing import spawn
from types import ModuleType
from typing import Any, Final

import torch

# -- modules that are imported later


@dataclass(frozen=True)
class ReplacementFinder(MetaPathFinder, Loader):
    """An import hook that loads our module when one of torch's is imported. It works once it is in `sys.meta_path`.

    Two finders with equal fields are equal. The names are not checked before they are imported.

    Attributes:
        modules: Maps the names of torch's modules to those of the modules that replace them.
        imported_with: Maps names of torch's modules to the names of further modules. When a module is imported, its
            further modules are imported, too. Empty by default.
    """

    modules: Mapping[str, str]
    imported_with: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec for a name in `modules`; None for any other. `path` and `target` are ignored."""
        return spec_from_loader(fullname, self) if fullname in self.modules else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that the import system creates an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts our module in place of `module`, which is being imported.

        Then imports the modules that `imported_with` has for its name. Raises `KeyError` if `module` is not in
        `modules`, and what these imports raise.
        """
        sys.modules[module.__name__] = importlib.import_module(self.modules[module.__name__])
        for name in self.imported_with.get(module.__name__, ()):
            importlib.import_module(name)


def replace_when_imported(modules: Mapping[str, str], imported_with: Mapping[str, Sequence[str]] | None = None) -> None:
    """Makes later imports of these modules of torch load our modules in their place.

    Does nothing if it was called with the same arguments before. Modules that are imported already are not replaced.
    The names are not checked before they are imported.

    Args:
        modules: Maps the names of torch's modules to those of our modules.
        imported_with: Maps names of torch's modules to the names of further modules. When a module is imported, its
            further modules are imported, too. None for none.
    """
    finder = ReplacementFinder(modules, imported_with or {})
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


# -- children of multiprocessing

_PREPARATION_KEY: Final = "farcall"
"""The key in the preparation data of a child process; `multiprocessing` ignores keys that it does not know."""

_PREPARATION_CODE: Final = "import sys; sys.path[:] = path; from farcall.pytorch import install; install()"
"""The code that a child process runs: it sets `sys.path`, and calls `install`."""


class _InstallWhenUnpickled:
    """Calls `farcall.pytorch.install` in the process that unpickles it. The constructor takes no arguments.

    It is pickled as code that also sets `sys.path`, because that process may not find farcall otherwise.
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (_PREPARATION_CODE, {"path": sys.path.copy()})


def install_in_children() -> None:
    """Makes child processes of `multiprocessing` run on farcall from now on: they call `install` when they start.

    It is for children that are spawned or come from a fork server. Does nothing the second time.
    """
    get_data = spawn.get_preparation_data
    if _PREPARATION_KEY in vars(get_data):
        return

    @functools.wraps(get_data)
    def get_more_data(name: str) -> dict[str, Any]:
        return {_PREPARATION_KEY: _InstallWhenUnpickled(), **get_data(name)}

    setattr(get_more_data, _PREPARATION_KEY, True)
    spawn.get_preparation_data = get_more_data


# -- installing

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
    "torch._C._distributed_autograd": "farcall.pytorch.autograd",
}
"""Maps the names of torch's modules that `install` replaces at once to the names of our modules."""

_LAZY_MODULES: Final = {
    "torch.distributed.rpc._testing": "farcall.pytorch._testing",
    "torch.distributed.rpc._testing.faulty_agent_backend_registry": (
        "farcall.pytorch._testing.faulty_agent_backend_registry"
    ),
    "torch.distributed.optim.optimizer": "farcall.pytorch.optim.optimizer",
    "torch.distributed.nn.api.remote_module": "farcall.pytorch.nn.remote_module",
    "torch.distributed.nn.jit.instantiator": "farcall.pytorch.nn.instantiator",
    "torch.distributed.nn.jit.templates.remote_module_template": "farcall.pytorch.nn.remote_module_template",
}
"""Maps the names of torch's modules that are replaced when they are imported to the names of our modules."""

_IMPORTED_WITH: Final = {
    "torch.distributed.nn.api.remote_module": (
        "torch.distributed.nn.jit.instantiator",
        "torch.distributed.nn.jit.templates.remote_module_template",
    )
}
"""Which of them torch imports with another one; programs find them as attributes of their packages."""

_SINGLE_NAMES: Final = (
    ("torch.distributed", "Reducer", "farcall.pytorch.autograd.reducers"),
    ("torch.futures", "collect_all", "farcall.pytorch.futures"),
    ("torch.futures", "wait_all", "farcall.pytorch.futures"),
)
"""Single names in other modules of torch's that are replaced: the module, the name, and our module that has it."""


def install() -> None:
    """Puts farcall in place of `torch.distributed.rpc`, its submodules, and torch's modules that use it.

    Call it before the program imports them. It starts nothing. Child processes that `multiprocessing` starts later run
    on farcall, too. Does nothing the second time.

    Raises:
        RuntimeError: torch's own RPC is running in this process.

    Example:
        import farcall.pytorch

        farcall.pytorch.install()
        import torch.distributed.rpc as rpc  # is farcall.pytorch
    """
    native = sys.modules.get("torch._C._distributed_rpc")
    if native is not None and not is_installed() and native._is_current_rpc_agent_set():
        raise RuntimeError("torch's own RPC is running in this process: call install() before init_rpc")
    own_modules = {name: importlib.import_module(ours) for name, ours in _MODULES.items()}
    own_modules |= {name: importlib.import_module(ours) for name, ours in _LAZY_MODULES.items() if name in sys.modules}
    torch_modules = {
        name: sys.modules[name] for name, ours in own_modules.items() if sys.modules.get(name, ours) is not ours
    }
    for name, ours in own_modules.items():
        _replace(name, ours)
    _rebind_everywhere(_find_replacements(torch_modules, own_modules))
    for module, name, ours_name in _SINGLE_NAMES:
        setattr(importlib.import_module(module), name, getattr(importlib.import_module(ours_name), name))
    replace_when_imported(_LAZY_MODULES, _IMPORTED_WITH)
    if "torch.distributed.rpc" in torch_modules:
        _disable_torch_init_rpc(torch_modules["torch.distributed.rpc"].init_rpc)
    install_in_children()


def is_installed() -> bool:
    """Returns True if `install` has put farcall in place of torch's modules in this process."""
    return getattr(sys.modules.get("torch._C._distributed_rpc"), "__name__", "") == "farcall.pytorch.native"


def replace_if_installed(name: str, module: ModuleType) -> None:
    """Replaces a module of torch's by our module. Does nothing if `install` was not called.

    It is for modules that torch creates only when it imports another module, so that `install` cannot replace them.

    Args:
        name: The name of torch's module. Raises `KeyError` if its parent is not imported.
        module: Our module.
    """
    if is_installed():
        _replace(name, module)


def _replace(name: str, module: ModuleType) -> None:
    """Replaces a module in `sys.modules`, and as an attribute of its parent package.

    Raises `KeyError` if the parent is not imported.
    """
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(torch._C if parent == "torch._C" else sys.modules[parent], child, module)


def _find_replacements(
    torch_modules: dict[str, ModuleType], own_modules: dict[str, ModuleType]
) -> dict[int, tuple[Any, Any]]:
    """Returns, by `id()`, each module, class and function of torch that has a replacement, with the replacement.

    Returns an empty dict for no modules.

    Args:
        torch_modules: torch's modules by name.
        own_modules: Our modules by torch's names. Replacements have the same name in the corresponding module. Raises
            `KeyError` if one of the names in `torch_modules` is missing.
    """
    replacements: dict[int, tuple[Any, Any]] = {}
    for module_name, module in torch_modules.items():
        ours = own_modules[module_name]
        replacements[id(module)] = module, ours
        for name, value in vars(module).items():
            # Only what torch defines in these modules; they also contain names that they have imported.
            if callable(value) and getattr(value, "__module__", None) in torch_modules and hasattr(ours, name):
                replacements[id(value)] = value, getattr(ours, name)
    return replacements


def _rebind_everywhere(replacements: dict[int, tuple[Any, Any]]) -> None:
    """Replaces global variables that hold one of these objects, in every imported module except farcall's own.

    Does nothing for an empty dict.

    Args:
        replacements: By `id()` of each object to replace: the object, and its replacement.
    """
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or module_name.partition(".")[0] == "farcall":
            continue
        for name, value in list(names.items()):
            if id(value) in replacements:
                names[name] = replacements[id(value)][1]


def _disable_torch_init_rpc(init_rpc: Any) -> None:
    """Makes torch's own `init_rpc` raise `RuntimeError`, for programs that have kept it where `install` misses it.

    The code of the given function itself is changed, so that all its users are affected.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "this is torch's own init_rpc: the program has kept it, for example as an attribute or a default argument, "
            "from before farcall.pytorch.install() was called. Call install() before the program imports "
            "torch.distributed.rpc, or run the program with `python -m farcall.pytorch`"
        )

    # The code of the function itself is replaced, because the program calls this very object.
    init_rpc.__code__ = refuse.__code__
    init_rpc.__defaults__ = init_rpc.__kwdefaults__ = None

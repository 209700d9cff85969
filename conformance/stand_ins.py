"""A module of tests that cannot be imported does not take the others with it.

Torch's `rpc_utils` imports all modules of tests. On an implementation that lacks a name, one of them may fail as it is
imported, and then none could be run. Inside `tolerated()`, such a module is empty instead: whoever wants one of its
classes gets an empty class, which has no tests, and the reason is noted.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType


class _Empty(ModuleType):
    """In place of a module that failed."""

    def __getattr__(self, name: str) -> type:
        # Only classes have tests. Who wants anything else from here fails in turn, and is noted in turn.
        if not name[:1].isupper():
            raise AttributeError(f"{self.__name__} could not be imported, so there is no {name} in it")
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Tolerant(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, reasons: dict[str, str]) -> None:
        self._loader = loader
        self._reasons = reasons

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except Exception as error:
            traceback.print_exc()
            self._reasons[module.__name__] = f"{module.__name__} cannot be imported: {type(error).__name__}: {error}"
            # Half of its classes may be there by now: they must not run without the rest.
            for name in [name for name in vars(module) if not name.startswith("__")]:
                delattr(module, name)
            module.__class__ = _Empty


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, prefix: str, reasons: dict[str, str]) -> None:
        self._prefix = prefix
        self._reasons = reasons

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix) or "test" not in fullname.rpartition(".")[2]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Tolerant(spec.loader, self._reasons)
        return spec


@contextmanager
def tolerated(prefix: str) -> Iterator[dict[str, str]]:
    """Within it, modules of tests below this prefix may fail: they are noted by name, with the reason."""
    reasons: dict[str, str] = {}
    finder = _Finder(prefix, reasons)
    sys.meta_path.insert(0, finder)
    try:
        yield reasons
    finally:
        sys.meta_path.remove(finder)

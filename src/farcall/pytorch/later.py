"""Modules that stand for torch's from the moment that somebody imports those, and not before.

Some modules of torch's take seconds to import, as does what has to be imported before them, and most programs need none
of them. So nothing is imported for them by `install`: a finder at the head of `sys.meta_path` waits for their names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


@dataclass(frozen=True)
class Substitutes(MetaPathFinder, Loader):
    """Finds our modules by the names of torch's."""

    modules: Mapping[str, str]
    """Ours by torch's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For a name of torch's: ours. None for any other."""
        return spec_from_loader(fullname, self) if fullname in self.modules else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Nothing of its own."""

    def exec_module(self, module: ModuleType) -> None:
        """Puts ours in the place of the module that was to be executed. Raises what the import of ours raises."""
        sys.modules[module.__name__] = importlib.import_module(self.modules[module.__name__])


def substitute_later(modules: Mapping[str, str]) -> None:
    """From now on, whoever imports one of these names gets our module. Twice is once."""
    finder = Substitutes(modules)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)

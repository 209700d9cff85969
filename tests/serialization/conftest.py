"""Stand-ins for the script that a process runs, so that one process can play sender and receiver in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

MainMaker = Callable[..., ModuleType]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Iterator[MainMaker]:
    """Makes this process one that runs the given source: as a script, as its spawned child, or interactively."""

    def become_main(source: str, *, spawned: bool = False, interactive: bool = False) -> ModuleType:
        module = ModuleType("__mp_main__" if spawned else "__main__")
        if not interactive:
            module.__file__ = "script.py"
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, "__main__", module)
        if spawned:
            monkeypatch.setitem(sys.modules, "__mp_main__", module)
        else:
            monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
        return module

    had = sys.modules.get("__mp_main__")
    yield become_main
    if had is None:
        sys.modules.pop("__mp_main__", None)

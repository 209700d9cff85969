"""Whether torch's own C++ agent is started. An implementation that leans on it has passed nothing.

Torch has two agents, and every way to start one goes through the constructor of its class. The class of the faulty one
is made only when its module is imported.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

note: Path | None = None
"""The file that is made when an agent is started in this process or one forked from it."""


def watch(class_: Any) -> None:
    """Note each object of a class of torch's that is made from now on. A class of anybody else is left as it is."""
    if type(class_).__name__ != "pybind11_type" or not str(class_.__module__).startswith("torch._C"):
        return
    make = class_.__init__

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        if note is not None:
            note.touch()
        make(self, *args, **kwargs)

    class_.__init__ = make_and_note

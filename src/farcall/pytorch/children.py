"""Processes that `multiprocessing` starts afresh have farcall in the place of torch's RPC, if their parent has.

A forked child has what its parent has. A spawned one, and one of a fork server, imports the script anew, and with it
torch's own RPC; the script cannot be asked to do anything against it, as it knows nothing of farcall. But before it
imports the script, such a child reads what its parent tells it of how to prepare (names, paths, ...). So the parent
tells it one thing more, which installs farcall when it is read. Other programs that it starts are not its children in
this sense: they are started as it was, by `python -m farcall.pytorch`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any, Final

_KEY: Final = "farcall"
"""Among what a child is told; `multiprocessing` itself reads only what it knows."""

_PREPARE: Final = "import sys; sys.path[:] = path; from farcall.pytorch import install; install()"


class _Installs:
    """Does so when it is unpickled. By code, as farcall may be on a path that the child is yet to be told of."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (_PREPARE, {"path": sys.path.copy()})


def install_in_children() -> None:
    """From now on, children of this process run on farcall. Twice is once."""
    tell = spawn.get_preparation_data
    if _KEY in vars(tell):
        return

    @functools.wraps(tell)
    def tell_more(name: str) -> dict[str, Any]:
        return {_KEY: _Installs(), **tell(name)}

    setattr(tell_more, _KEY, True)
    spawn.get_preparation_data = tell_more

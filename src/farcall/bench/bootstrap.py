"""The first thing that a process of the bench does; run as a file.

A process that serves or calls by another system must not pay for `import farcall`, which would be in the time that its
workers take to start. But whoever imports `farcall.bench.endpoint` imports the package that it is in first. So a
stand-in takes the package's place, with the same modules in it and nothing else, until farcall itself is measured.

Processes that are started by `multiprocessing` run this file again, under another name; for them it does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = str(Path(__file__).parents[1])


def stand_in() -> None:
    """Let `farcall.bench` be imported without `farcall`."""
    package = ModuleType("farcall")
    package.__path__ = [_PACKAGE]
    sys.modules["farcall"] = package


if __name__ == "__main__":
    stand_in()
    from farcall.bench.endpoint import main

    main(int(sys.argv[1]))

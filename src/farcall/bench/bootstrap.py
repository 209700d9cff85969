"""The first code of a process of the benchmark; run as a file.

A process of another system must not pay for `import farcall`, because that would count as time that its workers take to
start. But importing `farcall.bench.endpoint` imports the package `farcall` first. So an empty module takes the place of
the package, with the same `__path__`, until farcall itself is measured (`farcall_rpc.import_farcall`).

Processes that `multiprocessing` starts run this file again under another name. It does nothing then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = str(Path(__file__).parents[1])
"""The directory of the package `farcall`."""


def install_stand_in() -> None:
    """Puts an empty module in place of `farcall` in `sys.modules`, whether `farcall` is imported already or not.

    So `farcall.bench` can be imported without running the package's own code.
    """
    package = ModuleType("farcall")
    package.__path__ = [_PACKAGE]
    sys.modules["farcall"] = package


if __name__ == "__main__":
    install_stand_in()
    from farcall.bench.endpoint import main

    main(int(sys.argv[1]))

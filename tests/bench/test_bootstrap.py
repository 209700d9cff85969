from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from farcall.bench import bootstrap

# As in a process of the bench, but for the pipe.
PROGRAM = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("bootstrap", sys.argv[1])
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
assert "farcall" not in sys.modules  # a process of multiprocessing: nothing is done
bootstrap.install_stand_in()
import farcall.bench.endpoint
from farcall.bench import farcall_rpc

print(sorted(name for name in sys.modules if name.startswith("farcall.") and not name.startswith("farcall.bench")))
print(farcall_rpc.import_farcall().init_rpc.__module__)
import farcall
print(farcall is farcall_rpc.import_farcall(), callable(farcall.rpc_sync))
"""


def test_an_end_imports_nothing_of_farcall_until_it_is_measured() -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(bootstrap.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (done.stdout.splitlines(), done.stderr) == (["[]", "farcall.api", "True True"], "")

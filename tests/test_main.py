"""`python -m farcall`."""

from __future__ import annotations

import subprocess
import sys


def test_it_is_the_farcall_command() -> None:
    done = subprocess.run([sys.executable, "-m", "farcall", "run"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: farcall run -n N [options]")

"""Counts what three of ruff's rules find: functions that are too complex, too many arguments, private access.

These rules were added late, so the tree has violations of each. `make check` compares their number with a baseline that
may only shrink. A `noqa` comment does not hide a violation from this count.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from architecture.shrinking_baseline import Counts

ROOT = Path(__file__).parents[2]
DIRECTORIES = ("src", "tests", "benchmarks", "conformance", "examples")
MAX_COMPLEXITY = 15
MAX_ARGUMENTS = 7


def count_lint_violations(root: Path = ROOT) -> Counts:
    """Returns how often each rule is violated in each file below the root.

    Raises:
        RuntimeError: ruff did not run; the message has what it printed.
    """
    command = [
        _ruff(), "check", "--isolated", "--no-cache", "--exit-zero", "--ignore-noqa", "--output-format", "json",
        "--target-version", "py311", "--select", "C901,PLR0913,SLF001",
        "--config", f"lint.mccabe.max-complexity={MAX_COMPLEXITY}",
        "--config", f"lint.pylint.max-args={MAX_ARGUMENTS}",
        *(name for name in DIRECTORIES if (root / name).is_dir()),
    ]  # fmt: skip
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        raise RuntimeError(f"ruff failed with status {result.returncode}: {result.stderr}")
    counts: Counts = {}
    for violation in json.loads(result.stdout):
        files = counts.setdefault(violation["code"], {})
        file = str(Path(violation["filename"]).relative_to(root))
        files[file] = files.get(file, 0) + 1
    return counts


def _ruff() -> str:
    """Returns the ruff of the environment that runs this, or else the one on the PATH."""
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise RuntimeError("ruff is not installed in this environment; `make check` sets one up that has it")
    return found

"""Type checkers see what the interface promises: mypy --strict and pyright accept `right.py` and refuse `wrong.py`.

Pyright comes as basedpyright, which brings all that it needs; pyright's own package downloads its program when it runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def marked() -> set[int]:
    """Returns the lines of `wrong.py` that must be reported."""
    lines = (HERE / "wrong.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# E")}


def test_the_wrong_program_has_marks() -> None:
    assert len(marked()) == 54


@pytest.mark.slow
def test_mypy(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--no-pretty",
        "--config-file",
        "/dev/null",
    ]
    cache = ["--cache-dir", str(tmp_path)]
    ended = subprocess.run(
        [*command, *cache, str(HERE / "right.py"), str(HERE / "wrong.py")],
        capture_output=True,
        text=True,
        timeout=55,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin"},
    )
    errors = re.findall(r"(\w+\.py):(\d+): error: (.*)", ended.stdout)
    assert [error for error in errors if error[0] != "wrong.py"] == [], ended.stdout + ended.stderr
    assert {int(line) for _, line, _ in errors} == marked(), ended.stdout


@pytest.mark.slow
def test_pyright(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is in the dev extra")
    settings = {
        "include": [str(HERE / "right.py"), str(HERE / "wrong.py")],
        "extraPaths": [str(ROOT / "src"), str(HERE)],
        "typeCheckingMode": "standard",
    }
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    ended = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(project)],
        capture_output=True,
        text=True,
        timeout=55,
    )
    found = [each for each in json.loads(ended.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    right = [each for each in found if not each["file"].endswith("wrong.py")]
    assert right == []
    assert {each["range"]["start"]["line"] + 1 for each in found} == marked(), ended.stdout

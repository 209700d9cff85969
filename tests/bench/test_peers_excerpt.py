"""The table of peers in README says what the page of the recorded run says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 50.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_the_table_in_the_readme_is_that_of_the_page() -> None:
    found = run("--check")
    assert (found.returncode, found.stderr) == (0, "")


def test_another_figure_is_noticed_and_written_anew(tmp_path: Path) -> None:
    page, readme = tmp_path / "benchmarks.md", tmp_path / "README.md"
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    page.write_text(text.replace("| Pyro5 | ", "| Pyro6 | "), encoding="utf-8")
    before = (ROOT / "README.md").read_text(encoding="utf-8")
    readme.write_text(before, encoding="utf-8")
    files = ("--page", str(page), "--readme", str(readme))
    found = run("--check", *files)
    assert found.returncode == 1
    assert "run python benchmarks/peers.py" in found.stderr
    assert run(*files).returncode == run("--check", *files).returncode == 0
    assert readme.read_text(encoding="utf-8") == before.replace("| Pyro5 | ", "| Pyro6 | ")

"""What `pip install farcall` brings: the wheel and the source distribution are built, looked into and used."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import farcall

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with both, built from this tree."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--target", "sdist", "-d"]
    subprocess.run([*command, directory], cwd=ROOT, check=True, capture_output=True, timeout=50)
    return directory


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> zipfile.ZipFile:
    (path,) = distributions.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert top == {"farcall", f"farcall-{farcall.__version__}.dist-info"}
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == modules
    assert "farcall/py.typed" in wheel.namelist()


def test_metadata_names_version_and_urls(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(path).decode())
    assert metadata["Version"] == farcall.__version__
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])} >= {"Homepage", "Changelog", "Issues"}


def test_source_distribution_has_what_is_needed_to_build_and_test(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "hatch_build.py",
        "src/farcall/__init__.py",
        "src/farcall/_native/module.c",
        "src/farcall/_native/ring.h",
        "tests/conftest.py",
        "tests/native/ring_test.c",
    } <= names
    assert not {name for name in names if name.startswith((".venv", ".git/")) or "__pycache__" in name}
    assert not {name for name in names if name.endswith(".so")}


def test_installed_wheel_runs_a_group(distributions: Path, tmp_path: Path) -> None:
    (path,) = distributions.glob("*.whl")
    place = tmp_path / "installed"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(place)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, farcall\n"
        "farcall.init_rpc(f\"worker{os.environ['RANK']}\")\n"
        "if os.environ['RANK'] == '0':\n"
        "    print(farcall.__file__, farcall.rpc_sync('worker1', max, args=(3, 4)))\n"
        "farcall.shutdown()\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "farcall", "run", "-n", "2", str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"worker0 | {place / 'farcall' / '__init__.py'} 4\n"

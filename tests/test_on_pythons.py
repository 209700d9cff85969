from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import on_pythons

HERE = "{}.{}".format(*sys.version_info)

PYPROJECT = """
[project]
classifiers = [
  "Programming Language :: Python :: 3 :: Only",
  "Programming Language :: Python :: 3.11",
  "Programming Language :: Python :: 3.12",
  "Typing :: Typed",
]
"""


def write_program(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that claims 3.11 and 3.12, on a machine where neither is installed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.setattr(on_pythons, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_claimed_versions_are_those_of_the_classifiers() -> None:
    assert on_pythons.claimed_versions(PYPROJECT) == ["3.11", "3.12"]


def test_the_oldest_version_that_is_claimed_is_the_oldest_that_can_install_it() -> None:
    pyproject = (on_pythons.ROOT / "pyproject.toml").read_text()
    claimed = on_pythons.claimed_versions(pyproject)
    assert f'requires-python = ">={claimed[0]}"' in pyproject


def test_what_the_short_form_runs_is_there() -> None:
    assert [path for path in on_pythons.SHORT if not (on_pythons.ROOT / path).exists()] == []


def test_a_python_on_the_path_is_found_by_what_it_says_of_itself(root: Path) -> None:
    write_program(root / "bin" / "python3.12", "echo 3.12 /where/it is")
    write_program(root / "bin" / "python3.13", "echo 3.12 /where/it is")
    write_program(root / "bin" / "python3.11", "echo 'pyenv: version not chosen' >&2; exit 127")
    assert on_pythons.find_python("3.12") == "/where/it is"
    assert on_pythons.find_python("3.13") is None
    assert on_pythons.find_python("3.11") is None


def test_a_python_is_found_in_pyenv(root: Path) -> None:
    (root / "3.12.9" / "bin").mkdir(parents=True)
    write_program(root / "3.12.9" / "bin" / "python", "echo 3.12 /in/pyenv")
    write_program(
        root / "bin" / "pyenv", f"case $2 in 3.12) echo 3.12.9;; 3.12.9) echo {root}/3.12.9;; *) exit 1;; esac"
    )
    assert on_pythons.find_python("3.12") == "/in/pyenv"
    assert on_pythons.find_python("3.13") is None


@pytest.mark.usefixtures("root")
def test_where_no_other_python_is_found_that_is_said_and_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    assert on_pythons.main(["--short"]) == 0
    said = capfd.readouterr().out
    assert "NOT TESTED, as they are not installed here: Python 3.1" in said
    assert f"No other Python than {HERE} was found" in said


def test_every_version_is_run_and_the_first_failure_is_the_status(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / "pyproject.toml").write_text(PYPROJECT.replace("3.11", "3.98").replace("3.12", "3.99"))
    monkeypatch.setenv("PATH", f"{root}/bin:/usr/bin:/bin")
    for version, status in (("3.98", 0), ("3.99", 5)):
        (root / f".venv-{version}" / "bin").mkdir(parents=True)
        write_program(root / f".venv-{version}" / "bin" / "python", f"echo in {version}: $@; exit {status}")
        (root / f".venv-{version}" / ".installed").touch()
        write_program(root / "bin" / f"python{version}", f"echo {version} /python{version}")
    assert on_pythons.main(["-k", "some"]) == 5
    said = capfd.readouterr().out
    assert "in 3.98: -m pytest -q -k some" in said
    assert "in 3.99: -m pytest -q -k some" in said
    assert "Python 3.98: passed\nPython 3.99: FAILED with status 5" in said


def test_an_environment_is_made_once_and_again_where_it_was_interrupted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[object], **_: object) -> None:
        commands.append([str(part) for part in command])
        (root / ".venv-3.12").mkdir(exist_ok=True)

    monkeypatch.setattr(subprocess, "run", run)
    inside = root / ".venv-3.12" / "bin" / "python"
    for _ in range(2):
        assert on_pythons.environment("3.12", "/some/python") == inside
    assert commands[0] == ["/some/python", "-m", "venv", str(root / ".venv-3.12")]
    assert commands[1][-3:] == ["install", "--editable", ".[test]"]
    assert len(commands) == 2
    (root / ".venv-3.12" / ".installed").unlink()
    on_pythons.environment("3.12", "/some/python")
    assert len(commands) == 4


def test_an_environment_that_cannot_be_made_is_a_failure_and_the_next_version_is_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / "pyproject.toml").write_text(PYPROJECT.replace("3.11", "3.98").replace("3.12", "3.99"))
    monkeypatch.setenv("PATH", f"{root}/bin:/usr/bin:/bin")
    for version in ("3.98", "3.99"):
        write_program(root / "bin" / f"python{version}", f"[ $1 = -c ] && echo {version} $0")
    assert on_pythons.main([]) == 1
    said = capfd.readouterr().out
    assert "Python 3.98: its environment cannot be set up: Command" in said
    assert "Python 3.98: FAILED with status 1\nPython 3.99: FAILED with status 1" in said

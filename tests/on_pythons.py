"""Runs the tests on every Python version that pyproject.toml claims and that is found here, one after the other.

    python tests/on_pythons.py [--short] [arguments for pytest]

The version that runs this is left out: `make test` tests it, with torch. Every other one gets a virtual environment of
its own (`.venv-3.13`), without torch, as torch is tested on one version only: tests that need torch are skipped.
`--short` runs what depends on the version most (`SHORT`), for CI.

The exit status is that of the first version whose tests failed, or 0; also where no other Python is found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

SHORT: Final = (
    "tests/behaviour/test_mixed_pythons.py",  # groups of two versions
    "tests/behaviour/test_call_failures.py",
    "tests/behaviour/test_callees.py",
    "tests/behaviour/test_asynchronous_functions.py",
    "tests/behaviour/test_futures_of_calls.py",
    "tests/behaviour/test_interrupted_processes.py",
    "tests/behaviour/test_nested_calls.py",
    "tests/behaviour/test_reference_lifetimes.py",
    "tests/behaviour/test_restricted_calls.py",
    "tests/behaviour/test_restricted_data.py",
    "tests/behaviour/test_what_users_see.py",
    "tests/serialization",  # pickles, code by value, exceptions and their tracebacks
    "tests/cli",  # signals, output, child processes
    "tests/native/test_rings.py",  # one extension for all versions, and its references are counted
    "tests/test_api.py",
    "tests/test_api_processes.py",
    "tests/test_errors.py",
    "tests/test_functions.py",
    "tests/test_futures.py",
    "tests/test_futures_await.py",
    "tests/test_futures_settling.py",  # interrupts at every point of the bytecode
)
"""What `--short` runs, without the tests that are marked as slow."""


def claimed_versions(pyproject: str) -> list[str]:
    """Returns the minor versions, such as "3.12", that the classifiers in the text of a pyproject.toml name."""
    classifiers = tomllib.loads(pyproject)["project"]["classifiers"]
    matches = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text) for text in classifiers)
    return [match[1] for match in matches if match]


def find_python(version: str) -> str | None:
    """Returns an interpreter of that minor version, from the PATH or else from pyenv; None if there is none."""
    candidates = [f"python{version}"]
    if shutil.which("pyenv"):
        # `python3.12` on the PATH may be a stand-in of pyenv's, which fails unless that version is chosen here.
        prefix = _output(["pyenv", "latest", version])
        prefix = _output(["pyenv", "prefix", prefix]) if prefix else None
        candidates += [f"{prefix}/bin/python"] if prefix else []
    for candidate in candidates:
        # What runs is asked for, not its name: a stand-in does not say where the interpreter is.
        found = _output([candidate, "-c", "import sys; print('{}.{}'.format(*sys.version_info), sys.executable)"])
        if found is not None and found.split(" ", 1)[0] == version:
            return found.split(" ", 1)[1]
    return None


def environment(version: str, python: str) -> Path:
    """Returns the interpreter of the virtual environment for that version, which is made or renewed if need be.

    Raises:
        subprocess.CalledProcessError: it cannot be made; what pip said is on stderr.
    """
    directory = ROOT / f".venv-{version}"
    stamp, inside = directory / ".installed", directory / "bin" / "python"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        print(f"Setting up {directory.name}, once; this can take a minute ...", flush=True)
        subprocess.run([python, "-m", "venv", directory], check=True)
        install = [str(inside), "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--editable", ".[test]"]
        subprocess.run(install, cwd=ROOT, check=True)
        stamp.touch()  # last: a set-up that was interrupted is done again
    return inside


def main(arguments: list[str]) -> int:
    """Runs the tests on each version; returns the exit status."""
    short = "--short" in arguments
    given = [argument for argument in arguments if argument != "--short"]
    own = "{}.{}".format(*sys.version_info)
    claimed = claimed_versions((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    others = [version for version in claimed if version != own]
    found = {version: python for version in others if (python := find_python(version)) is not None}
    missing = [version for version in others if version not in found]
    if missing:
        print(f"NOT TESTED, as they are not installed here: Python {', '.join(missing)}", flush=True)
    if not found:
        print(f"No other Python than {own} was found, so no other one is tested.", flush=True)
    statuses: dict[str, int] = {}
    for version, python in found.items():
        print(f"Python {version}: {'the short form of the tests' if short else 'all tests'}, without torch", flush=True)
        try:
            inside = environment(version, python)
        except subprocess.CalledProcessError as error:
            print(f"Python {version}: its environment cannot be set up: {error}", flush=True)
            statuses[version] = 1
            continue
        command = [
            str(inside),
            "-m",
            "pytest",
            "-q",
            *(("-m", "not slow and not long", *SHORT) if short else ()),
            *given,
        ]
        statuses[version] = subprocess.run(command, cwd=ROOT).returncode
    for version, status in statuses.items():
        print(f"Python {version}: {'passed' if status == 0 else f'FAILED with status {status}'}")
    return next((status for status in statuses.values() if status), 0)


def _output(command: list[str]) -> str | None:
    """Returns what a command prints, without the white space around it; None if it fails or is not there."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

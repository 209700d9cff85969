"""Runs `ring_test.c`, the tests of `ring.h` without Python, in several builds.

- plain: optimised, as the extension is. Finds lost wake-ups, and frames that are not what was written.
- thread: under ThreadSanitizer, which finds data races. It does not know fences, and none of its findings needs one.
- address: under AddressSanitizer and UndefinedBehaviorSanitizer.
- aarch64: cross-compiled and run under qemu. Only by `make test-native` and `make test-aarch64`, which set
  FARCALL_RING_AARCH64.

`make test-native` also runs more rounds: FARCALL_RING_ROUNDS is the factor by which their numbers are multiplied.

A build is skipped where its compiler, its sanitizer or qemu is not installed; the reason says which package is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).with_name("ring_test.c")
HEADERS = Path(__file__).parents[2] / "src" / "farcall" / "_native"
NAMES = re.findall(r"^TEST\((\w+)\)", SOURCE.read_text(), re.MULTILINE)
ROUNDS = float(os.environ.get("FARCALL_RING_ROUNDS", "1"))

pytestmark = pytest.mark.timeout(300 if ROUNDS > 1 else 60)


class Build(NamedTuple):
    """A way to build and run the tests."""

    name: str
    compiler: str
    package: str
    """The Debian package that has the compiler."""
    flags: tuple[str, ...]
    factor: float
    """For the number of rounds: some builds are slower than others."""
    runner: tuple[str, ...] = ()
    """The command that runs the program, if it is not one for this machine."""
    runner_package: str = ""


BUILDS = [
    Build("plain", "gcc", "gcc", ("-O2", "-Werror"), 0.7),
    Build("thread", "gcc", "gcc", ("-O1", "-Wno-tsan", "-fsanitize=thread"), 0.1),
    Build("address", "gcc", "gcc", ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"), 0.1),
]
if os.environ.get("FARCALL_RING_AARCH64"):
    cross_compiler = ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu and libc6-dev-arm64-cross")
    BUILDS.append(Build("aarch64", *cross_compiler, ("-O2", "-static"), 0.1, ("qemu-aarch64",), "qemu-user"))


def compile_program(build: Build, source: Path, program: Path) -> subprocess.CompletedProcess[str]:
    general = ["-g", "-std=gnu11", "-Wall", "-Wextra", "-pthread", f"-I{HEADERS}"]
    command = [build.compiler, *general, *build.flags, str(source), "-o", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


def run_program(build: Build, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*build.runner, str(program), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=290)


def skip_what_cannot_be_built_here(build: Build, directory: Path) -> None:
    """Skips the test if not even an empty program can be built and run in this way."""
    needed = {build.compiler: build.package} | dict.fromkeys(build.runner, build.runner_package)
    for command, package in needed.items():
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed; the Debian package is {package}")
    source = directory / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    result = compile_program(build, source, directory / "empty")
    if result.returncode == 0:
        result = run_program(build, directory / "empty")
    if result.returncode != 0:
        said = (result.stderr or result.stdout or "nothing").strip().splitlines()[-1]
        pytest.skip(f"{build.compiler} cannot build and run a program with {' '.join(build.flags)}; it says: {said}")


@pytest.fixture(scope="module", params=BUILDS, ids=[build.name for build in BUILDS])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Build, Path]:
    """A build, and the program that it makes."""
    build: Build = request.param
    directory = tmp_path_factory.mktemp(build.name)
    skip_what_cannot_be_built_here(build, directory)
    result = compile_program(build, SOURCE, directory / "ring_test")
    assert (result.returncode, result.stderr) == (0, "")
    return build, directory / "ring_test"


@pytest.mark.parametrize("name", NAMES)
def test_ring(program: tuple[Build, Path], name: str) -> None:
    build, path = program
    result = run_program(build, path, f"{ROUNDS * build.factor:g}", name)
    assert result.returncode == 0, result.stdout
    assert f"{name}: passed" in result.stdout


def test_every_test_in_c_is_found() -> None:
    assert len(NAMES) == len(set(NAMES)) == SOURCE.read_text().count("\nTEST(")
    assert len(NAMES) > 20

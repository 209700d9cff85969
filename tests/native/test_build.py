"""How the C extension is built, packaged, found and turned off."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import farcall
from farcall import _native

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "farcall" / "_native"
EXTENSION = "farcall/_native/_rings.abi3.so"
HAS_COMPILER = (shutil.which("cc") or shutil.which("gcc")) is not None
HAS_HEADERS = Path(sysconfig.get_paths()["include"], "Python.h").exists()

needs_compiler = pytest.mark.skipif(
    not (HAS_COMPILER and HAS_HEADERS), reason="there is no C compiler here, or no headers of Python"
)


def load_build_hook() -> ModuleType:
    """`hatch_build.py`, which is not part of the package."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the C sources, so that nothing is built in the tree."""
    directory = tmp_path / "sources"
    directory.mkdir()
    for name in ("module.c", "ring.h"):
        shutil.copy(SOURCES / name, directory)
    return directory


# Where the extension is


def test_extension_is_there_where_it_can_be_built() -> None:
    if os.environ.get("FARCALL_NATIVE") == "0":
        assert _native.rings is None
    elif HAS_COMPILER and HAS_HEADERS:
        assert _native.rings is not None, "the extension was not built: install farcall again and see what pip -v says"


def test_extension_is_as_new_as_its_sources() -> None:
    built = SOURCES / "_rings.abi3.so"
    if not built.exists():
        pytest.skip("the extension was not built in this tree")
    newest = max(path.stat().st_mtime for path in (SOURCES / "module.c", SOURCES / "ring.h"))
    assert built.stat().st_mtime >= newest, "the tests run an old extension: make .venv/.installed"


@pytest.mark.parametrize("value", [None, "0", "1", ""])
def test_environment_variable_turns_the_extension_off(value: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "FARCALL_NATIVE"}
    if value is not None:
        environment["FARCALL_NATIVE"] = value
    program = (
        "import farcall, farcall._native, farcall.transports.poller\n"
        "assert farcall.native_available() == (farcall._native.rings is not None)\n"
        "poller = farcall.transports.poller.Poller(0.0)\n"
        "assert poller.has_rings == farcall.native_available()\n"
        "poller.close()\n"
        "print(farcall.native_available())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )
    has_extension = value != "0" and importlib.util.find_spec("farcall._native._rings") is not None
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{has_extension}\n", "")


def test_extension_that_cannot_be_loaded_is_left_out(tmp_path: Path) -> None:
    """One that was built for another kind of machine, say."""
    package = tmp_path / "farcall"
    shutil.copytree(ROOT / "src" / "farcall", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (package / "_native" / "_rings.abi3.so").write_bytes(b"\x7fELF of another machine")
    program = "import farcall; print(farcall.__file__, farcall.native_available())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )
    assert (result.stdout, result.stderr) == (f"{package / '__init__.py'} False\n", "")


def test_native_available_is_public() -> None:
    assert farcall.native_available() is (_native.rings is not None)
    assert "native_available" in farcall.__all__


# Compiling


@needs_compiler
def test_compiled_extension_can_be_imported(sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "_rings.abi3.so"
    assert load_build_hook().compile_extension(sources, target) is None
    program = "import _rings; print(_rings.mapping_size(4096))"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (result.stdout, result.stderr) == ("12288\n", "")
    assert sorted(path.name for path in sources.iterdir()) == ["module.c", "ring.h"]  # nothing is left there


@needs_compiler
def test_extension_compiles_without_warnings(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = load_build_hook()
    strict = ("-Werror", "-Wextra")
    usual = ("-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type")  # in extensions
    monkeypatch.setattr(hook, "FLAGS", (*hook.FLAGS, *strict, *usual))
    assert hook.compile_extension(sources, tmp_path / "_rings.abi3.so") is None


def test_missing_compiler_is_reported(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    target = tmp_path / "_rings.abi3.so"
    assert load_build_hook().compile_extension(sources, target) == "there is no C compiler (cc or gcc)"
    assert not target.exists()


def test_compiler_that_cannot_be_run_is_reported(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_HEADERS:
        pytest.skip("the headers of Python are missing here, and that is reported first")
    monkeypatch.setenv("CC", "/nowhere/cc -m64")
    problem = load_build_hook().compile_extension(sources, tmp_path / "_rings.abi3.so")
    assert "/nowhere/cc" in problem
    assert "No such file" in problem


def test_missing_headers_are_reported(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = load_build_hook()
    monkeypatch.setenv("CC", "true")
    monkeypatch.setattr(hook.sysconfig, "get_paths", lambda: {"include": str(tmp_path / "include")})
    problem = hook.compile_extension(sources, tmp_path / "_rings.abi3.so")
    assert problem.startswith(f"the headers of Python are missing ({tmp_path / 'include'})")


@needs_compiler
def test_failing_compiler_is_reported_with_what_it_said(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    target = tmp_path / "_rings.abi3.so"
    target.write_bytes(b"the old one")
    (sources / "module.c").write_text("#error this cannot be compiled\n")
    problem = load_build_hook().compile_extension(sources, target)
    assert problem.startswith("the compiler failed: ")
    assert "this cannot be compiled" in problem
    assert target.read_bytes() == b"the old one"
    assert sorted(path.name for path in sources.iterdir()) == ["module.c", "ring.h"]


def test_directory_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_HEADERS:
        pytest.skip("the headers of Python are missing here, and that is reported first")
    monkeypatch.setenv("CC", "true")
    problem = load_build_hook().compile_extension(tmp_path / "nowhere", tmp_path / "nowhere" / "_rings.abi3.so")
    assert "nowhere" in problem


def test_other_systems_are_reported(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = load_build_hook()
    monkeypatch.setattr(hook.sys, "platform", "darwin")
    assert hook.compile_extension(sources, tmp_path / "x.so") == "it is written for Linux, and this is darwin"


# Wheels


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a wheel is built from, without an extension that somebody has built."""
    directory = tmp_path / "tree"
    directory.mkdir()
    shutil.copytree(ROOT / "src", directory / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    return directory


def build_wheel(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    inherited = {name: text for name, text in os.environ.items() if name not in ("FARCALL_NATIVE", "CC")}
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", "dist"]
    return subprocess.run(
        command, cwd=tree, env={**inherited, **environment}, capture_output=True, text=True, timeout=50
    )


def wheel_of(tree: Path) -> tuple[str, set[str]]:
    """The tags in the name of the wheel, and the names of the files in it."""
    (path,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return path.stem.split("-", 2)[2], set(archive.namelist())


@needs_compiler
def test_wheel_has_the_extension_and_no_c_sources(tree: Path) -> None:
    result = build_wheel(tree)
    assert result.returncode == 0, result.stderr
    tag, names = wheel_of(tree)
    assert tag.startswith("cp311-abi3-linux_")
    assert EXTENSION in names
    assert not {name for name in names if name.endswith((".c", ".h", ".o"))}
    assert len([name for name in names if name.endswith(".so")]) == 1


@needs_compiler
def test_wheel_without_the_extension_is_for_every_machine(tree: Path) -> None:
    assert build_wheel(tree).returncode == 0  # leaves an extension in the tree, which must not get into the next wheel
    assert (tree / "src" / EXTENSION).exists()
    shutil.rmtree(tree / "dist")
    result = build_wheel(tree, FARCALL_NATIVE="0")
    assert result.returncode == 0, result.stderr
    tag, names = wheel_of(tree)
    assert tag == "py3-none-any"
    assert not {name for name in names if name.endswith((".so", ".c", ".h"))}
    assert "farcall/_native/__init__.py" in names


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc"])
def test_wheel_is_built_without_the_extension_where_it_cannot_be_compiled(tree: Path, compiler: str) -> None:
    result = build_wheel(tree, CC=compiler)
    assert result.returncode == 0, result.stderr
    assert "farcall is built without its C extension" in result.stdout + result.stderr
    tag, names = wheel_of(tree)
    assert tag == "py3-none-any"
    assert EXTENSION not in names


def test_wheel_that_must_have_the_extension_is_not_built_without(tree: Path) -> None:
    result = build_wheel(tree, CC="false", FARCALL_NATIVE="1")
    assert result.returncode != 0
    assert "the C extension of farcall cannot be built" in result.stdout + result.stderr

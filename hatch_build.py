"""Compiles the C extension `farcall._native` while the package is built, where that is possible.

It needs a C compiler and Python's headers. Where they are missing, or the compilation fails, the package is built
without the extension and says so; `FARCALL_NATIVE=0` skips it, `FARCALL_NATIVE=1` makes a failure fail the build.
The extension uses Python's stable ABI: one build serves Python 3.11 and all later versions.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src/farcall/_native")
TARGET = "_rings.abi3.so"
FLAGS = ("-O2", "-g0", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled extension to a wheel; in an editable installation it is put beside its sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects the files of a wheel. Raises `RuntimeError` as the module says."""
        wanted = os.environ.get("FARCALL_NATIVE", "")
        if wanted == "0":
            return
        built = Path(self.root) / SOURCES / TARGET
        problem = compile_extension(Path(self.root) / SOURCES, built)
        if problem is not None:
            if wanted == "1":
                raise RuntimeError(f"the C extension of farcall cannot be built: {problem}")
            self.app.display_warning(f"farcall is built without its C extension: {problem}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(built)] = f"farcall/_native/{TARGET}"


def compile_extension(sources: Path, target: Path) -> str | None:
    """Compiles `module.c` into the target file, in one step for those who are using it. Returns why it could not.

    The compiler is that of the environment variable `CC`, or `cc` or `gcc`.
    """
    if not sys.platform.startswith("linux"):
        return f"it is written for Linux, and this is {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0]:
        return "there is no C compiler (cc or gcc)"
    headers = sysconfig.get_paths()["include"]
    if not Path(headers, "Python.h").exists():
        return f"the headers of Python are missing ({headers}); the package is python3-dev or the like"
    try:
        with tempfile.TemporaryDirectory(dir=sources) as directory:
            built = Path(directory, TARGET)
            command = [*compiler, *FLAGS, f"-I{headers}", str(sources / "module.c"), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                return f"the compiler failed: {shlex.join(command)}\n{result.stderr}"
            os.replace(built, target)
    except OSError as error:  # the compiler cannot be run, or the directory cannot be written
        return str(error)
    return None

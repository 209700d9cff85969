"""The rules of the source tree, enforced over its syntax: who may import whom, and what every module must have.

The rules are the constants at the head; `violations` applies them to one module's source. Imports count wherever they
stand: at the head, inside a function, for type checking only, or by name through `import_module`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farcall"

BELOW_RUNTIME = {
    "errors", "options", "protocol", "serialization", "transports", "rendezvous", "security", "gate", "deadlines",
    "futures", "functions",
}  # fmt: skip
BELOW_API = BELOW_RUNTIME | {"backends", "runtime"}

MAY_IMPORT: dict[str, set[str]] = {
    # a layer may import itself, and:
    "errors": set(),
    "options": {"errors"},
    "protocol": {"errors"},
    "serialization": {"errors", "protocol"},
    "gate": set(),
    "_native": set(),
    "transports": {"errors", "protocol", "gate", "_native"},
    "security": {"errors", "functions", "protocol"},
    "rendezvous": {"errors", "protocol", "security", "transports"},
    "deadlines": {"errors", "gate", "options"},
    "interruption": {"deadlines"},
    "futures": {"deadlines", "errors", "gate"},
    "functions": {"errors", "futures"},
    "launcher": {"errors"},
    "backends": BELOW_RUNTIME - {"serialization", "gate"} | {"runtime"},
    "current": {"errors", "backends"},
    "runtime": BELOW_RUNTIME | {"backends", "current"},
    "rref": {"current", "errors", "futures", "gate", "options", "protocol", "serialization", "backends"},
    "api": BELOW_API | {"current", "rref", "launcher"},
    "workers": {"current", "errors", "futures", "gate", "options", "protocol", "backends", "rref"},
    "streams": set(),
    "many": {
        "current",
        "errors",
        "functions",
        "futures",
        "gate",
        "options",
        "protocol",
        "backends",
        "rref",
        "streams",
        "workers",
    },
    "groups": {"current", "errors", "options", "protocol", "backends", "api", "workers", "many"},
    "engines": {"errors", "options", "groups"},
    "asgi": {"errors", "futures", "many"},
    "collectives": {"errors", "backends", "functions", "futures", "options", "api"},
    # the edges: "farcall" is the package's own __init__, the public face
    "farcall": BELOW_API
    | {"rref", "api", "workers", "streams", "many", "groups", "engines", "asgi", "interruption"}
    | {"collectives", "backend_registry", "_native"},
    "backend_registry": {"backends"},
    "__main__": {"cli"},
    "cli": BELOW_RUNTIME | {"api", "farcall", "launcher", "bench"},
    "bench": {"errors", "farcall"},
    "testing": BELOW_API | {"current", "rref", "api", "groups", "farcall"},
    "pytorch": BELOW_API | {"rref", "api", "farcall", "testing"},
}

# The protocol is pure: ids, time and chance are handed in, and it waits for nothing.
NOT_IN_PROTOCOL = {"asyncio", "logging", "os", "pickle", "random", "select", "selectors", "socket", "threading", "time"}

# Optional packages, and who may import them. "lazily": inside a function, so that `import farcall` does not.
OPTIONAL_PACKAGES = {
    "torch": {"pytorch": "anywhere"},
    "numpy": {"pytorch": "anywhere", "serialization": "lazily", "bench": "lazily"},
    "matplotlib": {"bench": "lazily"},
    "rich": {"bench": "lazily"},
    # not optional, but half of the time of an import, and of no use on one host
    "cryptography": {"security": "lazily"},
    "ssl": {"security": "lazily", "transports": "lazily"},
}

# What may be imported inside a function or for type checking only: the other way round it is imported at the head.
LAZILY = {
    "rref": {"backends"},
    "current": {"backends"},
    "backends": {"runtime", "rendezvous", "security", "transports"},
    "cli": {"bench"},
}

# Directories of somebody's machine. Written so that the rule does not find itself.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root)" + "/")


class Import(NamedTuple):
    """One imported module."""

    module: str
    line: int
    lazy: bool


def layer_of(module: str) -> str:
    """The layer of a module of farcall: `farcall.protocol.frames` is of `protocol`, `farcall` of `farcall`."""
    return module.partition(".")[2].partition(".")[0] or "farcall"


def imports(tree: ast.Module) -> Iterator[Import]:
    """All that a module imports. `from farcall import errors` counts as `farcall.errors`."""
    for node, lazy in _nodes(tree, lazy=False):
        match node:
            case ast.Import(names):
                for alias in names:
                    yield Import(alias.name, node.lineno, lazy)
            case ast.ImportFrom(module="farcall", names=names, level=0):
                for alias in names:
                    module = f"farcall.{alias.name}" if alias.name in MAY_IMPORT else "farcall"
                    yield Import(module, node.lineno, lazy)
            case ast.ImportFrom(module, level=level):
                yield Import("." * level + (module or ""), node.lineno, lazy)
            case ast.Call(
                ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                [ast.Constant(str(module)), *_],
            ):
                yield Import(module, node.lineno, lazy)


def _nodes(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below, and whether each is run only when a function is called or a type checker reads it."""
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        match child:
            case ast.If(ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                inside = True
        yield child, inside
        yield from _nodes(child, inside)


def violations(module: str, source: str) -> list[str]:
    """What is wrong with this source of the module of this name."""
    tree = ast.parse(source)
    layer = layer_of(module)
    if layer not in MAY_IMPORT:
        return [f"the layer {layer!r} is not in the import table: say there what it may import"]
    found = []
    for imported, line, lazy in imports(tree):
        top = imported.partition(".")[0]
        problem = None
        if imported.startswith("."):
            problem = f"relative import of {imported}"
        elif top == "farcall" and layer_of(imported) not in MAY_IMPORT[layer] | {layer}:
            problem = f"{layer} may not import {imported}"
        elif top == "farcall" and layer_of(imported) in LAZILY.get(layer, ()) and not lazy:
            problem = f"{layer} must import {imported} lazily"
        elif layer == "protocol" and top in NOT_IN_PROTOCOL:
            problem = f"protocol is pure and may not import {imported}"
        elif top in OPTIONAL_PACKAGES:
            where = OPTIONAL_PACKAGES[top].get(layer)
            if where is None:
                problem = f"{layer} may not import {imported}"
            elif where == "lazily" and not lazy:
                problem = f"{layer} must import {imported} lazily"
        if problem:
            found.append(f"line {line}: {problem}")
    if not (ast.get_docstring(tree) or "").strip():
        found.append("no docstring")
    return found


def modules() -> dict[str, Path]:
    """All modules of the package by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.mark.parametrize("module", modules())
def test_every_module_keeps_the_rules(module: str) -> None:
    assert violations(module, modules()[module].read_text()) == []


# -- the rules bite

GOOD = '"""What it is."""\n'


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("farcall.errors", "import enum"),
        ("farcall.options", "from farcall.errors import UsageError"),
        ("farcall.protocol.frames", "from farcall.protocol.ids import CallId"),
        ("farcall.protocol.frames", "import struct, msgspec"),
        ("farcall.serialization.registry", "def reduce(): import numpy"),
        ("farcall.serialization.registry", "def reduce(): importlib.import_module('numpy')"),
        ("farcall.serialization.registry", "if TYPE_CHECKING:\n    import numpy as np"),
        ("farcall.functions", "from farcall import futures"),
        ("farcall.runtime.agent", "import farcall.transports.base"),
        ("farcall.api", "from farcall.runtime.agent import Agent"),
        ("farcall.api", "from farcall.rref import RRef"),
        ("farcall.rref", "def f(): from farcall.backends.interface import Handle"),
        ("farcall.rref", "if TYPE_CHECKING:\n    from farcall.backends.interface import Handle"),
        ("farcall.backends.registry", "def f(): from farcall.runtime.agent import Agent"),
        ("farcall.runtime.agent", "from farcall.backends.interface import RpcAgent"),
        ("farcall", "from farcall.api import init_rpc"),
        ("farcall.cli.main", "import farcall"),
        ("farcall.cli.bench", "def f(): from farcall.bench import command"),
        ("farcall.bench.plots", "def f(): import matplotlib"),
        ("farcall.testing.conformance", "from farcall import init_rpc"),
        ("farcall.pytorch.tensors", "import torch, numpy"),
    ],
)
def test_what_is_allowed_passes(module: str, line: str) -> None:
    assert violations(module, GOOD + line) == []


@pytest.mark.parametrize(
    ("module", "line", "problem"),
    [
        ("farcall.errors", "import farcall.options", "line 2: errors may not import farcall.options"),
        ("farcall.options", "from farcall import futures", "line 2: options may not import farcall.futures"),
        ("farcall.protocol.frames", "import time", "line 2: protocol is pure and may not import time"),
        ("farcall.protocol.frames", "from os import path", "line 2: protocol is pure and may not import os"),
        ("farcall.protocol.frames", "import os.path", "line 2: protocol is pure and may not import os.path"),
        ("farcall.protocol.ids", "def f():\n    import socket", "line 3: protocol is pure and may not import socket"),
        ("farcall.transports.tcp", "import farcall.runtime", "line 2: transports may not import farcall.runtime"),
        ("farcall.runtime.agent", "from farcall import init_rpc", "line 2: runtime may not import farcall"),
        ("farcall.runtime.agent", "import farcall", "line 2: runtime may not import farcall"),
        ("farcall.runtime.agent", "import farcall.api", "line 2: runtime may not import farcall.api"),
        ("farcall.runtime.agent", "from . import peers", "line 2: relative import of ."),
        ("farcall.runtime.agent", "from ..protocol import frames", "line 2: relative import of ..protocol"),
        ("farcall.runtime.agent", "import farcall.rref", "line 2: runtime may not import farcall.rref"),
        ("farcall.rref", "import farcall.api", "line 2: rref may not import farcall.api"),
        ("farcall.rref", "from farcall.runtime.calls import a", "line 2: rref may not import farcall.runtime.calls"),
        ("farcall.backends.registry", "import farcall.runtime", "line 2: backends must import farcall.runtime lazily"),
        ("farcall.api", "import farcall.pytorch", "line 2: api may not import farcall.pytorch"),
        ("farcall", "from farcall import testing", "line 2: farcall may not import farcall.testing"),
        ("farcall.cli.run", "from farcall.runtime.peers import a", "line 2: cli may not import farcall.runtime.peers"),
        ("farcall.cli.bench", "import farcall.bench", "line 2: cli must import farcall.bench lazily"),
        ("farcall.testing.data", "from farcall.bench import a", "line 2: testing may not import farcall.bench"),
        ("farcall.bench.plots", "import matplotlib", "line 2: bench must import matplotlib lazily"),
        ("farcall.api", "import torch", "line 2: api may not import torch"),
        ("farcall.api", "def f(): from torch.distributed import rpc", "line 2: api may not import torch.distributed"),
        ("farcall.api", "__import__('torch')", "line 2: api may not import torch"),
        ("farcall.api", "importlib.import_module('farcall.pytorch')", "line 2: api may not import farcall.pytorch"),
        ("farcall.testing.data", "def f(): import numpy", "line 2: testing may not import numpy"),
        ("farcall.serialization.registry", "import numpy", "line 2: serialization must import numpy lazily"),
        ("farcall.serialization.a", "class A:\n    import numpy", "line 3: serialization must import numpy lazily"),
        ("farcall.newcomer", "", "the layer 'newcomer' is not in the import table: say there what it may import"),
    ],
)  # fmt: skip
def test_what_is_forbidden_is_found(module: str, line: str, problem: str) -> None:
    assert violations(module, GOOD + line) == [problem]


@pytest.mark.parametrize("source", ["", "import enum\n", '"""  """\n', '# a comment\nx = "no docstring"\n'])
def test_a_missing_docstring_is_found(source: str) -> None:
    assert violations("farcall.api", source) == ["no docstring"]


# -- what the syntax does not tell


@pytest.mark.parametrize("module", ["farcall", "farcall.cli.main"])
def test_importing_it_imports_no_optional_package(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert module in imported  # the report was understood
    assert imported.isdisjoint(OPTIONAL_PACKAGES)


def project_files() -> Iterator[Path]:
    """All files that belong to the project: no environments, no caches, no `.git` (a file in a worktree)."""
    directories = [".ci", "src", "tests", "benchmarks", "conformance", "examples", "docs"]
    paths = [*ROOT.iterdir(), *(path for name in directories for path in (ROOT / name).rglob("*"))]
    return (path for path in paths if path.is_file() and path.name != ".git" and "__pycache__" not in path.parts)


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATHS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["cd /{}/main", "'/{}/.venv/bin'", "/{}/"])
@pytest.mark.parametrize("directory", ["work", "root"])
def test_a_path_of_a_machine_is_found(text: str, directory: str) -> None:
    assert MACHINE_PATHS.search(text.format(directory))


@pytest.mark.parametrize("text", ["https://example.org/work/", "./work/", "/workers/", "artwork/root/"])
def test_other_paths_are_let_be(text: str) -> None:
    assert not MACHINE_PATHS.search(text)

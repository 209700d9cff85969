"""The names that torch has for RPC, and their parameters, against ours; docs/pytorch.md lists what differs, and why."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from farcall.pytorch import native
from farcall.pytorch._testing import faulty_agent
from farcall.pytorch.installation import _LAZY_MODULES, _MODULES

LIMIT = 150.0
"""Seconds for importing all of it, on a busy machine."""

pytestmark = pytest.mark.timeout(LIMIT + 20)

DOCUMENT = Path(__file__).parents[2] / "docs" / "pytorch.md"
STAGE = Path(__file__).with_name("interface_stage.py")
STUBS = {
    "torch._C._distributed_rpc": native,
    "torch._C._distributed_rpc_testing": faulty_agent,
}
"""The modules that are C++ in torch: what they have is in stubs."""

MODULES = sorted((set(_MODULES) | set(_LAZY_MODULES)) - set(STUBS))
ROW = re.compile(r"^\| `(torch[\w.]*)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")


def excused(text: str | None = None) -> dict[str, str]:
    """Names that docs/pytorch.md says we do not have, or have otherwise; and why."""
    rows = ROW.findall(DOCUMENT.read_text(encoding="utf-8") if text is None else text)
    return {f"{module}.{name}": why.strip() for module, names, why in rows for name in NAME.findall(names)}


def ask(whose: str, modules: Collection[str] = MODULES) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(STAGE), whose, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    """By full name."""
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, "torch"), pool.submit(ask, "farcall"), pool.submit(ask, "keywords", STUBS)]
        theirs, ours, keywords = [answer.result() for answer in answers]
    found: dict[str, str] = dict.fromkeys(ours.pop("torch's own"), "is torch's own")
    for module, names in theirs.items():
        for name, parameters in names.items():
            if name not in ours[module]:
                found[f"{module}.{name}"] = "is missing"
            elif parameters is not None and not takes(ours[module][name], parameters):
                found[f"{module}.{name}"] = f"has parameters {ours[module][name]}, torch's {parameters}"
    for module, here in STUBS.items():
        lacking = stub_differences(module, here, keywords[module])
        found |= {f"{module}.{name}": what for name, what in lacking.items()}
    return found


def takes(ours: list[list[str]] | None, theirs: list[list[str]]) -> bool:
    """Whether ours can be called as torch's: it may have more parameters, at the end, and more defaults."""
    if ours is None or len(ours) < len(theirs):
        return False
    for (name, kind, default), (their_name, their_kind, their_default) in zip(ours, theirs, strict=False):
        if (name, kind) != (their_name, their_kind) or (their_default and default != their_default):
            return False
    return all(default or kind.startswith("VAR_") for _, kind, default in ours[len(theirs) :])


def stub_differences(module: str, here: Any, keywords: dict[str, list[str]]) -> dict[str, str]:
    """What a stub of torch's has and our module has not, or with other parameters."""
    path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".pyi")
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found |= _compare(node.name, node, getattr(here, node.name, None), keywords)
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            if not hasattr(here, node.target.id):
                found[node.target.id] = "is missing"
        elif isinstance(node, ast.ClassDef):
            found |= _class_differences(node, getattr(here, node.name, None), keywords)
    return found


def _class_differences(node: ast.ClassDef, ours: Any, keywords: dict[str, list[str]]) -> dict[str, str]:
    if ours is None:
        return {node.name: "is missing"}
    found: dict[str, str] = {}
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            name = f"{node.name}.{member.name}"
            if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in member.decorator_list):
                if not hasattr(ours, member.name):
                    found[name] = "is missing"
                continue
            found |= _compare(name, member, getattr(ours, member.name, None), keywords)
    return found


def _compare(name: str, node: ast.FunctionDef, ours: Any, keywords: dict[str, list[str]]) -> dict[str, str]:
    """Ours must take as many arguments by place, and by name those that can be given to torch's by name.

    Which those are is not in the stubs, which have names for all.
    """
    if ours is None:
        return {name: "is missing"}
    try:
        signature = inspect.signature(ours)
    except (ValueError, TypeError):
        return {}  # torch's own function
    if missing := sorted(set(keywords.get(name, ())) - set(signature.parameters)):
        return {name: f"has no parameters {missing}, but {sorted(signature.parameters)}"}
    if not name.endswith(".__init__"):  # there all have names
        static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
        places = node.args.args[1:] if static and node.args.args[0].arg == "self" else node.args.args
        try:
            signature.bind(*places)
        except TypeError as error:
            return {name: f"does not take {len(places)} arguments by place: {error}"}
    return {}


def test_what_is_missing_or_different_is_in_the_document(differences: dict[str, str]) -> None:
    known = excused()
    new = [f"{name} {what}" for name, what in differences.items() if name not in known]
    assert not new, "\n".join(new)


def test_the_document_lists_nothing_else(differences: dict[str, str]) -> None:
    stale = [name for name in excused() if name not in differences]
    assert not stale, "\n".join(stale)


def test_each_name_in_the_document_has_a_reason() -> None:
    assert excused()
    assert all(excused().values())


def test_parameters_are_compared() -> None:
    x, y, z = (
        ["x", "POSITIONAL_OR_KEYWORD", ""],
        ["y", "POSITIONAL_OR_KEYWORD", "1"],
        ["y", "POSITIONAL_OR_KEYWORD", ""],
    )
    assert takes([x, y], [x])
    assert takes([x, y], [x, y])
    assert takes([x, y], [x, z])
    assert not takes([x, z], [x])
    assert not takes([x, z], [x, y])
    assert not takes([x], [x, y])
    assert not takes(None, [x])


def test_rows_are_read() -> None:
    assert excused("| `torch.a` | `b`, `C.d` | no need |\n| other | x | y |\n") == {
        "torch.a.b": "no need",
        "torch.a.C.d": "no need",
    }

"""How much code a call passes through, on both ends together: a limit that a change of the call path has to respect.

A no-op, a remote call with `to_here`, and a call with a 64 MiB argument are traced in two real processes. The functions
and files of farcall that run are counted, and the decision points in those functions. A file is not to be merged with
another one to pass: each has one job.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "farcall"

WORKER = """
import json, sys, threading
import numpy
import farcall as rpc

passed = set()

def trace(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(PACKAGE):
        passed.add((code.co_filename, code.co_firstlineno))

def nothing():
    return None

def take(array):
    return None

def trace_on():
    sys.setprofile(trace)

def trace_off():
    sys.setprofile(None)
    found = list(passed)
    passed.clear()
    return found

def measure(function):
    for _ in range(20):
        function()
    shortest = None
    for _ in range(200):  # the machine may be busy: a thread that falls asleep on its way passes more code
        rpc.rpc_sync("w0", trace_on)
        sys.setprofile(trace)
        function()
        sys.setprofile(None)
        found = {*map(tuple, rpc.rpc_sync("w0", trace_off)), *passed}
        passed.clear()
        if shortest is None or len(found) < len(shortest):
            shortest = found
    return sorted(shortest)

PACKAGE, rank, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
options = rpc.RpcBackendOptions(init_method=f"file://{path}", heartbeat_interval=60, heartbeat_patience=600)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 1:
    data = numpy.zeros(8 << 20)
    print(json.dumps({
        "no-op": measure(lambda: rpc.rpc_sync("w0", nothing)),
        "64 MiB argument": measure(lambda: rpc.rpc_sync("w0", take, (data,))),
        "remote and to_here": measure(lambda: rpc.remote("w0", nothing).to_here()),
    }))
rpc.shutdown()
"""

# What may be passed: files, functions, decision points. The leader's loop runs all the time and is counted in addition.
LIMITS = {"no-op": (12, 25, 150), "remote and to_here": (18, 92, 360), "64 MiB argument": (16, 78, 350)}
LEADER = ("runtime/executor.py", "_lead")


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, int]]]:
    """For each kind of call, the file and first line of every function that ran, on both ends."""
    directory = tmp_path_factory.mktemp("walk")
    script = directory / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), str(PACKAGE)]
    workers = [
        subprocess.Popen([*command, str(rank), str(directory / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=50)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    found: dict[str, list[tuple[str, int]]] = json.loads(outputs[1])
    return found


@pytest.mark.parametrize("kind", LIMITS)
def test_a_call_passes_little_code(passed: dict[str, list[tuple[str, int]]], kind: str) -> None:
    functions = [_function_at(path, line) for path, line in passed[kind]] + [_function_named(*LEADER)]
    files = {path for path, _ in passed[kind]} | {str(PACKAGE / LEADER[0])}
    decisions = sum(map(_decision_points, functions))
    listed = "\n".join(sorted(f"{Path(path).relative_to(PACKAGE)}:{line}" for path, line in passed[kind]))
    print(f"{kind}: {len(files)} files, {len(functions)} functions, {decisions} decision points\n{listed}")
    max_files, max_functions, max_decisions = LIMITS[kind]
    assert len(files) <= max_files
    assert len(functions) <= max_functions
    assert decisions < max_decisions


def _trees(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _function_at(path: str, line: int) -> ast.AST:
    """Returns the function, lambda or comprehension whose code begins at that line."""
    for node in ast.walk(_trees(Path(path))):
        first = (
            min([node.lineno, *[each.lineno for each in getattr(node, "decorator_list", [])]], default=0)
            if hasattr(node, "lineno")
            else 0
        )
        if first == line and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return node
    return ast.Pass()  # a lambda or comprehension, which is counted with the function that it is in


def _function_named(path: str, name: str) -> ast.AST:
    nodes = ast.walk(_trees(PACKAGE / path))
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


def _decision_points(function: ast.AST) -> int:
    """Returns how many branches a function has, as McCabe counts them, one for the function itself not included."""
    points = 0
    for node in ast.walk(function):
        if isinstance(
            node, ast.If | ast.For | ast.While | ast.IfExp | ast.ExceptHandler | ast.Assert | ast.comprehension
        ):
            points += 1
        elif isinstance(node, ast.BoolOp):
            points += len(node.values) - 1
    return points


def test_decision_points_are_counted() -> None:
    source: Any = ast.parse("def f(a, b):\n  if a and b: return 1\n  for x in a:\n    pass\n  return b if a else 0")
    assert _decision_points(source) == 4

"""Workers of different Python minor versions in one group: calls by name work, bytecode is refused with both versions.

The other Pythons are those of the virtual environments beside this repository's files (`make test-pythons` makes one
for each version) and those that FARCALL_OTHER_PYTHONS lists, separated by colons. Where there is none, the tests that
need one are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ports

ROOT = Path(__file__).parents[2]
HERE = "{}.{}".format(*sys.version_info)
TIMEOUT = 100.0
"""Seconds for a group to do it all, on a machine that may be busy."""

SCRIPT = """
import json, operator, sys

import farcall as rpc

class Point:
    def __init__(self, x):
        self.x = x

class ScriptError(Exception):
    pass

def version():
    return "{}.{}".format(*sys.version_info)

def echo(value):
    return value

def x_of(point):
    return point.x

def x_of_reference(reference):
    return reference.local_value().x

def fail(kind):
    class LocalError(Exception):
        pass
    raise {"builtin": ValueError, "script": ScriptError, "local": LocalError}[kind](kind)

def make_adder(amount):
    return lambda value: value + amount

def outcome(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

rank, port = int(sys.argv[1]), sys.argv[2]
options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=30)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
facts = {}
if rank == 0:
    plain = {"numbers": [1, 2.5, 1 << 70], "text": "x", "none": None, "flags": [True, False]}
    facts["version"] = rpc.rpc_sync("w1", version)
    facts["plain"] = rpc.rpc_sync("w1", echo, args=(plain,)) == plain
    facts["bytes"] = rpc.rpc_sync("w1", len, args=(bytes(1 << 20),))
    facts["object"] = rpc.rpc_sync("w1", x_of, args=(Point(3),))
    point = rpc.remote("w1", Point, args=(4,))
    facts["reference"] = rpc.rpc_sync("w1", x_of_reference, args=(point,))
    for kind in ("builtin", "script", "local"):
        facts[kind] = outcome(lambda: rpc.rpc_sync("w1", fail, args=(kind,)))
    facts["lambda"] = outcome(lambda: rpc.rpc_sync("w1", lambda: 5))
    facts["argument"] = outcome(lambda: rpc.rpc_sync("w1", echo, args=([1, lambda: 5],)))
    facts["result"] = outcome(lambda: rpc.rpc_sync("w1", make_adder, args=(1,)))
    facts["afterwards"] = rpc.rpc_sync("w1", operator.add, args=(1, 2))
rpc.shutdown()
print(json.dumps(facts))
"""


@cache
def other_pythons() -> dict[str, str]:
    """Returns the interpreters of other versions that have what farcall needs, by version."""
    named = os.environ.get("FARCALL_OTHER_PYTHONS", "")
    candidates = [*filter(None, named.split(os.pathsep)), *map(str, sorted(ROOT.glob(".venv*/bin/python")))]
    program = "import cloudpickle, cryptography, msgspec, sys; print('{}.{}'.format(*sys.version_info))"
    found: dict[str, str] = {}
    for candidate in candidates:
        try:
            version = subprocess.run(
                [candidate, "-c", program], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        found.setdefault(version, candidate)
    found.pop(HERE, None)
    return found


def run_group(tmp_path: Path, pythons: list[str]) -> dict[str, Any]:
    """Runs the script as one worker on each of these Pythons; returns what rank 0 found."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = str(ports.free_port())
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    workers = [
        subprocess.Popen(
            [python, str(script), str(rank), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, python in enumerate(pythons)
    ]
    try:
        outputs = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs
    facts: dict[str, Any] = json.loads(outputs[0][0])
    return facts


@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("direction", ["to the other", "from the other"])
@pytest.mark.parametrize("other", ["3.11", "3.12", "3.13", "3.14"])
def test_group_of_two_python_versions(tmp_path: Path, other: str, direction: str) -> None:
    if other == HERE:
        pytest.skip(f"these tests run on {HERE} themselves")
    if other not in other_pythons():
        pytest.skip(f"there is no environment with Python {other}: `make test-pythons` makes one")
    pythons, versions = [sys.executable, other_pythons()[other]], [HERE, other]
    if direction == "from the other":
        pythons.reverse()
        versions.reverse()
    facts = run_group(tmp_path, pythons)
    caller, callee = (f"CPython {version}" for version in versions)
    assert facts["version"] == versions[1]
    assert facts["plain"]
    assert facts["bytes"] == 1 << 20
    assert [facts["object"], facts["reference"]] == [3, 4]
    assert facts["builtin"] == "ValueError: builtin"
    assert facts["script"] == "ScriptError: script"
    assert "LocalError" in facts["local"], "its class cannot be sent, its name and message can"
    by_value = "it contains a function or class by value, compiled by"
    to_callee = f"on worker 'w1': {by_value} {caller}, and this worker runs {callee}."
    assert facts["lambda"].startswith("SerializationError: ")
    assert to_callee in facts["lambda"]
    assert to_callee in facts["argument"]
    assert f"here: {by_value} {callee}, and this worker runs {caller}." in facts["result"]
    assert facts["afterwards"] == 3, "nobody crashed"

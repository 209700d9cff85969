"""Runs scripts in a network namespace of their own, where this host has an address that is not loopback.

Farcall encrypts what does not go over loopback, so tests of the encryption need such an address. The namespace goes
with its last process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ADDRESS = "10.231.78.1"
"""An address of the host in the namespace. Nothing outside of it can be reached."""

_SET_UP = f"ip link set lo up && ip addr add {ADDRESS}/32 dev lo"


def unshare() -> list[str]:
    """What a command begins with to run in a network namespace of its own. Skips the test if none can be had."""
    command = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    try:
        subprocess.run([*command, "sh", "-c", _SET_UP], capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError as error:
        pytest.skip(f"there is no command {error.filename}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine does not allow network namespaces: {error.stderr.strip()}")
    return command


def environment() -> dict[str, str]:
    """For a script: it can import what lies beside this module."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OWN_ADDRESS": ADDRESS}


def run(directory: Path, script: str, limit: float = 50) -> dict[str, Any]:
    """Runs a Python script in such a namespace; the last line that it prints is JSON, and is given back."""
    path = directory / "script.py"
    path.write_text(textwrap.dedent(script))
    inside = f'{_SET_UP} && exec "$@"'
    command = [*unshare(), "sh", "-c", inside, "sh", sys.executable, str(path)]
    with subprocess.Popen(
        command, cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            pytest.fail(f"the script did not end within {limit:g} s\n{output}\n{errors[-4000:]}")
    assert process.returncode == 0, f"{output}\n{errors[-4000:]}"
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**found, "errors": errors}

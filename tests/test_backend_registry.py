"""The registry under torch's name: a module that can be imported by any of the ways there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

import farcall
import farcall.backend_registry
from farcall.backends import registry


@pytest.mark.parametrize(
    "line",
    [
        "import farcall.backend_registry as found",
        "from farcall import backend_registry as found",
        "import farcall; found = farcall.backend_registry",
        "from farcall.backend_registry import register_backend, BackendType; import farcall.backend_registry as found",
    ],
)
def test_it_can_be_imported(line: str) -> None:
    script = f"{line}; print(found.__name__, found.backend_registered('FARCALL'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("farcall.backend_registry True\n", "")


def test_it_has_torchs_names_and_they_are_the_registrys() -> None:
    torchs = {
        "BackendType",
        "BackendValue",
        "backend_registered",
        "construct_rpc_backend_options",
        "init_backend",
        "register_backend",
    }
    assert set(farcall.backend_registry.__all__) == torchs | {"unregister_backend"}
    for name in farcall.backend_registry.__all__:
        assert getattr(farcall.backend_registry, name) is getattr(registry, name)

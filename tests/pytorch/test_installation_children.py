"""`installation`: what a child of `multiprocessing` is told. Real children are in test_programs."""

from __future__ import annotations

import pickle
import subprocess
import sys
from multiprocessing import spawn

import pytest

from farcall.pytorch.installation import install_in_children

READ = """
import pickle, sys
told = pickle.loads(bytes.fromhex(sys.argv[1]))
import torch.distributed.rpc as rpc
print(rpc.__name__, sys.path[0], sorted(told))
"""


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was before, afterwards."""
    before = spawn.get_preparation_data
    monkeypatch.setattr(spawn, "get_preparation_data", getattr(before, "__wrapped__", before))


def test_a_child_has_farcall_when_it_has_read_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install_in_children()
    monkeypatch.setattr(sys, "path", ["somewhere", *sys.path])
    told = spawn.get_preparation_data("child")
    del told["authkey"]  # it is for real children only
    sent = pickle.dumps(told)
    monkeypatch.undo()
    command = [sys.executable, "-W", "ignore", "-c", READ, sent.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    name, path, *keys = done.stdout.split(maxsplit=2)
    assert (name, path) == ("farcall.pytorch", "somewhere"), done.stderr
    assert "'farcall'" in keys[0]
    assert "'sys_path'" in keys[0]


def test_twice_is_once() -> None:
    install_in_children()
    once = spawn.get_preparation_data
    install_in_children()
    assert spawn.get_preparation_data is once


def test_multiprocessing_reads_only_what_it_knows() -> None:
    before = spawn.get_preparation_data("child")
    install_in_children()
    told = spawn.get_preparation_data("child")
    assert told.keys() - before.keys() == {"farcall"}
    assert {key: told[key] for key in before} == before

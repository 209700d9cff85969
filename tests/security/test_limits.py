"""What is noted of strangers: a line for each kind from each address, however often they come."""

from __future__ import annotations

from farcall.options import RpcBackendOptions
from farcall.security.limits import Limits, Notebook, limits_of


def test_each_kind_from_each_address_is_new_once() -> None:
    notebook = Notebook()
    assert notebook.is_new("tcp:10.0.0.1:4000", "silent")
    assert not notebook.is_new("tcp:10.0.0.1:4001", "silent"), "the port is of no account"
    assert notebook.is_new("tcp:10.0.0.1:4000", "wrong secret")
    assert notebook.is_new("tcp:10.0.0.2:4000", "silent")
    assert notebook.is_new("unix:process 7", "silent")
    assert notebook.is_new("unix:process 8", "silent")


def test_it_does_not_grow_for_ever() -> None:
    notebook = Notebook(most=3)
    for host in range(10):
        assert notebook.is_new(f"tcp:10.0.0.{host}:1", "silent")
    assert len(notebook._noted) == 3
    assert not notebook.is_new("tcp:10.0.0.9:1", "silent")
    assert notebook.is_new("tcp:10.0.0.0:1", "silent")


def test_the_limits_are_those_of_the_options() -> None:
    options = RpcBackendOptions(max_strangers=3, proof_timeout=0.5, max_greeting_size=2048)
    assert limits_of(options) == Limits(3, 0.5, 2048)
    assert limits_of(RpcBackendOptions()) == Limits()

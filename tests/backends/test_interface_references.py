"""What an `RRef` asks of an agent: by a backend that has no references, everything is refused or empty.

A backend that has them is in `test_interface.py`.
"""

from __future__ import annotations

import pytest

import farcall as rpc
from backends.in_process import InProcessOptions
from farcall.backends import NoReferences


def test_a_backend_without_references(backend: rpc.BackendType) -> None:
    rpc.init_rpc("me", backend=backend, rpc_backend_options=InProcessOptions(with_references=False))
    assert rpc.rpc_sync("me", int) == 0
    for use in (
        lambda: rpc.remote("me", int),
        lambda: rpc.RRef(3),
        lambda: rpc.api.current_agent().reference_store.calling,
    ):
        with pytest.raises(rpc.UsageError, match="backend of this worker has no references: use rpc_sync"):
            use()
    assert str(rpc.references()) == "owns 0, holds 0"
    assert rpc._rref_context_get_debug_info() == {}
    rpc._delete_all_user_and_unforked_owner_rrefs()
    rpc._destroy_rref_context(ignore_leak=False)


def test_an_empty_book_stays_empty() -> None:
    store = NoReferences()
    store.give_up_handles("for a reason")
    store.forget("gone")
    assert (store.inventory().owned, store.inventory().held, store.debug_info()) == ((), (), {})

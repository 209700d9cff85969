"""The store of a `LocalGroup` keeps the promises of `farcall.rendezvous.Store`."""

from __future__ import annotations

import pytest

from farcall.errors import RendezvousError
from farcall.testing import MemoryStore


def test_what_a_counter_cannot_do_is_an_error_that_changes_nothing() -> None:
    store = MemoryStore()
    store.set("text", b"text")
    with pytest.raises(RendezvousError, match="'text' is not a number"):
        store.add("text", 1)
    assert store.add("count", 2**63 - 2) == 2**63 - 2
    with pytest.raises(RendezvousError, match="'count' would exceed 64 bits"):
        store.add("count", 2)
    assert store.read("") == {"text": b"text", "count": b"%d" % (2**63 - 2)}

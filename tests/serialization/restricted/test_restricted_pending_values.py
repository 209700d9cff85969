"""Values that are made when their state has come."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.serialization.restricted.arrays import Pending


class Doubled(Pending):
    __slots__ = ()

    def _make(self, state: Any) -> Any:
        return 2 * state


def test_it_is_made_once() -> None:
    pending = Doubled()
    assert pending.finished is None
    assert pending.finish([1]) == [1, 1]
    assert pending.finished == [1, 1]
    with pytest.raises(TypeError, match="two states"):
        pending.finish([1])


def test_what_fails_is_not_finished() -> None:
    pending = Doubled()
    with pytest.raises(TypeError):
        pending.finish(None)
    assert pending.finished is None

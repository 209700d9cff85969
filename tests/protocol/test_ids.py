"""Who is who, by value."""

from __future__ import annotations

import pickle

import pytest

from farcall.protocol import WorkerInfo


def test_equal_and_hashed_by_value() -> None:
    info = WorkerInfo("a", 1)
    assert info == WorkerInfo(name="a", id=1)
    assert {info: "found"}[WorkerInfo("a", 1)] == "found"
    assert info != WorkerInfo("a", 2)
    assert info != WorkerInfo("b", 1)
    assert info != ("a", 1)  # type: ignore[comparison-overlap]


def test_travels_by_value() -> None:
    info = WorkerInfo("a", 1)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(info, protocol)) == info


def test_repr_is_torchs() -> None:
    assert repr(WorkerInfo("a", 1)) == "WorkerInfo(id=1, name=a)"


@pytest.mark.parametrize("attribute", ["name", "id", "other"])
def test_never_changes(attribute: str) -> None:
    info = WorkerInfo("a", 1)
    with pytest.raises((AttributeError, TypeError)):
        setattr(info, attribute, "b")
    assert info == WorkerInfo("a", 1)

"""That an object of a class of torch's is made does not go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import native


class pybind11_type(type):  # noqa: N801
    """As the classes that C++ makes have it."""


def make_class(module: str, meta: type[type] = pybind11_type) -> type:
    return meta("Agent", (), {"__module__": module, "__init__": lambda self, name="": setattr(self, "name", name)})


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "note", tmp_path / "note")
    return tmp_path / "note"


def test_an_agent_of_torchs_is_noted(note: Path) -> None:
    agent = make_class("torch._C._distributed_rpc")
    native.watch(agent)
    assert not note.exists()
    assert agent(name="a").name == "a"
    assert note.exists()


def test_agents_of_others_are_not(note: Path) -> None:
    for agent in (make_class("farcall.pytorch"), make_class("torch._C._distributed_rpc", type)):
        native.watch(agent)
        agent()
    native.watch(None)
    assert not note.exists()


def test_without_a_test_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make_class("torch._C._distributed_rpc")
    native.watch(agent)
    agent()
    assert native.note is None

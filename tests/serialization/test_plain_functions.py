"""What an edge registers as plain data is made at restricted workers, by what it registers for it."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.errors import NotAllowedError
from farcall.serialization import dumps, loads_guarded, register_plain


class Made:
    """What is made."""

    def __init__(self, how: str, value: int) -> None:
        self.how, self.value = how, value

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.value,)


class Changed(Made):
    """One whose pickle wants to change what was made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.value,), {"value": 5}


def make(value: int) -> Made:
    return Made("unchecked", value)


def make_checked(value: int) -> Made:
    return Made("checked", value)


class Nothing:
    """A guard that allows nothing."""

    def check_name(self, module: str, name: str) -> None:
        raise NotAllowedError(f"{module}.{name}")

    def check_found(self, module: str, name: str, found: object) -> None:
        raise NotAllowedError(f"{module}.{name}")


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from farcall.serialization import guarded

    monkeypatch.setattr(guarded, "_PLAIN", {})
    register_plain(make, make_checked)


def test_nothing_is_plain_that_nobody_registered() -> None:
    with pytest.raises(NotAllowedError, match="make"):
        loads_guarded(*dumps(Made("", 1)), Nothing())


@pytest.mark.usefixtures("_registered")
def test_the_checked_one_is_called() -> None:
    got = loads_guarded(*dumps([Made("", 1), Made("", 2)]), Nothing())
    assert [(each.how, each.value) for each in got] == [("checked", 1), ("checked", 2)]


@pytest.mark.usefixtures("_registered")
def test_what_was_made_is_not_changed() -> None:
    with pytest.raises(NotAllowedError, match="change"):
        loads_guarded(*dumps(Changed("", 1)), Nothing())

"""Fixtures of the autograd tests."""

from __future__ import annotations

import pytest
from torch.utils.weak import WeakTensorKeyDictionary

from farcall.pytorch.autograd import reducers


@pytest.fixture(autouse=True)
def _no_reducers_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test an empty table of the variables that reducers have.

    A backward pass takes another path while that table is not empty, and the variables of an earlier test may be part
    of a reference cycle, which only the garbage collector ends, at a moment of its own.
    """
    monkeypatch.setattr(reducers, "_together", WeakTensorKeyDictionary())

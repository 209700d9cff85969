"""What a program has given to a call."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.backends.interface import bad_arguments, bad_callee, check_timeout, checked_function
from farcall.errors import UsageError


def test_what_can_be_called() -> None:
    assert checked_function(int) is int
    wrong: Any = 3
    with pytest.raises(UsageError, match="3 cannot be called: give a function, a class or another callable"):
        checked_function(wrong)


def test_the_refusals_say_what_was_given() -> None:
    assert str(bad_arguments("abc")) == ("`args` must be a tuple or list of arguments, not a str; write args=(value,)")
    assert str(bad_callee(None)) == "`to` must be a worker's name, rank or WorkerInfo, not None"


@pytest.mark.parametrize("timeout", [-0.5, float("nan"), float("-inf")])
def test_less_than_nothing_is_no_timeout(timeout: float) -> None:
    with pytest.raises(UsageError, match="a timeout must be 0"):
        check_timeout(timeout)


@pytest.mark.parametrize("timeout", [None, "5", [5]])
def test_what_is_no_number_is_no_timeout(timeout: Any) -> None:
    with pytest.raises(UsageError, match="a timeout must be a number of seconds"):
        check_timeout(timeout)

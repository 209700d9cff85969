"""What a program has given to a call."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import farcall
from farcall.backends.interface import bad_arguments, check_timeout, checked_function, worker_key
from farcall.errors import UsageError
from farcall.protocol import WorkerInfo


def test_what_can_be_called() -> None:
    assert checked_function(int) is int
    wrong: Any = 3
    with pytest.raises(UsageError, match="3 cannot be called: give a function, a class or another callable"):
        checked_function(wrong)


def test_the_refusals_say_what_was_given() -> None:
    assert str(bad_arguments("abc")) == ("`args` must be a tuple or list of arguments, not a str; write args=(value,)")


@pytest.mark.parametrize("to", [None, True, 1.0, b"worker1", ["worker1"]])
def test_what_names_no_worker(to: Any) -> None:
    with pytest.raises(
        UsageError, match=r"`to` must be a worker's name, rank or WorkerInfo, or a farcall\.Worker, not "
    ):
        worker_key(to)


@pytest.mark.parametrize(
    ("to", "key"),
    [
        ("worker1", "worker1"),
        (1, 1),
        (numpy.int64(1), 1),
        (WorkerInfo("worker1", 1), WorkerInfo("worker1", 1)),
        (farcall.worker("worker1"), "worker1"),
        (farcall.worker(1), 1),
    ],
)
def test_what_names_a_worker(to: Any, key: Any) -> None:
    assert worker_key(to) == key


@pytest.mark.parametrize("timeout", [-0.5, float("nan"), float("-inf")])
def test_less_than_nothing_is_no_timeout(timeout: float) -> None:
    with pytest.raises(UsageError, match="a timeout must be 0"):
        check_timeout(timeout)


@pytest.mark.parametrize("timeout", [None, "5", [5]])
def test_what_is_no_number_is_no_timeout(timeout: Any) -> None:
    with pytest.raises(UsageError, match="a timeout must be a number of seconds"):
        check_timeout(timeout)

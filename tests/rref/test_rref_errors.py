"""References whose function failed, and values and arguments that cannot travel: what every use raises."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from eventually import eventually
from farcall import RRef, SerializationError
from farcall.testing import LocalGroup
from gates import SOON
from group_stage import call, echo
from reference_stage import USES, expect_nothing_left, remote, whole_text
from reference_values import ShelfError, fail, fetch

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("use", "to"),
    [pytest.param(use, to, id=use + (", another's" if to else ", own")) for use in USES for to in (0, 1)],
)
def test_every_use_raises_what_the_function_raised(group: LocalGroup, use: str, to: int) -> None:
    rref = remote(group.agents[0], to, fail, "empty")
    for _ in range(2):
        with pytest.raises(ShelfError) as caught:
            USES[use](rref)
        assert caught.value.args == ("empty", 7)
        assert not re.search(r"[\x00-\x08]", whole_text(caught.value)), "bytes of the protocol are in the text"


def test_a_third_worker_meets_the_error_too(group: LocalGroup) -> None:
    with pytest.raises(ShelfError, match="empty"):
        call(group.agents[0], 2, fetch, remote(group.agents[0], 1, fail, "empty"))


def test_the_owner_meets_the_error_by_local_value(group: LocalGroup) -> None:
    with pytest.raises(ShelfError, match="empty"):
        remote(group.agents[0], 0, fail, "empty").local_value()


@pytest.mark.parametrize("use", ["to_here", "local value", "_get_type"])
def test_an_error_that_the_owner_has_met_does_not_keep_the_reference(group: LocalGroup, use: str) -> None:
    rref = remote(group.agents[0], 0, fail, "empty")
    with pytest.raises(ShelfError):
        rref.local_value() if use == "local value" else USES[use](rref)
    del rref
    expect_nothing_left(group.agents)


@pytest.mark.parametrize("to", [0, 1], ids=["at the owner", "elsewhere"])
@pytest.mark.parametrize(
    "use",
    [
        lambda rref: rref.to_here(),
        lambda rref: rref.rpc_sync().anything(),
        lambda rref: rref.rpc_async().anything().wait(),
        lambda rref: rref.rpc_async().anything().result(SOON),
    ],
    ids=["to_here", "rpc_sync", "wait", "result"],
)
def test_an_error_that_was_handled_keeps_nothing(group: LocalGroup, use: Callable[[RRef[Any]], Any], to: int) -> None:
    """Not even until the garbage collector comes by: the references would be reported as leaks."""
    rref = remote(group.agents[0], to, fail, "early")
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ShelfError):
            use(rref)
        handle = weakref.ref(rref._handle)
        del rref
        eventually(lambda: handle() is None)
    finally:
        gc.enable()


def test_arguments_that_cannot_be_unpickled_there_fail_the_value(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match="cannot be rebuilt on worker 'worker1'"):
        remote(group.agents[0], 1, echo, Unreadable()).to_here()


class Unreadable:
    def __reduce__(self) -> Any:
        return raise_on_load, ()


def raise_on_load() -> None:
    raise ValueError("no")


def test_a_value_that_cannot_be_pickled_stays_usable_there(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, threading.Lock)
    with pytest.raises(SerializationError, match="cannot be pickled"):
        rref.to_here()
    assert rref.rpc_sync().locked() is False

"""References when workers go: a graceful shutdown, uses after it, and workers that are lost."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from eventually import eventually
from farcall import OwnerLostError, RpcError, UsageError
from farcall.runtime.handles import Handle
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, new_gate, wait_at
from group_stage import call, echo
from reference_stage import USES, expect_confirmed, expect_nothing_left, here, remote, tables
from reference_values import Shelf, fetch, keep, kept

pytestmark = pytest.mark.timeout(30)


def test_a_graceful_shutdown_names_what_is_left_and_who_holds_it(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup(3) as group:
        own, other = here(group.agents[0], Shelf()), remote(group.agents[0], 1, Shelf)
        call(group.agents[0], 2, keep, own)
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True)
        lines = sorted(record.getMessage() for record in caplog.records)
        assert len(lines) == 3
        assert "worker 'worker0' shuts down with references left: it owns 1, holds 1" in lines[0]
        assert "held 1 here, 1 by 'worker2'; made at " in lines[0]
        assert "worker 'worker1' shuts down with references left: it owns 1, holds 0" in lines[1]
        assert "(Shelf), held 1 by 'worker0'; made at the request of 'worker0'" in lines[1]
        assert "worker 'worker2' shuts down with references left: it owns 0, holds 1" in lines[2]
        kept.clear()
        del own, other


def test_what_only_its_owner_has_is_not_left(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup(2) as group:
        own = here(group.agents[0], Shelf())
        assert call(group.agents[0], 1, fetch, own).items == []
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True)
        assert caplog.text == ""
        del own


def test_a_shutdown_with_nothing_left_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup(3) as group:
        rrefs = [remote(group.agents[0], 1, Shelf) for _ in range(10)]
        assert call(group.agents[0], 2, fetch, rrefs[0]).items == []
        del rrefs
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True)
        assert caplog.text == ""
        assert [tables(agent) for agent in group.agents] == [{}] * 3


def test_a_reference_of_before_is_not_taken_for_one_of_now() -> None:
    with LocalGroup(2) as before:
        old = here(before.agents[0], "old")
        with LocalGroup(2) as group:
            new = here(group.agents[0], "new")
            assert (old._handle.reference[:3], old._handle.fork) == (new._handle.reference[:3], new._handle.fork)
            for to in (0, 1):
                with pytest.raises(UsageError, match=r"before it was shut down.*Create it anew"):
                    call(group.agents[0], to, fetch, old)
                with pytest.raises(UsageError, match="of another group"):
                    remote(group.agents[0], to, fetch, old)
            assert call(group.agents[0], 1, fetch, new) == "new"
            del new
        del old


@pytest.mark.parametrize("graceful", [True, False])
def test_a_use_after_the_shutdown_says_so(graceful: bool) -> None:
    with LocalGroup(2) as group:
        own, other = here(group.agents[0], 5), remote(group.agents[0], 1, echo, 6)
        expect_confirmed(other)
        group.shutdown(graceful=graceful)
        for use in (USES["to_here"], USES["rpc_sync"], USES["_get_type"], USES["remote"], USES["_get_future"]):
            with pytest.raises(UsageError, match="worker 'worker0' has shut down"):
                use(other)
        with pytest.raises(UsageError, match="worker 'worker0' has shut down"):
            own.rpc_sync().bit_length()
        assert repr(other) == "<RRef 0:1 owned by 'worker1'>"
        assert (other.owner_name(), own.is_owner()) == ("worker1", True)
        del own, other
        gc.collect()


@pytest.mark.parametrize("function", [wait_at, await_at], ids=["function", "coroutine"])
def test_a_shutdown_waits_for_remote_calls_under_way(function: Callable[[str], Any]) -> None:
    with LocalGroup(2) as group, ThreadPoolExecutor(1) as pool:
        gate = new_gate("under way")
        rref = remote(group.agents[0], 1, function, "under way")
        assert arrived["under way"].wait(SOON)
        ending = pool.submit(group.shutdown, True, SOON)
        try:
            assert not ended_soon(ending)
        finally:
            gate.set()
            ending.result(SOON)
        del rref


def ended_soon(future: Any) -> bool:
    """Whether it ends though it should not; waits only as long as it would take."""
    threading.Event().wait(0.2)
    return bool(future.done())


def test_a_lost_owner_is_named_by_every_use(group: LocalGroup) -> None:
    rref, passed = remote(group.agents[0], 1, echo, 5), remote(group.agents[0], 1, echo, 6)
    expect_confirmed(rref)
    expect_confirmed(passed)
    group.agents[1].shutdown(graceful=False, timeout=0)
    eventually(lambda: cast(Handle, rref._handle).new_error is not None)
    for use in USES.values():
        with pytest.raises(OwnerLostError, match="worker 'worker1', who owned reference 0:1") as caught:
            use(rref)
        assert caught.value.worker == "worker1"
    with pytest.raises(OwnerLostError, match="worker 'worker1', who owned reference 0:2"):
        call(group.agents[0], 2, echo, passed)
    with pytest.raises(OwnerLostError, match="worker 'worker1', who owned reference 0:2"):
        remote(group.agents[0], 2, echo, passed)
    assert "worker1" in repr(rref)
    expect_nothing_left([group.agents[0], group.agents[2]])


def test_a_remote_call_to_a_lost_worker(group: LocalGroup) -> None:
    call(group.agents[0], 1, echo, 0)
    group.agents[1].shutdown(graceful=False, timeout=0)
    eventually(lambda: len(group.agents[0].get_worker_infos()) == 2)
    with pytest.raises(RpcError, match="worker1"):
        remote(group.agents[0], 1, echo, 5).to_here()


def test_what_a_lost_worker_held_is_released(group: LocalGroup) -> None:
    value = Shelf()
    released = weakref.ref(value)
    call(group.agents[0], 2, keep, here(group.agents[0], value))
    del value
    assert group.agents[0].reference_store.inventory().owned[0].holders == ("worker2",)
    group.agents[2].shutdown(graceful=False, timeout=0)
    expect_nothing_left([group.agents[0], group.agents[1]])
    eventually(lambda: released() is None)
    kept.clear()


class Farewell:
    """Takes its time to go: does something in its finalizer."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


def new_farewell(group: LocalGroup, name: str) -> Farewell:
    def act() -> None:
        farewells[name] = "began"
        if name == "waits":
            wait_at(name)
        farewells[name] = call(group.agents[1], 2, echo, "called")

    return Farewell(act)


farewells: dict[str, str] = {}


@pytest.mark.parametrize("name", ["calls", "waits"])
def test_the_finalizer_of_a_value_may_call_and_holds_up_nobody(group: LocalGroup, name: str) -> None:
    farewells.clear()
    gate = new_gate(name)
    rref = remote(group.agents[0], 1, new_farewell, group, name)
    rref._get_future().wait()
    del rref
    if name == "waits":
        assert arrived[name].wait(SOON)
        assert call(group.agents[0], 1, echo, "meanwhile") == "meanwhile"
        assert call(group.agents[2], 1, echo, "meanwhile") == "meanwhile"
        gate.set()
    eventually(lambda: farewells.get(name) == "called")
    expect_nothing_left(group.agents)


def test_a_shutdown_waits_for_releases_that_lead_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """Each worker is idle most of the time, while a chain of references goes from the one to the other."""
    with LocalGroup(3) as group:
        rref = remote(group.agents[0], 1, Shelf)
        for number in range(90):
            rref = remote(group.agents[0], number % 3, echo, rref)
        assert rref.to_here(timeout=SOON) is not None
        del rref
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True, timeout=SOON)
        assert caplog.records == []

"""References whose function failed, or whose owner or holder is gone: every use raises an error that says so."""

from __future__ import annotations

import gc
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from eventually import eventually
from farcall import OwnerLostError, RpcError, RRef, SerializationError, UsageError
from farcall.testing import LocalGroup
from group_stage import NewGroup, call, echo
from reference_values import USES, Shelf, ShelfError, expect_no_references, fail, fetch, keep, kept
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)

KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def _keep_nothing() -> Iterator[None]:
    kept.clear()
    yield
    kept.clear()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("to", [0, 1], ids=["owned here", "owned by another worker"])
def test_every_use_raises_what_the_function_raised(group: LocalGroup, use: str, to: int) -> None:
    rref = group.remote(0, to, fail, ("empty",))
    for _ in range(2):
        with pytest.raises(ShelfError) as caught:
            USES[use](rref)
        assert caught.value.args == ("empty", 7)
        assert "in fail" in "".join(traceback.format_exception(caught.value))


def test_a_third_worker_meets_the_error_of_the_function_too(group: LocalGroup) -> None:
    with pytest.raises(ShelfError, match="empty"):
        call(group.agents[0], 2, fetch, group.remote(0, 1, fail, ("empty",)))
    with pytest.raises(ShelfError, match="empty"):
        group.remote(0, 0, fail, ("empty",)).local_value()


def test_arguments_that_cannot_be_unpickled_fail_the_value(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match="cannot be rebuilt on worker 'worker1'"):
        group.remote(0, 1, echo, (Unloadable(),)).to_here()


class Unloadable:
    def __reduce__(self) -> Any:
        return raise_on_load, ()


def raise_on_load() -> None:
    raise ValueError("no")


def test_a_failure_that_nobody_asks_for_is_no_trouble(group: LocalGroup, recwarn: pytest.WarningsRecorder) -> None:
    for _ in range(10):
        group.remote(0, 1, fail, ("empty",))
    expect_no_references(group)
    assert call(group.agents[0], 1, echo, "alive") == "alive"
    assert list(recwarn) == []


# -- Workers that leave


def test_every_use_of_a_reference_whose_owner_has_left_raises_owner_lost(group: LocalGroup) -> None:
    rref, passed = group.remote(0, 1, Shelf), group.remote(0, 1, Shelf)
    for each in (rref, passed):
        eventually(each.confirmed_by_owner)
    call(group.agents[0], 2, keep, passed)
    group.agents[1].shutdown(graceful=False)
    eventually(lambda: isinstance(error_of(rref), OwnerLostError) and isinstance(error_of(kept[0]), OwnerLostError))
    for use in USES.values():
        with pytest.raises(OwnerLostError, match="worker 'worker1', who owned reference 0:1") as caught:
            use(rref)
        assert caught.value.worker == "worker1"
    for send in (lambda: call(group.agents[0], 2, echo, passed), lambda: group.remote(0, 2, echo, (passed,))):
        with pytest.raises(OwnerLostError, match="who owned reference 0:2"):
            send()
    assert "worker1" in repr(rref)


def error_of(rref: RRef[Any]) -> BaseException | None:
    try:
        rref.to_here()
    except RpcError as error:
        return error
    return None


def test_what_a_worker_held_is_released_when_it_leaves(group: LocalGroup) -> None:
    rref = group.rref(1, Shelf())
    call(group.agents[1], 0, keep, rref)
    call(group.agents[1], 2, keep, rref)
    del rref
    gc.collect()
    eventually(lambda: group.references(1).owned[0].holders == ("worker0", "worker2"))
    group.agents[0].shutdown(graceful=False)
    eventually(lambda: group.references(1).owned[0].holders == ("worker2",))
    assert kept[1].rpc_sync().put("tea") == 1
    kept.clear()
    eventually(lambda: not group.references(1).owned)


@pytest.mark.parametrize("graceful", [True, False])
def test_a_use_after_the_shutdown_of_this_worker_says_so(make_group: NewGroup, graceful: bool) -> None:
    group = make_group(2)
    own, other = group.rref(0, Shelf()), group.remote(0, 1, Shelf)
    eventually(other.confirmed_by_owner)
    group.shutdown(graceful=graceful)
    for use in USES.values():
        with pytest.raises(UsageError, match="worker 'worker0' has shut down"):
            use(other)
    with pytest.raises(UsageError, match="worker 'worker0' has shut down"):
        own.rpc_sync().put("tea")
    assert repr(other) == "<RRef 0:1 owned by 'worker1'>"


# -- Processes that are killed


def test_references_of_killed_processes_are_lost_or_released(workers: StartWorkers) -> None:
    """w1 owns a value, holds ten values of w0, and has passed five of them on to w2. Then it is killed."""
    script = """
    import gc, weakref
    kept = []
    def keep(*values): kept.extend(values)
    def forget(): kept.clear()
    def pass_on(rref, to):
        kept.append(rref)
        rpc.rpc_sync(to, keep, args=(rref,))
    class Thing: pass
    start(heartbeat_patience=600)
    if RANK == 0:
        theirs = rpc.remote("w1", str, args=("tea",))
        rpc.rpc_sync("w2", keep, args=(theirs,))
        things = [Thing() for _ in range(10)]
        gone = [weakref.ref(thing) for thing in things]
        for number in range(10):
            if number < 5:
                rpc.rpc_sync("w1", keep, args=(rpc.RRef(things.pop()),))
            else:
                rpc.rpc_sync("w1", pass_on, args=(rpc.RRef(things.pop()), "w2"))
        def holders():
            gc.collect()
            return sorted({name for owned in rpc.references().owned for name in owned.holders})
        def alive(): return sum(ref() is not None for ref in gone)
        assert wait_for(lambda: holders() == ["w1", "w2"] and not any(one.handles for one in rpc.references().owned))
        report(ready=alive())
        assert wait_for(lambda: holders() == ["w2"] and alive() == 5, 20)
        report(after=[holders(), alive()])
        assert wait_for(lambda: outcome(theirs.to_here).get("error") == "OwnerLostError", 20)
        ways = dict(to_here=theirs.to_here, rpc_sync=theirs.rpc_sync().upper,
                    rpc_async=lambda: theirs.rpc_async().upper().wait(),
                    remote=lambda: theirs.remote().upper().to_here(),
                    passed=lambda: rpc.rpc_sync("w2", keep, args=(theirs,)))
        report(uses={way: outcome(use).get("error") for way, use in ways.items()})
        rpc.rpc_sync("w2", forget)
        report(end=wait_for(lambda: alive() == 0, 20), left=str(rpc.references()))
    elif RANK == 2:
        assert wait_for(lambda: len(kept) == 6, 20)
        value = kept[0]
        assert wait_for(lambda: outcome(value.to_here).get("error") == "OwnerLostError", 20)
        report(passed_on=outcome(value.to_here)["text"])
        wait_for(lambda: os.path.exists("end"), 30)
    else:
        time.sleep(100)
    rpc.shutdown(graceful=False)
    """
    group = workers(script, n=3)
    assert group.wait_for(0, "ready") == 10
    group.send_signal(1, signal.SIGKILL)
    assert group.wait_for(0, "after") == [["w2"], 5]
    assert group.wait_for(0, "end") is True
    assert "'w1'" in group.wait_for(2, "passed_on")
    (group.directory / "end").touch()
    facts = group.finish({1: KILLED}, quiet=False)[0]
    assert facts["uses"] == dict.fromkeys(("to_here", "rpc_sync", "rpc_async", "remote", "passed"), "OwnerLostError")

"""What a program asks of others, with references in it: nothing is taken before all is known to be right."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eventually import eventually
from farcall import OwnerLost, RRef, SerializationError, UsageError, WorkerInfo, WorkerLost
from farcall.agent import calling as calling_module
from farcall.agent import handle as handle_module
from farcall.agent.sending import Sender
from farcall.agent.tending import work_off
from farcall.options import UNSET_RPC_TIMEOUT
from farcall.protocol.wire import METHOD
from farcall.sleeping import FOREVER
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, start
from interruption import At, Interrupt
from reference_stage import expect_confirmed, expect_nothing_left, here, remote, tables

pytestmark = pytest.mark.timeout(30)

kept: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    kept.clear()


def echo(*args: Any, **kwargs: Any) -> Any:
    return (args, kwargs) if kwargs or len(args) != 1 else args[0]


# -- An interrupt at any point

MESSAGES = (
    "agent/book.py",
    "agent/calling.py",
    "agent/outgoing.py",
    "agent/calls.py",
    "protocol/references.py",
    "protocol/delivery.py",
    "protocol/control.py",
)

USES: dict[str, Callable[[LocalGroup, RRef[Any], RRef[Any]], object]] = {
    "remote": lambda group, own, other: remote(group[0], 1, list),
    "remote with references": lambda group, own, other: remote(group[0], 1, echo, own, other),
    "call with references": lambda group, own, other: start(group[0], 2, echo, [own, other]),
    "method": lambda group, own, other: other.rpc_async().copy(),
    "remote that is told": lambda group, own, other: remote(group[0], 1, int),
    "fetch of what is told": lambda group, own, other: (rref := remote(group[0], 1, int), rref.to_here()),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("use", USES)
def test_an_interrupt_at_any_point_of_a_use_of_references_leaves_nothing_behind(
    new_group: Callable[..., LocalGroup], use: str
) -> None:
    """A number that was taken and never sent would hold up all that follow: nothing would ever be given back."""
    group = new_group(3, spin=0.0)
    for point in itertools.count():
        own, other, extra = here(group[0], [1]), remote(group[0], 1, list, (1,)), remote(group[0], 1, list)
        assert other.to_here() == [1]
        expect_confirmed(other)
        expect_confirmed(extra)
        assert call(group[0], 2, echo, 1) == 1  # connected
        assert remote(group[0], 1, int).to_here() == 0  # wanted: it is told the next time
        del extra  # so that there is something to be said
        with group[0].book._lock:
            work_off(group[0].book)
        result = None  # not let go within: what is raised in a finalizer is lost
        with contextlib.suppress(Interrupt, WorkerLost), At(MESSAGES, (point,)) as at:
            result = USES[use](group, own, other)
        assert other.to_here() == [1], at.places
        del own, other, result
        try:
            expect_nothing_left(group)
        except AssertionError as error:
            pytest.fail(f"after an interrupt at {at.places}: {error}")
        if not at.has_acted:
            assert point > 10
            return


# -- Arguments of every form


@pytest.mark.parametrize("to", [0, 1], ids=["oneself", "another"])
@pytest.mark.parametrize(
    ("args", "kwargs", "result"),
    [
        (None, None, ((), {})),
        ((), {}, ((), {})),
        ([1, 2], None, ((1, 2), {})),
        ((), {"a": 1}, ((), {"a": 1})),
        ((1,), {"a": 2}, ((1,), {"a": 2})),
    ],
)
def test_arguments_of_a_remote_call(group: LocalGroup, to: int, args: Any, kwargs: Any, result: Any) -> None:
    assert RRef.of(group[0].calling.remote(to, echo, args, kwargs)).to_here() == result
    by_value = RRef.of(group[0].calling.remote(to, lambda *args, **kwargs: (args, kwargs), args, kwargs))
    assert by_value.to_here() == result
    callee = remote(group[0], to, Callee)
    assert RRef.of(group[0].calling.remote_on(callee._handle, "take", args or (), kwargs)).to_here() == result
    called = group[0].calling.call_on(callee._handle, METHOD, "take", args or (), kwargs, SOON)
    assert called.wait() == result


class Callee:
    def take(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.mark.parametrize("to", ["worker1", 1, WorkerInfo("worker1", 1)])
def test_a_remote_call_goes_to_a_name_a_rank_or_an_info(group: LocalGroup, to: Any) -> None:
    assert remote(group[0], to, echo, "tea").owner_name() == "worker1"


# -- What is wrong is raised before anything is taken


WRONG: dict[str, tuple[type[BaseException], str, Callable[[Any, Any, Any], Any]]] = {
    "an argument that cannot be pickled": (
        SerializationError,
        "cannot be pickled",
        lambda agent, to, good: remote(agent, to, echo, good, threading.Lock()),
    ),
    "too many references": (
        SerializationError,
        "a message with 3 references cannot be sent; at most 2",
        lambda agent, to, good: remote(agent, to, echo, [here(agent, number) for number in range(3)]),
    ),
    "what cannot be called": (
        UsageError,
        "cannot be called",
        lambda agent, to, good: remote(agent, to, 5, good),  # type: ignore[arg-type]
    ),
    "a method with an argument that cannot be pickled": (
        SerializationError,
        "cannot be pickled",
        lambda agent, to, good: good.remote().append(threading.Lock()),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_remote_call_takes_nothing(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(handle_module, "MOST_HANDLES", 2)
    error, text, attempt = WRONG[what]
    good = remote(group[0], 1, list)
    expect_confirmed(good)
    eventually(lambda: not group[0].book.has_work())
    before = numbers(group)
    with pytest.raises(error, match=text):
        attempt(group[0], 1, good)
    assert numbers(group) == before
    assert remote(group[0], 1, echo, "later").to_here() == "later"
    del good
    expect_nothing_left(group)


def numbers(group: LocalGroup) -> Any:
    """The numbers that worker 0 has given to messages and references for worker 1."""
    book = group[0].book
    return book.mailboxes.delivery.links[1].last, book._references.numbers.get(1)


@pytest.mark.parametrize("to", [0, 1], ids=["oneself", "another"])
def test_no_memory_for_the_copies_of_large_arguments_takes_nothing(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch, to: int
) -> None:
    numpy = pytest.importorskip("numpy")
    passed = remote(group[0], 2, echo, "tea")
    expect_confirmed(passed)
    eventually(lambda: not group[0].book.has_work())

    def no_memory(buffer: Any) -> bytearray:
        raise MemoryError(f"no {len(buffer)} bytes")

    before, owned = numbers(group), len(group[0].book._references.owned)
    with monkeypatch.context() as patch:
        for name in ("bytearray", "bytes"):
            patch.setattr(calling_module, name, no_memory, raising=False)
        with pytest.raises(MemoryError):
            remote(group[0], to, echo, numpy.zeros(100_000), passed)
    assert (numbers(group), len(group[0].book._references.owned)) == (before, owned)
    assert remote(group[0], to, echo, "later").to_here() == "later"
    del passed
    expect_nothing_left(group)


@pytest.mark.parametrize("connected", [True, False])
def test_a_worker_that_is_gone_takes_nothing(group: LocalGroup, connected: bool) -> None:
    passed = here(group[0], "tea")
    if connected:
        call(group[0], 1, echo, 0)
    group[1].shutdown(graceful=False, timeout=0)
    if connected:
        eventually(lambda: group[0]._peers[1].is_lost)
    for attempt in (remote, call):
        with pytest.raises(WorkerLost, match="worker1"):
            attempt(group[0], 1, echo, passed)  # type: ignore[operator]
    assert tables(group[0]) == {"owned": 1, "values": 1, "origins": 1}
    assert call(group[0], 2, echo, passed) == passed


def test_a_reference_that_leads_nowhere_is_refused_by_everyone(group: LocalGroup) -> None:
    bad = remote(group[0], 1, list)
    expect_confirmed(bad)
    group[1].shutdown(graceful=False, timeout=0)
    eventually(lambda: group[0]._peers[1].is_lost)
    for to in (0, 2):
        with pytest.raises(OwnerLost, match="who owned"):
            call(group[0], to, echo, bad)
    with pytest.raises(OwnerLost, match="who owned"):
        remote(group[0], 2, echo, bad)
    expect_nothing_left([group[0], group[2]])
    assert bad.owner_name() == "worker1"


# -- How long a reference lives


def test_a_call_that_was_answered_gives_its_reference_back_though_its_future_is_kept(group: LocalGroup) -> None:
    future = remote(group[0], 1, list).rpc_async().append(1)
    assert future.wait() is None
    expect_nothing_left(group)
    assert future.done()


def test_a_reference_of_a_call_to_oneself_lives_until_it_has_run(group: LocalGroup) -> None:
    gate = new_gate("own")
    result = remote(group[0], 0, wait_at, "own", Callee()).remote().take(1)
    gc.collect()
    assert arrived["own"].wait(SOON)
    group[0].book.work_off()
    gate.set()
    assert result.to_here() == ((1,), {})
    del result
    expect_nothing_left(group)


def test_the_arguments_of_a_remote_call_to_oneself_go_with_its_value(group: LocalGroup) -> None:
    passed = remote(group[0], 1, echo, "tea")
    outer = remote(group[0], 0, echo, [passed])
    assert outer.to_here() == [passed]
    inner = weakref.ref(passed._handle)
    del passed
    gc.collect()
    assert inner() is not None
    del outer
    expect_nothing_left(group)
    assert inner() is None


# -- What the protocol has to say goes along


def test_a_fetch_takes_along_that_a_reference_was_kept(group: LocalGroup) -> None:
    """No other message need be sent for it: the owner counts the fork when the fetch comes."""
    rref = remote(group[0], 1, echo, "tea")
    expect_confirmed(rref)
    group[2]._supervisor.has_chores = lambda: False
    call(group[0], 2, keep, rref)
    with group[2].book._lock:
        group[2].book._ask_owners()
        assert not group[2].book.mailboxes.outboxes, "it may be dropped in a moment"
        while not group[2].book.mailboxes.outboxes:
            group[2].book._ask_owners()
    assert kept[0].to_here(timeout=SOON) == "tea"
    eventually(lambda: kept[0].confirmed_by_owner())


def keep(rref: RRef[Any]) -> None:
    kept.append(rref)


def test_a_remote_call_takes_along_what_is_to_be_said(group: LocalGroup) -> None:
    dropped = remote(group[0], 1, echo, "tea")
    expect_confirmed(dropped)
    eventually(lambda: not group[0].book.has_work())
    group[0]._supervisor.has_chores = lambda: False
    del dropped
    gc.collect()
    with group[0].book._lock:
        work_off(group[0].book)
    assert len(group[1].book._references.owned) == 1
    there = remote(group[0], 1, echo, "milk")
    assert there.to_here() == "milk"
    assert [str(reference) for reference in group[1].book._references.owned] == [str(there._handle.reference)]


# -- Timeouts


def test_seconds_of_a_timeout(group: LocalGroup) -> None:
    calling = group[0].calling
    calling.rpc_timeout = 7.0
    assert [calling.resolve_timeout(given) for given in (UNSET_RPC_TIMEOUT, 0, 0.5)] == [7.0, 0, 0.5]


@pytest.mark.parametrize("rpc_timeout", [0.0, 60.0])
def test_a_remote_call_is_held_back_while_too_much_waits_to_be_sent(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch, rpc_timeout: float
) -> None:
    """For at most the worker's timeout; 0 is without end, here as everywhere."""
    call(group[0], 1, echo, 0)
    connection = group[0]._peers[1].connection
    assert connection is not None
    held: list[float] = []
    monkeypatch.setattr("farcall.agent.outgoing.MAX_WAITING", -1)
    monkeypatch.setattr(Sender, "hold_back", lambda _, deadline, is_over: held.append(deadline))
    group[0].calling.rpc_timeout = rpc_timeout
    rref = remote(group[0], 1, echo, "tea")
    assert len(held) == 1
    assert (held[0] == FOREVER) is (rpc_timeout == 0)
    monkeypatch.undo()
    assert rref.to_here() == "tea"

"""The connection for our own calls: replies find their callers, loss is told to everybody, time is kept."""

from __future__ import annotations

import contextlib
import gc
import itertools
import select
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from types import SimpleNamespace

import pytest
from agent_stage import a_megabyte

from eventually import eventually
from farcall import RpcTimeoutError, UsageError, WorkerLost
from farcall.agent.calls import PendingCall
from farcall.agent.outgoing import Outgoing
from farcall.gathering import wait_all
from farcall.protocol.wire import CALL, encode
from farcall.sleeping import FOREVER
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start
from interruption import At, Interrupt

pytestmark = pytest.mark.timeout(30)


def connection(group: LocalGroup) -> Outgoing:
    """The one from worker0 to worker1."""
    (found,) = [one for one in group[0]._connections if one.peer.name == "worker1"]
    return found


def test_one_connection_serves_all_threads(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    together = threading.Barrier(16)

    def work(n: int) -> int:
        together.wait(SOON)
        result: int = call(group[0], 1, echo, n)
        return result

    assert list(background.map(work, range(16))) == list(range(16))
    assert len(group[0]._connections) == 1
    assert len(group[1]._incoming) == 1


def test_replies_come_in_any_order(group: LocalGroup) -> None:
    gates = [new_gate(f"gate {n}") for n in range(8)]
    futures = [start(group[0], 1, wait_at, f"gate {n}", n) for n in range(8)]
    for n in (5, 0, 7, 3, 6, 1, 4, 2):
        gates[n].set()
        assert futures[n].wait() == n
    assert connection(group).pending == {}


def test_a_waiter_hands_the_reading_on(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gates = [new_gate(f"gate {n}") for n in range(8)]
    waiting = [background.submit(call, group[0], 1, wait_at, f"gate {n}", n) for n in range(8)]
    for n in range(8):
        assert arrived[f"gate {n}"].wait(SOON)
    for n in range(8):
        gates[n].set()
        assert waiting[n].result(SOON) == n


def test_a_reply_is_settled_though_nobody_waits(group: LocalGroup) -> None:
    futures = [start(group[0], 1, echo, n) for n in range(200)]
    deadline = monotonic() + SOON
    while not all(future.done() for future in futures):
        assert monotonic() < deadline
    assert [future.value() for future in futures] == list(range(200))


def test_loss_fails_everything_under_way_and_names_worker_and_function(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("lost")
    waiting = [background.submit(call, group[0], 1, wait_at, "lost") for _ in range(4)]
    futures = [start(group[0], 1, wait_at, "lost") for _ in range(4)]
    eventually(lambda: connection(group).calls_started == 8)
    for incoming in list(group[1]._incoming):
        incoming.close()
    for error in [one.exception(SOON) for one in waiting] + [future.exception(SOON) for future in futures]:
        assert isinstance(error, WorkerLost)
        assert isinstance(error, ConnectionError)
        assert error.worker == "worker1"
        assert "worker 'worker1' was lost" in str(error)
        assert "`wait_at`" in str(error)
        assert str(error).endswith("does every worker call rpc.shutdown() at its end?")
    gate.set()
    assert call(group[0], 1, echo, "connected anew") == "connected anew"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(encode(CALL, 1, b"", b""), id="a call"),
        pytest.param(encode(9, 1, b"", b""), id="unknown kind"),
        pytest.param(b"\x55\x55\x02\x00" + b"\x55" * 60, id="noise"),
    ],
)
def test_an_answer_that_is_none_loses_the_connection_only(group: LocalGroup, answer: bytes) -> None:
    gate = new_gate("mad")
    future = start(group[0], 1, wait_at, "mad")
    assert arrived["mad"].wait(SOON)
    (incoming,) = group[1]._incoming
    incoming.answer([answer])
    error = future.exception(1)
    gate.set()
    assert isinstance(error, WorkerLost)
    assert call(group[0], 1, echo, "connected anew") == "connected anew"


def test_an_answer_to_nobody_is_dropped(group: LocalGroup) -> None:
    assert call(group[0], 1, echo, 1) == 1
    (incoming,) = group[1]._incoming
    incoming.answer([encode(2, 999_999, b"", b"")])
    assert call(group[0], 1, echo, 2) == 2


def test_large_messages_both_ways_from_many_threads(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    def work(n: int) -> bool:
        data = bytes([n]) * (3 << 20)
        return all(call(group[n % 2], 1 - n % 2, echo, data) == data for _ in range(3))

    assert all(background.map(work, range(8)))


def test_buffers_may_be_changed_as_soon_as_the_call_is_made(group: LocalGroup) -> None:
    numpy = pytest.importorskip("numpy")
    gate = new_gate("busy")
    blockers = [start(group[0], 1, wait_at, "busy") for _ in range(16)]  # nobody reads the arguments for a while
    futures = []
    array = numpy.zeros(1 << 18)
    for n in range(20):
        array[:] = n
        futures.append(start(group[0], 1, echo, array))
    array[:] = -1
    gate.set()
    assert [set(future.wait().tolist()) for future in futures] == [{float(n)} for n in range(20)]
    wait_all(blockers)


def test_more_than_the_socket_takes_is_sent_in_the_end(group: LocalGroup) -> None:
    futures = [start(group[0], 1, echo, (n, bytes(200_000))) for n in range(200)]
    assert [future.wait()[0] for future in futures] == list(range(200))


def test_a_callers_time_ends_while_another_thread_reads(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("read")
    reader = background.submit(call, group[0], 1, wait_at, "read")
    assert arrived["read"].wait(SOON)
    began = monotonic()
    with pytest.raises(RpcTimeoutError):
        call(group[0], 1, wait_at, "read", timeout=0.1)
    assert 0.1 <= monotonic() - began < 0.6
    gate.set()
    reader.result(SOON)


def test_a_timeout_is_kept_while_other_replies_stream_in(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("stream")
    stop = threading.Event()

    def stream() -> None:
        while not stop.is_set():
            wait_all([start(group[0], 1, echo, n) for n in range(20)])

    streams = [background.submit(stream) for _ in range(3)]
    began = monotonic()
    with pytest.raises(RpcTimeoutError):
        call(group[0], 1, wait_at, "stream", timeout=0.2)
    took = monotonic() - began
    stop.set()
    gate.set()
    for one in streams:
        one.result(SOON)
    assert 0.2 <= took < 0.9


def test_a_timeout_is_kept_though_the_arguments_cannot_be_sent(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2)
    assert call(group[0], 1, echo, 1) == 1
    (incoming,) = group[1]._incoming
    group[1]._poller.remove(incoming._descriptor)  # it reads no more
    began = monotonic()
    with pytest.raises(RpcTimeoutError):
        call(group[0], 1, echo, bytes(64 << 20), timeout=0.3)
    assert 0.3 <= monotonic() - began < 1.2


# -- Ctrl-C


class Interrupting:
    """Ctrl-C comes in the midst of its unpickling."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _raise_in_the_main_thread, (signal.SIGINT,)


def _raise_in_the_main_thread(number: int) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(number)


def returns_interrupting() -> Interrupting:
    return Interrupting()


def test_ctrl_c_while_a_result_is_unpickled_is_no_serialization_error(group: LocalGroup) -> None:
    with pytest.raises(KeyboardInterrupt):
        call(group[0], 1, returns_interrupting)


def test_ctrl_c_while_waiting_leaves_the_connection_and_the_call_alone(group: LocalGroup) -> None:
    gate = new_gate("waiting")
    future = start(group[0], 1, wait_at, "waiting", "came")
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    began = monotonic()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert monotonic() - began < 0.6
    timer.join()
    same = connection(group)
    assert call(group[0], 1, echo, "after") == "after"
    gate.set()
    assert future.wait() == "came"
    assert connection(group) is same


def test_a_call_that_fails_after_ctrl_c_is_not_reported_as_unseen(group: LocalGroup) -> None:
    gate = new_gate("interrupted")
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            call(group[0], 1, wait_at, "interrupted")
        timer.join()
        interrupted = weakref.ref(next(iter(connection(group).pending.values())))
        connection(group).lose("for the test")
        gc.collect()
        eventually(lambda: interrupted() is None)
    assert [str(one.message) for one in caught] == []
    gate.set()


def test_ctrl_c_behind_another_reader(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("waiting")
    reader = background.submit(call, group[0], 1, wait_at, "waiting", "read")
    assert arrived["waiting"].wait(SOON)
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    began = monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(group[0], 1, wait_at, "waiting")
    assert monotonic() - began < 0.6
    timer.join()
    gate.set()
    assert reader.result(SOON) == "read"
    while connection(group).pending:  # the one that was interrupted, too
        call(group[0], 1, echo, 1)
    assert call(group[0], 1, a_megabyte) == bytes(1 << 20)


# -- an interrupt at any point of a call

CALLING = tuple(f"agent/{name}.py" for name in ("outgoing", "attendance", "reading", "sending", "poller"))
CALLING += ("farcall/futures.py",)


class Scene:
    """Calls of worker0 to worker1 which are answered before anybody reads, so that all goes on in this thread."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group

    def call(self) -> PendingCall:
        """A call whose reply is there, unread."""
        future: PendingCall = start(self.group[0], 1, echo, 1)
        (one,) = self.group[0]._connections
        poll = select.poll()
        poll.register(one._descriptor, select.POLLIN)
        assert poll.poll(SOON * 1000)
        return future


@pytest.fixture
def scene(new_group: Callable[..., LocalGroup], monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(Outgoing, "watch_in_background", lambda *_: None)
    return Scene(new_group(2, spin=0.0))


def test_an_interrupt_at_any_point_of_a_wait_leaves_nobody_waiting(scene: Scene) -> None:
    for point in itertools.count():
        waited, called = scene.call(), scene.call()
        ran: list[object] = []
        derived = waited.then(lambda _, ran=ran: ran.append("waited"))
        other = called.then(lambda _, ran=ran: ran.append("called"))
        with contextlib.suppress(Interrupt), At(CALLING, (point,)) as at:
            waited.wait()
        try:
            for future in (waited, derived, called, other):
                error = future.exception(SOON)
                assert error is None or isinstance(error, (WorkerLost, Interrupt)), at.places
        except TimeoutError:
            pytest.fail(f"somebody waits in vain, after an interrupt at {at.places}")
        assert len(set(ran)) == len(ran), f"a callback ran twice: {at.places}"
        assert "called" in ran or other.exception(), at.places
        assert "waited" in ran or derived.exception(), at.places
        assert call(scene.group[0], 1, echo, "after") == "after", at.places
        if not at.has_acted:
            assert point > 20
            return


def test_an_interrupt_at_any_point_of_a_call_leaves_no_call_that_nobody_knows_of(scene: Scene) -> None:
    assert call(scene.group[0], 1, echo, 0) == 0
    for point in itertools.count():
        future = None
        with contextlib.suppress(Interrupt), At(CALLING, (point,)) as at:
            future = start(scene.group[0], 1, echo, 1)
        if future is not None:
            assert future.wait() == 1
        for one in list(scene.group[0]._connections):
            assert not one.pending or at.places[0].startswith("Attendance.unattended"), at.places
        assert call(scene.group[0], 1, echo, "after") == "after", at.places
        if not at.has_acted:
            assert point > 5
            return


def test_an_interrupt_at_any_point_of_a_loss_is_seen_through(scene: Scene) -> None:
    for point in itertools.count():
        futures = [scene.call() for _ in range(3)]
        derived = [future.then(lambda f: f.exception()) for future in futures]
        lost = connection(scene.group)
        with contextlib.suppress(Interrupt), At(CALLING, (point,)) as at:
            lost.lose("a test says so")
        if lost.is_lost():
            for future in futures:
                assert isinstance(future.exception(SOON), WorkerLost), at.places
            for one in derived:
                assert isinstance(one.result(SOON), WorkerLost), at.places
            assert lost not in scene.group[0]._connections, at.places
        assert call(scene.group[0], 1, echo, "after") == "after", at.places
        if not at.has_acted:
            assert point > 20
            return


def test_a_call_that_is_told_of_a_loss_is_not_told_of_it_twice(
    group: LocalGroup, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while the thread that has found the loss is still at it."""
    assert call(group[0], 1, echo, 0) == 0
    lost = connection(group)
    closing, go_on = threading.Event(), threading.Event()
    close = lost._channel.close

    def slow_close() -> None:
        closing.set()
        go_on.wait(SOON)
        close()

    monkeypatch.setattr(lost, "_channel", SimpleNamespace(close=slow_close))
    losing = background.submit(lost.lose, "a test says so")
    assert closing.wait(SOON)
    with pytest.raises(WorkerLost, match="a test says so"):
        call(group[0], 1, echo, 1)
    assert call(group[0], 1, echo, 2) == 2
    go_on.set()
    losing.result(SOON)


def test_an_interrupt_at_any_point_of_an_expiry_settles_the_call(scene: Scene) -> None:
    gate = new_gate("expiry")
    for point in itertools.count():
        future = start(scene.group[0], 1, wait_at, "expiry", timeout=SOON)
        derived = future.then(lambda f: f.exception())
        one = connection(scene.group)
        with contextlib.suppress(Interrupt), At(CALLING, (point,)) as at:
            one._expire(future)
        one.tick(monotonic() + 2 * SOON)  # the supervisor's next look
        assert isinstance(future.exception(0), RpcTimeoutError), at.places
        assert isinstance(derived.result(SOON), RpcTimeoutError), at.places
        if not at.has_acted:
            gate.set()
            return


def test_callbacks_that_an_interrupted_wait_left_run_once(group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dispatched to the pool; a second thread that waits for the same future must not run them again."""
    future = start(group[0], 1, echo, 1)
    one = connection(group)
    ran = []
    future.add_done_callback(ran.append)

    def interrupted(*_: object) -> None:
        wait(future, FOREVER)
        raise KeyboardInterrupt

    wait, attend, line = one._reading.wait, one._reading.attend, one._reading.line
    dispatched: list[object] = []
    monkeypatch.setattr(one, "_reading", SimpleNamespace(wait=interrupted, attend=attend, line=line))
    monkeypatch.setattr(one, "_dispatch", lambda *job: dispatched.append(job))
    future.due = [lambda _: ran.append("due")]
    with pytest.raises(KeyboardInterrupt):
        one.drive(future, FOREVER)
    assert len(dispatched) >= 1
    assert future.due is None


def test_a_reply_whose_waiter_was_interrupted_before_it_read_is_looked_after(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(scene.group[0], 1, echo, 1) == 1
    one = connection(scene.group)
    future = scene.group[0].call(1, echo, (1,), None, SOON)

    def interrupted(*_: object) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(one, "_reading", SimpleNamespace(wait=interrupted))
        patch.setattr(one._attendance, "since", 0.0)
        with pytest.raises(Interrupt):
            future.wait()
        assert one._attendance.since
    assert future.wait() == 1


# -- calls in the midst of a call, as signal handlers and finalizers make them


@pytest.mark.parametrize("waits", [False, True], ids=["rpc_async", "rpc_sync"])
def test_a_call_at_any_point_of_a_call_is_answered_or_refused(scene: Scene, waits: bool) -> None:
    refused: set[str] = set()
    answered = 0
    for point in itertools.count():
        inner: list[PendingCall] = []

        def handle(inner: list[PendingCall] = inner) -> None:
            nonlocal answered
            inner.append(start(scene.group[0], 1, echo, "inner"))
            if waits:
                try:
                    assert inner[0].wait() == "inner"
                    answered += 1
                except UsageError as error:
                    refused.add(str(error).partition("the midst of ")[2].partition(",")[0])

        same = list(scene.group[0]._connections)
        with At(CALLING, (point,), handle) as at:
            assert call(scene.group[0], 1, echo, "outer") == "outer"
        for one in inner:
            assert one.result(SOON) == "inner", at.places
        assert not same or same == list(scene.group[0]._connections), f"the connection was lost: {at.places}"
        if not at.has_acted:
            assert point > 20
            break
    if waits:
        assert answered > 10
        assert refused == {"sending", "reading a reply"}


def test_a_signal_handler_calls_while_the_main_thread_sleeps_in_a_wait(group: LocalGroup) -> None:
    gate = new_gate("outer")
    outer = start(group[0], 1, wait_at, "outer", "came")
    assert arrived["outer"].wait(SOON)
    results: list[str] = []

    def handle(*_: object) -> None:
        results.append(call(group[0], 1, echo, "inner"))
        gate.set()
        # The outer reply is read by this wait, as likely as not: nobody wakes the outer one then.
        results.append(call(group[0], 1, echo, "inner again"))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
        timer.start()
        began = monotonic()
        assert outer.wait() == "came"
        assert monotonic() - began < 0.8
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert results == ["inner", "inner again"]
    assert not connection(group)._reading._holder

"""Large data in arguments and results: it arrives as it was, belongs to its receiver alone, and its memory goes back.

Groups in this process show what arrives. Two processes show the same with memory that both of them map.
"""

from __future__ import annotations

import array
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventually import eventually
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start
from worker_processes import starting_workers

pytestmark = pytest.mark.timeout(60)

LARGE = 300_000
"""Elements of 8 bytes: enough that they do not go into the pickle, and on one host through shared memory."""

kept: list[Any] = []


@pytest.fixture(autouse=True)
def _keep_nothing() -> Iterator[None]:
    kept.clear()
    yield
    kept.clear()


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


ARRAYS: dict[str, Any] = {
    "floats": np.arange(LARGE, dtype=np.float64),
    "two dimensions": np.arange(LARGE, dtype=np.int32).reshape(1000, -1),
    "Fortran order": np.asfortranarray(np.arange(LARGE).reshape(1000, -1)),
    "every second column": np.arange(LARGE).reshape(1000, -1)[:, ::2],
    "backwards": np.arange(LARGE)[::-1],
    "booleans": np.arange(LARGE) % 3 == 0,
    "complex": np.arange(LARGE) * 1j,
    "other byte order": np.arange(LARGE).astype(">i8"),
    "texts": np.array(["tea", "milk"] * LARGE),
    "records": np.zeros(LARGE, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.arange(LARGE).astype("datetime64[s]"),
    "objects": np.array([1, "a", None] * 1000, dtype=object),
    "small": np.arange(3),
    "scalar": np.array(5.0),
    "empty": np.zeros((0, 3)),
}


def equal(left: Any, right: Any) -> bool:
    """Whether two arrays have the same type, shape, order and contents."""
    return (
        (left.dtype, left.shape) == (right.dtype, right.shape)
        and bool(np.array_equal(left, right))
        and (left.flags.f_contiguous == right.flags.f_contiguous or not right.flags.c_contiguous)
    )


@pytest.mark.parametrize("kind", ARRAYS)
def test_any_array_arrives_as_it_was(group: LocalGroup, kind: str) -> None:
    sent = ARRAYS[kind]
    back = call(group.agents[0], 1, echo, sent)
    assert equal(back, sent)
    assert equal(group.remote(0, 1, echo, (sent,)).to_here(), sent)


BYTES: dict[str, Any] = {
    "bytes": bytes(range(256)) * 2000,
    "bytearray": bytearray(range(256)) * 2000,
    "array.array": array.array("d", range(LARGE)),
}


@pytest.mark.parametrize("kind", BYTES)
def test_large_bytes_arrive_as_they_were(group: LocalGroup, kind: str) -> None:
    sent = BYTES[kind]
    for value in (sent, [sent], {"in": (sent, sent)}):
        back = call(group.agents[0], 1, echo, value)
        assert back == value
        assert type(back) is type(value)


def test_a_memoryview_arrives(group: LocalGroup) -> None:
    assert call(group.agents[0], 1, bytes, memoryview(b"abc" * 100_000)) == b"abc" * 100_000
    assert bytes(call(group.agents[0], 1, memoryview, b"abc" * 100_000)) == b"abc" * 100_000
    assert call(group.agents[0], 1, len, [memoryview(b"abc")]) == 1


def test_arrays_arrive_inside_of_anything(group: LocalGroup) -> None:
    sent = np.arange(LARGE)
    back = call(group.agents[0], 1, echo, {"a": [sent, Box(sent)], "b": (sent[:10], sent.reshape(2, -1))})
    assert equal(back["a"][0], sent)
    assert equal(back["a"][1].content, sent)
    assert equal(back["b"][1], sent.reshape(2, -1))


def add_in_place(values: Any, number: int) -> Any:
    values += number
    return values


@pytest.mark.parametrize("to", [0, 1], ids=["itself", "another worker"])
def test_a_received_array_is_writable_and_belongs_to_its_receiver(group: LocalGroup, to: int) -> None:
    sent = np.zeros(LARGE)
    back = call(group.agents[0], to, add_in_place, sent, 1)
    assert sent.sum() == 0
    assert back.sum() == LARGE
    back += 1
    assert back.sum() == 2 * LARGE
    again = call(group.agents[0], to, add_in_place, sent, 5)
    assert (back.sum(), again.sum(), sent.sum()) == (2 * LARGE, 5 * LARGE, 0)


def test_an_array_that_cannot_be_written_to_arrives_so(group: LocalGroup) -> None:
    sent = np.zeros(LARGE)
    sent.flags.writeable = False
    assert call(group.agents[0], 1, is_writable, sent) is False
    assert not call(group.agents[0], 1, echo, sent).flags.writeable


def is_writable(values: Any) -> bool:
    return bool(values.flags.writeable)


def sum_at(values: Any, gate: str) -> float:
    wait_at(gate)
    return float(values.sum())


def test_the_sender_may_change_an_array_as_soon_as_the_call_was_made(group: LocalGroup) -> None:
    gate = new_gate("sum")
    sent = np.ones(LARGE)
    futures, references = [], []
    for number in range(4):
        sent[:] = number
        futures.append(start(group.agents[0], 1, sum_at, sent, "sum"))
        references.append(group.remote(0, 1, sum_at, (sent, "sum")))
    sent[:] = -1
    gate.set()
    assert [future.wait() for future in futures] == [number * LARGE for number in range(4)]
    assert [rref.to_here() for rref in references] == [number * LARGE for number in range(4)]


def keep_view(values: Any) -> Any:
    kept.append(values[: len(values) // 2])
    return values


def keep_all(values: Any) -> Any:
    kept.append(values)
    return values


@pytest.mark.parametrize("keep", [keep_view, keep_all])
def test_an_echoed_array_of_which_the_callee_keeps_a_view_is_not_shared(group: LocalGroup, keep: Any) -> None:
    sent = np.full(LARGE, 1.0)
    back = call(group.agents[0], 1, keep, sent)
    back[:] = 2.0
    assert kept[0].min() == kept[0].max() == 1.0
    kept[0][:] = 3.0
    assert back.min() == back.max() == 2.0
    for number in range(10, 15):  # what is kept and what came back stay as they are, whatever is sent next
        call(group.agents[0], 1, echo, np.full(LARGE, float(number)))
    assert kept[0].min() == kept[0].max() == 3.0
    assert back.min() == back.max() == 2.0
    assert sent.min() == sent.max() == 1.0


def return_kept() -> Any:
    return kept[0]


def test_a_result_is_a_copy_of_what_the_callee_keeps(group: LocalGroup) -> None:
    kept.append(np.zeros(LARGE))
    back = call(group.agents[0], 1, return_kept)
    kept[0][:] = 1
    assert back.sum() == 0
    rref = group.rref(1, kept[0])
    assert call(group.agents[1], 2, fetch_and_add, rref) == 2 * LARGE
    assert kept[0].sum() == LARGE


def fetch_and_add(rref: Any) -> float:
    values = rref.to_here(timeout=SOON)
    values += 1
    return float(values.sum())


def test_received_arrays_stay_when_the_group_has_gone(make_group: NewGroup) -> None:
    group = make_group(2)
    back = call(group.agents[0], 1, echo, np.arange(LARGE))
    call(group.agents[0], 1, keep_all, np.arange(LARGE))
    group.shutdown()
    assert equal(back, np.arange(LARGE))
    assert equal(kept[0], np.arange(LARGE))


def test_many_threads_send_large_arrays_at_once(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(8)

    def work(thread: int) -> bool:
        barrier.wait(SOON)
        for n in range(5):
            back = call(group.agents[thread % 3], (thread + n) % 3, echo, np.full(LARGE, thread * 100 + n), timeout=60)
            if not equal(back, np.full(LARGE, thread * 100 + n)):
                return False
        return True

    assert all(background.map(work, range(8)))


class Watched(np.ndarray):
    """An array to which there can be weak references; it arrives as one too."""


def watch(values: Any) -> Any:
    watched.append(weakref.ref(values))
    return values


watched: list[weakref.ref[Any]] = []


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_callee_lets_go_of_arguments_and_results_when_the_call_is_over(group: LocalGroup, fails: bool) -> None:
    watched.clear()
    sent = np.zeros(LARGE).view(Watched)
    for _ in range(3):
        if fails:
            with pytest.raises(ZeroDivisionError):
                call(group.agents[0], 1, watch_and_fail, sent)
        else:
            call(group.agents[0], 1, watch, sent)
    assert len(watched) == 3
    call(group.agents[0], 1, echo, 0)  # a thread may keep what it did last until it does the next thing
    gc.collect()
    eventually(lambda: all(ref() is None for ref in watched))


def watch_and_fail(values: Any) -> float:
    watch(values)
    return 1 / 0


def test_the_caller_lets_go_of_what_it_sent_though_the_call_is_still_running(group: LocalGroup) -> None:
    gate = new_gate("sum")
    sent = np.zeros(LARGE).view(Watched)
    is_alive = weakref.ref(sent)
    future = start(group.agents[0], 1, sum_at, sent, "sum")
    assert arrived["sum"].wait(SOON)
    del sent
    eventually(lambda: is_alive() is None)
    gate.set()
    assert future.wait() == 0


# -- Between two processes

SCRIPT = """
import gc, numpy as np, resource

LARGE = 1 << 20  # elements: 8 MiB
kept = []
def keep(values):
    kept.append(values[: len(values) // 2])
    return values
def add(values, number):
    values += number
    return values
def kept_values(): return [[float(each.min()), float(each.max())] for each in kept]
def forget(): kept.clear()
def sum_after(values, to):
    rpc.rpc_sync(to, wait_for_change)
    return float(values.sum())
changed = threading.Event()
def wait_for_change(): assert changed.wait(20)
def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
def highest(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

start()
if RANK == 0:
    sent = np.zeros(LARGE)
    back = rpc.rpc_sync("w1", add, args=(sent, 1))
    again = rpc.rpc_sync("w1", add, args=(back, 1))
    again += 1
    report(own=[float(each[0]) == each.mean() and float(each[0]) for each in (sent, back, again)])

    back = rpc.rpc_sync("w1", keep, args=(np.full(LARGE, 1.0),))
    back[:] = 2.0
    for number in range(10, 15):
        rpc.rpc_sync("w1", add, args=(np.full(LARGE, float(number)), 0))
    report(kept=rpc.rpc_sync("w1", kept_values), back=[back.min(), back.max()])
    rpc.rpc_sync("w1", forget)

    array = np.empty(LARGE)
    futures = []
    for number in range(4):
        array[:] = number
        futures.append(rpc.rpc_async("w1", sum_after, args=(array, "w0")))
    array[:] = -1
    changed.set()
    report(sums=[future.wait() / LARGE for future in futures])

    back = rpc.wait_all([rpc.rpc_async("w1", add, args=(np.full(LARGE, float(n)), 1)) for n in range(16)])
    report(many=[float(each.min()) == each.max() and float(each[0]) for each in back])
    del back, futures, array, again

    for _ in range(20):  # what is kept for the next message is there by then
        rpc.rpc_sync("w1", add, args=(sent, 1))
    before = [highest(), rpc.rpc_sync("w1", highest)]
    for number in range(200):
        rpc.rpc_sync("w1", add, args=(sent, 1))
        rpc.remote("w1", add, args=(sent, 1)).to_here()
    report(grown=[highest() - before[0], rpc.rpc_sync("w1", highest) - before[1]])
    report(references=str(rpc.references()))
rpc.shutdown()
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes on one host have reported."""
    directory: Path = tmp_path_factory.mktemp("arrays")
    with starting_workers(directory) as workers:
        return workers(SCRIPT).finish()[0]


def test_two_processes_have_arrays_of_their_own(facts: dict[str, Any]) -> None:
    assert facts["own"] == [0, 1, 3]


def test_what_one_process_keeps_is_not_changed_by_the_other(facts: dict[str, Any]) -> None:
    assert facts["kept"] == [[1.0, 1.0]]
    assert facts["back"] == [2.0, 2.0]


def test_a_process_may_change_an_array_as_soon_as_the_call_was_made(facts: dict[str, Any]) -> None:
    assert facts["sums"] == [0, 1, 2, 3]


def test_many_large_arrays_at_once_between_two_processes(facts: dict[str, Any]) -> None:
    assert facts["many"] == [n + 1 for n in range(16)]


def test_the_memory_of_large_arrays_is_used_again(facts: dict[str, Any]) -> None:
    """400 arrays of 8 MiB each way are 6,400 MiB. What is kept between two calls has been taken before."""
    assert max(facts["grown"]) < 100, "MiB"

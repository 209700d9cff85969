"""Small messages through shared memory, between real processes: nothing is lost, mixed up, or waited for in vain."""

from __future__ import annotations

import signal

import pytest

import farcall._native
from worker_processes import StartWorkers

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(farcall._native.rings is None, reason="rings need the C extension"),
]

COUNTING = """
    from farcall import api

    def through_ring():
        return sum(link.ring.frames_out for link in api.current_agent()._links() if link.ring is not None)
"""


def test_messages_of_all_sizes_from_many_threads(workers: StartWorkers) -> None:
    script = (
        COUNTING
        + """
    def echo(number, data): return number, data

    start()
    if RANK == 0:
        wrong = []

        sizes = (1, 100, 5_000, 20_000, 70_000, 300_000, 2_000_000)

        def run(thread):
            for number in range(150):
                data = bytes([number]) * sizes[number * thread % 7 if number % 5 == 0 else 0]
                if rpc.rpc_sync("w1", echo, args=(number, data)) != (number, data):
                    wrong.append((thread, number))

        for number in range(300):
            rpc.rpc_sync("w1", echo, args=(number, b""))
        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        burst = [rpc.rpc_async("w1", echo, args=(number, b"x" * (number % 300))) for number in range(2000)]
        answers = [future.wait()[0] for future in burst]
        report(wrong=wrong, in_order=answers == list(range(2000)), ring=through_ring())
    rpc.shutdown()
    """
    )
    facts = workers(script, transports=("unix",)).finish()[0]
    assert facts["wrong"] == []
    assert facts["in_order"]
    assert facts["ring"] > 0, "no message took the ring"


def test_the_callbacks_of_replies_run_though_nobody_reads(workers: StartWorkers) -> None:
    script = (
        COUNTING
        + """
    def echo(number): return number

    start()
    if RANK == 0:
        done = []
        for number in range(500):
            rpc.rpc_sync("w1", echo, args=(number,))
            rpc.rpc_async("w1", echo, args=(number,)).then(lambda future: done.append(future.value()))
            if number % 50 == 0:
                assert wait_for(lambda: len(done) == number + 1), (number, len(done))
        report(done=wait_for(lambda: sorted(done) == list(range(500))), ring=through_ring())
    rpc.shutdown()
    """
    )
    facts = workers(script, transports=("unix",)).finish()[0]
    assert facts["done"]
    assert facts["ring"] > 0, "no message took the ring"


def test_a_peer_that_is_killed_is_noticed(workers: StartWorkers) -> None:
    script = (
        COUNTING
        + """
    start()
    if RANK == 0:
        for number in range(300): rpc.rpc_sync("w1", abs, args=(number,))
        report(ring=through_ring())
        try:
            while True: rpc.rpc_sync("w1", abs, args=(1,))
        except rpc.WorkerLostError as error:
            report(lost=str(error))
        rpc.shutdown(graceful=False)
    else:
        rpc.shutdown()
    """
    )
    group = workers(script, transports=("unix",))
    assert group.wait_for(0, "ring") > 0
    group.send_signal(1, signal.SIGKILL)
    assert "'w1'" in group.wait_for(0, "lost")
    group.wait(0)


def test_a_peer_that_dies_with_calls_in_the_ring_is_noticed(workers: StartWorkers) -> None:
    script = (
        COUNTING
        + """
    import signal

    def die(now):
        if now: os.kill(os.getpid(), signal.SIGKILL)
        return now

    start()
    if RANK == 0:
        for number in range(300): rpc.rpc_sync("w1", die, args=(False,))
        burst = [rpc.rpc_async("w1", die, args=(number == 50,)) for number in range(300)]
        ends = []
        for future in burst:
            try:
                ends.append(future.wait())
            except rpc.WorkerLostError:
                ends.append("lost")
        report(ends=sorted(set(map(str, ends[:51]))), later=sorted(set(map(str, ends[51:]))), ring=through_ring())
        rpc.shutdown(graceful=False)
    else:
        rpc.shutdown()
    """
    )
    group = workers(script, transports=("unix",))
    assert set(group.wait_for(0, "ends")) <= {"False", "lost"}
    assert group.wait_for(0, "later") == ["lost"]
    group.wait(0)


def test_a_shutdown_waits_for_what_is_in_the_ring(workers: StartWorkers) -> None:
    script = (
        COUNTING
        + """
    start()
    if RANK == 0:
        for number in range(300): rpc.rpc_sync("w1", abs, args=(number,))
        burst = [rpc.rpc_async("w1", abs, args=(-number,)) for number in range(300)]
        ring = through_ring()
    rpc.shutdown()
    if RANK == 0:
        report(all=[future.wait() for future in burst] == list(range(300)), ring=ring)
    """
    )
    facts = workers(script, transports=("unix",)).finish()[0]
    assert facts["all"]
    assert facts["ring"] > 0


def test_who_has_nothing_to_do_sleeps_and_is_woken(workers: StartWorkers) -> None:
    script = (
        COUNTING
        + """
    from time import process_time

    start()
    if RANK == 0:
        for number in range(300): rpc.rpc_sync("w1", abs, args=(number,))
        before = process_time(), rpc.rpc_sync("w1", process_time)
        threading.Event().wait(1.0)
        took = process_time() - before[0], rpc.rpc_sync("w1", process_time) - before[1]
        report(took=max(took))
    rpc.shutdown()
    """
    )
    facts = workers(script, transports=("unix",)).finish()[0]
    assert facts["took"] < 0.2


def test_forked_children_leave_the_rings_alone(workers: StartWorkers) -> None:
    """At both ends, while calls go on in another thread."""
    script = (
        COUNTING
        + """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads

    def fork():
        child = os.fork()
        if not child:
            try:
                rpc.rpc_sync("w1", abs, args=(-1,), timeout=5)
            except rpc.RpcError:
                os._exit(7)
            finally:
                os._exit(8)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    start()
    if RANK == 0:
        for number in range(300): rpc.rpc_sync("w1", abs, args=(number,))
        over, wrong = threading.Event(), []

        def run():
            number = 0
            while not over.is_set():
                number += 1
                if rpc.rpc_sync("w1", abs, args=(-number,), timeout=20) != number: wrong.append(number)

        thread = threading.Thread(target=run)
        thread.start()
        here = [fork() for _ in range(5)]
        there = [rpc.rpc_sync("w1", fork, timeout=20) for _ in range(5)]
        over.set()
        thread.join()
        before = through_ring()
        for number in range(300): rpc.rpc_sync("w1", abs, args=(number,))
        report(here=here, there=there, wrong=wrong, went_on=through_ring() > before)
    rpc.shutdown()
    """
    )
    facts = workers(script, transports=("unix",)).finish()[0]
    assert facts["here"] == facts["there"] == [7] * 5
    assert facts["wrong"] == []
    assert facts["went_on"], "no message took the ring any more"

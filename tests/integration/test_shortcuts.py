"""Small messages through shared memory, between real processes: nothing is lost, mixed up, or waited for in vain."""

from __future__ import annotations

import signal

import pytest
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)

EARLY = """
    from farcall import api
    from farcall.agent import outgoing

    outgoing.AFTER = 2

    def through_ring():
        return sum(each._sender.ring.head for each in api._agent._connections if each._sender.ring is not None)
"""


def test_messages_of_all_sizes_from_many_threads(workers: StartWorkers) -> None:
    script = (
        EARLY
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
        EARLY
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
        EARLY
        + """
    start()
    if RANK == 0:
        for number in range(300): rpc.rpc_sync("w1", abs, args=(number,))
        report(ring=through_ring())
        try:
            while True: rpc.rpc_sync("w1", abs, args=(1,))
        except rpc.WorkerLost as error:
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

"""A million small messages and a thousand large ones leave nothing behind; one of a GiB takes no more than a GiB."""

from __future__ import annotations

from textwrap import dedent

import pytest

from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(180)

LIMIT = 150.0
STEADY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Of the allocator, which otherwise keeps memory that nobody uses, as much as it likes."""

STAGE = """
    import gc, threading
    import numpy

    def measures():
        "Megabytes of memory, descriptors, and segments of shared memory that are mapped."
        gc.collect()
        with open("/proc/self/statm") as statm:
            megabytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        with open("/proc/self/maps") as maps:
            segments = maps.read().count("/memfd:farcall")
        return megabytes, len(os.listdir("/proc/self/fd")), segments

    def small(count):
        for _ in range(count // 1000):
            rpc.wait_all([rpc.rpc_async("w1", max, args=(number, 1)) for number in range(900)])
            for number in range(100):
                assert rpc.rpc_sync("w1", max, args=(number, 1)) == max(number, 1)

    def large(count):
        data = numpy.arange(1 << 19)
        for number in range(count):
            data[0] = number
            other = rpc.rpc_sync("w1", numpy.add, args=(data, 1))
            assert other[0] == number + 1 and other[-1] == data[-1] + 1

    def kilobytes(pids):
        "Of some processes together: what each has for itself, and what they share, once."
        own, shared = 0, 0
        for pid in pids:
            with open(f"/proc/{pid}/status") as status:
                lines = dict(line.split(":", 1) for line in status)
            own += int(lines["RssAnon"].split()[0])
            shared = max(shared, int(lines["RssShmem"].split()[0]))
        return own + shared

    class Peak:
        "The most that some processes together took while it lasted, beyond what they had before, in GiB."

        def __init__(self, *pids):
            self.pids, self.over, self.most = pids, threading.Event(), 0.0

        def __enter__(self):
            self.before = kilobytes(self.pids)
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
            return self

        def watch(self):
            while not self.over.wait(0.002):
                self.most = max(self.most, (kilobytes(self.pids) - self.before) / (1 << 20))

        def __exit__(self, *error):
            self.over.set()
            self.thread.join()
"""


def stage(script: str) -> str:
    return dedent(STAGE) + dedent(script)


@pytest.mark.long
def test_a_million_small_and_a_thousand_large_messages_leave_nothing(workers: StartWorkers) -> None:
    script = stage("""
        start()
        if RANK == 0:
            small(40_000)
            large(200)
            before = measures(), rpc.rpc_sync("w1", measures)
            small(1_000_000)
            large(1_000)
            report(before=before, after=(measures(), rpc.rpc_sync("w1", measures)))
        rpc.shutdown()
    """)
    found = workers(script, limit=LIMIT, environment=STEADY).finish()[0]
    for before, after in zip(found["before"], found["after"], strict=True):
        assert after[0] - before[0] < 16, "megabytes"
        # One more may be kept for the next messages, by chance; one for each would be thousands.
        assert after[1] - before[1] <= 4, "descriptors"
        assert after[2] - before[2] <= 4, "segments"


def test_a_gib_takes_no_more_than_its_own_size_and_a_tenth_at_both_ends_together(workers: StartWorkers) -> None:
    script = stage("""
        start()
        if RANK == 0:
            data = numpy.ones(1 << 27)
            assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
            with Peak(os.getpid(), rpc.rpc_sync("w1", os.getpid)) as peak:
                total = rpc.rpc_sync("w1", numpy.sum, args=(data,))
            report(total=int(total), peak=peak.most)
        rpc.shutdown()
    """)
    found = workers(script, limit=LIMIT).finish()[0]
    assert found["total"] == 1 << 27
    assert 0.5 < found["peak"] <= 1.1

"""Many workers, many threads, everybody calls everybody: no call is lost, doubled or mixed up.

Every call has a number of its own and a payload made from it; the callee notes the number and answers with what only
that number gives. FARCALL_STRESS_SECONDS says for how long.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from worker_processes import StartWorkers

SECONDS = float(os.environ.get("FARCALL_STRESS_SECONDS", "8"))
THREADS = 16

SCRIPT = """
import collections, random, zlib

SECONDS, THREADS = float(os.environ["STRESS_SECONDS"]), int(os.environ["STRESS_THREADS"])
served = collections.Counter()  # by caller and thread: how many; and the sum of their numbers, and of their squares
sums = collections.Counter()
squares = collections.Counter()
lock = threading.Lock()

def payload_of(number, size):
    return (b"%d," % number) * (size // 8)

def serve(caller, thread, number, payload, hop):
    with lock:
        served[f"{caller}.{thread}"] += 1
        sums[f"{caller}.{thread}"] += number
        squares[f"{caller}.{thread}"] += number * number
    if hop is not None:  # asks the next one, while the caller waits
        assert rpc.rpc_sync(hop, answer, args=(number,)) == answer(number)
    return number, zlib.crc32(payload), payload[::-1]

def answer(number):
    return number * 3 + 1

calls = collections.Counter()
expected_sums = collections.Counter()
expected_squares = collections.Counter()
failures = []

def check(number, payload, result):
    if result != (number, zlib.crc32(payload), payload[::-1]):
        failures.append(f"{number}: got the reply of {result[0]}")

def work(thread):
    chance = random.Random(RANK * 1000 + thread)
    number = thread * 1_000_000
    key = f"{RANK}.{thread}"
    burst = []
    try:
        while time.monotonic() < stop:
            number += 1
            size = chance.choice([0, 8, 100, 1000, 20_000, 70_000, 300_000]) if chance.random() < 0.3 else 16
            payload = payload_of(number, size)
            to = chance.randrange(SIZE)
            hop = chance.randrange(SIZE) if chance.random() < 0.05 else None
            calls[f"{key}>{to}"] += 1
            expected_sums[f"{key}>{to}"] += number
            expected_squares[f"{key}>{to}"] += number * number
            args = (RANK, thread, number, payload, hop)
            if chance.random() < 0.3:
                burst.append((number, payload, rpc.rpc_async(to, serve, args=args)))
            else:
                check(number, payload, rpc.rpc_sync(to, serve, args=args))
            if len(burst) > 20:
                for one in burst:
                    check(one[0], one[1], one[2].wait())
                burst.clear()
        for one in burst:
            check(one[0], one[1], one[2].wait())
    except BaseException as error:
        failures.append(f"thread {thread}: {type(error).__name__}: {error}")

start()
stop = time.monotonic() + SECONDS
threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
rpc.shutdown()
report(failures=failures[:5], calls=calls, sums=expected_sums, squares=expected_squares,
       served=served, served_sums=sums, served_squares=squares)
"""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("transports", [("unix", "tcp")], ids="+".join)
def test_no_call_is_lost_doubled_or_mixed_up(
    workers: StartWorkers, transports: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"STRESS_SECONDS": str(SECONDS), "STRESS_THREADS": str(THREADS)}
    group = workers(SCRIPT, n=4, transports=transports, limit=SECONDS + 80, environment=environment)
    reports = group.finish()
    assert [facts["failures"] for facts in reports] == [[]] * 4
    for made, served in (("calls", "served"), ("sums", "served_sums"), ("squares", "served_squares")):
        expected = {key: count for facts in reports for key, count in facts[made].items()}
        found = {f"{key}>{to}": count for to, facts in enumerate(reports) for key, count in facts[served].items()}
        assert found == expected
    total = sum(Counter(facts["calls"]).total() for facts in reports)
    with capsys.disabled():
        print(f"\n4 workers x {THREADS} threads, {SECONDS:g} s: {total:,} calls, {total / SECONDS:,.0f} a second")
    assert total > 100 * SECONDS

"""Many workers on one machine: all start, everybody calls everybody, and all shut down.

FARCALL_MANY_WORKERS says how many; `make many` takes 64.
"""

from __future__ import annotations

import os

import pytest

from worker_processes import StartWorkers

MANY = int(os.environ.get("FARCALL_MANY_WORKERS", "24"))
LIMIT = 30 + 2.0 * MANY

SCRIPT = """
BEGIN
began = time.monotonic()
while len(names()) < SIZE:  # the test has a limit
    time.sleep(0.1)
futures = [rpc.rpc_async(f"w{rank}", divmod, args=(100 * RANK + rank, SIZE)) for rank in range(SIZE)]
wrong = [rank for rank, future in enumerate(futures) if future.wait() != divmod(100 * RANK + rank, SIZE)]
report(wrong=wrong, names=names(), calls=time.monotonic() - began)
while not os.path.exists("over"):
    time.sleep(0.1)
report(shutdown=outcome(rpc.shutdown, timeout=30), after=time.monotonic())
"""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("begin", ["start(init_timeout=60)", "join(init_timeout=60)"], ids=["fixed", "open"])
def test_many_workers_start_call_everyone_and_shut_down(
    workers: StartWorkers, begin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = workers(SCRIPT.replace("BEGIN", begin), n=MANY, limit=LIMIT)
    everybody = sorted(f"w{rank}" for rank in range(MANY))
    for rank in range(MANY):
        group.wait_for(rank, "calls")
    (group.directory / "over").touch()
    reports = group.finish(quiet=False)  # the store's host may say that others hung up
    assert [rank for rank in range(MANY) if "Traceback" in group.errors(rank)] == []
    for facts in reports:
        assert facts["wrong"] == []
        assert facts["names"] == everybody
        assert facts["shutdown"].get("error") is None, facts["shutdown"]
    with capsys.disabled():
        slowest = max(facts["calls"] for facts in reports)
        leaving = max(facts["shutdown"]["seconds"] for facts in reports)
        print(f"\n{MANY} workers ({begin}): calls to all {slowest:.1f} s, shutdown {leaving:.1f} s")

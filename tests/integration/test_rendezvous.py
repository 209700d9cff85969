"""How real workers find each other, in any order, and what they say when somebody does not come."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from ports import free_port
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(45)

ALL_CALL_ALL = """
start()
report(answers=[rpc.rpc_sync(to, divmod, args=(to + 7, 3)) for to in range(SIZE)])
report(info=[rpc.get_worker_info(f"w{to}").id for to in range(SIZE)])
rpc.shutdown()
"""
ANSWERS = [[2, 1], [2, 2], [3, 0]]


@pytest.mark.parametrize("transports", [("unix",), ("tcp",), ("unix", "tcp")], ids="+".join)
@pytest.mark.parametrize("url", ["tcp", "env", "file"])
def test_three_workers_meet_and_all_call_all(workers: StartWorkers, url: str, transports: tuple[str, ...]) -> None:
    for facts in workers(ALL_CALL_ALL, n=3, url=url, transports=transports).finish():
        assert facts == {"answers": ANSWERS, "info": [0, 1, 2]}


@pytest.mark.parametrize("url", ["tcp", "env", "file"])
@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)])
def test_any_order_of_start(workers: StartWorkers, url: str, order: tuple[int, ...]) -> None:
    group = workers(ALL_CALL_ALL, n=3, url=url, order=order[:1])
    for rank in order[1:]:
        time.sleep(0.3)
        group.start(rank)
    assert [facts["answers"] for facts in group.finish()] == [ANSWERS] * 3


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("transports", [("tcp",), ("unix", "tcp")], ids="+".join)
def test_ipv6(workers: StartWorkers, transports: tuple[str, ...]) -> None:
    group = workers(ALL_CALL_ALL, n=3, url=f"tcp://[::1]:{free_port('::1')}", transports=transports)
    assert [facts["answers"] for facts in group.finish()] == [ANSWERS] * 3


MISSING = """
report(**outcome(start, init_timeout=2))
report(threads=threading.active_count(), again=outcome(rpc.rpc_sync, "w0", int))
"""


def _without_ranks_1_and_3(workers: StartWorkers, url: str) -> list[dict[str, Any]]:
    """Rank 2 comes a little later than rank 0, and so its time is over later."""
    group = workers(MISSING, n=4, url=url, order=(0,))
    time.sleep(0.5)
    group.start(2)
    return group.finish(quiet=False)


def _names_who_came(facts: dict[str, Any]) -> bool:
    count, names = "only 2 of 4 workers joined in ", "s: w0 (rank 0), w2 (rank 2); missing: ranks 1, 3"
    return facts["error"] == "RendezvousTimeoutError" and count in facts["text"] and names in facts["text"]


@pytest.mark.parametrize("url", ["tcp", "file"])
def test_a_missing_worker_is_named_together_with_who_came(workers: StartWorkers, url: str) -> None:
    first, later = _without_ranks_1_and_3(workers, url)
    assert _names_who_came(first)
    assert 1.5 < first["seconds"] < 4
    for facts in (first, later):
        assert facts["threads"] == 1
        assert facts["again"]["error"] == "NotInitializedError"


def test_who_came_later_is_told_who_is_missing_too(workers: StartWorkers) -> None:
    _, later = _without_ranks_1_and_3(workers, "tcp")
    assert _names_who_came(later), later["text"]


def test_without_the_first_worker(workers: StartWorkers) -> None:
    (facts,) = workers("report(**outcome(start, init_timeout=1))", order=(1,)).finish()
    assert facts["error"] == "RendezvousTimeoutError"
    assert 0.8 < facts["seconds"] < 3


def test_two_of_one_name_are_told(workers: StartWorkers) -> None:
    script = """
    report(**outcome(rpc.init_rpc, "same", rank=RANK, world_size=SIZE, rpc_backend_options=options()))
    """
    for facts in workers(script).finish(quiet=False):
        assert facts["error"] == "RendezvousError"
        assert "the worker name 'same' is not unique" in facts["text"]
        assert facts["seconds"] < 10


@pytest.mark.parametrize("url", ["tcp", "file"])
def test_again_and_again_on_the_same_place(workers: StartWorkers, url: str) -> None:
    script = """
    answers = []
    for turn in range(5):
        start()
        answers.append(rpc.rpc_sync((RANK + 1) % SIZE, int, args=(turn,)))
        rpc.shutdown()
    report(answers=answers, threads=threading.active_count(), descriptors=len(os.listdir("/proc/self/fd")))
    """
    for facts in workers(script, n=3, url=url).finish():
        assert facts["answers"] == [0, 1, 2, 3, 4]
        assert facts["threads"] == 1
        assert facts["descriptors"] <= 6


def test_a_transport_that_cannot_be_used_degrades_to_tcp(workers: StartWorkers) -> None:
    environment = {"TMPDIR": "/proc/nowhere", "XDG_RUNTIME_DIR": "/proc/nowhere"}
    group = workers(ALL_CALL_ALL, n=3, environment=environment)
    assert [facts["answers"] for facts in group.finish()] == [ANSWERS] * 3

"""Two hosts that can be cut off from each other: network namespaces with a virtual cable between them.

Skipped where the machine does not allow it: `ip` is needed, and the right to make namespaces (root, or CAP_SYS_ADMIN).
A partition pulls the cable: the packets of both sides are dropped, and nobody is told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from worker_processes import Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

_NETWORK = "10.231.77"


def ip(*words: str) -> str:
    """Runs `ip`. Raises `CalledProcessError`."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout


class TwoHosts:
    """Two namespaces, each with one end of the cable."""

    def __init__(self) -> None:
        self._spaces = [f"farcall-{os.getpid()}-{side}" for side in (0, 1)]

    def make(self) -> None:
        """Raises `CalledProcessError` where that is not allowed."""
        for space in self._spaces:
            ip("netns", "add", space)
        here, there = self._spaces
        ip("-n", here, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", there)
        for side, space in enumerate(self._spaces):
            ip("-n", space, "addr", "add", f"{_NETWORK}.{side + 1}/24", "dev", "cable")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "cable", "up")

    def remove(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=10, check=False)

    def partition(self) -> None:
        ip("-n", self._spaces[1], "link", "set", "cable", "down")

    def heal(self) -> None:
        ip("-n", self._spaces[1], "link", "set", "cable", "up")

    def within(self, side: int) -> list[str]:
        """What a command begins with that is to run on that host."""
        return ["ip", "netns", "exec", self._spaces[side]]


class WorkersOnTwoHosts(Workers):
    """Worker 0 on the first host, all others on the second."""

    hosts: TwoHosts

    def command(self, rank: int) -> list[str]:
        return [*self.hosts.within(min(rank, 1)), *super().command(rank)]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command")
    two = TwoHosts()
    try:
        try:
            two.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error.stderr.strip()}")
        yield two
    finally:
        two.remove()


def start(hosts: TwoHosts, directory: Path, script: str, n: int = 2) -> WorkersOnTwoHosts:
    settings = {
        "PYTHONFAULTHANDLER": "1",
        "STAGE_URL": f"tcp://{_NETWORK}.1:{free_port()}",
        "STAGE_TRANSPORTS": "tcp",  # both have one file system, so unix sockets would lead through the partition
    }
    group = WorkersOnTwoHosts(directory, script, n, settings, 70)
    group.hosts = hosts
    for rank in range(n):
        group.start(rank)
        group.wait_for(rank, "up")
    return group


def until(moment: float) -> None:
    """Waits for a moment that nothing but the clock tells of."""
    time.sleep(max(0.0, moment - time.monotonic()))


CALLING = """
    from farcall.api import current_agent
    ran, failures, lost = [], [], []
    def bump(number):
        ran.append(number)
        return number + 1
    def make(number): return [number]
    join(heartbeat_interval=0.4, heartbeat_patience=float(PATIENCE))
    rpc.add_membership_callback(lambda change: lost.append(change.worker.name) if change.kind == "lost" else None)
    report(up=True)
    wait_for(lambda: len(names()) == SIZE)
    other = f"w{1 - RANK}" if RANK < 2 else "w0"
    made = 0
    slowest = 0.0
    again = 0
    while not os.path.exists("over") and len(failures) < 3:
        made += 1
        began = time.monotonic()
        try:
            assert rpc.rpc_sync(other, bump, args=(made,), timeout=20) == made + 1
            assert rpc.remote(other, make, args=(made,)).to_here(20) == [made]
        except rpc.RpcError as error:
            failures.append([type(error).__name__, str(error), time.monotonic()])
            time.sleep(0.1)
        slowest = max(slowest, time.monotonic() - began)
        if made == 10:
            report(busy=True)
        if again == 0 and os.path.exists("healed"):
            again = made
        if again and made == again + 10:
            report(again=True)
        time.sleep(0.01)
"""
"""Workers that call each other all the time: `busy` after ten rounds, `again` after ten more with the cable back."""


def test_a_short_partition_is_no_loss(hosts: TwoHosts, tmp_path: Path) -> None:
    """Short for the patience, that is. TCP tries again after 0.2, 0.4, 0.8 ... s: the silence is up to twice as long as
    the partition, and that is as long as this busy machine takes to plug the cable in again.
    """
    script = (
        CALLING.replace("PATIENCE", "24.0")
        + """
    report(made=made, failures=failures, slowest=slowest)
    wait_for(lambda: os.path.exists("end"), 20)
    report(ran=ran, lost=lost, names=names())
    report(empty=wait_for(lambda: not rpc.references().owned and not rpc.references().held))
    wait_for(lambda: os.path.exists("bye"), 20)
    rpc.shutdown(timeout=10)
    """
    )
    group = start(hosts, tmp_path, script)
    try:
        for rank in (0, 1):
            group.wait_for(rank, "busy")
        began = time.monotonic()
        hosts.partition()
        until(began + 2.0)
        hosts.heal()
        (tmp_path / "healed").touch()
        for rank in (0, 1):
            group.wait_for(rank, "again")
        (tmp_path / "over").touch()
        for rank in (0, 1):
            group.wait_for(rank, "made")
        (tmp_path / "end").touch()
        for rank in (0, 1):
            group.wait_for(rank, "empty")
        (tmp_path / "bye").touch()
        reports = group.finish()
    finally:
        group.kill_all()
    for rank in (0, 1):
        facts, other = reports[rank], reports[1 - rank]
        assert facts["failures"] == []
        assert facts["slowest"] > 1.5  # so the cable was pulled
        assert facts["lost"] == []
        assert facts["names"] == ["w0", "w1"]
        assert facts["empty"] is True
        assert other["ran"] == list(range(1, facts["made"] + 1))  # each once, and none is missing


def test_a_long_partition_makes_two_groups_and_who_comes_again_is_welcome(hosts: TwoHosts, tmp_path: Path) -> None:
    script = (
        CALLING.replace("PATIENCE", "2.0")
        + """
    report(failures=failures, view=names(), ran=ran)
    wait_for(lambda: os.path.exists("healed"), 40)
    time.sleep(2)
    report(apart=names(), later=outcome(rpc.rpc_sync, other, bump, args=(0,)))
    if RANK > 0:
        wait_for(lambda: os.path.exists("again"), 20)
        before = rpc.get_worker_info().id
        report(shutdown=outcome(rpc.shutdown, timeout=10))
        join()
        report(number=[before, rpc.get_worker_info().id])
    report(whole=wait_for(lambda: names() == [f"w{rank}" for rank in range(SIZE)], 20))
    report(call=outcome(rpc.rpc_sync, other, bump, args=(0,)))
    wait_for(lambda: os.path.exists("bye"), 30)
    rpc.shutdown(graceful=False)
    """
    )
    group = start(hosts, tmp_path, script, n=3)
    try:
        for rank in range(3):
            group.wait_for(rank, "busy")
        cut = time.monotonic()
        hosts.partition()
        views = [group.wait_for(rank, "view") for rank in range(3)]
        failures: list[Any] = [group.wait_for(rank, "failures") for rank in range(3)]
        hosts.heal()
        (tmp_path / "healed").touch()
        apart = [group.wait_for(rank, "apart") for rank in range(3)]
        (tmp_path / "again").touch()
        whole = [group.wait_for(rank, "whole") for rank in range(3)]
        calls = [group.wait_for(rank, "call") for rank in range(3)]
        (tmp_path / "bye").touch()
        reports = group.finish(quiet=False)
    finally:
        group.kill_all()
    assert views == apart == [["w0"], ["w1", "w2"], ["w1", "w2"]]
    for rank, facts in enumerate(reports):
        assert facts["later"]["error"] == "WorkerLostError"
        assert facts["later"]["seconds"] < 1
        first = failures[rank][0]
        assert first[0] in (
            "WorkerLostError",
            "OwnerLostError",
        )  # of the call, or of the reference
        assert first[2] - cut < 10
        assert len(set(facts["ran"])) == len(facts["ran"]) or rank == 0  # two call worker 0, with the same numbers
    assert whole == [True] * 3
    assert [call["result"] for call in calls] == [1, 1, 1]
    assert all(before < after for before, after in (reports[rank]["number"] for rank in (1, 2)))

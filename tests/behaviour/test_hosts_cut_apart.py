"""Three hosts on one network, two of which lose sight of each other: network namespaces on a bridge.

Host a reaches b and c all the time. While b and c do not reach each other nobody may be lost, on any of the three.
Skipped where the machine does not allow it: `ip` is needed, and the right to make namespaces (root, or CAP_SYS_ADMIN).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from worker_processes_with_orders import WorkerProcesses

from eventually import eventually
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_NETWORK = "10.231.79"
_HOSTS = ("a", "b", "c")


def ip(*words: str) -> None:
    """Runs `ip`. Raises `CalledProcessError`."""
    subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=True)


class ThreeHosts:
    """Namespaces `a`, `b` and `c`, and one for the bridge between them."""

    def __init__(self) -> None:
        self._spaces = {name: f"farcall-{os.getpid()}-{name}" for name in (*_HOSTS, "bridge")}

    def make(self) -> None:
        """Raises `CalledProcessError` where that is not allowed."""
        for space in self._spaces.values():
            ip("netns", "add", space)
        bridge = self._spaces["bridge"]
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for number, name in enumerate(_HOSTS, 1):
            space = self._spaces[name]
            ip("-n", bridge, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "cable", "netns", space)
            ip("-n", bridge, "link", "set", f"to-{name}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "cable")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "cable", "up")

    def remove(self) -> None:
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=20, check=False)

    def cut_b_from_c(self) -> None:
        self.isolate("bc", "on")

    def isolate(self, names: str, state: str) -> None:
        """Isolated ports of a bridge reach those that are not, and not each other. Nobody is told."""
        for name in names:
            ip("-n", self._spaces["bridge"], "link", "set", f"to-{name}", "type", "bridge_slave", "isolated", state)

    def cut_b_to_c(self) -> None:
        """Only what b sends to c is dropped: b hears c, for as long as c does not wait for b's acknowledgements."""
        ip("-n", self._spaces["b"], "route", "add", "blackhole", f"{_NETWORK}.3/32")

    def cut_off_c(self) -> None:
        ip("-n", self._spaces["bridge"], "link", "set", "to-c", "down")

    def within(self, name: str) -> list[str]:
        """What a command begins with that is to run on that host."""
        return ["ip", "netns", "exec", self._spaces[name]]


@pytest.fixture
def hosts() -> Iterator[ThreeHosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command")
    three = ThreeHosts()
    try:
        try:
            three.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error.stderr.strip()}")
        yield three
    finally:
        three.remove()


PLACES = "aabbbccc"
"""The host of each worker, by its rank."""
ALL = [f"w{rank}" for rank in range(len(PLACES))]


def start(hosts: ThreeHosts, interval: float, patience: float) -> WorkerProcesses:
    return WorkerProcesses(
        len(PLACES),
        f"tcp://{_NETWORK}.1:{free_port()}",
        interval,
        patience,
        transports=["tcp"],  # all have one file system, so unix sockets would lead around the cut
        prefixes=[hosts.within(name) for name in PLACES],
    )


@pytest.mark.parametrize("cut", ["cut_b_from_c", "cut_b_to_c"])
def test_hosts_that_do_not_reach_each_other_lose_nobody_whom_a_third_host_hears(hosts: ThreeHosts, cut: str) -> None:
    interval, patience = 0.4, 2.4
    with start(hosts, interval, patience) as workers:
        assert workers.ask(0, "call_all()") == ALL
        getattr(hosts, cut)()
        until = time.monotonic() + 2.5 * patience
        while time.monotonic() < until:
            assert workers.ask(0, "call_all()") == ALL
            time.sleep(0.1)
        assert [workers.ask(rank, "names()") for rank in range(len(PLACES))] == [ALL] * len(PLACES)
        # A host that is lost to all is noticed all the same.
        hosts.cut_off_c()
        left = [name for name, place in zip(ALL, PLACES, strict=True) if place != "c"]
        for rank in range(len(left)):
            eventually(lambda rank=rank: workers.ask(rank, "names()") == left)


@pytest.mark.long
def test_a_host_that_is_cut_off_from_the_store_for_long_shuts_down_with_the_others(hosts: ThreeHosts) -> None:
    """The kernel must not end connections that the group has not given up: others hear the host all the time."""
    with start(hosts, 0.4, 2.4) as workers:
        hosts.isolate("ac", "on")  # the store is in rank 0, on host a
        time.sleep(36)  # the keepalive of the store's connections, while workers meet, is half a minute
        assert [workers.ask(rank, "names()") for rank in range(len(PLACES))] == [ALL] * len(PLACES)
        hosts.isolate("ac", "off")
        with ThreadPoolExecutor(len(PLACES)) as pool:
            orders = [pool.submit(workers.ask, rank, "rpc.shutdown(timeout=60)") for rank in range(len(PLACES))]
            assert [order.result() for order in orders] == [None] * len(PLACES)

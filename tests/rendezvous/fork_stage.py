"""A worker that has met others forks: the child lets go of everything, and the parent goes on."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from farcall.errors import RendezvousError
from farcall.rendezvous import join_open, rendezvous

def held():
    links = [f"/proc/self/fd/{{number}}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [link for link in found if "socket:" in link or ".open" in link]

before = held()
url = f"tcp://127.0.0.1:{{sys.argv[1]}}"
{meeting}
host.store._lock.acquire()  # as another thread might, just when this one forks
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that is stuck must not outlive the test
    for one in (guest, host):
        one.store.abandon()
    try:
        host.store.set("k", b"from the child")
    except RendezvousError as error:
        told = "forked from" in str(error)
    host.store.close()
    os._exit(0 if told and held() == before else 1)
host.store._lock.release()
assert os.waitpid(child, 0)[1] == 0, "the child kept something, or could use what is not its own"
guest.store.set("k", b"v")
assert host.store.get("k", 10) == b"v"
guest.store.close()
host.store.close()
"""


def expect_a_forked_child_lets_go(port: int, meeting: str) -> None:
    """`meeting` is the part of the program that makes `host` and `guest`, of `url`."""
    program = PROGRAM.format(meeting=meeting)
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(port)], check=True, timeout=30)

"""Two hosts on one machine: two network namespaces, joined by a pair of virtual interfaces.

`join_two` moves this process into a network namespace of its own, and makes a second one. A process that this one
starts is on the first host; it moves to the second with `enter`. Root may do that, and so may other users where the
kernel lets them have user namespaces. The commands `ip` and `nsenter` have to be installed.

The namespaces end with this process: nothing has to be cleaned up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NEAR: Final = "10.213.7.1"
"""The address of the first host."""
FAR: Final = "10.213.7.2"
"""The address of the second host."""
INTERFACE: Final = "bench0"
"""The name of the interface between the hosts, at both of them."""
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000


class NotAllowed(Exception):
    """There can be no namespaces here. The text says why."""


@dataclass(frozen=True)
class SecondHost:
    """The second namespace. It exists as long as this process and its holder do."""

    holder: subprocess.Popen[bytes]
    path: str
    """The namespace as a file, for `enter`."""


def join_two() -> SecondHost:
    """Moves this process into a new namespace, and joins that to a second one.

    Must be called before the process has threads.

    Raises:
        NotAllowed: The kernel refuses, or a command is missing.
    """
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWNET if uid == 0 else _CLONE_NEWUSER | _CLONE_NEWNET)
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    # It ends when its standard input does, so it cannot outlive this process.
    program = "from hosts.namespaces import hold; hold()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    holder = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != b"ready\n":
        raise NotAllowed("the second namespace could not be made")
    there = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
    _run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid))
    for prefix, address in (([], NEAR), (there, FAR)):
        _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _run(*prefix, "ip", "link", "set", interface, "up")
    return SecondHost(holder, f"/proc/{holder.pid}/ns/net")


def hold() -> None:
    """The program of the holder: has a namespace until its standard input ends."""
    _unshare(_CLONE_NEWNET)
    print("ready", flush=True)
    sys.stdin.read()


def enter(path: str) -> None:
    """Moves this thread, and the threads that it starts from now on, into a namespace. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise NotAllowed(f"this user may not make network namespaces: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotAllowed(f"the command `{command[0]}` is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NotAllowed(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from None

"""What the scripts of the tests with real processes begin with. Runs in the workers, not in the test.

from worker_script import *

start()
if RANK == 0:
    report(answer=rpc.rpc_sync("w1", max, args=(1, 2)))
rpc.shutdown()
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import farcall as rpc

__all__ = [
    "RANK",
    "SIZE",
    "join",
    "names",
    "options",
    "os",
    "outcome",
    "report",
    "rpc",
    "start",
    "sys",
    "threading",
    "time",
    "wait_for",
]

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
_reports = os.open(os.environ["STAGE_REPORTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)


def options(**changes: Any) -> rpc.RpcBackendOptions:
    """The options that the test gave for all, with the changes that this script wants."""
    given = {"init_method": os.environ["STAGE_URL"], "init_timeout": 20}
    if "STAGE_TRANSPORTS" in os.environ:
        given["transports"] = tuple(os.environ["STAGE_TRANSPORTS"].split(","))
    return rpc.RpcBackendOptions(**{**given, **changes})


def start(**changes: Any) -> None:
    """Makes this process worker w0, w1 ..."""
    if os.environ["STAGE_URL"] == "env://":
        rpc.init_rpc(f"w{RANK}", rpc_backend_options=options(**changes))
    else:
        rpc.init_rpc(f"w{RANK}", rank=RANK, world_size=SIZE, rpc_backend_options=options(**changes))


def join(name: str | None = None, **changes: Any) -> None:
    """Makes this process worker w0, w1 ... of an open group, or the one of that name."""
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    rpc.init_rpc(name or f"w{RANK}", rpc_backend_options=options(**changes))


def names() -> list[str]:
    """Those who are in the group, as this worker sees it."""
    return sorted(info.name for info in rpc.get_worker_infos())


def report(**facts: Any) -> None:
    """Tells the test."""
    os.write(_reports, json.dumps(facts).encode() + b"\n")


def wait_for(condition: Any, seconds: float = 10.0) -> bool:
    """Whether it came true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def outcome(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a call gave or raised, and how long it took."""
    began = time.monotonic()
    try:
        facts: dict[str, Any] = {"result": function(*args, **kwargs)}
    except BaseException as error:
        facts = {"error": type(error).__name__, "text": str(error)}
    return {**facts, "seconds": time.monotonic() - began}

"""One worker of the chaos test (`chaos.py`): it calls the others all the time, and writes down what came of it.

It is told what to do by lines on its standard input, and answers with a line of JSON for each on its standard output.

What it writes down goes into a file, a line at once, so that it survives a SIGKILL:

    call <id>                     a call has begun here
    end <id> right                ... and has ended: with its own result
    end <id> wrong <what>         ... with something else
    end <id> <error> <text>       ... with an error
    ran <id>                      the function of a call has run here
    hung <id>                     ... one that runs until it is cancelled, and was not in time

The id of a call that is made to be cancelled ends with c, that of one which a function makes for another worker with i.
    lost <name> <number>          this worker was told that another one was lost
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import random
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, Final
from zlib import crc32

import farcall as rpc
from farcall.api import current_agent
from farcall.errors import ExpelledError
from farcall.runtime.agent import Agent

CALL_TIMEOUT: Final = 20.0
"""Seconds. Far beyond what a call can take with all that happens here: who hears of this has found a call that hung."""
LEAVE_TIMEOUT: Final = 20.0
STEP: Final = 0.002
"""Seconds. How often a function that runs until it is cancelled looks whether it is."""
PAUSE: Final = 0.01
THREADS: Final = 2
_LARGE: Final = 100_000
_KEPT: Final = 12


class Scene:
    """What this process does and has: its file, its calls, the references that it keeps for a while."""

    def __init__(self, token: str, file: str, seed: int) -> None:
        self.token = token
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._seed = seed
        self._numbers = itertools.count(1)
        self.kept: deque[rpc.RRef[Any]] = deque(maxlen=_KEPT)
        self.dwelling: set[str] = set()
        """The calls that run here until they are cancelled."""
        self.resting = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(THREADS)]

    def note(self, *words: object) -> None:
        """Writes a line down."""
        os.write(self._file, (" ".join(map(str, words)).replace("\n", " | ") + "\n").encode())

    def start(self) -> None:
        """Begins to call others."""
        for thread in self._threads:
            thread.start()

    def rest(self) -> None:
        """Makes no calls any more, and drops all references. Those under way come to their end first."""
        self.resting.set()
        for thread in self._threads:
            thread.join()
        self.kept.clear()
        gc.collect()  # errors hold the frames that they went through, and those hold what they had in hand

    def begin(self, mark: str = "") -> str:
        """The id of a call that is about to be made. `mark` is its last letter: see the top of this module."""
        call_id = f"{self.token}.{next(self._numbers)}{mark}"
        self.note("call", call_id)
        return call_id

    def ended(self, call_id: str, found: object, expected: object) -> None:
        """That call has this result, and should have that."""
        self.note("end", call_id, *(["right"] if found == expected else ["wrong", repr(found)[:200]]))

    def failed(self, call_id: str, error: BaseException) -> None:
        """That call has ended with an error."""
        self.note("end", call_id, type(error).__name__, error)

    def attempt(self, call: Callable[[str], tuple[object, object]], mark: str = "") -> None:
        """Makes a call, which gives what came and what should have, and writes down what became of it."""
        call_id = self.begin(mark)
        try:
            found, expected = call(call_id)
        except BaseException as error:
            self.failed(call_id, error)
            raise
        self.ended(call_id, found, expected)

    def _work(self, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        acts = (
            self._call, self._call, self._call_many, self._call_through, self._refer, self._share, self._lend,
            self._cancel, self._time_out, self._abandon,
        )  # fmt: skip
        while not self.resting.wait(PAUSE * chance.random()):
            try:
                chance.choice(acts)(chance)
            except Exception as error:  # it is written down, and judged by who reads it
                if isinstance(error, ExpelledError):
                    return
            if chance.random() < 0.1 and self.kept:
                try:
                    self.kept.popleft()
                except IndexError:  # the other thread was quicker
                    pass

    # What it does. Each picks those whom it calls.

    def _call(self, chance: random.Random) -> None:
        payload = bytes(chance.randrange(_LARGE) if chance.random() < 0.05 else 20)
        to = _somebody(chance)
        self.attempt(
            lambda call_id: (
                rpc.rpc_sync(to, serve, args=(call_id, payload), timeout=CALL_TIMEOUT),
                (call_id, len(payload)),
            )
        )

    def _call_many(self, chance: random.Random) -> None:
        pending = []
        for _ in range(5):
            call_id = self.begin()
            try:
                future = rpc.rpc_async(_somebody(chance), serve, args=(call_id, b""), timeout=CALL_TIMEOUT)
            except Exception as error:
                self.failed(call_id, error)
            else:
                pending.append((call_id, future))
        for call_id, future in pending:
            try:
                self.ended(call_id, future.wait(), (call_id, 0))
            except Exception as error:
                self.failed(call_id, error)

    def _call_through(self, chance: random.Random) -> None:
        to, hop = _somebody(chance), _somebody(chance)
        self.attempt(
            lambda call_id: (
                rpc.rpc_sync(to, serve, args=(call_id, b"", hop.name), timeout=CALL_TIMEOUT),
                (call_id, 0),
            )
        )

    def _refer(self, chance: random.Random) -> None:
        to = _somebody(chance)

        def call(call_id: str) -> tuple[Any, Any]:
            reference = rpc.remote(to, make, args=(call_id,))
            if chance.random() < 0.2:
                self.kept.append(reference)
            return reference.to_here(CALL_TIMEOUT), value_of(call_id)

        self.attempt(call)

    def _share(self, chance: random.Random) -> None:
        owner, third = _somebody(chance), _somebody(chance)
        keep = chance.random() < 0.3

        def call(call_id: str) -> tuple[Any, Any]:
            reference = rpc.remote(owner, make, args=(call_id + "r",))
            return (
                rpc.rpc_sync(third, use, args=(call_id, reference, keep), timeout=CALL_TIMEOUT),
                (call_id, value_of(call_id + "r")),
            )

        self.attempt(call)

    def _lend(self, chance: random.Random) -> None:
        third = _somebody(chance)
        keep = chance.random() < 0.3

        def call(call_id: str) -> tuple[Any, Any]:
            reference = rpc.RRef(value_of(call_id))
            return (
                rpc.rpc_sync(third, use, args=(call_id, reference, keep), timeout=CALL_TIMEOUT),
                (call_id, value_of(call_id)),
            )

        self.attempt(call)

    def _cancel(self, chance: random.Random) -> None:
        call_id = self.begin("c")
        try:
            future = rpc.rpc_async(_somebody(chance), dwell, args=(call_id, _hops(chance)), timeout=CALL_TIMEOUT)
            self.resting.wait(0.02 * chance.random())
            for _ in range(chance.choice((1, 1, 2))):
                future.cancel()
            self.ended(call_id, future.wait(), "an error")
        except Exception as error:
            self.failed(call_id, error)

    def _time_out(self, chance: random.Random) -> None:
        to, seconds = _somebody(chance), 0.005 + 0.02 * chance.random()
        self.attempt(
            lambda call_id: (rpc.rpc_sync(to, dwell, args=(call_id, _hops(chance)), timeout=seconds), "an error"), "c"
        )

    def _abandon(self, chance: random.Random) -> None:
        """Leaves a `deadline` block by an exception, while a remote call runs that was made in it."""
        to = _somebody(chance)

        def call(call_id: str) -> tuple[Any, Any]:
            try:
                with rpc.deadline(CALL_TIMEOUT):
                    reference = rpc.remote(to, dwell, args=(call_id, _hops(chance)))
                    self.resting.wait(0.02 * chance.random())
                    raise InterruptedError
            except InterruptedError:
                return reference.to_here(CALL_TIMEOUT), "an error"

        self.attempt(call, "c")


scene: Scene | None = None
"""Of this process."""


def _scene() -> Scene:
    assert scene is not None
    return scene


def _somebody(chance: random.Random) -> rpc.WorkerInfo:
    return chance.choice(rpc.get_worker_infos())


def _hops(chance: random.Random) -> list[str]:
    return [_somebody(chance).name for _ in range(chance.randrange(4))]


# What workers run for each other.


def value_of(call_id: str) -> list[str] | str:
    """What the reference that was made by a call must lead to: plain data for most, which workers tell unasked."""
    return f"value of {call_id}" if crc32(call_id.encode()) % 4 else ["value", call_id]


def serve(call_id: str, payload: bytes, hop: str | None = None) -> tuple[str, int]:
    """Answers what only this call is answered, after it has called another one if it is told to."""
    me = _scene()
    me.note("ran", call_id)
    if hop is not None:
        me.attempt(
            lambda inner: (rpc.rpc_sync(hop, serve, args=(inner, b""), timeout=CALL_TIMEOUT / 2), (inner, 0)),
            "i",
        )
    return call_id, len(payload)


def dwell(call_id: str, hops: list[str]) -> str:
    """Runs until it is cancelled, at the end of a chain of calls to those workers."""
    me = _scene()
    me.note("ran", call_id)
    me.dwelling.add(call_id)
    try:
        if hops:
            to, *rest = hops
            me.attempt(lambda inner: (rpc.rpc_sync(to, dwell, args=(inner, rest)), "an error"), "c")
        limit = monotonic() + 2 * CALL_TIMEOUT
        while not rpc.cancelled():
            if monotonic() > limit:
                me.note("hung", call_id)
                break
            sleep(STEP)
    finally:
        me.dwelling.discard(call_id)
    return "the result of a cancelled call"


def make(call_id: str) -> list[str] | str:
    """Makes a value for a reference."""
    _scene().note("ran", call_id)
    return value_of(call_id)


def use(call_id: str, reference: rpc.RRef[Any], keep: bool) -> tuple[str, Any]:
    """Fetches the value of somebody's reference, and may keep the reference for a while."""
    me = _scene()
    me.note("ran", call_id)
    if keep and not me.resting.is_set():
        me.kept.append(reference)
    return call_id, reference.to_here(CALL_TIMEOUT / 2)


# What it is told to do.


def cut_connections(share: float, chance: random.Random) -> int:
    """Breaks some of the connections of this process, whatever they are for; how many."""
    cut = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with one:
            try:
                one.getpeername()  # raises for one that listens
                if chance.random() < share:
                    one.shutdown(socket.SHUT_RDWR)
                    cut += 1
            except OSError:
                pass
    return cut


def state() -> dict[str, Any]:
    """Whom this worker knows, and what is left in its tables."""
    inventory = rpc.references()
    left = {key: number for key, number in rpc._rref_context_get_debug_info().items() if number != "0"}
    if inventory.owned or inventory.held:
        left["references"] = str(inventory)
    if pending := rpc.get_metrics()["calls_pending"]:
        left["calls_pending"] = str(pending)
    if dwelling := _scene().dwelling:
        left["functions"] = str(sorted(dwelling))
    return {"view": sorted([info.name, info.id] for info in rpc.get_worker_infos()), "left": left}


def say(**facts: Any) -> None:
    """Answers."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """The life of one worker. Gives the exit status of its process."""
    global scene
    name, url, token, seed, file, interval, patience = arguments
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    scene = Scene(token, file, int(seed))
    options = rpc.RpcBackendOptions(
        init_method=url,
        init_timeout=30,
        heartbeat_interval=float(interval),
        heartbeat_patience=float(patience),
    )
    rpc.init_rpc(name, rpc_backend_options=options)
    agent = current_agent()
    assert isinstance(agent, Agent)
    me = scene
    rpc.add_membership_callback(
        lambda change: me.note("lost", change.worker.name, change.worker.id) if change.kind == "lost" else None
    )
    say(up=agent.info.id)
    scene.start()
    return _obey(scene, agent, random.Random(int(seed)))


def _obey(me: Scene, agent: Agent, chance: random.Random) -> int:
    unread = b""
    while True:
        if isinstance(agent.closed, ExpelledError):
            me.rest()
            rpc.shutdown(graceful=False)
            say(expelled=True)
            return 0
        if not select.select([0], [], [], 0.05)[0]:
            continue
        data = os.read(0, 1 << 12)
        if not data:  # who started this one has died
            os._exit(3)
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            match line.decode():
                case "cut":
                    say(cut=cut_connections(0.3, chance))
                case "rest":
                    me.rest()
                    say(rests=True)
                case "state":
                    say(state=state())
                case "leave":
                    me.rest()
                    rpc.shutdown(timeout=LEAVE_TIMEOUT)
                    say(left=True)
                    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

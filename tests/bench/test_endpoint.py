from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Coroutine
from multiprocessing import Pipe
from typing import Any

import pytest

from farcall.bench import endpoint, timing
from farcall.bench.system import FutureCalls
from systems import PEERS

LATENCIES = {"p50_us", "p99_us", "mean_us"}


class Caller(FutureCalls):
    """Calls nobody; echoes by itself."""

    def __init__(self) -> None:
        self.noops = 0
        self.echoed: list[int] = []

    def noop(self) -> None:
        self.noops += 1

    def payload(self, size: int) -> Any:
        return bytes(range(256)) * (size // 256) + bytes(size % 256)

    def echo(self, payload: Any) -> Any:
        self.echoed.append(len(payload))
        return payload

    def start(self) -> Any:
        self.noop()

    def finish(self, future: Any) -> None:
        pass

    def close(self) -> None:
        pass


class StreamingCaller(Caller):
    """Many threads may call it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def send(self, payload: Any) -> None:
        self.sent.append(len(payload))


class ForgetfulCaller(Caller):
    def echo(self, payload: Any) -> Any:
        return payload[:-1] + b"\0"


class AwaitingCaller(Caller):
    """Its users write coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = 0

    async def await_noop(self) -> None:
        self.awaited += 1

    async def await_echo(self, payload: Any) -> Any:
        self.awaited += 1
        return payload

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)


class ExchangingCaller(Caller):
    """Gives something else for what it gets."""

    def __init__(self, back: bytes = b"") -> None:
        super().__init__()
        self._back = back
        self.exchanged = 0

    def exchange(self, payload: Any) -> Any:
        self.exchanged += 1
        return self._back or bytes(len(payload))


class SharingCaller(Caller):
    """Has references, but no proxies."""

    def remote_to_here(self) -> None:
        pass

    def share(self, references: int) -> None:
        self.noops += references


class ReferringCaller(SharingCaller):
    """Has all that references can do; notes which calls it made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def noop(self) -> None:
        self.made.append("no-op")

    def echo(self, payload: Any) -> Any:
        self.made.append(f"{len(payload)} bytes")

    def remote_to_here(self) -> None:
        self.made.append("remote + to_here")

    def proxy_call(self) -> None:
        self.made.append("proxy call")

    def pass_back(self) -> None:
        self.made.append("passed back")

    def share(self, references: int) -> None:
        self.made += ["shared reference"] * references


def test_what_a_caller_can_be_asked_for_depends_on_what_it_can_do() -> None:
    plain = {"noops", "pipelined", "echoes", "in_flight", "stop"}
    assert set(endpoint.caller_commands(Caller())) == plain
    assert set(endpoint.caller_commands(StreamingCaller())) == plain | {"threads", "streaming"}
    assert set(endpoint.caller_commands(ExchangingCaller())) == plain | {"exchanges"}
    assert set(endpoint.caller_commands(SharingCaller())) == plain | {"remotes", "share_rate"}
    referring = plain | {"remotes", "share_rate", "proxies", "passed_back", "shared", "mixed"}
    assert set(endpoint.caller_commands(ReferringCaller())) == referring


@pytest.mark.parametrize("size", [0, 3, 1000])
def test_a_payload_is_sent_so_many_times(size: int) -> None:
    caller = Caller()
    found = endpoint.echoes(caller, size, calls=5, warmup=2, seconds=60.0)
    assert set(found) == LATENCIES
    assert caller.echoed == [size] * (1 + 2 + 5)


def test_a_slow_one_is_not_warmed_up_again() -> None:
    caller = Caller()
    endpoint.echoes(caller, 64, calls=1000, warmup=100, seconds=-1.0)  # any call takes longer
    assert caller.echoed == [64] * (1 + timing.MIN_CALLS)


def test_something_else_that_comes_back_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="512 bytes were sent, but something else came back: bytes"):
        endpoint.echoes(ForgetfulCaller(), 512, calls=5, warmup=2, seconds=60.0)


def test_others_that_come_back_are_as_many() -> None:
    caller = ExchangingCaller()
    assert set(endpoint.exchanges(caller, 64, calls=5, warmup=2, seconds=60.0)) == LATENCIES
    assert caller.exchanged == 1 + 2 + 5
    with pytest.raises(RuntimeError, match="64 bytes were sent, but not as many came back: bytes"):
        endpoint.exchanges(ExchangingCaller(b"few"), 64, calls=5, warmup=2, seconds=60.0)


def test_coroutines_are_timed_inside_their_event_loop() -> None:
    caller = AwaitingCaller()
    endpoint.echoes(caller, 10, calls=5, warmup=2, seconds=60.0)
    assert (caller.awaited, caller.echoed) == (7, [10])


def test_calls_of_all_kinds_are_mixed() -> None:
    caller = ReferringCaller()
    found = endpoint.mixed(caller, endpoint.MIXED_KINDS, calls=20, warmup=0, seed=1)
    assert list(found) == list(endpoint.MIXED_KINDS)
    assert all(set(values) == LATENCIES for values in found.values())
    expected = ["no-op", "64 bytes", "4096 bytes", "1048576 bytes", "remote + to_here", "proxy call"]
    assert Counter(caller.made) == dict.fromkeys([*expected, "shared reference"], 20)


def test_one_kind_alone_is_called_in_the_same_way() -> None:
    caller = ReferringCaller()
    assert set(endpoint.mixed(caller, ["proxy call"], calls=3, warmup=2, seed=1)) == {"proxy call"}
    assert caller.made == ["proxy call"] * 5


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(KeyError, match="smoke signal"):
        endpoint.mixed(ReferringCaller(), ["smoke signal"], calls=1, warmup=0, seed=1)


def test_a_rate_in_flight_makes_the_calls() -> None:
    caller = Caller()
    assert endpoint.in_flight(caller, window=4, calls=100, seconds=60.0) > 0
    assert caller.noops == 5 + 100


def test_payloads_are_sent_while_no_ops_are_timed() -> None:
    caller = StreamingCaller()
    found = endpoint.caller_commands(caller)["streaming"](size=1000, seconds=0.01)
    assert 0 < found["p50_us"] <= found["p99_us"]  # type: ignore[index]
    assert set(caller.sent) == {1000}
    assert caller.noops > 0


def test_a_role_that_cannot_be_taken_up_is_told_and_ends_it() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send({"kind": "server", "system": PEERS["ray"], "address": None})
        assert endpoint.run(theirs) == 1
        outcome, traceback = ours.recv()
        assert outcome == "failed"
        assert traceback.strip().endswith("NotImplementedError: Ray starts its serving ends by itself")


def test_a_system_whose_module_is_not_found_is_told_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send({"kind": "caller", "system": PEERS["ray"]})
        monkeypatch.setitem(sys.modules, "systems.ray_actors", None)
        assert endpoint.run(theirs) == 1
        outcome, traceback = ours.recv()
        assert outcome == "failed"
        assert "systems.ray_actors" in traceback

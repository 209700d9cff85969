from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from multiprocessing import Pipe
from typing import Any

import pytest

from farcall.bench import endpoint, timing
from farcall.bench.systems.base import FutureCalls


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


def test_what_a_caller_can_be_asked_for_depends_on_what_it_can_do() -> None:
    plain = {"noops", "pipelined", "echoes", "in_flight", "stop"}
    assert set(endpoint.caller_commands(Caller())) == plain
    assert set(endpoint.caller_commands(StreamingCaller())) == plain | {"threads", "streaming"}
    assert set(endpoint.caller_commands(ExchangingCaller())) == plain | {"exchanges"}
    assert set(endpoint.caller_commands(SharingCaller())) == plain | {"remotes", "share_rate"}


@pytest.mark.parametrize("size", [0, 3, 1000])
def test_a_payload_is_sent_so_many_times(size: int) -> None:
    caller = Caller()
    found = endpoint.echoes(caller, size, calls=5, warmup=2, seconds=60.0)
    assert set(found) == {"p50_us", "p99_us"}
    assert caller.echoed == [size] * (1 + 2 + 5)


def test_a_slow_one_is_not_warmed_up_again() -> None:
    caller = Caller()
    endpoint.echoes(caller, 64, calls=1000, warmup=100, seconds=-1.0)  # any call takes longer
    assert caller.echoed == [64] * (1 + timing.LEAST)


def test_something_else_that_comes_back_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="512 bytes were sent, and something else came back: bytes"):
        endpoint.echoes(ForgetfulCaller(), 512, calls=5, warmup=2, seconds=60.0)


def test_others_that_come_back_are_as_many() -> None:
    caller = ExchangingCaller()
    assert set(endpoint.exchanges(caller, 64, calls=5, warmup=2, seconds=60.0)) == {"p50_us", "p99_us"}
    assert caller.exchanged == 1 + 2 + 5
    with pytest.raises(RuntimeError, match="64 bytes were sent, and not as many came back: bytes"):
        endpoint.exchanges(ExchangingCaller(b"few"), 64, calls=5, warmup=2, seconds=60.0)


def test_coroutines_are_timed_inside_their_event_loop() -> None:
    caller = AwaitingCaller()
    endpoint.echoes(caller, 10, calls=5, warmup=2, seconds=60.0)
    assert (caller.awaited, caller.echoed) == (7, [10])


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
        ours.send({"kind": "caller", "system": "smoke-signals"})
        assert endpoint.run(theirs) == 1
        outcome, traceback = ours.recv()
        assert outcome == "failed"
        assert traceback.strip().endswith("KeyError: 'smoke-signals'")

"""Turns of systems whose processes are played."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.bench_stage import PYRO5, TORCH, FakeEnds, found_beside
from farcall.bench.effort import QUICK
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import (
    BANDWIDTH,
    EXCHANGED,
    FETCHED,
    IN_FLIGHT,
    LATENCY,
    LATENCY_P99,
    SHARED,
    STARTUP,
    STREAMING,
    THREADS,
    Findings,
)
from farcall.bench.measurements import MEMORY_FACTOR, Measurer
from farcall.bench.processes import EndpointFailed
from farcall.bench.system import System
from systems import PEERS

EFFORT = dataclasses.replace(
    QUICK, sizes=(0, 65536, 1 << 20), windows=(1, 8), workers=(1, 2), threads=(1, 4), streamed=(1 << 20,)
)


def usual(system: System, command: str, options: dict[str, Any]) -> Any:
    match command:
        case "echoes":
            return {"p50_us": 2.0 + options["size"], "p99_us": 9.0}
        case "exchanges":
            return {"p50_us": 4.0 * options["size"], "p99_us": 9.0}
        case "in_flight":
            return 1000.0 * options["window"]
        case "threads":
            return {"calls_per_s": 500.0 * options["threads"]}
        case "streaming":
            return {"p50_us": 60.0, "p99_us": 0.001 * options["size"]}
        case "remotes":
            return {"p50_us": 50.0, "p99_us": 90.0}
        case "share_rate":
            return 333.0
        case "start":
            return 0.5 * options["workers"]
    raise AssertionError(command)


def measurer(findings: Findings, ends: FakeEnds, memory: int = 1 << 40) -> Measurer:
    return Measurer(EFFORT, findings, ends.open, lambda: memory)


def test_a_payload_turn_finds_latency_and_from_64_kib_bandwidth() -> None:
    findings, ends = found_beside(), FakeEnds(usual)
    measurer(findings, ends).turn("payload", OWN)
    assert findings.median(LATENCY, OWN, 0) == pytest.approx(2e-6)
    assert findings.median(LATENCY_P99, OWN, 0) == pytest.approx(9e-6)
    assert findings.median(BANDWIDTH, OWN, 0) is None
    assert findings.median(BANDWIDTH, OWN, 65536) == pytest.approx(2 * 65536 / 65538e-6)
    assert ends.opened == [("farcall", "payload")]


def test_the_other_turns_find_what_they_are_for() -> None:
    findings, ends = found_beside(), FakeEnds(usual)
    for part in ("exchange", "in-flight", "threads", "streaming", "references", "startup"):
        measurer(findings, ends).turn(part, OWN)
    assert findings.median(EXCHANGED, OWN, 0) is None
    assert findings.median(EXCHANGED, OWN, 65536) == pytest.approx(0.5e6)
    assert findings.median(IN_FLIGHT, OWN, 8) == 8000.0
    assert findings.median(THREADS, OWN, 4) == 2000.0
    assert findings.median(STREAMING, OWN, 1 << 20) == pytest.approx(1048.576e-6)
    assert findings.median(FETCHED, OWN, 1) == pytest.approx(20_000.0)
    assert findings.median(SHARED, OWN, 1) == 333.0
    assert [findings.median(STARTUP, OWN, count) for count in (1, 2)] == [0.5, 1.0]
    # Sharing needs a third end; workers are started by a process of their own each time.
    assert [part for _, part in ends.opened] == [
        *("exchange", "in-flight", "threads", "streaming", "references", "shared", "startup", "startup")
    ]


def test_what_a_system_cannot_do_is_not_tried_and_has_its_reason() -> None:
    findings, ends = found_beside(PYRO5), FakeEnds(usual)
    for part in ("in-flight", "references"):
        measurer(findings, ends).turn(part, PYRO5)
    assert ends.opened == []
    assert findings.reason(IN_FLIGHT, PYRO5, 8) == "a proxy of Pyro5 has one call under way at a time"
    assert "no references" in str(findings.reason(SHARED, PYRO5, 1))


def test_of_some_only_the_echo_is_tried() -> None:
    findings, ends = found_beside(PYRO5), FakeEnds(usual)
    measurer(findings, ends).turn("exchange", PYRO5)
    assert ends.opened == []
    assert findings.reason(EXCHANGED, PYRO5, 65536) == "only the echo is measured for it"
    measurer(findings, ends, memory=1 << 20).turn("exchange", OWN)
    assert "may be needed" in str(findings.reason(EXCHANGED, OWN, 1 << 20))
    assert findings.median(EXCHANGED, OWN, 65536) is not None


def test_a_system_whose_caller_is_for_one_thread_is_not_tried_with_more() -> None:
    findings, ends = found_beside(PYRO5, TORCH), FakeEnds(usual)
    for part in ("threads", "streaming"):
        measurer(findings, ends).turn(part, PYRO5)
    assert ends.opened == []
    assert findings.reason(THREADS, PYRO5, 4) == "its caller is used by one thread only"
    assert findings.reason(STREAMING, PYRO5, 1 << 20) == "its caller is used by one thread only"
    measurer(findings, ends).turn("threads", TORCH)
    assert findings.times_as_fast(THREADS, TORCH, 4) is None
    measurer(findings, ends).turn("threads", OWN)
    assert findings.times_as_fast(THREADS, TORCH, 4) == 1.0


def test_a_stream_for_which_there_is_no_memory_is_not_tried() -> None:
    findings, ends = found_beside(), FakeEnds(usual)
    measurer(findings, ends, memory=1 << 20).turn("streaming", OWN)
    assert findings.median(STREAMING, OWN, 1 << 20) is None
    assert "may be needed" in str(findings.reason(STREAMING, OWN, 1 << 20))
    assert findings.reason(LATENCY, OWN, 1 << 20) is None


def test_a_size_that_fails_ends_the_turn_and_is_not_tried_again() -> None:
    def too_large(system: System, command: str, options: dict[str, Any]) -> Any:
        if options["size"] >= 65536:
            raise EndpointFailed("a traceback", "ValueError: too large")
        return usual(system, command, options)

    findings, ends = found_beside(TORCH), FakeEnds(too_large)
    for _ in range(2):
        measurer(findings, ends).turn("payload", TORCH)
    assert findings.values[LATENCY, "torch", 0] == pytest.approx([2e-6, 2e-6])
    assert findings.median(LATENCY, TORCH, 65536) is None
    assert findings.reason(LATENCY, TORCH, 65536) == "ValueError: too large"
    assert findings.reason(BANDWIDTH, TORCH, 1 << 20) == "not tried: it failed at 64 KiB"
    assert TORCH in findings.systems


def test_a_system_that_cannot_be_started_is_left_out_and_the_others_go_on() -> None:
    findings, ends = found_beside(TORCH, PYRO5), FakeEnds(usual)
    ends.cannot_start.add("torch")
    each = measurer(findings, ends)
    for part in ("payload", "in-flight"):
        for system in (OWN, TORCH, PYRO5):
            each.turn(part, system)
    assert findings.left_out == {TORCH.label: "it could not be started: no such device"}
    assert findings.systems == [OWN, PYRO5]
    assert [name for name, _ in ends.opened].count("torch") == 1
    assert findings.median(LATENCY, PYRO5, 0) is not None


def test_one_that_cannot_be_started_later_keeps_what_was_found() -> None:
    findings, ends = found_beside(TORCH), FakeEnds(usual)
    measurer(findings, ends).turn("payload", TORCH)
    ends.cannot_start.add("torch")
    measurer(findings, ends).turn("in-flight", TORCH)
    assert TORCH in findings.systems
    assert findings.reason(IN_FLIGHT, TORCH, 1) == "no such device"
    assert findings.median(LATENCY, TORCH, 0) is not None


def test_one_that_does_not_end_in_order_keeps_its_values_and_it_is_noted() -> None:
    findings, ends = found_beside(TORCH), FakeEnds(usual)
    ends.cannot_stop.add("torch")
    measurer(findings, ends).turn("payload", TORCH)
    assert findings.median(LATENCY, TORCH, 1 << 20) is not None
    assert findings.reasons == {}
    assert findings.notes == [f"{TORCH.label} did not end in order: it hangs"]


def test_a_size_for_which_there_is_no_memory_is_not_tried() -> None:
    findings, ends = found_beside(), FakeEnds(usual)
    measurer(findings, ends, memory=MEMORY_FACTOR * 65536).turn("payload", OWN)
    assert findings.median(LATENCY, OWN, 65536) is not None
    assert findings.median(LATENCY, OWN, 1 << 20) is None
    assert findings.reason(LATENCY, OWN, 1 << 20) == "not tried: 10 MiB of memory may be needed, which are not free"


def test_every_peer_says_how_it_is_used() -> None:
    assert list(PEERS) == ["torch", "ray", "rpyc", "pyro5", "grpc", "xoscar", "dask", "monarch"]
    assert all(peer.usage and peer.package for peer in PEERS.values())

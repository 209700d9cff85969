from __future__ import annotations

import json

from bench.bench_stage import PYRO5, TORCH, found_beside
from farcall.bench import findings as found
from farcall.bench.effort import QUICK
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import BANDWIDTH, IN_FLIGHT, LATENCY, SHARED, STARTUP, Findings, points


def test_a_value_is_the_median_over_the_rounds() -> None:
    findings = found_beside()
    for value in (9.0, 1.0, 2.0):
        findings.record(LATENCY, OWN, 64, value)
    assert findings.median(LATENCY, OWN, 64) == 2.0
    assert findings.median(LATENCY, OWN, 0) is None
    assert findings.median(IN_FLIGHT, OWN, 64) is None


def test_a_ratio_says_how_many_times_as_fast_farcall_is_whichever_way_is_better() -> None:
    findings = found_beside(TORCH)
    findings.record(LATENCY, OWN, 0, 2.0)
    findings.record(LATENCY, TORCH, 0, 10.0)
    findings.record(IN_FLIGHT, OWN, 8, 100.0)
    findings.record(IN_FLIGHT, TORCH, 8, 400.0)
    findings.record(SHARED, OWN, 1, 5.0)
    assert findings.times_as_fast(LATENCY, TORCH, 0) == 5.0
    assert findings.times_as_fast(IN_FLIGHT, TORCH, 8) == 0.25
    assert findings.times_as_fast(SHARED, TORCH, 1) is None


def test_the_first_reason_is_kept() -> None:
    findings = found_beside(TORCH)
    findings.explain([LATENCY, BANDWIDTH], TORCH, 64, "too large")
    findings.explain([LATENCY], TORCH, 64, "another")
    assert findings.reason(LATENCY, TORCH, 64) == findings.reason(BANDWIDTH, TORCH, 64) == "too large"
    assert findings.reason(LATENCY, OWN, 64) is None


def test_a_system_that_is_left_out_is_no_peer_any_more() -> None:
    findings = found_beside(TORCH, PYRO5)
    findings.leave_out(TORCH, "it is not installed")
    assert findings.systems == [OWN, PYRO5]
    assert findings.peers == [PYRO5]
    assert findings.left_out == {TORCH.label: "it is not installed"}


def test_points_of_a_measure() -> None:
    assert points(LATENCY, QUICK) == QUICK.sizes
    assert points(BANDWIDTH, QUICK) == [size for size in QUICK.sizes if size >= 65536]
    assert points(IN_FLIGHT, QUICK) == QUICK.windows
    assert points(STARTUP, QUICK) == QUICK.workers
    assert points(SHARED, QUICK) == (1,)


def test_the_json_has_every_round_every_ratio_and_every_reason() -> None:
    findings = found_beside(TORCH)
    for value in (1.0, 3.0):
        findings.record(IN_FLIGHT, OWN, 8, 4 * value)
        findings.record(IN_FLIGHT, TORCH, 8, value)
    findings.explain([IN_FLIGHT], TORCH, 64, "it stood still")
    written = json.loads(json.dumps(findings.as_json(QUICK, {"cores": "2"})))
    assert written["machine"] == {"cores": "2"}
    assert written["effort"]["quick"] is True
    assert list(written["systems"]) == ["farcall", "torch"]
    assert set(written["measures"]) == {measure.key for measure in found.MEASURES}
    flight = written["measures"]["in_flight"]["systems"]
    assert flight["farcall"][1] == {"point": 8, "median": 8.0, "rounds": [4.0, 12.0]}
    assert flight["torch"] == [
        {"point": 1, "median": None, "reason": "not measured in this run"},
        {"point": 8, "median": 2.0, "rounds": [1.0, 3.0], "farcall_is_times_as_fast": 4.0},
        {"point": 64, "median": None, "reason": "it stood still"},
    ]


def test_nothing_found_is_still_json() -> None:
    assert json.dumps(Findings().as_json(QUICK, {}))

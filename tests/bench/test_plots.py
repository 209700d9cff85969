"""What is drawn; and, where matplotlib is installed, that it can be."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bench.bench_stage import TORCH, found_beside
from farcall.bench import plots
from farcall.bench.effort import QUICK
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import BANDWIDTH, FETCHED, LATENCY, STARTUP, Findings
from systems import COMPARED

EFFORT = dataclasses.replace(QUICK, sizes=(0, 64, 1 << 20), workers=(1, 2))


def some_findings() -> Findings:
    findings = found_beside(TORCH)
    for size in EFFORT.sizes:
        findings.record(LATENCY, OWN, size, 1e-6 * (size + 30))
    findings.record(LATENCY, TORCH, 64, 1e-3)
    findings.record(BANDWIDTH, OWN, 1 << 20, 2e9)
    findings.record(FETCHED, OWN, 1, 9000.0)
    return findings


def test_a_curve_leaves_out_what_is_not_there() -> None:
    findings = some_findings()
    assert [size for size, _ in plots.curve(findings, LATENCY, OWN, EFFORT)] == [0, 64, 1 << 20]
    assert plots.curve(findings, LATENCY, TORCH, EFFORT) == [(64, 1e-3)]
    assert plots.curve(findings, STARTUP, OWN, EFFORT) == []


def test_bandwidth_is_drawn_in_gigabytes() -> None:
    assert plots.curve(some_findings(), BANDWIDTH, OWN, EFFORT) == [(1 << 20, 2.0)]


def test_nothing_has_a_place_on_a_logarithmic_axis() -> None:
    assert plots.positions((0, 64, 4096)) == {0: 4.0, 64: 64.0, 4096: 4096.0}
    assert plots.positions((0,)) == {0: 1.0}


def test_every_system_has_a_look_of_its_own() -> None:
    findings = Findings(systems=list(COMPARED))
    looks = [plots.style_of(findings, system) for system in COMPARED]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == len(COMPARED)


def test_the_pictures_are_drawn_and_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = plots.draw(some_findings(), EFFORT, tmp_path)
    names = {f"{name}.{ending}" for name in ("latency", "bandwidth", "references") for ending in ("svg", "png")}
    assert {file.name for file in files} == names == {path.name for path in tmp_path.iterdir()}
    svg = (tmp_path / "latency.svg").read_text()
    assert "torch.distributed.rpc" in svg
    assert re.search("1 MiB", svg)
    (again := tmp_path / "again").mkdir()
    plots.draw(some_findings(), EFFORT, again)
    assert (again / "latency.svg").read_text() == svg

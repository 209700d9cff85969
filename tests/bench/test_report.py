from __future__ import annotations

import dataclasses

from bench.bench_stage import PYRO5, TORCH, found_beside
from farcall.bench import report
from farcall.bench.effort import QUICK, Effort
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import BANDWIDTH, FETCHED, IN_FLIGHT, LATENCY, SHARED, STARTUP, Findings

EFFORT = dataclasses.replace(QUICK, sizes=(0, 1 << 20), windows=(1, 64), workers=(2,))
WHERE = {"processor": "an abacus", "date": "2020-02-02 10:00 UTC"}


def some_findings() -> Findings:
    findings = found_beside(TORCH, PYRO5)
    findings.record(LATENCY, OWN, 0, 30e-6)
    findings.record(LATENCY, TORCH, 0, 600e-6)
    findings.record(LATENCY, OWN, 1 << 20, 1e-3)
    findings.record(BANDWIDTH, OWN, 1 << 20, 2.1e9)
    findings.explain([LATENCY, BANDWIDTH], TORCH, 1 << 20, "it broke")
    findings.record(IN_FLIGHT, OWN, 64, 80_000.0)
    findings.record(IN_FLIGHT, TORCH, 64, 5_000.0)
    for window in EFFORT.windows:
        findings.explain([IN_FLIGHT], PYRO5, window, "one at a time")
    findings.record(FETCHED, OWN, 1, 9_000.0)
    findings.record(FETCHED, TORCH, 1, 1_800.0)
    findings.explain([SHARED], PYRO5, 1, "no references")
    findings.record(STARTUP, OWN, 2, 0.25)
    return findings


def test_the_tables_have_a_row_for_each_system_and_a_dash_where_there_is_nothing() -> None:
    tables = report.tables(some_findings(), EFFORT)
    assert list(tables) == [LATENCY, BANDWIDTH, IN_FLIGHT, FETCHED, STARTUP]
    times, ratios = tables[LATENCY]
    assert times.header == ["system", "payload: 0 B", "1 MiB"]
    assert times.rows == [
        ["farcall", "30.0 µs", "1.00 ms"],
        ["torch.distributed.rpc", "600 µs", "–"],
        ["Pyro5", "–", "–"],
    ]
    assert ratios.rows == [["torch.distributed.rpc", "20.0×", "–"], ["Pyro5", "–", "–"]]
    assert [table.rows[0] for table in tables[BANDWIDTH]] == [["farcall", "2.10 GB/s"]]
    assert tables[IN_FLIGHT][0].rows[0] == ["farcall", "–", "80,000"]
    assert tables[IN_FLIGHT][1].rows[0] == ["torch.distributed.rpc", "–", "16.0×"]
    assert tables[FETCHED][0].rows[0] == ["farcall", "9,000", "–"]
    assert tables[FETCHED][1].rows[0] == ["torch.distributed.rpc", "5.00×", "–"]
    assert tables[STARTUP][0].rows[0] == ["farcall", "250 ms"]


def test_farcall_by_itself_has_no_ratios_and_what_was_not_measured_no_table() -> None:
    findings = found_beside()
    findings.record(LATENCY, OWN, 0, 30e-6)
    tables = report.tables(findings, dataclasses.replace(EFFORT, rounds=3))
    assert [[table.title for table in each] for each in tables.values()] == [
        ["A call with a payload, there and back (medians over 3 rounds)"]
    ]


def test_every_empty_cell_that_has_a_reason_is_explained_once() -> None:
    findings = some_findings()
    findings.notes.append("Dask did not end in order: it hangs")
    findings.left_out["Ray"] = "it is not installed"
    assert report.reasons(findings) == [
        "Ray was left out: it is not installed",
        "torch.distributed.rpc, latency at 1 MiB: it broke",
        "Pyro5, in flight at 1, in flight at 64: one at a time",
        "Pyro5, shared: no references",
        "Dask did not end in order: it hangs",
    ]


def test_the_page_has_plots_tables_reasons_usages_and_the_machine() -> None:
    page = report.page(some_findings(), EFFORT, WHERE, ["latency.svg", "latency.png", "references.svg"])
    assert page.startswith("# Benchmarks\n\nfarcall beside torch.distributed.rpc and Pyro5, ")
    assert "```sh\npython benchmarks/compare.py --quick --peers torch,pyro5 --write-docs\n```" in page
    assert "](benchmarks/latency.svg)" in page
    assert "](benchmarks/references.svg)" in page
    assert "startup.svg" not in page
    assert "| farcall | 30.0 µs | 1.00 ms |" in page
    assert "- Pyro5, shared: no references" in page
    assert f"- Pyro5: {PYRO5.usage}" in page
    assert "- processor: an abacus" in page
    assert "- date: 2020-02-02 10:00 UTC" in page
    assert page.endswith("\n")


def test_a_quick_run_says_so_on_the_page() -> None:
    said = "**This was a quick run"
    assert said in report.page(some_findings(), EFFORT, WHERE, [])
    assert said not in report.page(some_findings(), Effort(), WHERE, [])

"""The benchmark between hosts: what it records, and what it does where there can be no namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from figures import Results
from hosts import run
from hosts.systems import FarcallBetweenHosts, PlainTls, TorchBetweenHosts

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "hosts.run", "--quick")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}


def some_results() -> Results:
    """Two rounds in which farcall was ten times as fast as torch in everything."""
    results = Results()
    points = ("no-op", *run.SIZES, "remote + to_here")
    for factor in (1.0, 1.2):
        for system, base in (("farcall-clear", 10.0), ("farcall-encrypted", 20.0), ("torch", 200.0)):
            found = {point: {"p50_us": base * factor} for point in points}
            found["pipelined"] = {"calls_per_s": 1e6 / (base * factor)}
            found[run.BESIDE] = {"p99_us": 1000 * base}
            results.record(system, found)
        results.record("plain-tls", {point: {"p50_us": 30.0 * factor} for point in ("no-op", *run.SIZES)})
    return results


def test_the_figures_compare_what_the_rounds_found() -> None:
    found = {figure.title: figure for figure in run.wanted_figures(some_results())}
    assert found["encrypted, no-op: faster than torch in clear text"].value == pytest.approx(10)
    assert found["encrypted, pipelined: faster than torch in clear text"].value == pytest.approx(10)
    assert found["clear text, 64 MiB: faster than torch"].value == pytest.approx(20)
    assert found["encrypted, 1 MiB: faster than plain ssl sockets"].value == pytest.approx(1.5)
    assert found["no-op: encrypted more than in clear text"].value == pytest.approx(11)
    assert found["clear text, no-op: slowest run / fastest run"].value == pytest.approx(1.2)
    assert found["farcall-encrypted, no-op beside 256 MiB, p99"].value == pytest.approx(20)
    assert found["farcall-encrypted, no-op beside 256 MiB, p99"].verdict == "missed"


def test_a_system_that_was_not_measured_is_shown_as_absent() -> None:
    results = some_results()
    del results.rounds["torch"]
    titles = {figure.title: figure.verdict for figure in run.wanted_figures(results)}
    assert titles["clear text, no-op: faster than torch"] == "not measured"
    systems = [FarcallBetweenHosts(False), FarcallBetweenHosts(True), TorchBetweenHosts(), PlainTls()]
    table = run.tables(results, systems, 2)[0]
    assert table.rows[0][1:3] == ["11.0 µs", "11.0 µs"]
    assert set(table.rows[2][1:]) == {"–"}


def test_the_section_has_the_tables_and_the_run() -> None:
    text = run.section(run.tables(some_results(), [PlainTls()], 2), {"cores": "2"})
    assert text.startswith("## Between hosts\n")
    assert "| plain `ssl` sockets, blocking | 33.0 µs |" in text
    assert text.endswith("The run: cores 2.")


def test_without_the_right_to_make_namespaces_it_says_so_and_ends_well() -> None:
    code = (
        "import sys\nfrom hosts import namespaces, run\n"
        "def refuse(flags):\n    raise namespaces.NotAllowed('not here')\n"
        "namespaces._unshare = refuse\nsys.exit(run.main(['--quick']))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bench-hosts is skipped: not here.")


@pytest.mark.slow
def test_a_quick_run_measures_between_two_hosts(tmp_path: Path) -> None:
    systems = "farcall-clear,farcall-encrypted,plain-tls"
    done = subprocess.run(
        [*PROGRAM, "--systems", systems, "--json", str(tmp_path / "found.json")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("bench-hosts is skipped"):
        pytest.skip(done.stdout)
    assert "Between two hosts" in done.stdout
    assert '"farcall-encrypted"' in (tmp_path / "found.json").read_text()

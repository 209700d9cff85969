from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compare
from bench.bench_stage import FakeEnds
from compare import choose_peers
from farcall.bench import command, plots, report
from farcall.bench.command import Outputs, plan, run
from farcall.bench.effort import QUICK, Effort
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import Findings
from farcall.bench.measurements import Measurer
from farcall.bench.processes import EndpointFailed
from farcall.bench.system import System
from farcall.errors import UsageError
from systems import PEERS

ANSWERS: dict[str, Any] = {
    "echoes": {"p50_us": 30.0, "p99_us": 90.0},
    "exchanges": {"p50_us": 40.0, "p99_us": 90.0},
    "in_flight": 50_000.0,
    "threads": {"calls_per_s": 40_000.0},
    "streaming": {"p50_us": 70.0, "p99_us": 777.0},
    "remotes": {"p50_us": 100.0, "p99_us": 200.0},
    "share_rate": 2_000.0,
    "start": 0.5,
}


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> FakeEnds:
    """In place of all processes."""
    ends = FakeEnds(lambda system, name, options: ANSWERS[name])
    monkeypatch.setattr(
        command, "Measurer", lambda effort, findings: Measurer(effort, findings, ends.open, lambda: 1 << 40)
    )
    return ends


def test_peers_are_chosen_by_name_in_a_fixed_order() -> None:
    assert choose_peers("") == []
    assert choose_peers("ray, Torch") == [PEERS["torch"], PEERS["ray"]]
    assert choose_peers("all") == list(PEERS.values())
    with pytest.raises(UsageError, match=r"there is no 'carrier-pigeons'; there are torch, ray, .*, monarch, or all"):
        choose_peers("ray,carrier-pigeons")


def test_every_system_has_its_turn_in_each_part_of_each_round_and_the_order_rotates() -> None:
    effort = Effort(rounds=2, parts=("payload", "startup"))
    titles = [title for title, _ in plan([OWN, PEERS["dask"], PEERS["ray"]], effort, Measurer(effort, Findings()))]
    assert titles == [
        *(f"round 1: {part}, {name}" for part in effort.parts for name in ("farcall", "Dask", "Ray")),
        *(f"round 2: {part}, {name}" for part in effort.parts for name in ("Dask", "Ray", "farcall")),
    ]


def test_a_run_shows_tables_and_writes_json(ends: FakeEnds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(QUICK, [], Outputs(json=tmp_path / "found.json")) == 0
    out, err = capsys.readouterr()
    assert "30.0 µs" in out
    assert "777 µs" in out
    assert "40,000" in out
    assert "This was a quick run" in err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["measures"]["in_flight"]["systems"]["farcall"][0]["rounds"] == [50_000.0]
    assert found["machine"]["farcall"]
    assert len(found["others_percent"]) == len(QUICK.parts)


def test_a_peer_that_is_not_installed_is_named_and_left_out(
    ends: FakeEnds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(System, "is_installed", property(lambda system: system.family == "pyro5"))
    monkeypatch.setenv("COLUMNS", "200")
    assert run(QUICK, choose_peers("monarch,pyro5"), Outputs()) == 0
    _, err = capsys.readouterr()
    assert (
        "Monarch was left out: it is not installed; install it with `pip install torchmonarch` or `make bench-peers`"
        in err
    )
    assert {name for name, _ in ends.opened} == {"farcall", "pyro5"}


def test_a_run_without_farcall_fails(ends: FakeEnds, capsys: pytest.CaptureFixture[str]) -> None:
    ends.cannot_start.add("farcall")
    assert run(QUICK, [], Outputs()) == 1
    assert "farcall was left out: it could not be started: no such device" in capsys.readouterr().err


def test_without_matplotlib_plots_are_skipped_and_it_is_said(
    ends: FakeEnds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    assert run(QUICK, [], Outputs(plots=tmp_path / "plots")) == 0
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()
    with pytest.raises(UsageError, match="--write-docs needs matplotlib"):
        run(QUICK, [], Outputs(docs=tmp_path))


def test_the_page_is_written_with_the_plots_that_it_shows(
    ends: FakeEnds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def draw(findings: Findings, effort: Effort, directory: Path) -> list[Path]:
        (directory / "latency.svg").write_text("a picture")
        return [directory / "latency.svg"]

    monkeypatch.setattr(plots, "can_draw", lambda: True)
    monkeypatch.setattr(plots, "draw", draw)
    assert run(QUICK, [], Outputs(docs=tmp_path)) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert "](benchmarks/latency.svg)" in page
    assert page.endswith(f"\n\n{report.HOSTS_BEGIN}\n{report.HOSTS_END}\n")
    assert (tmp_path / "benchmarks" / "latency.svg").is_file()


def test_a_new_page_keeps_what_bench_hosts_has_recorded_on_the_old_one(
    ends: FakeEnds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: True)
    monkeypatch.setattr(plots, "draw", lambda *_: [])
    recorded = f"{report.HOSTS_BEGIN}\n\n## Between hosts\n\n| a table |\n\n{report.HOSTS_END}\n"
    (tmp_path / "benchmarks.md").write_text(f"# Old figures\n\n{recorded}")
    assert run(QUICK, [], Outputs(docs=tmp_path)) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.endswith(f"\n\n{recorded}")
    assert "Old figures" not in page


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (Outputs(json=Path("nowhere/found.json")), "--json: the directory .*nowhere does not exist"),
        (Outputs(plots=Path(__file__)), r"--plots: .*test_command.py is not a directory"),
        (Outputs(docs=Path("nowhere")), "--write-docs: the directory nowhere does not exist"),
    ],
)
def test_what_could_not_be_written_is_refused_before_anything_is_measured(
    ends: FakeEnds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outputs: Outputs, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        run(QUICK, [], outputs)
    assert ends.opened == []


def test_a_peer_that_breaks_in_the_middle_leaves_the_others_be(
    monkeypatch: pytest.MonkeyPatch, ends: FakeEnds, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(system: System, name: str, options: dict[str, Any]) -> Any:
        if system != OWN and name == "in_flight":
            raise EndpointFailed("long", "it burst")
        return ANSWERS[name]

    monkeypatch.setattr(ends, "_answer", breaks)
    monkeypatch.setattr(System, "is_installed", True)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(QUICK, choose_peers("torch"), Outputs()) == 0
    out, err = capsys.readouterr()
    assert "torch.distributed.rpc, in flight at 1: it burst" in err
    assert "50,000" in out


def test_compare_takes_peers_and_what_farcall_bench_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "run", lambda *arguments: asked.extend(arguments) or 7)
    assert compare.main(["--quick", "--peers", "dask,torch", "--sizes", "0", "--write-docs"]) == 7
    effort, peers, outputs = asked
    assert (effort.sizes, effort.seconds) == ((0,), QUICK.seconds)
    assert peers == [PEERS["torch"], PEERS["dask"]]
    assert outputs == Outputs(docs=Path("docs"))


def test_compare_refuses_an_unknown_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--peers", "smoke-signals"])
    assert "--peers: there is no 'smoke-signals'; there are torch, " in capsys.readouterr().err

"""All parts of `make bench`: with processes that are played for all systems, and with real ones for farcall."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

import measurements
import report
import run
import systems
from farcall.bench.endpoint import MIXED_KINDS
from farcall.bench.processes import Endpoints, start_ends
from farcall.bench.system import System
from figures import Figure, Results, wanted_figures
from measurements import BUSY_PROGRAMS, PARTS, QUICK, YARDSTICKS, busy_load, contended_loads

TINY = dataclasses.replace(QUICK, rounds=1, calls=20, warmup=5, mixed_calls=5, contended_seconds=0.02)
LATENCIES = {"p50_us", "p99_us", "mean_us"}


def latency(p50: float) -> dict[str, float]:
    return {"p50_us": p50, "p99_us": 10 * p50, "mean_us": 2 * p50}


class Stage:
    """In place of all processes. Torch takes 100 times as long as others; all take longer beside a load."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.up_together: set[frozenset[str]] = set()
        self.load = ""
        self.asked: list[tuple[str, str, str]] = []
        """Each time: the system, the load, and the command."""

    def answer(self, system: str, command: str, options: dict[str, Any]) -> Any:
        self.asked.append((system, self.load, command))
        slow = (100 if system == "torch" else 1) * (5 if self.load else 1)
        match command:
            case "mixed":
                kinds = options["kinds"]
                return {kind: latency(slow * (6.0 if len(kinds) > 1 else 5.0)) for kind in kinds}
            case "pipelined":
                return {"calls_per_s": 1e6 / slow}
            case "threads":
                return {"calls_per_s": 1e6 / slow, **latency(slow * 50.0)}
            case "shared":
                return 1e4 / slow
            case "call_all":
                return 100.0
        return latency(slow * 10.0)


class FakeEnd:
    pid = os.getpid()

    def __init__(self, stage: Stage, system: str) -> None:
        self._stage = stage
        self._system = system
        self._answers: list[Any] = []

    def ask(self, command: str, **options: Any) -> Any:
        return self._stage.answer(self._system, command, options)

    def send(self, command: str, **options: Any) -> None:
        self._answers.append(self.ask(command, **options))

    def receive(self) -> Any:
        return self._answers.pop(0)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()

    class FakeEndpoints:
        def __init__(self) -> None:
            self.names: list[str] = []

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            for name in self.names:
                stage.up.remove(name)

        def start(self, title: str, **role: Any) -> FakeEnd:
            return FakeEnd(stage, "busy workers")

        def wait_until_up(self, *ends: FakeEnd) -> None:
            pass

    def fake_start_ends(endpoints: FakeEndpoints, system: System, third: bool = False) -> tuple[FakeEnd, FakeEnd]:
        stage.up.append(system.name)
        endpoints.names.append(system.name)
        stage.up_together.add(frozenset(stage.up))
        return FakeEnd(stage, system.name), FakeEnd(stage, system.name)

    @contextmanager
    def loaded(load: object) -> Iterator[None]:
        assert stage.up  # the system is started before its load
        assert not stage.load
        stage.load = f"{load} programs" if isinstance(load, int) else "computing"
        stage.load = "" if load == 0 else stage.load
        yield
        stage.load = ""

    monkeypatch.setattr(measurements, "Endpoints", FakeEndpoints)
    monkeypatch.setattr(measurements, "start_ends", fake_start_ends)
    monkeypatch.setattr(measurements, "busy_programs", loaded)
    monkeypatch.setattr(measurements, "computing", loaded)
    monkeypatch.setattr(measurements, "run_python", lambda *_: "0.1")
    monkeypatch.setattr(measurements, "cpu_seconds", lambda pid: 0.0)
    monkeypatch.setattr(measurements, "_SETTLE_S", 0.0)
    monkeypatch.setattr(measurements, "SIZES", dict.fromkeys(measurements.SIZES, 1 << 16))
    return stage


def take_all_turns(stage: Stage, effort: measurements.Effort) -> Results:
    results = Results()
    for _, turn in run.plan(systems.ALL, effort, results):
        turn()
        assert stage.up == []
    return results


def test_every_system_is_up_only_while_it_is_measured(stage: Stage) -> None:
    take_all_turns(stage, dataclasses.replace(TINY, idle_seconds=0.0))
    alone = {frozenset([system.name]) for system in (*systems.ALL, systems.COPY)}
    # Two that use no processor while nobody calls: see `measure_beside`.
    assert stage.up_together == alone | {frozenset(pair) for pair in YARDSTICKS.items()}
    assert not any("torch" in together and len(together) > 1 for together in stage.up_together)


def test_every_part_gives_figures_with_p50_p99_and_mean(stage: Stage) -> None:
    effort = dataclasses.replace(TINY, rounds=3, idle_seconds=0.0)
    results = take_all_turns(stage, effort)
    figures = {figure.title: figure for figure in wanted_figures(results)}
    assert [title for title, figure in figures.items() if figure.value is None] == []
    for number in (1, 2, 4):
        for name in ("p50", "mean"):
            title = f"no-op, unix, beside {busy_load(number)}, {name}: faster than torch"
            assert figures[title].value == pytest.approx(100.0)
    for kind in MIXED_KINDS:
        assert figures[f"{kind}, mixed, unix: of its own run"].value == pytest.approx(1.2)
    assert figures["no-op, unix: slowest fresh run, of the fastest"].value == 1.0
    assert figures["no-op, unix, pure Python: faster than torch"].value == pytest.approx(100.0)
    assert figures["16 threads, 60 calls each, unix: p99"].value == pytest.approx(0.5)
    assert figures["reference made, passed back and dropped, unix: faster than torch"].value == pytest.approx(100.0)
    shown = {table.title: table for table in report.tables(results, figures.values(), effort)}
    calls = shown["A no-op between two processes of one host (medians over 3 rounds)"]
    assert ["farcall, unix, pure Python", "10.0 / 100.0 / 20.0", "1,000,000"] in calls.rows
    contended = shown["A no-op beside busy programs, and while another thread computes (medians over 3 rounds)"]
    assert [row[1] for row in contended.rows if row[0] == "farcall, unix"] == contended_loads()
    assert [row[1] for row in contended.rows if row[0] == "torch.distributed.rpc"] == contended_loads()
    beside = "5,000.0 / 50,000.0 / 10,000.0"
    threads = "25,000.0 / 250,000.0 / 50,000.0"
    assert ["torch.distributed.rpc", "1 busy program", beside, beside, "2,000", threads] in contended.rows
    assert ["torch.distributed.rpc", "callee computes", beside, beside, "–", "–"] in contended.rows
    assert len(shown["farcall, unix: calls of several kinds in random order (medians over 3 rounds)"].rows) == 7


def test_torch_is_contended_as_farcall_is_and_only_the_two(stage: Stage) -> None:
    take_all_turns(stage, dataclasses.replace(TINY, idle_seconds=0.0))
    beside = {name: [(load, command) for system, load, command in stage.asked if system == name and load] for name in
              ("farcall-unix", "torch")}  # fmt: skip
    assert beside["farcall-unix"] == beside["torch"]
    assert {load for load, _ in beside["torch"]} == {"1 programs", "2 programs", "4 programs", "computing"}
    assert {system for system, load, _ in stage.asked if load} == {"farcall-unix", "torch"}


def test_rounds_that_differ_are_shown_as_both_values() -> None:
    results = Results()
    for p50 in (11.0, 12.0, 72.0):
        results.record("farcall-unix", {"no-op": latency(p50)})
    for p50 in (10.0, 12.0, 14.0):
        results.record("torch", {"no-op": latency(p50)})
    assert report.latencies(results, "farcall-unix", "no-op") == "12.0 / 120.0 / 24.0 (p50 from 11.0 to 72.0)"
    assert report.latencies(results, "torch", "no-op") == "12.0 / 120.0 / 24.0"
    assert report.latencies(results, "torch", "pipelined") == "–"


def test_a_second_mode_among_fresh_runs_is_missed() -> None:
    results = Results()
    for slowest in (9.0, 20.0, 9.5):
        results.record("farcall-unix", {"fresh run": {"fastest_us": 8.0, "slowest_us": slowest}})
    found = next(figure for figure in wanted_figures(results) if "fresh run" in figure.title)
    assert (found.value, found.verdict) == (2.5, "missed")


def test_floors_stay_where_they_were() -> None:
    floors = {figure.title: figure.floor or figure.required for figure in wanted_figures(Results())}
    assert {
        "no-op, unix: faster than torch": 12,
        "pipelined, unix: torch's rate": 12,
        "64 MiB there and back, unix: torch's bandwidth": 8,
        "1 MiB there and back, unix: torch's bandwidth": 6,
        "4 KiB there and back, unix: torch's rate": 10,
        "16 threads, unix: torch's rate": 10,
        "idle worker: share of a core": 1,
    }.items() <= floors.items()
    assert not any(is_stricter_floor(figure) for figure in wanted_figures(Results()))


def is_stricter_floor(figure: Figure) -> bool:
    if figure.floor is None:
        return False
    return figure.floor > figure.required if figure.bound == "≥" else figure.floor < figure.required


def test_each_kind_is_measured_in_a_run_of_its_own_and_all_in_one(stage: Stage) -> None:
    found = measurements.measure_mixed(systems.find("farcall-unix"), TINY)
    assert found == {f"{way}: {kind}": latency(p50) for way, p50 in (("alone", 5.0), ("mixed", 6.0)) for kind in
                     MIXED_KINDS}  # fmt: skip
    assert [command for _, _, command in stage.asked] == ["mixed"] * (len(MIXED_KINDS) + 1)


def test_farcall_makes_calls_of_all_kinds_in_random_order() -> None:
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, systems.find("farcall-unix"), third=True)
        found = caller.ask("mixed", kinds=MIXED_KINDS, calls=5, warmup=2, seed=1)
    assert set(found) == set(MIXED_KINDS)
    assert all(set(values) == LATENCIES and min(values.values()) > 0 for values in found.values())


@pytest.mark.parametrize("name", ["farcall-unix", "farcall-unix-python"])
def test_farcall_is_measured_beside_every_load(name: str) -> None:
    found = measurements.measure_contended(systems.find(name), TINY)
    points = {f"{load}: {how}" for load in contended_loads() for how in ("in a row", "apart")}
    assert set(found) == points | {f"{busy_load(number)}: 16 threads" for number in BUSY_PROGRAMS}
    assert all(found[point].keys() == LATENCIES for point in points)
    assert all(value > 0 for values in found.values() for value in values.values())


def test_pure_python_workers_do_not_use_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    system = systems.find("farcall-unix-python")
    assert system.environment == {"FARCALL_NATIVE": "0"}
    with Endpoints() as endpoints:
        ends = start_ends(endpoints, system)
        for end in ends:
            with open(f"/proc/{end.pid}/environ", "rb") as environment:
                assert b"FARCALL_NATIVE=0" in environment.read().split(b"\0")
            with open(f"/proc/{end.pid}/maps") as maps:
                assert "farcall/_native" not in maps.read()


def test_references_are_measured_in_every_use() -> None:
    part = next(part for part in PARTS if part.title == "calls")
    found = part.measure(systems.find("farcall-unix"), TINY)
    assert {"no-op", "pipelined", "remote + to_here", "proxy call", "passed back"} == set(found)

"""Floors are compared with the best of several runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, which stands beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("floors")
    for name in ("floors", "figures"):
        sys.modules.pop(name, None)


def write_run(path: Path, **values: float | None) -> str:
    bounds = {"speed": ("≥", 12.0), "idle": ("<", 1.0)}
    figures = [
        {"title": title, "value": value, "bound": bounds[title][0], "required": bounds[title][1], "verdict": "ignored"}
        for title, value in values.items()
    ]
    path.write_text(json.dumps({"figures": figures}))
    return str(path)


def test_a_floor_is_met_if_one_run_meets_it(floors: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = write_run(tmp_path / "slow.json", speed=5.6, idle=0.2)
    fast = write_run(tmp_path / "fast.json", speed=40.0, idle=3.0)
    assert floors.main([slow, fast]) == 0
    out = capsys.readouterr().out
    assert "40.00×" in out
    assert "0.20×" in out


@pytest.mark.parametrize("second", [11.9, None])
def test_a_floor_that_no_run_meets_fails(floors: Any, tmp_path: Path, second: float | None) -> None:
    runs = [write_run(tmp_path / "a.json", speed=5.6), write_run(tmp_path / "b.json", speed=second)]
    assert floors.main(runs) == 1


def test_a_floor_below_what_is_wanted_is_what_counts(floors: Any, tmp_path: Path) -> None:
    figure = {"title": "speed", "value": 9.0, "bound": "≥", "required": 12.0, "floor": 8.0, "aim": None}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"figures": [figure]}))
    assert floors.main([str(path)]) == 0
    path.write_text(json.dumps({"figures": [figure | {"value": 7.9}]}))
    assert floors.main([str(path)]) == 1


def test_a_figure_that_was_never_measured_fails(floors: Any, tmp_path: Path) -> None:
    assert floors.main([write_run(tmp_path / "a.json", speed=None)]) == 1
    assert floors.main([write_run(tmp_path / "b.json", speed=None), write_run(tmp_path / "c.json", speed=13.0)]) == 0

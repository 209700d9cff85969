"""For the tests of the runner: a suite without torch, and the processes that its tests have started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eventually import eventually


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Waits until so many processes of the fake suite have written their number down, and gives the numbers."""
    place = tmp_path / "pids"
    place.mkdir()
    monkeypatch.setenv("FAKE_SUITE", str(place))
    here, usual = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (here, usual))))

    def wait(count: int) -> list[int]:
        eventually(lambda: len(_numbers(place)) >= count)
        return _numbers(place)

    return wait


def _numbers(place: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(place) if name.isdigit())

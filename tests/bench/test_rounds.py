from __future__ import annotations

import time

import pytest

from farcall.bench import rounds
from farcall.bench.screen import Screen


def test_each_round_begins_with_another_one() -> None:
    assert [rounds.rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rounds.rotated("", 3) == []


def test_turns_are_taken_in_order_each_with_what_others_used_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 20.0, 24.0])
    others = iter([100.0, 103.0, 110.0, 110.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(rounds, "others_cpu_seconds", lambda: next(others))
    screen = Screen()
    screen._notes = None  # as without rich, which asks the clock too
    taken: list[str] = []
    percents: list[float] = []
    rounds.take_turns([("one", lambda: taken.append("1")), ("two", lambda: taken.append("2"))], percents, screen)
    assert taken == ["1", "2"]
    assert percents == [pytest.approx(30.0), 0.0]
    assert capsys.readouterr().err == "[0/2] one\n[1/2] two\n[2/2] measured\n"

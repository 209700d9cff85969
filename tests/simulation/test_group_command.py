"""The command that measures groups: what it prints, how it ends, and that a change costs N log N messages at most."""

from __future__ import annotations

from functools import partial
from math import log2

import pytest

from simulation import group
from simulation.group import ALONE, Row, changes_of, measure
from simulation.planted_membership_bugs import NoComparing


@pytest.mark.parametrize("workers", [16, 32, 64, 128])
def test_a_change_costs_n_log_n_messages_at_most(workers: int) -> None:
    changes: list[int] = []
    rows = list(measure(workers, 1, changes.append))
    assert [row.what for row in rows] == ["joins", *ALONE, "churn"]
    assert sum(changes) == changes_of(workers)
    for row in rows:
        assert 0 < row.messages <= workers * log2(workers), str(row)
        assert row.messages <= 5 * workers, str(row)  # in fact it is about three for each worker
        assert row.seconds <= (10.0 if row.what == "vanish" else 15.0 if row.what == "churn" else 1.5), str(row)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert group.main(["--workers", "16", "24", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert " ".join(printed.split()).startswith("N change changes messages /N N log2 N /that seconds")
    assert sum(line.split()[:2] == ["24", "churn"] for line in printed.splitlines()) == 1
    assert printed.endswith("all groups agreed, and no change cost more than N log2 N messages\n")


def test_a_group_that_does_not_agree_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group, "CHURN_LOSS", 0.3)
    monkeypatch.setattr(group, "measure", partial(measure, machine=NoComparing))
    assert group.main(["--workers", "16"]) == 1
    assert "BROKEN: 16 workers, seed 1: " in capsys.readouterr().out


def test_messages_beyond_measure_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(group, "measure", lambda *_: [Row(64, "join", 1, 385.0, 0.1)])
    assert group.main(["--workers", "64"]) == 1
    assert "TOO DEAR: join of 64 workers cost 385 messages for each change" in capsys.readouterr().out

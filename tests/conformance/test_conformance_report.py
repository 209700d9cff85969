"""The table, what is lost, and the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.categories import Categories, Category, Rule
from conformance.outcomes import Outcome, failed
from conformance.report import ReportError, Run, read_baseline, write_baseline, write_json

CATEGORIES = Categories(
    [Category("b", ""), Category("unused", ""), Category("a", "")], [Rule("A", "*", "a"), Rule("B", "*", "b")]
)
OUTCOMES = {
    "A.test_1": Outcome("passed", seconds=1.25),
    "A.test_2": failed("why not"),
    "B.test_1": Outcome("skipped", "no GPU", seconds=0.5),
    "B.test_new": failed("new"),
}


def test_the_table_has_a_row_for_each_category_with_tests_in_their_order() -> None:
    table = Run(OUTCOMES, {}).table(CATEGORIES, "title")
    assert list(table.header) == ["category", "passed", "failed", "skipped", "total", "seconds"]
    assert [list(row) for row in table.rows] == [
        ["b", "0", "1", "1", "2", "0.5"],
        ["a", "1", "1", "0", "2", "1.2"],
        ["all", "1", "2", "1", "4", "1.8"],
    ]


def test_the_counts() -> None:
    assert Run(OUTCOMES, {}).counts() == "1 passed, 2 failed, 1 skipped"


@pytest.mark.parametrize(
    ("baseline", "lost"),
    [
        ({}, ["A.test_2", "B.test_new"]),
        ({"A.test_2": "skipped", "B.test_new": "skipped"}, []),
        ({"A.test_2": "passed", "B.test_1": "passed", "B.test_new": "skipped"}, ["A.test_2", "B.test_1"]),
    ],
)
def test_lost_is_what_torch_itself_passes(baseline: dict[str, str], lost: list[str]) -> None:
    run = Run(OUTCOMES, baseline)
    assert run.lost() == lost
    assert run.failed() == ["A.test_2", "B.test_new"]


def test_a_baseline_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    assert read_baseline(path) == {}
    good = {test: OUTCOMES[test] for test in ("B.test_1", "A.test_1")}
    write_baseline(good, list(OUTCOMES), path)
    assert read_baseline(path) == {"A.test_1": "passed", "B.test_1": "skipped"}
    assert path.read_text().splitlines()[1:3] == ['"A.test_1": "passed",', '"B.test_1": "skipped"']


def test_of_what_failed_the_baseline_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"A.test_2": "passed", "A.test_gone": "passed", "A.test_other": "skipped"}))
    with pytest.raises(ReportError, match=r"run it again: A\.test_2, B\.test_new"):
        write_baseline(OUTCOMES, [*OUTCOMES, "A.test_other"], path)
    assert read_baseline(path) == {
        "A.test_1": "passed", "A.test_2": "passed", "A.test_other": "skipped", "B.test_1": "skipped",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["[]", "{", '{"A.test": "failed"}'])
def test_another_file_is_no_baseline(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"other\.json"):
        read_baseline(path)


def test_all_outcomes_as_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, "about it", [OUTCOMES, {}], CATEGORIES)
    written = json.loads(path.read_text())
    assert written["about"] == "about it"
    assert written["runs"][1] == {}
    assert written["runs"][0]["A.test_2"] == {"status": "failed", "category": "a", "seconds": 0.0, "reason": "why not"}
    assert "reason" not in written["runs"][0]["A.test_1"]

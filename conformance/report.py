"""What a run has found: the table by category, what was lost against torch itself, and the files.

The baseline is what torch itself does with its tests, `{test: "passed" or "skipped"}`. A test is *lost* if it passes
there and did not here; one that the baseline does not know is lost if it failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conformance.categories import Categories
from conformance.outcomes import Outcome
from farcall.bench.tables import TextTable

BASELINE: Final = Path(__file__).with_name("baseline.json")
Baseline = Mapping[str, str]
Outcomes = Mapping[str, Outcome]
_STATUSES: Final = ("passed", "failed", "skipped")


class ReportError(Exception):
    """A file is not what it should be, or what was found cannot be written."""


@dataclass(frozen=True)
class Run:
    """The outcomes of all selected tests, and the baseline."""

    outcomes: Outcomes
    baseline: Baseline

    def lost(self) -> list[str]:
        """The tests that torch itself passes, and that did not pass."""
        return [
            test
            for test, outcome in sorted(self.outcomes.items())
            if (outcome.status != "passed" and self.baseline.get(test) == "passed")
            or (outcome.status == "failed" and test not in self.baseline)
        ]

    def failed(self) -> list[str]:
        """All tests that failed, also those that torch itself skips."""
        return sorted(test for test, outcome in self.outcomes.items() if outcome.status == "failed")

    def counts(self) -> str:
        """How many passed, failed and were skipped, in words."""
        return ", ".join(f"{_count(list(self.outcomes.values()), status)} {status}" for status in _STATUSES)

    def table(self, categories: Categories, title: str) -> TextTable:
        """How many tests of each category passed, failed and were skipped, and how long they took."""
        groups: dict[str, list[Outcome]] = {name: [] for name in categories.all}
        for test, outcome in self.outcomes.items():
            groups[categories.of(test)].append(outcome)
        rows = [_row(name, group) for name, group in groups.items() if group]
        rows.append(_row("all", [outcome for group in groups.values() for outcome in group]))
        return TextTable(title, ["category", *_STATUSES, "total", "seconds"], rows)


def read_baseline(path: Path = BASELINE) -> dict[str, str]:
    """Read a baseline; there is nothing in one that does not exist. Raises ReportError if it is another file."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ReportError(f"{path}: {error}") from error
    if not isinstance(read, dict) or not all(status in ("passed", "skipped") for status in read.values()):
        raise ReportError(f'{path} is no baseline: it must have the form {{"Class.method": "passed" or "skipped"}}')
    return read


def write_baseline(outcomes: Outcomes, there: Sequence[str], path: Path = BASELINE) -> None:
    """Record what torch itself does. Tests that were not run stay as they were, if they are still there.

    Raises ReportError after writing if tests failed: nothing was recorded of these.
    """
    statuses = {test: status for test, status in read_baseline(path).items() if test in there}
    statuses |= {test: outcome.status for test, outcome in outcomes.items() if outcome.status != "failed"}
    path.write_text(json.dumps(statuses, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    if failed := Run(outcomes, {}).failed():
        names = ", ".join(failed)
        raise ReportError(f"the baseline has nothing new about what failed on torch itself; run it again: {names}")


def write_json(path: Path, about: str, runs: Sequence[Outcomes], categories: Categories) -> None:
    """Write all outcomes of all runs. Raises OSError."""
    found = [
        {
            test: {
                "status": outcome.status,
                "category": categories.of(test),
                "seconds": round(outcome.seconds, 2),
                **({"reason": outcome.reason} if outcome.reason else {}),
            }
            for test, outcome in sorted(outcomes.items())
        }
        for outcomes in runs
    ]
    path.write_text(json.dumps({"about": about, "runs": found}, indent=1) + "\n", encoding="utf-8")


def _row(name: str, group: Sequence[Outcome]) -> list[str]:
    seconds = sum(outcome.seconds for outcome in group)
    return [name, *(str(_count(group, status)) for status in _STATUSES), str(len(group)), f"{seconds:.1f}"]


def _count(group: Sequence[Outcome], status: str) -> int:
    return sum(outcome.status == status for outcome in group)

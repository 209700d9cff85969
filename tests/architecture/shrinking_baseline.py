"""Baselines that may only shrink: what is wrong today is counted and recorded, and nothing may be added to it.

A baseline is a JSON file `{rule: {file: count}}`. `compare` says what differs from it, as sentences for the reader of a
failed test: a count above the recorded one is a new violation, and a count below it means that the record has to be
lowered. `lower` writes the lower counts. It never raises one, so the command that calls it cannot hide anything.
"""

from __future__ import annotations

import json
from pathlib import Path

Counts = dict[str, dict[str, int]]
"""How often each rule is violated in each file: `{rule: {file: count}}`. A count of zero is left out."""


def read_baseline(path: Path) -> Counts:
    """Returns the recorded counts.

    Args:
        path: The JSON file of the baseline.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON.
    """
    counts: Counts = json.loads(path.read_text(encoding="utf-8"))
    return counts


def write_baseline(path: Path, counts: Counts) -> None:
    """Writes the counts in a stable order, so that a change of one count is a change of one line."""
    ordered = {rule: dict(sorted(files.items())) for rule, files in sorted(counts.items()) if files}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(found: Counts, baseline: Counts) -> list[str]:
    """Returns one sentence for each count that differs from the baseline; an empty list if none does."""
    problems = []
    places = {(rule, file) for counts in (found, baseline) for rule in counts for file in counts[rule]}
    for rule, file in sorted(places):
        now, allowed = found.get(rule, {}).get(file, 0), baseline.get(rule, {}).get(file, 0)
        if now > allowed:
            problems.append(f"{file}: {rule} {now} times, where the baseline allows {allowed}")
        elif now < allowed:
            problems.append(
                f"{file}: {rule} only {now} times, and the baseline says {allowed}: lower it (make baselines)"
            )
    return problems


def lower(found: Counts, baseline: Counts) -> Counts:
    """Returns the baseline with every count lowered to what was found; a count that grew stays as it was recorded."""
    lowered: Counts = {}
    for rule, files in baseline.items():
        for file, allowed in files.items():
            if now := min(found.get(rule, {}).get(file, 0), allowed):
                lowered.setdefault(rule, {})[file] = now
    return lowered

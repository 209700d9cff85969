"""The baselines of this tree, and the command that lowers them: `make baselines`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from architecture.behaviour_imports import count_internal_imports
from architecture.lint_counts import count_lint_violations
from architecture.shrinking_baseline import Counts, compare, lower, read_baseline, write_baseline
from architecture.words import find_retired_words

BASELINES: dict[str, Callable[[], Counts]] = {
    "behaviour_imports_baseline.json": count_internal_imports,
    "lint_baseline.json": count_lint_violations,
    "words_baseline.json": find_retired_words,
}


def baseline_path(name: str) -> Path:
    """Returns where the baseline of that name is recorded."""
    return Path(__file__).with_name(name)


def main() -> int:
    """Lowers every baseline to what is found now; returns 1 if something has grown, and says what."""
    has_grown = False
    for name, count in BASELINES.items():
        found, baseline = count(), read_baseline(baseline_path(name))
        lowered = lower(found, baseline)
        write_baseline(baseline_path(name), lowered)
        for problem in compare(found, lowered):
            has_grown = True
            print(f"{name}: {problem}", file=sys.stderr)
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())

"""What is recorded as wrong may only become less, and the checks that count it find what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.baselines import BASELINES, baseline_path
from architecture.behaviour_imports import count_internal_imports
from architecture.lint_counts import count_lint_violations
from architecture.shrinking_baseline import compare, lower, read_baseline, write_baseline
from architecture.words import count_words, retired_words


@pytest.mark.parametrize("name", BASELINES)
def test_tree_matches_its_baseline(name: str) -> None:
    assert compare(BASELINES[name](), read_baseline(baseline_path(name))) == []


def test_compare_names_what_grew_and_what_shrank() -> None:
    found = {"C901": {"a.py": 2, "b.py": 1}, "SLF001": {"c.py": 1}}
    baseline = {"C901": {"a.py": 1, "b.py": 1, "gone.py": 3}}
    assert compare(found, baseline) == [
        "a.py: C901 2 times, where the baseline allows 1",
        "gone.py: C901 only 0 times, and the baseline says 3: lower it (make baselines)",
        "c.py: SLF001 1 times, where the baseline allows 0",
    ]


def test_lower_never_raises_a_count() -> None:
    found = {"C901": {"a.py": 5, "b.py": 1}, "SLF001": {"c.py": 1}}
    assert lower(found, {"C901": {"a.py": 2, "b.py": 4, "gone.py": 1}}) == {"C901": {"a.py": 2, "b.py": 1}}


def test_a_written_baseline_is_read_back(tmp_path: Path) -> None:
    counts = {"C901": {"b.py": 1, "a.py": 2}, "SLF001": {}}
    write_baseline(tmp_path / "baseline.json", counts)
    assert read_baseline(tmp_path / "baseline.json") == {"C901": {"a.py": 2, "b.py": 1}}


def test_lint_violations_are_counted_with_and_without_noqa(tmp_path: Path) -> None:
    arguments = ", ".join("abcdefgh")
    branches = "".join(f"    if x == {number}:\n        return\n" for number in range(15))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "bad.py").write_text(
        f"def many({arguments}): pass\ndef branchy(x):\n{branches}\nother._private\nother._private  # noqa: SLF001\n"
    )
    (tmp_path / "src" / "good.py").write_text(f"def some({arguments[:-3]}): pass\n")
    assert count_lint_violations(tmp_path) == {
        "C901": {"src/bad.py": 1},
        "PLR0913": {"src/bad.py": 1},
        "SLF001": {"src/bad.py": 2},
    }


def test_retired_words_come_from_the_table_of_the_glossary() -> None:
    glossary = "| call | a bell |\n\n| instead of | write |\n|---|---|\n| bell | wake-up |\n| nap, doze | sleep |\n"
    assert retired_words(glossary) == {"bell", "nap", "doze"}
    with pytest.raises(ValueError, match="no table"):
        retired_words("# Glossary")


def test_retired_words_are_found_in_names_and_prose() -> None:
    text = "class BellRinger: ...\ndef ring_bells(): 'The bell; belly, NAPS, snap, kidnap.'\nheartbeat_patience = 1"
    assert count_words(text, {"bell", "nap", "patience"}) == {"bell": 3, "nap": 1}


def test_internal_packages_are_found_in_tests_of_behaviour_and_in_what_these_import(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "behaviour").mkdir(parents=True)
    (tests / "agent").mkdir()
    (tests / "behaviour" / "test_calls.py").write_text(
        "import first_stage\nimport farcall.agents\nSCRIPT = 'from farcall import api, transports'\n"
    )
    (tests / "first_stage.py").write_text("from second_stage import call\nimport farcall.transportspace\n")
    (tests / "second_stage.py").write_text("import farcall.agent.peers\nfrom farcall.agent import Agent\n")
    (tests / "other_stage.py").write_text("import farcall.protocol\n")
    (tests / "agent" / "test_agent.py").write_text("import farcall.runtime\n")
    assert count_internal_imports(tests) == {
        "farcall.agent": {"tests/second_stage.py": 2},
        "farcall.transports": {"tests/behaviour/test_calls.py": 1},
    }

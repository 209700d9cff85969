"""The list of promises, `tests/behaviour/promises.md`: every line says where it is tested, and those tests exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROMISES = TESTS / "behaviour" / "promises.md"

_LINE = re.compile(r"- [A-Z`0-9].*\. \((?:a|b|c)\) (.+)")
_TESTS = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
_MODULE = re.compile(r"new module: `(?:runtime|transports|protocol)/\w+`")
_CONCEPT = re.compile(r"gone with concept: \w.*")


def promises(text: str) -> list[str]:
    """Returns the lines of the list: those behind the first heading of a topic."""
    _, _, topics = text.partition("\n## ")
    return [line for line in topics.splitlines() if line.startswith("- ")]


def problem_with(line: str, tests: Path = TESTS) -> str | None:
    """Returns what is wrong with one line of the list; None if nothing is."""
    found = _LINE.fullmatch(line)
    if found is None:
        return "it is not `- Promise. (kind) where`"
    kind, where = line[: found.start(1)].rstrip()[-2], found[1]
    if kind == "b":
        return None if _MODULE.fullmatch(where) else "(b) names no new module"
    if kind == "c":
        return None if _CONCEPT.fullmatch(where) else "(c) names no concept"
    named = _TESTS.findall(where)
    if not named or _TESTS.sub("", where).strip(", "):
        return "(a) names something else than tests"
    missing = [f"{file}::{test}" for file, test in named if test not in names_of_tests_in(file, tests)]
    return f"there is no {', '.join(missing)}" if missing else None


def names_of_tests_in(file: str, tests: Path) -> set[str]:
    """Returns the names of the tests in a file, which is in tests/behaviour unless its path says otherwise."""
    path = tests.parent / file if "/" in file else tests / "behaviour" / file
    if not path.is_file():
        return set()
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_says_where_it_is_tested() -> None:
    lines = promises(PROMISES.read_text(encoding="utf-8"))
    assert {line: problem for line in lines if (problem := problem_with(line)) is not None} == {}


def test_no_promise_is_listed_twice() -> None:
    sentences = [line.partition(" (a) ")[0] for line in promises(PROMISES.read_text(encoding="utf-8"))]
    assert [sentence for sentence, count in Counter(sentences).items() if count > 1] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("- It holds. (a) `test_x.py::test_y`", None),
        ("- It holds. (a) `test_x.py::test_y`, `tests/other/test_z.py::test_y`", None),
        ("- It holds. (b) new module: `runtime/executor`", None),
        ("- It holds. (c) gone with concept: turns", None),
        ("- It holds. (a) `test_x.py::test_gone`", "there is no test_x.py::test_gone"),
        ("- It holds. (a) `test_gone.py::test_y`", "there is no test_gone.py::test_y"),
        ("- It holds. (a) somewhere", "(a) names something else than tests"),
        ("- It holds. (a) `test_x.py::test_y` and elsewhere", "(a) names something else than tests"),
        ("- It holds. (b) new module: somewhere", "(b) names no new module"),
        ("- It holds. (c) gone", "(c) names no concept"),
        ("- It holds.", "it is not `- Promise. (kind) where`"),
    ],
)
def test_a_line_that_is_wrong_is_found(tmp_path: Path, line: str, problem: str | None) -> None:
    for directory, file in (("behaviour", "test_x.py"), ("other", "test_z.py")):
        (tmp_path / "tests" / directory).mkdir(parents=True)
        (tmp_path / "tests" / directory / file).write_text("def test_y(): pass\n")
    assert problem_with(line, tmp_path / "tests") == problem

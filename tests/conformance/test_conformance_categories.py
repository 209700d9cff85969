"""Which test is of which category: the rules, the choice, and our own file against our own baseline."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from conformance.categories import Categories, CategoriesError, Category, Rule, matches
from conformance.report import read_baseline

# How many tests of torch 2.13.0 are of each category.
COUNTS = {
    "rpc-core": 33, "lifecycle": 31, "timeouts": 11, "futures": 25, "rref": 49, "async-execution": 29,
    "backend-options": 7, "dynamic-membership": 5, "sparse": 24, "profiler": 35, "dist-autograd": 60,
    "dist-autograd-sparse": 32, "dist-optimizer": 4, "remote-module": 10, "ddp-autograd": 8, "examples": 3,
    "faulty-agent": 22, "torchscript-callee": 27, "torchscript-remote-module": 6, "torchscript-autograd": 2,
    "torchscript-rref": 15, "torchscript-caller": 25, "device-maps": 1, "cuda": 99,
}  # fmt: skip


def some(*rules: Rule) -> Categories:
    names = dict.fromkeys(rule.category for rule in rules)
    return Categories([Category(name, "", "too far" * (name == "far")) for name in names], rules)


def test_every_test_of_the_baseline_has_its_category() -> None:
    categories = Categories.read()
    found = Counter(map(categories.of, read_baseline()))
    assert found == COUNTS
    assert list(categories.all) == list(COUNTS)


def test_every_pattern_of_ours_decides_about_a_test() -> None:
    categories = Categories.read()
    tests = read_baseline()
    deciding = {next(rule for rule in categories._rules if rule.takes(test)) for test in tests}
    assert set(categories._rules) - deciding == set()


def test_what_is_out_of_reach_says_why() -> None:
    far = {name: category.out_of_reach for name, category in Categories.read().all.items() if category.out_of_reach}
    assert set(far) == {"torchscript-rref", "torchscript-caller", "cuda"}
    assert "C++ agent" in far["torchscript-caller"]
    assert "\n" not in "".join(far.values())


@pytest.mark.parametrize(
    ("test", "category"),
    [
        ("RpcTest.test_other", "all"),
        ("RpcTest.test_long_timeout", "letters"),
        ("RpcTest.test_rref", "exact"),
        ("JitRpcTest.test_other", "class"),
    ],
)
def test_the_most_specific_pattern_decides(test: str, category: str) -> None:
    categories = some(
        Rule("*RpcTest", "*", "all"),
        Rule("JitRpcTest", "*", "class"),
        Rule("RpcTest", "test_*", "all"),
        Rule("RpcTest", "test_*timeout", "letters"),
        Rule("RpcTest", "test_rref*", "letters"),
        Rule("*Test", "test_rref", "exact"),
    )
    assert categories.of(test) == category


def test_a_test_without_a_category_is_named() -> None:
    with pytest.raises(CategoriesError, match=r"no category takes A\.test_b"):
        some(Rule("B", "*", "b")).of("A.test_b")


def test_two_equally_specific_patterns_are_no_answer() -> None:
    with pytest.raises(CategoriesError, match=r"a and b take A\.test_ab alike"):
        some(Rule("A", "test_a*", "a"), Rule("A", "test_*b", "b")).of("A.test_ab")


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (None, {"a", "b", "far"}),
        ("", {"a", "b", "far"}),
        ("a", {"a"}),
        ("a, far", {"a", "far"}),
        ("reachable", {"a", "b"}),
        ("reachable,^a", {"b"}),
        ("^a", {"b", "far"}),
        ("^reachable", {"far"}),
    ],
)
def test_a_choice_of_categories(words: str | None, chosen: set[str]) -> None:
    assert some(*(Rule("*", "*", name) for name in ("a", "b", "far"))).chosen(words) == chosen


def test_a_category_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(CategoriesError, match="no category 'c'; there are a, b, reachable"):
        some(Rule("A", "*", "a"), Rule("B", "*", "b")).chosen("a,^c")


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ([], True),
        (["test_a"], True),
        (["nothing", "Rpc"], True),
        (["test_b"], False),
        (["Rpc*add"], True),
        (["add*"], False),
    ],
)
def test_part_of_a_name_or_a_pattern(patterns: list[str], found: bool) -> None:
    assert matches("RpcTest.test_add", patterns) is found


@pytest.mark.parametrize(
    "text",
    [
        "[a",
        "a = 1",
        "[a]\nabout = 'x'",
        "[a]\nabout = 'x'\nkind = 1\ntests = {}",
        "[reachable]\nabout = 'x'\ntests = {}",
    ],
)
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(CategoriesError, match=r"wrong\.toml"):
        Categories.read(path)

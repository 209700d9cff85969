"""Which test is of which category, as `categories.toml` has it; its head says how it is read.

A test is named `Class.method`, the class as it is generated for an agent: `TensorPipeRpcTest.test_add`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

OWN: Final = Path(__file__).with_name("categories.toml")
REACHABLE: Final = "reachable"
"""In a choice: all categories that are not out of reach."""
_WILD: Final = "*?"


class CategoriesError(Exception):
    """The file of the categories is wrong or says nothing about a test, or a category does not exist."""


@dataclass(frozen=True)
class Category:
    """A kind of tests."""

    name: str
    about: str
    out_of_reach: str = ""
    """Why no implementation in Python can pass them here; empty if one can."""
    slow: bool = False


@dataclass(frozen=True)
class Rule:
    """A pattern of classes and one of their methods, and the category that takes what matches both."""

    class_: str
    method: str
    category: str

    def takes(self, test: str) -> bool:
        """Whether both patterns match."""
        class_, _, method = test.partition(".")
        return fnmatchcase(class_, self.class_) and fnmatchcase(method, self.method)

    @property
    def weight(self) -> tuple[bool, int, int]:
        """The more specific of two rules is the greater one."""
        exact = not any(letter in _WILD for letter in self.method)
        return exact, _letters(self.method), _letters(self.class_)


class Categories:
    """All categories, in the order in which they are shown."""

    def __init__(self, categories: Iterable[Category], rules: Iterable[Rule]) -> None:
        self.all: Final = {category.name: category for category in categories}
        self._rules: Final = sorted(rules, key=lambda rule: rule.weight, reverse=True)

    @classmethod
    def read(cls, path: Path = OWN) -> Self:
        """Read a file. Raises CategoriesError if it does not have the form of ours, and OSError."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls(
                [_category(name, table) for name, table in tables.items()],
                [rule for name, table in tables.items() for rule in _rules(name, table)],
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CategoriesError(f"{path}: {error!r}; the head of {OWN.name} says what it should look like") from error

    def of(self, test: str) -> str:
        """The category of a test. Raises CategoriesError if there is none, or two patterns are equally specific."""
        taking = [rule for rule in self._rules if rule.takes(test)]
        if not taking:
            raise CategoriesError(f"no category takes {test}; add it to {OWN.name}")
        best = {rule.category for rule in taking if rule.weight == taking[0].weight}
        if len(best) > 1:
            raise CategoriesError(f"{' and '.join(sorted(best))} take {test} alike; name it as a whole in one of them")
        return taking[0].category

    def chosen(self, words: str | None) -> set[str]:
        """The categories that words such as `rref,futures`, `reachable` or `reachable,^faulty-agent` name.

        Raises CategoriesError for a name that no category has.
        """
        wanted: set[str] = set()
        unwanted: set[str] = set()
        for word in filter(None, (word.strip() for word in (words or "").split(","))):
            name = word.removeprefix("^")
            (unwanted if word != name else wanted).update(self._named(name))
        return (wanted or set(self.all)) - unwanted

    def _named(self, name: str) -> set[str]:
        if name == REACHABLE:
            return {category.name for category in self.all.values() if not category.out_of_reach}
        if name not in self.all:
            raise CategoriesError(f"there is no category {name!r}; there are {', '.join((*self.all, REACHABLE))}")
        return {name}


def matches(test: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns, or of the parts of a name, is in the test's name; all are if there are none."""
    return not patterns or any(
        fnmatchcase(test, pattern) if any(letter in _WILD for letter in pattern) else pattern in test
        for pattern in patterns
    )


def _category(name: str, table: dict[str, Any]) -> Category:
    if name == REACHABLE:
        raise ValueError(f"{name!r} stands for all that are in reach, and cannot be a category")
    return Category(name, **{key: value for key, value in table.items() if key != "tests"})


def _rules(name: str, table: dict[str, Any]) -> Iterator[Rule]:
    for class_, methods in table["tests"].items():
        for method in methods:
            yield Rule(class_, method, name)


def _letters(pattern: str) -> int:
    return sum(letter not in _WILD for letter in pattern)

"""Finds words that the glossary says are no longer used, in source code and documents.

`docs/glossary.md` is the list: the first column of its last table. Names count by their parts, so `LaneOffer` and
`offer_lanes` both contain the word `lane`. The plural with `s` counts as the word.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from architecture.shrinking_baseline import Counts

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"

_TABLE_HEADER = "| instead of | write |"
_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PUBLIC_NAMES = re.compile(r"\bheartbeat_patience\b")
"""Options that users set keep their names, whatever the glossary says."""


def retired_words(glossary: str) -> set[str]:
    """Returns the words that the glossary's last table replaces.

    Args:
        glossary: The text of docs/glossary.md.

    Raises:
        ValueError: The text has no such table.
    """
    _, header, table = glossary.partition(_TABLE_HEADER)
    if not header:
        raise ValueError(f"the glossary has no table with the header {_TABLE_HEADER!r}")
    words: set[str] = set()
    for row in table.strip().splitlines()[1:]:
        words.update(word.strip() for word in row.split("|")[1].split(","))
    return words


def count_words(text: str, words: set[str]) -> Counter[str]:
    """Returns how often each of the words occurs in the text; a word that does not occur is not in the result."""
    counts: Counter[str] = Counter()
    for part in _NAME_PART.findall(_PUBLIC_NAMES.sub("", text)):
        part = part.lower()
        if part in words:
            counts[part] += 1
        elif part.removesuffix("s") in words:
            counts[part.removesuffix("s")] += 1
    return counts


def scanned_files() -> list[Path]:
    """Returns the files that users and developers read: the package, the documents and the examples."""
    directories = [(ROOT / "src", "*.py"), (ROOT / "examples", "*.py"), (ROOT / "docs", "*.md")]
    found = [path for directory, pattern in directories for path in directory.rglob(pattern)]
    return sorted(path for path in [*found, *ROOT.glob("*.md")] if path.name not in ("glossary.md", "CHANGELOG.md"))


def find_retired_words() -> Counts:
    """Returns how often each retired word occurs in each file."""
    words = retired_words(GLOSSARY.read_text(encoding="utf-8"))
    found: Counts = {}
    for path in scanned_files():
        for word, count in count_words(path.read_text(encoding="utf-8"), words).items():
            found.setdefault(word, {})[str(path.relative_to(ROOT))] = count
    return found

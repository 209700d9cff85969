"""Counts where tests of behaviour name packages of the runtime, which no user imports.

The tests of behaviour have to stay as they are when the runtime is replaced. So they may use the public API only. The
few that name an internal package are counted in a baseline that may only shrink.

Whole files are searched, not only their import statements, because many tests run a script from a string. The modules
in `tests/` that a test of behaviour imports are searched too.
"""

from __future__ import annotations

import re
from pathlib import Path

from architecture.shrinking_baseline import Counts

TESTS = Path(__file__).parents[1]
INTERNAL_PACKAGES = ("agent", "links", "protocol", "runtime", "transports")

_NAMES = "|".join(INTERNAL_PACKAGES)
_DOTTED = re.compile(rf"\bfarcall\.({_NAMES})\b")
_FROM_PACKAGE = re.compile(rf"\bfrom farcall import [^\n]*?\b({_NAMES})\b")
_IMPORTED_MODULE = re.compile(r"\b(?:from|import) (\w+)")


def count_internal_imports(tests: Path = TESTS) -> Counts:
    """Returns how often each internal package is named in each file that the tests of behaviour consist of.

    Args:
        tests: The directory of all tests.
    """
    counts: Counts = {}
    for path in sorted(behaviour_files(tests)):
        text = path.read_text(encoding="utf-8")
        for package in [*_DOTTED.findall(text), *_FROM_PACKAGE.findall(text)]:
            files = counts.setdefault(f"farcall.{package}", {})
            file = str(path.relative_to(tests.parent))
            files[file] = files.get(file, 0) + 1
    return counts


def behaviour_files(tests: Path) -> set[Path]:
    """Returns the files in tests/behaviour, and the modules in tests/ that they import, directly or not."""
    unread = list((tests / "behaviour").rglob("*.py"))
    found: set[Path] = set()
    while unread:
        path = unread.pop()
        if path not in found:
            found.add(path)
            modules = set(_IMPORTED_MODULE.findall(path.read_text(encoding="utf-8")))
            unread += [module for name in modules if (module := tests / f"{name}.py").is_file()]
    return found

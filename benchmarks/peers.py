"""The table of peers in the repository's README: an excerpt of docs/benchmarks.md, which `make bench-peers` writes.

    python benchmarks/peers.py            # after make bench-peers ARGS="--write-docs"
    python benchmarks/peers.py --check    # status 1 if README does not say what the page says

A cell has a peer's own figure, and how many times as fast farcall was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from recording import Block

ROOT: Final = Path(__file__).parent.parent
BEGIN: Final = "<!-- peers: written by benchmarks/peers.py; do not edit -->"
END: Final = "<!-- end of peers -->"
SHOWN: Final = (
    ("A call with a payload, there and back", "1 KiB", "1 KiB there and back"),
    ("A call with a payload, there and back", "64 MiB", "64 MiB there and back"),
    ("Throughput of no-op calls", "64", "calls/s, 64 in flight"),
)
"""Section of the page, column there, column here."""

Table = dict[str, dict[str, str]]
"""Cells by row and column."""


def tables_of(page: str, section: str) -> list[Table]:
    """All tables of a section. Raises `ValueError` if there is no such section."""
    _, heading, rest = page.partition(f"## {section}\n")
    if not heading:
        raise ValueError(f"the page has no section {section!r}")
    found: list[Table] = []
    head: list[str] = []
    for line in rest.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            head = []
        elif not head:
            head = [cell.rpartition(": ")[2] for cell in cells]
            found.append({})
        elif not set(line) <= set("|:- "):
            found[-1][cells[0]] = dict(zip(head[1:], cells[1:], strict=True))
    return found


def excerpt(page: str) -> str:
    """The table, in Markdown. Raises `ValueError` and `KeyError` for a page that lacks something."""
    rows: dict[str, list[str]] = {}
    for section, column, _ in SHOWN:
        figures, ratios = tables_of(page, section)[:2]
        for system, cells in figures.items():
            ratio = ratios.get(system, {}).get(column)
            rows.setdefault(system, []).append(cells[column] + (f" ({ratio})" if ratio not in (None, "–") else ""))
    lines = [["system", *(name for _, _, name in SHOWN)], [":---", *["---:"] * len(SHOWN)]]
    lines += [[system, *cells] for system, cells in rows.items()]
    date = page.partition("- date: ")[2].partition("\n")[0].strip()
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{date}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Write it, or compare; the exit status."""
    parser = argparse.ArgumentParser(prog="peers.py", description="The table of peers in README.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is another one")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md", metavar="FILE")
    options = parser.parse_args(arguments)
    table = excerpt(options.page.read_text(encoding="utf-8"))
    if not options.check:
        Block(options.readme, BEGIN, END).replace(table)
    elif table not in options.readme.read_text(encoding="utf-8"):
        print(
            f"{options.readme} does not say what {options.page} says: run python benchmarks/peers.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where a run is recorded: between two marks in a README. What stands around them is never touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Block:
    """The text between two marks of a file."""

    file: Path
    begin: str
    end: str

    @classmethod
    def of_tables(cls, readme: Path) -> Self:
        """The place of all tables of a run."""
        return cls(readme, "<!-- results: written by run.py --write-readme; do not edit -->", "<!-- end of results -->")

    @classmethod
    def of_program(cls, program: str) -> Self:
        """The place of the tables of another program in this directory's README, by its name: `workloads.run`, say."""
        mark = f"<!-- results: written by {program} --write-readme; do not edit -->"
        return cls(Path(__file__).parent / "README.md", mark, f"<!-- end of {program} -->")

    def around(self) -> tuple[str, str]:
        """What stands before and after the block. Raises OSError, and ValueError if the file lacks the marks."""
        before, begin, rest = self.file.read_text(encoding="utf-8").partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"{self.file} lacks the lines {self.begin!r} and {self.end!r} that say where results go")
        return before, after

    def replace(self, text: str) -> None:
        """Put this text there. Raises as `around`, and then changes nothing."""
        before, after = self.around()
        self.file.write_text(f"{before}{self.begin}\n\n{text}\n\n{self.end}{after}", encoding="utf-8")

"""How a test ended, and why, in a line.

A test of several processes fails with one long text: the tracebacks of its ranks inside the traceback of whoever waited
for them. The line that matters is the last exception of each rank, as the first cause of a chain stands first.
"""

from __future__ import annotations

import json
import re
import unittest
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self

Status = Literal["passed", "failed", "skipped"]

_RANK: Final = re.compile(r"^.*\bProcess \d+ exited with error code \d+ and exception:\s*$", re.MULTILINE)
_TRACEBACK: Final = "Traceback (most recent call last):"
_LONGEST_REASON: Final = 500
_LONGEST_DETAILS: Final = 200_000


@dataclass(frozen=True)
class Outcome:
    """How a test ended."""

    status: Status
    reason: str = ""
    """In a line, for what did not pass."""
    details: str = ""
    """All that is known of what failed: tracebacks and output."""
    seconds: float = 0.0

    def to_json(self) -> str:
        """As a line, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """What `to_json` has written. Raises ValueError or TypeError for anything else."""
        return cls(**json.loads(line))

    def with_output(self, output: str) -> Self:
        """With what the test has printed, which is of use only if it failed. Of a long output the end counts."""
        if self.status != "failed" or not output.strip():
            return self
        return replace(self, details=f"{self.details}\n--- output ---\n{output[-_LONGEST_DETAILS:]}".lstrip())


def failed(reason: str, details: str = "") -> Outcome:
    """A failure, for this reason."""
    return Outcome("failed", _in_a_line(reason), details[-_LONGEST_DETAILS:])


def of_result(result: unittest.TestResult) -> Outcome:
    """The outcome of the one test that this is the result of."""
    wrong = [text for _, text in (*result.errors, *result.failures)]
    if wrong:
        details = "\n".join(wrong)
        return failed(reason_in(details), details)
    if result.unexpectedSuccesses:
        return failed("it is marked as one that must fail, and did not")
    if result.skipped:
        return Outcome("skipped", _in_a_line(result.skipped[0][1]))
    return Outcome("passed")


def reason_in(text: str) -> str:
    """Of a text with tracebacks, the exceptions that ended the ranks, each once."""
    last = [exceptions[-1] for part in _RANK.split(text) if (exceptions := list(_exceptions(part)))]
    lines = text.strip().splitlines()
    return _in_a_line(" | ".join(dict.fromkeys(last)) or (lines[-1] if lines else "no reason given"))


def _exceptions(text: str) -> Iterator[str]:
    """The line after each traceback: the type of the exception, and what it says."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            yield line


def _in_a_line(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."

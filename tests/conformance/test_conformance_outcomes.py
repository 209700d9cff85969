"""How a test ended, and why, in a line."""

from __future__ import annotations

import unittest

import pytest

from conformance.outcomes import Outcome, failed, of_result, reason_in

OF_RANKS = """Traceback (most recent call last):
  File "common_distributed.py", line 1, in _check_return_codes
    raise RuntimeError(error)
RuntimeError: Process 0 exited with error code 10 and exception:
Traceback (most recent call last):
  File "a.py", line 1, in f
    1 / 0
    ~~^~~
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in f
ValueError: the last one
with a second line

Process 2 exited with error code 10 and exception:
Traceback (most recent call last):
  File "b.py", line 1, in g
AssertionError: 1 != 2

Process 3 exited with error code 10 and exception:
Traceback (most recent call last):
  File "b.py", line 1, in g
AssertionError: 1 != 2
"""


def result_of(test: type[unittest.TestCase]) -> Outcome:
    result = unittest.TestResult()
    test("runTest").run(result)
    return of_result(result)


def test_the_reason_is_what_ended_the_ranks() -> None:
    assert reason_in(OF_RANKS) == "ValueError: the last one | AssertionError: 1 != 2"


def test_the_reason_without_ranks_is_the_last_exception() -> None:
    assert reason_in(OF_RANKS.partition("Process 2")[0].partition("exception:\n")[2]) == "ValueError: the last one"


@pytest.mark.parametrize(("text", "reason"), [("", "no reason given"), ("one\ntwo\n", "two")])
def test_without_a_traceback_the_last_line_counts(text: str, reason: str) -> None:
    assert reason_in(text) == reason


def test_a_reason_is_one_line_and_not_endless() -> None:
    outcome = failed("a\n  b " + "x" * 1000)
    assert outcome.reason.startswith("a b xxx")
    assert len(outcome.reason) == 500
    assert outcome.reason.endswith("...")


def test_what_unittest_tells() -> None:
    class Passes(unittest.TestCase):
        def runTest(self) -> None:  # noqa: N802
            pass

    class Fails(unittest.TestCase):
        def runTest(self) -> None:  # noqa: N802
            self.fail("no luck")

    class Raises(unittest.TestCase):
        def runTest(self) -> None:  # noqa: N802
            raise KeyError("gone")

    class Skipped(unittest.TestCase):
        def runTest(self) -> None:  # noqa: N802
            self.skipTest("not today")

    class Unexpected(unittest.TestCase):
        runTest = unittest.expectedFailure(lambda self: None)  # noqa: N815

    assert result_of(Passes) == Outcome("passed")
    assert result_of(Fails).reason == "AssertionError: no luck"
    assert result_of(Raises).reason == "KeyError: 'gone'"
    assert "in runTest" in result_of(Raises).details
    assert result_of(Skipped) == Outcome("skipped", "not today")
    assert result_of(Unexpected).status == "failed"


def test_an_outcome_travels_as_a_line() -> None:
    outcome = Outcome("failed", "why", "all\nof it", 1.5)
    assert "\n" not in outcome.to_json()
    assert Outcome.from_json(outcome.to_json()) == outcome
    with pytest.raises(TypeError):
        Outcome.from_json('{"kind": 1}')


def test_output_is_kept_of_what_failed() -> None:
    assert failed("why", "trace").with_output("printed").details == "trace\n--- output ---\nprinted"
    assert failed("why", "trace").with_output(" \n").details == "trace"
    assert Outcome("passed").with_output("printed").details == ""
    assert len(failed("why").with_output("x" * 1_000_000).details) < 201_000

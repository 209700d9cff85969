"""`python -m conformance`: the arguments, the progress, the verdict.

Exit status: 0 if all selected tests that torch itself passes have passed, in every run; 1 if not; 2 if nothing could be
run; 130 after Ctrl-C, 143 after SIGTERM. The table and what was lost go to standard output, the rest to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from conformance.categories import Categories, CategoriesError, matches
from conformance.outcomes import Outcome, failed
from conformance.report import ReportError, Run, read_baseline, write_baseline, write_json
from conformance.runner import NurseryFailed, Runner
from farcall.bench.processes import exit_on_signals
from farcall.bench.screen import Screen

ITSELF: Final = "none"
_EVERY: Final = 50
"""Where there is no terminal, and so no bar, a line says how far it is after so many tests."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Ends the program for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance", description="Run PyTorch's own tests of its RPC framework on farcall."
    )
    parser.add_argument(
        "--impl",
        default="farcall.pytorch:install",
        metavar="MODULE:FUNCTION",
        help=f"what is called to take the place of torch's RPC; {ITSELF!r} is torch itself (default: %(default)s)",
    )
    parser.add_argument(
        "--category", metavar="A,B", help="only these categories; 'reachable' for all in reach; '^A' leaves one out"
    )
    parser.add_argument(
        "-k", action="append", default=[], metavar="PATTERN", help="only tests whose name has this in it, or matches it"
    )
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="tests at once (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="limit for each test (default: %(default)g)"
    )
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="runs in a row, which must all pass (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each test; all output of what fails")
    parser.add_argument("--list", action="store_true", help="list the tests and their categories, run none")
    parser.add_argument(
        "--write-baseline",
        action="store_true",
        help=f"record what torch itself does; with --impl {ITSELF} and no choice",
    )
    options = parser.parse_args(arguments)
    for name, value in (("--jobs", options.jobs), ("--runs", options.runs)):
        if value < 1:
            parser.error(f"{name} must be at least 1, not {value}")
    if not options.timeout > 0:
        parser.error(f"--timeout must be more than 0, not {options.timeout:g}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {options.json.parent}")
    if options.write_baseline and (options.impl != ITSELF or options.list or options.runs > 1):
        parser.error(f"--write-baseline is for one run of torch itself: --impl {ITSELF}")
    return options


class Session:
    """One use of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the files. Raises CategoriesError or ReportError for a wrong one, or a category that is not there."""
        self._options = options
        self._categories = Categories.read()
        self._chosen = self._categories.chosen(options.category)
        self._baseline = {} if options.write_baseline else read_baseline()
        self._screen = Screen()

    def selected(self, tests: Sequence[str]) -> list[str]:
        """Those of the tests that were asked for, slow ones first."""
        found = [test for test in tests if self._categories.of(test) in self._chosen and matches(test, self._options.k)]
        return sorted(found, key=lambda test: not self._categories.all[self._categories.of(test)].slow)

    def list(self) -> int:
        """Print the tests that were asked for, without running any. Torch is not needed for it."""
        tests = self.selected(list(self._baseline))
        for test in sorted(tests):
            print(f"{self._categories.of(test):25} {test}")
        return 0 if tests else 2

    def run(self, runner: Runner) -> int:
        """Run them. Gives the exit status. Raises NurseryFailed, CategoriesError, ReportError or OSError."""
        options, loaded = self._options, runner.loaded
        there = self.selected(loaded.tests)
        missing = {
            test: failed(loaded.broken.get(test.partition(".")[0], f"is not among the tests of {loaded.about}"))
            for test in self.selected(sorted(set(self._baseline) - set(loaded.tests)))
        }
        if not there and not missing:
            _say("no test was selected; --list shows what there is")
            return 2
        for warning in loaded.warnings:
            _say(f"warning: {warning}")
        about = f"{loaded.about} on {options.impl}, {options.jobs} at once, {options.timeout:g} s for each test"
        _say(f"{len(there) + len(missing)} tests of {about}")
        runs = []
        for number in range(1, options.runs + 1):
            began = time.monotonic()
            run = Run({**missing, **self._outcomes(runner, there)}, self._baseline)
            runs.append(run)
            self._show(run, f"run {number} of {options.runs}: " * (options.runs > 1), time.monotonic() - began)
        if options.json is not None:
            write_json(options.json, about, [run.outcomes for run in runs], self._categories)
        if options.write_baseline:
            write_baseline(runs[-1].outcomes, loaded.tests)
        return 1 if any(run.lost() for run in runs) else 0

    def _outcomes(self, runner: Runner, tests: Sequence[str]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        shown = self._screen.progress(len(tests)) if sys.stderr.isatty() else nullcontext()
        with shown as progress:
            for test, outcome in runner.run(tests):
                outcomes[test] = outcome
                if outcome.status == "failed" or self._options.verbose:
                    _say(f"{outcome.status} {outcome.seconds:6.2f} s  {test}  {outcome.reason}".rstrip())
                if outcome.status == "failed" and self._options.verbose:
                    _say("\n".join(f"    {line}" for line in outcome.details.splitlines()))
                if progress is not None:
                    progress(test, len(outcomes))
                elif len(outcomes) % _EVERY == 0:
                    _say(f"{len(outcomes)} of {len(tests)}")
        return outcomes

    def _show(self, run: Run, which: str, seconds: float) -> None:
        self._screen.table(run.table(self._categories, f"{which}PyTorch's RPC tests on {self._options.impl}"))
        lost = run.lost()
        for title, tests in (
            ("not passed, though torch itself passes:", lost),
            ("failed, and torch itself skips it:", sorted(set(run.failed()) - set(lost))),
        ):
            if tests:
                print(title)
            for test in tests:
                print(f"  {test}: {run.outcomes[test].reason}")
        for name in sorted({self._categories.of(test) for test in lost}):
            if reason := self._categories.all[name].out_of_reach:
                print(f"{name} is out of reach: {reason}")
        print(f"{which}{run.counts()} in {seconds:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Gives its exit status."""
    options = parse(arguments)
    with exit_on_signals():
        try:
            session = Session(options)
            if options.list:
                return session.list()
            with Runner(options.impl, options.jobs, options.timeout) as runner:
                return session.run(runner)
        except (CategoriesError, NurseryFailed, ReportError, OSError) as error:
            _say(f"conformance: {error}")
            return 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

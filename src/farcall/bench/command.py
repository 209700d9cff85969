"""A whole run of the benchmark: measures, prints tables, and writes the files that were asked for.

`farcall bench` measures farcall alone. The repository's `benchmarks/compare.py` calls the same code with other systems,
and writes docs/benchmarks.md. Outputs that cannot be written are rejected before anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farcall.bench import machine, plots, report
from farcall.bench.effort import Effort
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import Findings
from farcall.bench.measurements import Measurer
from farcall.bench.processes import exit_on_signals
from farcall.bench.rounds import Turn, rotated, take_turns
from farcall.bench.screen import Screen
from farcall.bench.system import System
from farcall.errors import UsageError

_INSTALL_PLOTS = "`pip install 'farcall[bench]'` installs it"


@dataclass(frozen=True)
class Outputs:
    """Which files to write besides what is printed. `Outputs()` writes none.

    Attributes:
        json: A file for all results, whose directory must exist; None for none.
        plots: A directory for pictures, which is created if necessary; None for none.
        docs: The directory of the documentation, for benchmarks.md and its plots; None to leave it alone.
    """

    json: Path | None = None
    plots: Path | None = None
    docs: Path | None = None
    """The directory of the documentation, for benchmarks.md and its plots; None to leave it alone."""

    def check(self) -> None:
        """Checks, as far as possible, that the files can be written. Writes nothing. Outputs that are None are fine.

        Raises:
            UsageError: The directory of `json` or the directory `docs` does not exist, `plots` exists but is not a
                directory, or `docs` is given and matplotlib is not installed.
        """
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise UsageError(f"--json: the directory {self.json.absolute().parent} does not exist")
        if self.plots is not None and self.plots.exists() and not self.plots.is_dir():
            raise UsageError(f"--plots: {self.plots} is not a directory")
        if self.docs is not None and not self.docs.is_dir():
            raise UsageError(f"--write-docs: the directory {self.docs} does not exist; run it in the repository")
        if self.docs is not None and not plots.can_draw():
            raise UsageError(f"--write-docs needs matplotlib for the plots; {_INSTALL_PLOTS}")


def plan(chosen: Sequence[System], effort: Effort, measurer: Measurer) -> list[Turn]:
    """Returns all turns of a run in order: in each round, each part of the run for every system.

    A turn is a title and a function that measures one part of one system. The order of the systems rotates by round.
    Returns an empty list if no systems were chosen.

    Args:
        chosen: The systems to measure: farcall and the libraries that it is compared with.
        effort: How many rounds, and which parts, such as "payload".
        measurer: Carries out the turns.
    """
    return [
        (f"round {number + 1}: {part}, {system.label}", lambda part=part, system=system: measurer.turn(part, system))  # type: ignore[misc]
        for number in range(effort.rounds)
        for part in effort.parts
        for system in rotated(chosen, number)
    ]


def run(effort: Effort, peers: Sequence[System], outputs: Outputs) -> int:
    """Measures farcall and its peers, prints the results and writes the files.

    Args:
        effort: What to measure, and how much of it.
        peers: Other systems to compare with; may be empty. Systems that are not installed are reported and left out.
        outputs: Which files to write; `Outputs()` for none.

    Returns:
        The exit status: 0, or 1 if farcall itself could not be measured.

    Raises:
        UsageError: An output cannot be written. Nothing has been measured then.
        OSError: A file could not be written after the run.
        SystemExit: The run was ended by SIGTERM (status 143) or Ctrl-C (130).
    """
    outputs.check()
    screen = Screen()
    findings = Findings()
    for peer in peers:
        if not peer.is_installed:
            name = peer.distribution or peer.package
            findings.leave_out(peer, f"it is not installed; install it with `pip install {name}` or `make bench-peers`")
    findings.systems = [OWN, *(peer for peer in peers if peer.label not in findings.left_out)]
    with exit_on_signals():
        take_turns(plan(list(findings.systems), effort, Measurer(effort, findings)), findings.others_percent, screen)
    packages = [system.distribution or system.package or system.name for system in findings.systems]
    where = machine.describe([*packages, "numpy"], findings.others_percent)
    _show(findings, effort, where, screen)
    _write(findings, effort, where, outputs, screen)
    return 0 if OWN in findings.systems else 1


def _show(findings: Findings, effort: Effort, where: dict[str, str], screen: Screen) -> None:
    """Prints the tables, the machine, reasons for missing values, and warnings.

    Prints no tables if there are no values.

    Args:
        findings: The results.
        effort: What was measured.
        where: Texts about the machine, by their titles, such as "kernel".
        screen: Where to print.
    """
    for shown in report.tables(findings, effort).values():
        for table in shown:
            screen.table(table)
    screen.line(", ".join(f"{name} {value}" for name, value in where.items()))
    for line in report.reasons(findings):
        screen.note(line, style="yellow")
    if machine.disturbed(findings.others_percent):
        screen.note(
            "Other programs used the processor during the run. Repeat it on an idle machine for reliable figures.",
            style="yellow",
        )
    if effort.quick:
        screen.note("This was a quick run: its figures are not reliable.", style="yellow")


def _write(findings: Findings, effort: Effort, where: dict[str, str], outputs: Outputs, screen: Screen) -> None:
    """Writes the files that were asked for, and prints the names of plots and pages.

    Does nothing if none were asked for. Without matplotlib, prints why there are no plots. `where` has texts about the
    machine, by their titles. Raises `OSError` if a file cannot be written.
    """
    if outputs.json is not None:
        found = findings.as_json(effort, where)
        outputs.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if outputs.plots is not None:
        if plots.can_draw():
            outputs.plots.mkdir(parents=True, exist_ok=True)
            for file in plots.draw(findings, effort, outputs.plots):
                screen.note(f"wrote {file}")
        else:
            screen.note(f"No plots: matplotlib is not installed; {_INSTALL_PLOTS}.", style="yellow")
    if outputs.docs is not None:
        directory = outputs.docs / "benchmarks"
        directory.mkdir(exist_ok=True)
        names = [file.name for file in plots.draw(findings, effort, directory)]
        page = outputs.docs / "benchmarks.md"
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        text = report.page(findings, effort, where, names) + report.hosts_section(before)
        page.write_text(text, encoding="utf-8")
        screen.note(f"wrote {page} and its plots")

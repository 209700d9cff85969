"""`farcall bench`, put together: measures, shows, and writes what was asked for.

What cannot work is refused before anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farcall.bench import machine, plots, report
from farcall.bench.effort import Effort
from farcall.bench.findings import Findings
from farcall.bench.measurements import Measurer
from farcall.bench.processes import ended_by_signals
from farcall.bench.rounds import Turn, rotated, take
from farcall.bench.screen import Screen
from farcall.bench.systems import OWN, PEERS, System, installed
from farcall.errors import UsageError

_INSTALL_PLOTS = "`pip install 'farcall[bench]'` installs it"


@dataclass(frozen=True)
class Outputs:
    """What is written, besides what is shown. None: not at all."""

    json: Path | None = None
    plots: Path | None = None
    docs: Path | None = None
    """The directory that holds the documentation."""

    def check(self) -> None:
        """Raises `UsageError` if it could not be written."""
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise UsageError(f"--json: there is no directory {self.json.absolute().parent}")
        if self.plots is not None and self.plots.exists() and not self.plots.is_dir():
            raise UsageError(f"--plots: {self.plots} is no directory")
        if self.docs is not None and not self.docs.is_dir():
            raise UsageError(f"--write-docs: there is no directory {self.docs}; run it where the repository's is")
        if self.docs is not None and not plots.can_draw():
            raise UsageError(f"--write-docs needs matplotlib for the plots; {_INSTALL_PLOTS}")


def choose_peers(text: str) -> list[System]:
    """The peers of a list such as `torch,ray`; `all` are all. Raises `UsageError` for one that is not known."""
    names = [name for word in text.split(",") if (name := word.strip().lower())]
    if unknown := [name for name in names if name not in PEERS and name != "all"]:
        raise UsageError(f"--peers: there is no {', '.join(map(repr, unknown))}; there are {', '.join(PEERS)}, or all")
    return [peer for name, peer in PEERS.items() if name in names or "all" in names]


def plan(chosen: Sequence[System], effort: Effort, measurer: Measurer) -> list[Turn]:
    """All turns in their order: in each round, every system has its turn in each part, beginning with another one."""
    return [
        (f"round {number + 1}: {part}, {system.label}", lambda part=part, system=system: measurer.turn(part, system))  # type: ignore[misc]
        for number in range(effort.rounds)
        for part in effort.parts
        for system in rotated(chosen, number)
    ]


def run(effort: Effort, peers: Sequence[System], outputs: Outputs) -> int:
    """Measure, show, write; the exit status: 1 if farcall itself could not be measured. Raises `UsageError` first."""
    outputs.check()
    screen = Screen()
    findings = Findings()
    for peer in peers:
        if not installed(peer):
            name = peer.distribution or peer.package
            findings.leave_out(peer, f"it is not installed; `pip install {name}` does, or `make bench-peers`")
    findings.systems = [OWN, *(peer for peer in peers if peer.label not in findings.left_out)]
    with ended_by_signals():
        take(plan(list(findings.systems), effort, Measurer(effort, findings)), findings.others_percent, screen)
    packages = [system.distribution or system.package or system.name for system in findings.systems]
    where = machine.describe([*packages, "numpy"], findings.others_percent)
    _show(findings, effort, where, screen)
    _write(findings, effort, where, outputs, screen)
    return 0 if OWN in findings.systems else 1


def _show(findings: Findings, effort: Effort, where: dict[str, str], screen: Screen) -> None:
    for shown in report.tables(findings, effort).values():
        for table in shown:
            screen.table(table)
    screen.line(", ".join(f"{name} {value}" for name, value in where.items()))
    for line in report.reasons(findings):
        screen.note(line, style="yellow")
    if machine.disturbed(findings.others_percent):
        screen.note(
            "Other programs disturbed the run. Figures to keep need a machine with nothing else to do.", style="yellow"
        )
    if effort.quick:
        screen.note("This was a quick run: its figures are not to be believed.", style="yellow")


def _write(findings: Findings, effort: Effort, where: dict[str, str], outputs: Outputs, screen: Screen) -> None:
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
        page.write_text(report.page(findings, effort, where, names), encoding="utf-8")
        screen.note(f"wrote {page} and its plots")

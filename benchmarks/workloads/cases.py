"""What is run and what is wanted of it: the cases, the rounds in which the two systems take turns, and the figures."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from farcall.bench.processes import Endpoints, free_port
from farcall.bench.system import START_LIMIT_S
from figures import Figure
from workloads.settings import ParameterServing, Reinforcement, Setting

LABELS: Final = {"farcall": "farcall", "torch": "torch.distributed.rpc"}

Findings = dict[str, float]


@dataclass
class Case:
    """One workload with its numbers, and what each round of each system found."""

    workload: str
    """On the command line: `rl` or `ps`."""
    name: str
    title: str
    setting: Setting
    rate: str
    """Which finding is the throughput."""
    wanted: float | None = None
    """How many times torch's throughput farcall must have; None: nothing is asked for."""
    aim: float | None = None
    rounds: dict[str, list[Findings]] = field(default_factory=dict)

    def median(self, system: str, finding: str) -> float | None:
        """The median over the rounds; None if it was not measured."""
        values = [found[finding] for found in self.rounds.get(system, ())]
        return statistics.median(values) if values else None

    @property
    def ratio(self) -> float | None:
        """Of the median throughputs; None unless both systems were measured."""
        ours, theirs = (self.median(system, self.rate) for system in ("farcall", "torch"))
        return None if ours is None or not theirs else ours / theirs

    @property
    def figure(self) -> Figure | None:
        """What is wanted and what was found; None if nothing is wanted."""
        if self.wanted is None:
            return None
        return Figure(f"{self.title}: torch's throughput", self.ratio, self.wanted, aim=self.aim)


def all_cases(computing: Sequence[str], world_size: int, quick: bool) -> list[Case]:
    """Every case for each way of computing. Quick ones show that everything works, and no more."""
    cases = []
    for way in computing:
        for batched in (False, True):
            kind = "batched" if batched else "one by one"
            setting = Reinforcement(computing=way, world_size=world_size, batched=batched)
            if quick:
                setting = dataclasses.replace(setting, episodes=2, steps=20)
            cases.append(
                Case(
                    workload="rl",
                    name=f"rl-{kind.replace(' ', '-')}-{way}",
                    title=f"reinforcement learning, {kind}, policy in {way}",
                    setting=setting,
                    rate="steps_per_s",
                    # Of the world size that is the default; how it is with others is for whoever asks for them.
                    wanted=3 if world_size == 4 else None,
                    aim=5 if world_size == 4 else None,
                )
            )
        for width, batches in ((64, 200), (1024, 20)):
            if quick and width > 64:
                continue
            cases.append(
                Case(
                    workload="ps",
                    name=f"ps-{width}-{way}",
                    title=f"parameter server, layers of {width} × {width}, model in {way}",
                    setting=ParameterServing(
                        computing=way, world_size=world_size, width=width, batches=5 if quick else batches
                    ),
                    rate="updates_per_s",
                )
            )
    return cases


def measure(system: str, setting: Setting) -> Findings:
    """One round of one system: its processes are started, measured and ended. Raises EndpointFailed."""
    port = free_port()
    with Endpoints() as endpoints:
        workers = [
            endpoints.start(
                f"{setting.name(rank)} of {LABELS[system]}",
                kind="module",
                module="workloads.worker",
                options={
                    "system": system,
                    "setting": setting,
                    "rank": rank,
                    "port": port,
                    "limit": START_LIMIT_S,
                },
            )
            for rank in range(setting.world_size)
        ]
        endpoints.wait_until_up(*workers)
        found: Findings = workers[0].ask("lead")
        return found

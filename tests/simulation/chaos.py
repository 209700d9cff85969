"""`python -m simulation.chaos`: an open group of real processes under load, to which everything happens.

Workers (`chaos_worker.py`) call each other all the time. By chance, from a seed, they are killed, also the one that
hosts the store, and started again with the same name; stopped for a moment, or for so long that the group takes them
for dead; their connections are broken; they join and leave. In the end all rest, and then

- every call of every worker that lives has ended, with its own right result or with an error that names a worker;
- no call has run twice;
- nobody was taken for dead who was not killed or stopped for long; those who were stopped for long have heard it;
- all views agree, all tables are empty, everybody leaves in good order, and no process is left.

Exits with 0 if that is so, else with 1: what was found is printed, and where the workers' files are.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from simulation.chaos_child import Child, Files
from simulation.chaos_verdict import judge
from simulation.simulate import shown_progress

INTERVAL: Final = 0.25
PATIENCE: Final = 3.0
SHORT_STOP: Final = (0.2, 1.0)
"""Seconds, well below the patience: the machine may be busy with other things."""
LONG_STOP: Final = (2.0, 3.0)
"""Times the patience."""
PAUSE: Final = (0.1, 0.8)
"""Seconds between two things that happen."""
FEWEST: Final = 3
"""So many workers are left alone at any time."""
LIMIT: Final = 40.0
"""Seconds for anything that must come to an end."""
ACTS: Final = ("kill", "kill", "kill host", "stop", "stop", "stop", "freeze", "cut", "cut", "cut", "join", "leave")


class Finding(Exception):
    """Something did not go as it should."""


class Chaos:
    """One run. Use it in a `with`: at its end no process is left."""

    def __init__(self, workers: int, seed: int, directory: Path) -> None:
        self.workers = workers
        self.counts: Counter[str] = Counter()
        self.excused: set[tuple[str, int]] = set()
        """Name and number of those who may be taken for dead."""
        self.children: list[Child] = []
        """All that were ever started."""
        self._chance = random.Random(seed)
        self._directory = directory
        self._port = _free_port()
        self._tokens = itertools.count(1)
        self._names = itertools.count(1)
        self._deck: list[str] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if not child.is_over:  # something went wrong before
                self.excused.add((child.name, child.number or 0))
                child.end()
            child.close()

    # The run

    def run(self, seconds: float, progress: Callable[[int, float], None]) -> None:
        """Everything happens for so long; then all come to rest and leave. Raises `Finding`."""
        for _ in range(self.workers):
            self._start(f"w{next(self._names)}")
        self._until("all workers to start", lambda: all(child.is_up for child in self._living()))
        began = time.monotonic()
        act_at = began
        while (now := time.monotonic()) < began + seconds:
            self._look(now)
            if now >= act_at:
                self._act()
                act_at = now + self._chance.uniform(*PAUSE)
            progress(sum(self.counts.values()), max(now - began, 1e-3))
        self._until("all that was begun to come to its end", self._is_calm)
        self._come_to_rest()

    def _look(self, now: float) -> None:
        """Does what is due, and sees what has become of the workers."""
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        for child in self._living():
            child.listen()
            if child.status() is not None:
                self._ended(child)
        time.sleep(0.02)

    def _ended(self, child: Child) -> None:
        child.is_over = True
        if child.fate == "killed":
            return
        if child.status() != 0 or not (child.said("left") if child.fate == "leaves" else child.said("expelled")):
            raise Finding(f"{child} ended with status {child.status()}: {child.last_words()}")
        if child.fate == "frozen":
            self.counts["expelled"] += 1
        elif child.fate != "leaves":
            raise Finding(f"{child} was expelled, and had not been stopped for long")

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            self._look(time.monotonic())
            if time.monotonic() > deadline:
                raise Finding(f"waited {LIMIT:g} s in vain for {what}: {', '.join(map(str, self._living()))}")

    def _is_calm(self) -> bool:
        return not self._agenda and all(child.is_up and not child.fate for child in self._living())

    def _come_to_rest(self) -> None:
        living = self._living()
        for child in living:
            child.tell("rest")
        self._until("all calls to end", lambda: all(child.said("rests") for child in living))
        deadline = time.monotonic() + LIMIT
        while problems := self._problems(living):
            if time.monotonic() > deadline:
                raise Finding(f"{LIMIT:g} s after all came to rest: " + "; ".join(problems))
        for child in living:
            self._excuse(child)
            child.fate = "leaves"
            child.tell("leave")
        self._until("all to leave", lambda: not self._living())

    def _problems(self, living: list[Child]) -> list[str]:
        for child in living:
            child.forget("state")
            child.tell("state")
        self._until("all to tell their state", lambda: all(child.said("state") for child in living))
        expected = sorted([child.name, child.number] for child in living)
        problems = []
        for child in living:
            told = child.said("state")
            if told["view"] != expected:
                problems.append(f"{child} sees {told['view']}, not {expected}")
            if told["left"]:
                problems.append(f"{child} has left in its tables {told['left']}")
        return problems

    # What happens

    def _act(self) -> None:
        """Does the next thing that is possible now. All have their turn, by chance, before one has another."""
        if not self._deck:
            self._deck = self._chance.sample(ACTS, len(ACTS))
        for what in self._deck:
            if self._do(what):
                self._deck.remove(what)
                return

    def _do(self, what: str) -> bool:
        """Whether it was possible."""
        alone = [child for child in self._living() if child.is_up and not child.fate]
        if what == "join":
            if len(self._living()) >= self.workers + 3:
                return False
            self.counts["joins"] += 1
            self._start(f"w{next(self._names)}")
            return True
        if what == "cut":
            self.counts["cuts"] += 1
            self._chance.choice(alone).tell("cut")
            return True
        victims = [child for child in alone if child.listens_at(self._port)] if what == "kill host" else alone
        if len(alone) <= FEWEST or not victims:
            return False
        victim = self._chance.choice(victims)
        match what:
            case "kill host":
                self.counts["kills of the store's host"] += 1
                self._kill(victim)
            case "kill":
                self._kill(victim)
            case "stop":
                self._stop(victim)
            case "freeze":
                self._freeze(victim)
            case "leave":
                self._leave(victim)
        return True

    def _kill(self, victim: Child) -> None:
        self.counts["kills"] += 1
        self._excuse(victim)
        victim.fate = "killed"
        victim.signal(signal.SIGKILL)
        self._later(self._chance.choice((0.0, 0.5, 2.0)), lambda: self._start(victim.name))

    def _stop(self, victim: Child) -> None:
        self.counts["stops"] += 1
        victim.fate = "stopped"
        victim.signal(signal.SIGSTOP)
        self._later(self._chance.uniform(*SHORT_STOP), lambda: self._go_on(victim))

    def _go_on(self, victim: Child) -> None:
        victim.fate = ""
        victim.signal(signal.SIGCONT)

    def _freeze(self, victim: Child) -> None:
        """It is stopped until all take it for dead; another one takes its name meanwhile, or after it."""
        self.counts["long stops"] += 1
        self._excuse(victim)
        victim.fate = "frozen"
        victim.signal(signal.SIGSTOP)
        seconds = PATIENCE * self._chance.uniform(*LONG_STOP)
        self._later(seconds, lambda: victim.signal(signal.SIGCONT))
        self._later(self._chance.choice((0.1, 2 * seconds)), lambda: self._start(victim.name))

    def _leave(self, victim: Child) -> None:
        self.counts["leaves"] += 1
        self._excuse(victim)  # its good-bye may get lost; if it is taken for dead before, it hears of it
        victim.fate = "leaves"
        victim.tell("leave")

    def _excuse(self, victim: Child) -> None:
        assert victim.number is not None
        self.excused.add((victim.name, victim.number))

    # Workers

    def _living(self) -> list[Child]:
        return [child for child in self.children if not child.is_over]

    def _start(self, name: str) -> None:
        token = str(next(self._tokens))
        self.children.append(
            Child(
                name,
                token,
                (f"tcp://127.0.0.1:{self._port}", token, str(self._chance.randrange(1 << 30))),
                (str(INTERVAL), str(PATIENCE)),
                Files(self._directory, f"{name}.{token}"),
            )
        )

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), act))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def main(arguments: list[str] | None = None) -> int:
    """The command. Gives its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation.chaos",
        description="An open group of real processes under load: killed, stopped, cut off, joining and leaving.",
    )
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="how long (300)")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="about so many (8)")
    parser.add_argument("--seed", type=int, metavar="S", help="of what happens")
    options = parser.parse_args(arguments)
    seed = random.randrange(10**9) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="farcall-chaos-"))
    findings: list[str] = []
    began = time.perf_counter()
    with Chaos(options.workers, seed, directory) as chaos:
        try:
            with shown_progress(None, options.seconds, "events", "chaos") as progress:
                chaos.run(options.seconds, progress)
        except Finding as finding:
            findings.append(str(finding))
    verdict = judge(chaos.children, chaos.excused)
    findings += verdict.findings
    for title, counts in (("happened", chaos.counts), ("calls", verdict.calls), ("errors", verdict.errors)):
        shown = ", ".join(f"{what} {count:,}" for what, count in sorted(counts.items()))
        print(f"{title}: {shown or 'none'}")
    print(f"{time.perf_counter() - began:,.1f} s, seed {seed}, {len(chaos.children)} processes")
    for what in findings[:20]:
        print(f"BROKEN: {what}")
    if findings:
        print(f"{len(findings)} findings; what the workers wrote is in {directory}")
        return 1
    print("every call ended as it should, none ran twice, all views agreed, and nothing was left")
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())

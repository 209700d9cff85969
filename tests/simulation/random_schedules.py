"""Random schedules for `SimulatedNetwork`: everything is drawn from one seed, so that a seed is a schedule.

Each schedule first draws what kind it is: how many workers there are and how many of them die, whether links break,
whether a worker is dishonest, which link is slow. Then it draws the steps, and the order in which everything comes to
rest. Most faults show in few handles that are passed on quickly while a message about them is late, so that is what
most schedules do.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TypeVar
from unittest import mock

from farcall.protocol import refcount
from farcall.protocol.ids import Worker
from simulation.invariants import BrokenInvariant
from simulation.schedules import Step
from simulation.simulated_worker import SimulatedWorker
from simulation.simulation import SimulatedNetwork

T = TypeVar("T")

WORKERS = 4
STEPS = 40
MAX_CLAIMS = 6
"""The limit of claims in simulations: more than all references of a schedule, so that no honest claim is refused."""
_MAX_WORKERS = 6
_MAX_REFERENCES = 4


class RandomSchedule:
    """The schedule of one seed. `run` plays it to the end."""

    def __init__(self, seed: int, workers: int = WORKERS, steps: int = STEPS) -> None:
        self._random = Random(seed).random
        self._steps = 1 + self._below(2 * steps)
        self.network = SimulatedNetwork(2 + self._below(max(1, workers - 1)))
        self._has_faults = self._random() < 0.6
        self._crashes = (0, 0, 1, 1, 1, 2)[self._below(6)]
        self._unmade = 1 + self._below(_MAX_REFERENCES)  # few references, so that much happens to each
        count = len(self.network.workers)
        self._forger = count - 1 if self._random() < 0.25 else None  # it does nothing but to forge, and to drop handles
        self._slow = self._below(count), self._below(count)
        self._diligence = (0.1, 0.3, 0.6)[self._below(3)]  # of workers at what they do by themselves

    def run(self) -> SimulatedNetwork:
        """Plays the schedule. Raises `BrokenInvariant`."""
        with limited_claims():
            for _ in range(self._steps):
                self.make_step()
            if self._random() < 0.5:
                self._drop_all_handles()
            self.network.finish(self._choose)
        return self.network

    def make_step(self) -> None:
        """Makes one step, or none if the step that was drawn is impossible."""
        network, dice = self.network, self._random()
        if not network.alive:
            return
        worker = self._choose(network.alive)
        if self._random() < self._diligence and self._let_worker_act(worker):
            return
        if self._forger is not None and self._random() < 0.15:
            self._forge(self._forger, worker)
        elif dice < 0.4 and network.frames:
            self._move_frame()
        elif dice < 0.85:
            self._let_program_act()
        elif dice < 0.9 and (network.untold or network.unintroduced):
            if network.untold and (not network.unintroduced or self._random() < 0.5):
                network.step("remove", *self._choose(network.untold))
            else:
                network.step("add", *self._choose(network.unintroduced))
        elif dice < 0.94:
            if network.deaths < self._crashes:
                self._crash()
            elif network.deaths and len(network.workers) < _MAX_WORKERS:
                network.step("restart")
        elif dice < 0.945:
            network.step("illegal", worker.me, self._below(1000))
        elif self._has_faults and network.ends:
            network.step("close", self._below(len(network.ends)))

    def _drop_all_handles(self) -> None:
        """Drops all handles while much is under way; else they are kept until all is at rest."""
        for worker in self.network.alive:
            for handle in list(worker.handles):
                self.network.step("drop", worker.me, handle)
                if self.network.frames and self._random() < 0.5:
                    self._move_frame()

    def _let_worker_act(self, worker: SimulatedWorker) -> bool:
        """Lets a worker do something by itself. Returns False if there is nothing to do."""
        steps: list[Step] = [("run", worker.me, number) for number in worker.invocations]
        if worker.due:
            steps.append(("work", worker.me))
            if worker.counts.unreported:
                steps.append(("report", worker.me))
        for to in worker.to_connect:
            is_cut = self._has_faults and self._random() < 0.2
            steps.append(("fail" if is_cut else "connect", worker.me, to))
        if worker.stuck():
            steps.append(("retry", worker.me))
        return bool(steps) and self.network.step(*self._choose(steps))

    def _forge(self, forger: Worker, worker: SimulatedWorker) -> None:
        if self._random() < 0.6:
            self.network.step("forge", forger, worker.me, self._below(1000))
            return
        creator = self._below(len(self.network.workers))
        word = self._choose(["claim", "seek"])
        for ahead in range(1, 1 + (1 if self._random() < 0.7 else 2 * MAX_CLAIMS)):
            self.network.step(word, forger, worker.me, creator, ahead)

    def _crash(self) -> None:
        """Crashes a worker, often one of which a frame is under way: its death matters most."""
        senders = [end.peer for end, _ in self.network.frames.values()]
        if senders and self._random() < 0.7:
            self.network.step("crash", self._choose(senders))
        else:
            self.network.step("crash", self._choose(self.network.alive).me)

    def _move_frame(self) -> None:
        numbers = list(self.network.frames)
        number = self._choose(numbers)
        if self._is_slow(number):
            number = self._choose(numbers)
            if self._is_slow(number) and self._random() < 0.8:
                return
        dice = self._random() if self._has_faults else 0.0
        if dice > 0.8 and self.network.step("discard", number):
            return
        self.network.step("again" if dice > 0.9 else "deliver", number)

    def _is_slow(self, number: int) -> bool:
        end, _ = self.network.frames[number]
        return (end.peer, end.me) == self._slow

    def _let_program_act(self) -> None:
        dice, alive = self._random(), [worker for worker in self.network.alive if worker.me != self._forger]
        holders = [worker for worker in alive if worker.handles]
        if not holders or (self._unmade and dice < 0.2):
            if self._unmade and alive:
                self._create(self._choose(alive))
            return
        worker = self._choose(holders)
        me, handle = worker.me, self._choose(list(worker.handles))
        if dice < 0.4:
            holder = self._choose([each for each in self.network.alive if each.handles])
            self.network.step("drop", holder.me, self._choose(list(holder.handles)))
            return
        if dice < 0.55 and self.network.step("fetch", me, handle):
            return
        if dice < 0.6 and self._cancel(me, handle):
            return
        to = self._below(len(self.network.workers))
        more = [self._choose(list(worker.handles))] if self._random() < 0.2 else []
        if dice < 0.75:
            self._make_call("pass", me, to, handle, *more)
        elif dice < 0.9:
            self._make_call("use", me, to, handle, *more)
        elif ends := [end.number for end in self.network.ends if end.me == me and not end.is_client]:
            self._make_call("return", me, self._choose(ends), handle, *more)

    def _cancel(self, me: int, handle: int) -> bool:
        """Cancels the remote call of a handle, perhaps twice, or a call that is under way. False if there is none."""
        if self._random() < 0.6 and self.network.step("cancel", me, handle):
            if self._random() < 0.3:
                self.network.step("cancel", me, handle)
            return True
        calls = [
            (end.number, call_id)
            for end in self.network.ends
            if end.me == me
            for call_id, (number, _) in end.pending.items()
            if not number
        ]
        return bool(calls) and self.network.step("giveup", me, *self._choose(calls))

    def _create(self, worker: SimulatedWorker) -> None:
        self._unmade -= 1
        handles = list(worker.handles)
        if handles and self._random() < 0.4 and self._make_call("on", worker.me, self._choose(handles)):
            return
        if self._random() < 0.3:
            self.network.step("make", worker.me)
            return
        brought = [self._choose(handles)] if handles and self._random() < 0.2 else []
        self._make_call("call", worker.me, self._below(len(self.network.workers)), *brought)

    def _make_call(self, word: str, me: int, *more: int) -> bool:
        """Makes a call, and mostly sends it at once. Returns False if it is impossible."""
        if not self.network.step(word, me, *more):
            return False
        if self._random() < 0.85:
            draft = max(self.network.workers[me].drafts, default=0)
            is_interrupted = self._has_faults and self._random() < 0.1
            self.network.step("interrupt" if is_interrupted else "send", me, draft)
        return True

    def _below(self, bound: int) -> int:
        return int(self._random() * bound)

    def _choose(self, among: list[T]) -> T:
        return among[int(self._random() * len(among))]


def limited_claims() -> mock._patch[int]:
    """Returns a context in which claims are limited, as they are in random schedules."""
    return mock.patch.object(refcount, "MAX_CLAIMS", MAX_CLAIMS)


def replay(schedule: Iterable[Step], workers: int) -> SimulatedNetwork:
    """Plays a schedule that was printed, and then lets it come to rest. Raises `BrokenInvariant`."""
    with limited_claims():
        network = SimulatedNetwork(workers)
        for step in schedule:
            network.step(*step)
        network.finish()
    return network


def shorten(broken: BrokenInvariant, workers: int) -> BrokenInvariant:
    """Returns the same invariant broken by fewer steps: steps are left out as long as it stays broken."""
    steps = list(broken.schedule)
    tried = 0
    while tried < len(steps):
        tried = 0
        for position in reversed(range(len(steps))):
            shorter = steps[:position] + steps[position + 1 :]
            try:
                replay(shorter, workers)
            except BrokenInvariant as again:
                if again.invariant == broken.invariant:
                    broken, steps, tried = again, shorter, 0
                    continue
            tried += 1
    broken.schedule = steps
    return broken

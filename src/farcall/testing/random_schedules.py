"""Random schedules for `SimulatedNetwork`: everything from one seed, so that a seed is a schedule.

Each schedule first draws what kind it is (how many workers, how often messages get lost, doubled or cut off, which link
is slow, how many workers die), then its steps, then the order in which everything comes to rest. What goes wrong goes
wrong in few handles that are passed on quickly while a message of theirs is late, so that is what most of them do.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TypeVar

from farcall.testing.invariants import BrokenInvariant
from farcall.testing.simulated_workers import NewWorker, Parcel, SimulatedWorker
from farcall.testing.simulation import SimulatedNetwork, Step

T = TypeVar("T")

WORKERS = 4
STEPS = 24


class RandomSchedule:
    """One schedule: the seed's own. `run` plays it to the end."""

    def __init__(
        self,
        seed: int,
        workers: int = WORKERS,
        steps: int = STEPS,
        *,
        new_worker: NewWorker = SimulatedWorker,
    ) -> None:
        self._random = Random(seed).random
        self._steps = 1 + self._below(2 * steps)
        self.network = SimulatedNetwork(2 + self._below(max(1, workers - 1)), new_worker=new_worker)
        self._faults = self._random() < 0.5  # of the network
        self._crashes = (0, 0, 1, 1, 1, 2)[self._below(6)]
        self._unmade = 1 + self._below(4)  # references: few, so that much happens to each
        count = len(self.network.workers)
        self._slow = self._below(count), self._below(count)
        self._keen = (0.1, 0.3, 0.6)[self._below(3)]  # on chores

    def run(self) -> SimulatedNetwork:
        """Plays it. Raises `BrokenInvariant`."""
        for _ in range(self._steps):
            self._make_one_step()
        if self._random() < 0.5:
            self._let_go_of_everything()
        self.network.finish(self._choose)
        return self.network

    def _let_go_of_everything(self) -> None:
        """All handles are dropped while much is under way; else they are kept until all is at rest."""
        for worker in self.network.alive:
            for handle in list(worker.handles):
                self.network.step("drop", worker.me, handle)
                if self.network.under_way and self._random() < 0.5:
                    self._move_a_message()

    def _make_one_step(self) -> None:
        network, dice = self.network, self._random()
        if not network.alive:
            return
        if (chores := network.chores()) and self._random() < self._keen:
            network.step(*self._choose(chores))
        elif network.answers and self._random() < 0.2:
            network.step("answer", *self._choose(network.answers))
        elif dice < 0.45 and network.under_way:
            self._move_a_message()
        elif dice < 0.85:
            self._let_a_program_act()
        elif dice < 0.91 and (network.untold or network.ungreeted):
            if network.untold and (not network.ungreeted or self._random() < 0.5):
                network.step("tell", *self._choose(network.untold))
            else:
                network.step("greet", *self._choose(network.ungreeted))
        elif dice < 0.965:
            if network.deaths < self._crashes:
                self._crash_a_worker()
            elif network.deaths and len(network.workers) < 6:
                network.step("restart")
        elif dice < 0.97:
            network.step("illegal", self._choose(network.alive).me, self._below(1000))
        elif self._faults:
            self._trouble_a_link()

    def _crash_a_worker(self) -> None:
        """Often one that has just passed something on: its death matters most."""
        senders = [key[0] for key, (payload, _) in self.network.under_way.items() if isinstance(payload, Parcel)]
        if senders and self._random() < 0.7:
            self.network.step("crash", self._choose(senders))
        else:
            self.network.step("crash", self._choose(self.network.alive).me)

    def _move_a_message(self) -> None:
        keys = list(self.network.under_way)
        key = self._choose(keys)
        if key[:2] == self._slow:
            key = self._choose(keys)
            if key[:2] == self._slow and self._random() < 0.8:
                return
        word = "deliver"
        if self._faults:
            dice = self._random()
            word = "deliver" if dice < 0.7 else "again" if dice < 0.85 else "lose"
        if word != "lose" and len(keys) > 1 and self._random() < 0.3:
            self.network.step(word, *key[:2], *[number for *link, number in keys if (*link,) == key[:2]])
        else:
            self.network.step(word, *key)

    def _trouble_a_link(self) -> None:
        network = self.network
        one, other = self._choose(network.alive).me, self._choose(network.alive).me
        dice = self._random()
        if network.cuts and dice < 0.5:
            network.step("heal", *self._choose(list(network.cuts)))
        else:
            network.step("resend" if dice < 0.65 else "ack" if dice < 0.8 else "cut", one, other)

    def _let_a_program_act(self) -> None:
        step, alive, dice = self.network.step, self.network.alive, self._random()
        holders = [worker for worker in alive if worker.handles]
        if self._unmade and (not holders or dice < 0.15):
            self._unmade -= 1
            worker = self._choose(alive)
            me = worker.me
            if self._random() < 0.4:
                step("make", me)
            else:
                brought = [self._choose(list(worker.handles))] if worker.handles and self._random() < 0.2 else []
                step("call" if self._random() < 0.5 else "ask", me, self._below(len(self.network.workers)), *brought)
            return
        if not holders:
            return
        worker = self._choose(holders)
        me = worker.me
        handle = self._choose(list(worker.handles))
        if dice < 0.4:
            lent = worker.lent()
            if lent and self._random() < 0.4:
                step("keep", me, self._choose(lent))
            else:
                step("drop", me, handle)
            return
        to = self._below(len(self.network.workers))
        if dice < 0.75:
            if dice < 0.5:
                step("pass", me, to, handle, self._choose(list(worker.handles)))
            else:
                step("pass", me, to, handle)
        elif dice < 0.93:
            step("use", me, to, handle)
        elif worker.drafts:
            step("abandon", me, next(iter(worker.drafts)).number)
        else:
            step("draft", me, to, handle)

    def _below(self, bound: int) -> int:
        return int(self._random() * bound)

    def _choose(self, among: list[T]) -> T:
        return among[int(self._random() * len(among))]


def replay(
    schedule: Iterable[Step],
    workers: int,
    *,
    new_worker: NewWorker = SimulatedWorker,
) -> SimulatedNetwork:
    """Plays a schedule that was printed, and then lets it come to rest. Raises `BrokenInvariant`."""
    network = SimulatedNetwork(workers, new_worker=new_worker)
    for step in schedule:
        network.step(*step)
    network.finish()
    return network


def shorten(
    broken: BrokenInvariant,
    workers: int,
    *,
    new_worker: NewWorker = SimulatedWorker,
) -> BrokenInvariant:
    """The same invariant broken by fewer steps: steps are left out while it stays broken, until none can be."""
    steps = list(broken.schedule)
    tried = 0
    while tried < len(steps):
        tried = 0
        for position in reversed(range(len(steps))):
            shorter = steps[:position] + steps[position + 1 :]
            try:
                replay(shorter, workers, new_worker=new_worker)
            except BrokenInvariant as again:
                if again.invariant == broken.invariant:
                    broken, steps, tried = again, shorter, 0
                    continue
            tried += 1
    broken.schedule = steps
    return broken

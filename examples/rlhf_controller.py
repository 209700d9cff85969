"""A controller, rollout workers and a learner, as in reinforcement learning from human feedback.

    farcall run -n 6 examples/rlhf_controller.py

Rank 0 is the controller, rank 1 the learner, all others are rollout workers. The controller keeps a `Rollout` on each
rollout worker and a `Learner` on the learner. In each step all rollout workers sample answers; as soon as all but one
have answered, the learner takes these batches, and the slowest worker's call is cancelled. Every step has a
deadline. Here a "model" is one number, and the reward is how near its answers come to `TARGET`.
"""

from __future__ import annotations

import os
import random

import farcall

TARGET = 3.0
STEPS = 30
SAMPLES = 16

Sample = tuple[float, float]
"""The noise that was added to the model's answer, and the reward of the answer."""


class Rollout:
    """Lives on a rollout worker, and samples answers with the newest weight."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.chance = random.Random(farcall.worker().name)

    def generate(self, samples: int) -> list[Sample]:
        noises = [self.chance.gauss(0, 1) for _ in range(samples)]
        return [(noise, -abs(self.weight + noise - TARGET)) for noise in noises]

    def load(self, weight: float) -> None:
        self.weight = weight


class Learner:
    """Lives on the learner, and moves the weight towards the answers with rewards above the mean."""

    def __init__(self, weight: float, rate: float) -> None:
        self.weight = weight
        self.rate = rate

    def update(self, batches: list[list[Sample]]) -> float:
        samples = [sample for batch in batches for sample in batch]
        mean = sum(reward for _, reward in samples) / len(samples)
        self.weight += self.rate * sum((reward - mean) * noise for noise, reward in samples) / len(samples)
        return self.weight


def control(steps: int) -> None:
    rollouts = farcall.workers("rollout*")
    quorum = max(1, len(rollouts) - 1)  # the slowest is not waited for
    actors = rollouts.keep(Rollout, 0.0)
    learner = farcall.worker("learner").keep(Learner, 0.0, rate=0.5)
    weight = 0.0
    for _ in range(steps):
        with farcall.deadline(30):  # for the whole step, on all workers
            batches = actors.submit(Rollout.generate, SAMPLES).first(quorum).result()
            weight = learner.call(Learner.update, list(batches.values()))
            actors.call(Rollout.load, weight)
    print(f"workers that roll out: {len(actors)}, batches in each step: {quorum}")
    print(f"from 0.0 to {weight:.1f}, target {TARGET}")


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size < 3:
        raise SystemExit("a controller, a learner and a rollout worker: start at least three workers")
    name = {0: "controller", 1: "learner"}.get(rank, f"rollout{rank - 2}")
    with farcall.Group(name):
        if rank == 0:
            control(STEPS)


if __name__ == "__main__":
    main()

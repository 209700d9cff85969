"""Reinforcement learning: observers ask an agent what to do next, step by step, and a coordinator counts.

As in PyTorch's benchmark, a group of N has one coordinator, one agent and N - 2 observers. An observer's environment is
dummy: random states and rewards. With each step it calls the agent, with a reference to the agent's object, its own
number and its state, and waits for the action. *One by one*, the agent answers each call for itself. *Batched*, it
waits for the states of all observers, decides in one go, and answers them all; no thread of its own waits meanwhile.

What is counted
- A step is one action for one observer. The rate is that of all observers together, by the coordinator's clock, over
  the episodes: from telling the observers to begin until the last has reported.
- The agent's latency is from the first request of a batch to the decision (one by one: of that request alone). The
  observer's is what it waits for an action. As PyTorch's benchmark has them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from workloads import computing, sides
from workloads.latency import micros
from workloads.settings import Reinforcement

side = sides.chosen()
rpc = side.rpc


class Agent:
    """Holds the policy; lives on the agent's worker."""

    def __init__(self, setting: Reinforcement) -> None:
        self._compute = computing.find(setting.computing)
        features = int(np.prod(setting.state))
        self._policy = self._compute.policy(features, setting.layers, setting.actions)
        self._states = self._compute.zeros(setting.others, *setting.state)
        self._observers = setting.others
        self._missing = setting.others
        self._actions = side.Future()
        self._lock = threading.Lock()
        self._began = 0.0
        self._latencies: list[float] = []

    def answer(self, state: Any) -> int:
        """The action for one state."""
        began = time.perf_counter()
        action = self._policy.choose(self._compute.array(state)[None])[0]
        self._latencies.append(time.perf_counter() - began)
        return action

    def answer_with_others(self, observer: int, state: Any) -> Any:
        """A future of the action for this observer's state: it comes when all observers' states have come."""
        with self._lock:
            if self._missing == self._observers:
                self._began = time.perf_counter()
            self._states[observer] = self._compute.array(state)
            self._missing -= 1
            actions = self._actions
            complete = self._missing == 0
            if complete:
                self._missing = self._observers
                self._actions = side.Future()
        answer = actions.then(lambda decided: decided.wait()[observer])
        if complete:
            # No state can change meanwhile: every observer waits for the answer.
            decision = self._policy.choose(self._states)
            self._latencies.append(time.perf_counter() - self._began)
            actions.set_result(decision)
        return answer

    def end_episode(self) -> list[float]:
        """The latencies of the episode, in seconds."""
        latencies, self._latencies = self._latencies, []
        self._policy.forget()
        return latencies


def select_action(agent: Any, observer: int, state: Any) -> int:
    """Runs on the agent's worker, for one observer's call."""
    action: int = agent.local_value().answer(state)
    return action


@sides.answers_later
def select_action_batched(agent: Any, observer: int, state: Any) -> Any:
    """Runs on the agent's worker, for one observer's call; answered with those of all the others."""
    return agent.local_value().answer_with_others(observer, state)


class Observer:
    """Steps an environment; lives on its own worker."""

    def __init__(self, number: int, setting: Reinforcement) -> None:
        self._number = number
        self._steps = setting.steps
        self._shape = setting.state
        self._select = select_action_batched if setting.batched else select_action
        self._generator = np.random.default_rng(number)

    def _observe(self) -> Any:
        return side.cargo(self._generator.random(self._shape, np.float32))

    def run_episode(self, agent: Any) -> tuple[Any, list[float]]:
        """The reward of each step, and how long each action was waited for, in seconds. Raises if a call fails."""
        owner, select, number = agent.owner(), self._select, self._number
        rewards = np.zeros(self._steps, np.float32)
        latencies = []
        state = self._observe()
        for step in range(self._steps):
            began = time.perf_counter()
            rpc.rpc_sync(owner, select, args=(agent, number, state))
            latencies.append(time.perf_counter() - began)
            state = self._observe()
            rewards[step] = self._generator.integers(2)
        return side.cargo(rewards), latencies


def lead(setting: Reinforcement) -> dict[str, float]:
    """The coordinator's part: everything is made, runs one episode that does not count, and then all that do.

    The result has `steps`, `steps_per_s`, and the latencies in µs: `agent_p50_us`, `agent_p95_us`, `observer_p50_us`
    and `observer_p95_us`. Raises if a call fails.
    """
    agent = rpc.remote(setting.name(1), Agent, args=(setting,))
    observers = [
        rpc.remote(setting.name(number + 2), Observer, args=(number, setting)) for number in range(setting.others)
    ]
    taken = 0.0
    deciding: list[float] = []
    waiting: list[float] = []
    for episode in range(1 + setting.episodes):
        began = time.perf_counter()
        reports = side.wait_all([observer.rpc_async().run_episode(agent) for observer in observers])
        elapsed = time.perf_counter() - began
        latencies = agent.rpc_sync().end_episode()
        if episode:
            taken += elapsed
            deciding += latencies
            waiting += [latency for _, each in reports for latency in each]
    return {
        "steps": len(waiting),
        "steps_per_s": len(waiting) / taken,
        **micros("agent", deciding),
        **micros("observer", waiting),
    }

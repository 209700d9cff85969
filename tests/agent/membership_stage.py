"""Groups whose hearts beat at the test's word only, and what a test sees of them."""

from __future__ import annotations

from typing import Any

from farcall.agent import Agent
from farcall.testing import LocalGroup
from group_stage import call, echo

INTERVAL = 1000.0
"""Nobody's heart beats by itself."""
ROUNDS = 8
"""So many silent rounds are the patience."""
SLOW_HEART: dict[str, Any] = {"heartbeat_interval": INTERVAL, "heartbeat_patience": ROUNDS * INTERVAL}


def names_here(agent: Agent) -> set[str]:
    return {member.name for member in agent.group.here().values()}


def connect_all(group: LocalGroup) -> None:
    """Every worker calls every other one, so that all connections between two are there."""
    for agent in group:
        for name in group.names:
            if name != agent.info.name:
                assert call(agent, name, echo, 1) == 1

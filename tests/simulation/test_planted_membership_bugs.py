"""Each planted bug of the membership protocol is found by the scenarios. With -s, a table of what finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farcall.protocol.membership import Membership
from simulation.membership_scenarios import SCENARIOS
from simulation.planted_membership_bugs import PLANTED


def found(machine: Callable[..., Membership]) -> tuple[str, str] | None:
    """The first scenario that does not come out right, and what was wrong."""
    for scenario in SCENARIOS:
        try:
            scenario(machine)
        except AssertionError as error:
            return scenario.__name__, str(error).splitlines()[0]
    return None


@pytest.mark.parametrize(("name", "machine"), PLANTED, ids=[name for name, _ in PLANTED])
def test_a_planted_bug_is_found(name: str, machine: Callable[..., Membership]) -> None:
    finding = found(machine)
    assert finding is not None, "all scenarios came out right"
    print(f"\n{name:20} {finding[0]:36} {finding[1]}")

"""How long a handle is lent: not at once asked for, and not for ever lent."""

from __future__ import annotations

from farcall.agent.lending import LENT_FOR, Lending
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_tables import Held, Standing

REFERENCE = RRefId(0, 1, 1)
FORK = ForkId(1, 2)


def lent(*numbers: int) -> dict[ForkId, Held]:
    return {ForkId(1, number): Held(RRefId(0, 1, number), Standing.LENT, 1) for number in numbers}


def looks_until_due(lending: Lending, table: dict[ForkId, Held]) -> int:
    for look in range(1, 100):
        if lending.due(table):
            return look
    raise AssertionError("never")


def test_a_handle_is_lent_for_some_looks_whenever_it_came() -> None:
    for late in range(LENT_FOR):
        lending = Lending()
        for _ in range(late):
            assert lending.due({}) == []
        assert LENT_FOR < looks_until_due(lending, lent(2)) <= 2 * LENT_FOR


def test_all_that_are_still_lent_are_due_and_those_that_came_meanwhile_are_not() -> None:
    lending = Lending()
    first, both = lent(2, 3), lent(3, 4)
    for _ in range(LENT_FOR):
        assert lending.due(first) == []
    found = [lending.due(both) for _ in range(LENT_FOR)]
    assert found == [[]] * (LENT_FOR - 1) + [[(RRefId(0, 1, 3), ForkId(1, 3))]]


def test_what_was_dropped_and_waits_for_its_children_is_not_asked_for() -> None:
    lending, table = Lending(), lent(2)
    table[FORK].dropped = True
    assert [lending.due(table) for _ in range(3 * LENT_FOR)] == [[]] * 3 * LENT_FOR

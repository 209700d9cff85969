"""Each bug that is planted in what a book does at one stroke is caught by the simulation. With -s, a table of how soon.

A bug is one piece of the source of `hearing.py` or `tending.py` written otherwise: there is nothing in a stroke that
could be overridden.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import NamedTuple

import pytest

from farcall.agent import book, hearing, tending
from farcall.testing import simulated_books
from farcall.testing.invariants import BrokenInvariant
from farcall.testing.random_schedules import RandomSchedule
from farcall.testing.simulated_books import BookWorker
from farcall.testing.simulation import show

MOST_SCHEDULES = 4000

USED = [
    (hearing, book, "hear_messages"),
    (hearing, book, "hear_acknowledged"),
    (hearing, simulated_books, "create_answered"),
    (tending, book, "work_off"),
    (tending, simulated_books, "tend"),
]
"""What of these modules is used, and where."""


class Stroke(NamedTuple):
    """A bug: its name, where it is, what stands there, and what it is made."""

    name: str
    module: ModuleType
    right: str
    wrong: str


PLANTED = [
    Stroke("ForkKept", hearing, "mark = number\n                    del owned.forks[fork]\n", "mark = number\n"),
    Stroke("OwnHandlesForgotten", hearing, "if owned.handles or len(owned.forks) > 1:", "if len(owned.forks) > 1:"),
    Stroke("OtherForksForgotten", hearing, "if owned.handles or len(owned.forks) > 1:", "if owned.handles:"),
    Stroke("ValueKept", hearing, "del values[named]  # type: ignore[arg-type]\n", "pass\n"),
    Stroke(
        "ParentOfChildKept",
        hearing,
        "del parents[fork]  # type: ignore[arg-type]\n                    continue",
        "continue",
    ),
    Stroke("EndNotPosted", hearing, "outbox += [(last, message)]\n                        del", "del"),
    Stroke(
        "LentDeletedAtTheOwner",
        hearing,
        "if held.standing is CONFIRMED and there is not None:",
        "if there is not None:",
    ),
    Stroke(
        "DeletedThoughNotDropped",
        hearing,
        "if held.dropped and len(held.children) == 1 and",
        "if len(held.children) == 1 and",
    ),
    Stroke("AcknowledgedNotConfirmed", hearing, "            held.standing = CONFIRMED\n", ""),
    Stroke("DeletedWithChildren", hearing, "if held.dropped and not held.children:", "if held.dropped:"),
    Stroke("HeldThoughDeleted", hearing, "del held_forks[parcel.fork], kept[number]", "del kept[number]"),
    Stroke("OutOfTurn", hearing, "in_turn = number == received.mark + 1 and not received.beyond", "in_turn = True"),
    Stroke(
        "OutOfTurnWithGaps",
        hearing,
        "in_turn = number == received.mark + 1 and not received.beyond",
        "in_turn = number == received.mark + 1",
    ),
    Stroke("HandleNotConfirmed", hearing, "                handle.confirmed = True\n", "                pass\n"),
    Stroke("CallNotMarked", hearing, "        link.received.mark = number\n        value", "        value"),
    Stroke(
        "CallOutOfTurn",
        hearing,
        "or number != link.received.mark + 1 or link.received.beyond or reference in values",
        "or reference in values",
    ),
    Stroke("CallOverValue", hearing, "link.received.beyond or reference in values", "link.received.beyond"),
    Stroke(
        "ChildrenNotWaitedFor",
        tending,
        "elif held.children or held.standing is UNCONFIRMED:",
        "elif held.standing is UNCONFIRMED:",
    ),
    Stroke("LentDroppedAsConfirmed", tending, "elif held.standing is not CONFIRMED:", "elif False:"),
    Stroke("DropForgotten", tending, "                held.dropped = True\n", ""),
    Stroke("DropNotPosted", tending, "                outbox += [(number, message)]\n", ""),
    Stroke("DeliveredNotConfirmed", tending, "            held.standing = CONFIRMED\n", ""),
    Stroke(
        "DeliveredAfterDrop",
        tending,
        "if held is None or held.dropped:\n                left",
        "if held is None:\n                left",
    ),
]


def plant(monkeypatch: pytest.MonkeyPatch, bug: Stroke) -> None:
    source = inspect.getsource(bug.module)
    assert source.count(bug.right) == 1, f"what is to be made wrong stands there {source.count(bug.right)} times"
    changed = ModuleType(bug.module.__name__)
    exec(compile(source.replace(bug.right, bug.wrong), f"<{bug.name}>", "exec"), changed.__dict__)
    for module, where, name in USED:
        if module is bug.module:
            monkeypatch.setattr(where, name, getattr(changed, name))


_table: list[tuple[str, int, BrokenInvariant]] = []


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_stroke_is_caught(bug: Stroke, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, bug)
    for seed in range(MOST_SCHEDULES):
        try:
            RandomSchedule(seed, new_worker=BookWorker).run()
        except BrokenInvariant as broken:
            _table.append((bug.name, seed + 1, broken))
            return
    pytest.fail(f"{MOST_SCHEDULES} random schedules ran clean")


def test_the_table_of_planted_strokes() -> None:
    print(f"\n{'planted bug':24} {'schedules':>9}  broken     the schedule")
    for name, after, broken in _table:
        print(f"{name:24} {after:>9,}  {broken.invariant:10} {show(broken.schedule)[:90]}")
    assert len(PLANTED) >= 8


def test_the_strokes_as_they_are_run_clean_from_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hearing, tending):
        plant(monkeypatch, Stroke("none", module, '"""' + (module.__doc__ or "") + '"""', ""))
    for seed in range(300):
        RandomSchedule(seed, new_worker=BookWorker).run()

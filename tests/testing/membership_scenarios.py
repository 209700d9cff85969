"""What a group goes through, and what must come of it. Each raises an `AssertionError` if it does not.

They take the protocol to be tested, so that planted bugs can be shown to be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log2

from farcall.protocol.ids import Worker
from farcall.protocol.membership import Membership
from farcall.testing import group as command
from farcall.testing.simulated_group import SimulatedGroup

Machine = Callable[..., Membership]

SOON = 0.45
"""Seconds until all know of what is told to them, and does not have to be found out."""
FROZEN = 10.0
"""... and until a worker that is silent is lost for all."""


def fixed(machine: Machine, count: int, seed: int = 1) -> SimulatedGroup:
    group = SimulatedGroup(seed, machine=machine, as_bytes=True)
    group.start_fixed(count)
    group.run(2.0)
    return group


def watcher_and_watched(group: SimulatedGroup) -> tuple[Worker, Worker]:
    number = group.there()[0]
    return number, next(iter(group.workers[number].machine.watching.watched))


def single_changes(machine: Machine) -> None:
    """Joins, leaves and crashes are known to all at once; silence within ten seconds; none costs too much."""
    group = fixed(machine, 32)
    for what, within in [
        ("join", SOON),
        ("leave", SOON),
        ("crash", SOON),
        ("vanish", FROZEN),
        ("join", SOON),
    ]:
        before = group.spreading_messages()
        command.change(group, what, random.Random(what))
        group.settle(within)
        group.run(3.0)
        cost, size = group.spreading_messages() - before, len(group.there())
        assert cost <= size * log2(size), f"{what} cost {cost} messages in a group of {size}"
    assert not group.expelled


def restart_under_the_old_name(machine: Machine) -> None:
    """Its coming ends the older one of its name, though that was silent for no more than a moment."""
    group = fixed(machine, 12)
    group.vanish(5)
    number = group.join("worker4")
    group.settle(2.0)
    assert all(group.workers[n].machine.members.names["worker4"] == number for n in group.there() if n != 5)


def old_one_of_a_name_lives_on(machine: Machine) -> None:
    """Two want one name: the later has it, the other one hears that it must go."""
    group = fixed(machine, 12)
    group.join("worker4")
    group.settle(3.0)
    assert group.expelled == [5]


def busy_for_five_seconds(machine: Machine) -> None:
    """Nobody is taken for dead for that, whenever it begins, and with a little loss besides."""
    group = fixed(machine, 12)
    group.loss = 0.01
    for number in (1, 4, 7, 10, 2, 5):
        group.freeze(number, 5.0)
        group.run(6.13)
    group.settle(3.0)
    assert len(group.there()) == 12


def all_stop_for_a_minute(machine: Machine) -> None:
    """A machine that was suspended: nobody blames others for the time that it missed itself."""
    group = fixed(machine, 12)
    for number in group.there():
        group.freeze(number, 60.0)
    group.run(70.0)
    group.settle(1.0)
    assert len(group.there()) == 12


def watcher_away_as_the_watched_returns(machine: Machine) -> None:
    """The watcher comes back late, to answers that it has not read yet."""
    group = fixed(machine, 2)
    group.freeze(2, 9.0)
    group.run(6.5)
    group.freeze(1, 5.0)
    group.run(10.0)
    assert len(group.there()) == 2


def one_bad_link(machine: Machine) -> None:
    """Two that do not reach each other, while all others reach both, stay."""
    group = fixed(machine, 10)
    group.cut(*watcher_and_watched(group))
    group.run(40.0)
    assert len(group.there()) == 10


def cut_off(machine: Machine) -> None:
    """One that reached nobody for a while is lost, or is not; but it never takes others with it."""
    for seed in range(6):
        group = fixed(machine, 5, seed)
        # The one that ticks before all others: it would be the first to take others for dead.
        alone = min(group.there(), key=lambda number: group.workers[number].machine.watching._now or 0.0)
        group.part([alone])
        watching = group.workers[alone].machine.watching
        while max(watching.silence(number) for number in watching.watched) < 6.9:
            group.run(0.005)
        group.run(0.99)
        group.heal()  # just before the tick at which it has heard nobody for as long as the patience is
        group.run(3.0)
        group.settle(15.0)
        assert len(group.there()) == 5
    for eighths in range(24):
        group = fixed(machine, 8, eighths)
        group.part([3])
        group.run(7.0 + eighths / 8)
        group.heal()
        group.run(1.0)
        group.settle(15.0)
        assert set(group.there()) >= {1, 2, 4, 5, 6, 7, 8}


def short_partition(machine: Machine) -> None:
    """A break of five seconds is no loss, and what happened on one side meanwhile is known on the other soon."""
    group = fixed(machine, 20)
    side = group.there()[:8]
    group.part(side)
    group.run(1.0)
    group.join()
    group.leave(15)
    group.run(4.0)
    group.heal()
    group.settle(6.0)
    assert len(group.there()) == 20


def news_lost_on_the_way(machine: Machine) -> None:
    """What pushing does not bring, comparing does."""
    group = fixed(machine, 20)
    for what in ("join", "leave", "join", "crash"):
        group.loss = 0.8
        command.change(group, what, random.Random(7))
        group.run(0.3)
        group.loss = 0.0
        group.settle(8.0)


def coming_and_going_at_once(machine: Machine) -> None:
    """News of the coming that arrives after news of the going brings nobody back."""
    group = fixed(machine, 16)
    for _ in range(8):
        number = group.join()
        group.run(0.02)
        group.leave(number)
        group.run(0.7)
        group.settle(3.0)


def frozen_for_too_long(machine: Machine) -> None:
    """Who was taken for dead and is not hears of it, and goes."""
    group = fixed(machine, 12)
    group.freeze(6, 20.0)
    group.settle(FROZEN)
    group.run(22.0)
    assert group.expelled == [6]
    group.settle(1.0)


def joiner_that_knows_only_one(machine: Machine) -> None:
    """The store knew only one member, and the joiner's first words are lost."""
    group = fixed(machine, 16)
    group.loss = 1.0
    group.join(knowing=[7])
    group.loss = 0.0
    group.settle(5.0)


def leave_with_a_dead_neighbour(machine: Machine) -> None:
    """Nobody waits for the dead: neither who leaves nor who joins."""
    group = fixed(machine, 12)
    for number in group.workers[1].machine.members.successors(1, 2):
        group.vanish(number)
    group.run(0.1)
    group.leave(1)
    group.join()
    group.settle(FROZEN)


def churn(machine: Machine) -> None:
    """Everything at once, with losses."""
    for seed in range(3):
        group, chance = fixed(machine, 16, seed), random.Random(seed)
        group.loss = 0.01
        for _ in range(25):
            group.run(chance.expovariate(1.0))
            command.change(group, chance.choice(command.TOGETHER), chance)
        group.settle(30.0)


SCENARIOS: list[Callable[[Machine], None]] = [
    single_changes, restart_under_the_old_name, old_one_of_a_name_lives_on, busy_for_five_seconds,
    all_stop_for_a_minute, watcher_away_as_the_watched_returns, one_bad_link, cut_off, short_partition,
    news_lost_on_the_way, coming_and_going_at_once, frozen_for_too_long, joiner_that_knows_only_one,
    leave_with_a_dead_neighbour, churn,
]  # fmt: skip

"""What a group goes through, and what must come of it. Each raises an `AssertionError` if it does not.

They take the protocol to be tested, so that planted bugs can be shown to be found.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log2

from farcall.protocol.ids import Worker
from farcall.protocol.membership import Membership
from simulation import group as command
from simulation.simulated_group import SimulatedGroup

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


def many_gone_at_once(machine: Machine) -> None:
    """However many are lost together: each within the patience and two intervals, for all who are left."""
    for count, gone in [(2, 1), (12, 11), (64, 63), (120, 60), (160, 157)]:
        group = fixed(machine, count)
        for number in random.Random(count).sample(group.there(), gone):
            group.vanish(number)
        group.settle(FROZEN)
        assert len(group.there()) == count  # the lost ones do not know it


def hosts_lost_in_turn(machine: Machine) -> None:
    """More are lost while the first are waited for. Each has its own time."""
    group, chance = fixed(machine, 60), random.Random(3)
    left = group.there()
    for _ in range(4):
        for number in chance.sample(left, 12):
            left.remove(number)
            group.vanish(number)
        group.run(1.5)
    group.settle(FROZEN - 1.5)


def silent_for_almost_the_patience(machine: Machine) -> None:
    """Patience is a promise: nobody is lost before it is over, whenever the silence begins."""
    for interval, patience in [(1.0, 8.0), (1.0, 3.0), (0.2, 1.6), (0.7, 5.0)]:
        group = SimulatedGroup(
            3, machine=machine, interval=interval, patience=patience, latency=(0.0005, interval / 50)
        )
        group.start_fixed(9)
        group.run(2 * interval)
        chance = random.Random(4)
        for attempt in range(12):
            number = chance.choice(group.there())
            group.freeze(number, patience)
            group.run(patience - (0.1 + chance.random() * 0.3) * interval)
            if attempt % 2:  # those who judge it are away for a moment, and find its answer unread
                for other, worker in group.workers.items():
                    if number in worker.machine.watching.watched:
                        group.freeze(other, (0.4 + chance.random()) * interval)
            group.run(4 * interval)
        assert group.declared == {}


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
    for place, number in enumerate(group.there()):  # not all at the same moment: the first to stop is the last to go on
        group.freeze(number, 60.0 - place * 0.5)
        group.run(0.25)
    group.run(70.0)
    group.settle(1.0)
    assert len(group.there()) == 12, f"{group.declared.keys()} were lost"


def watcher_cut_off_while_it_asks(machine: Machine) -> None:
    """It has asked others about a silent one, and does not hear their answers."""
    for seed in range(20):
        group = fixed(machine, 8, seed)
        watcher, watched = watcher_and_watched(group)
        group.freeze(watched, 7.9)
        group.run(7.7)
        group.part([watcher])
        group.run(0.8 + seed / 20)
        group.heal()
        group.run(10.0)
        assert group.declared == {}


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


def three_hosts(machine: Machine) -> None:
    """Two hosts that do not reach each other, and a third that reaches both: all stay, on both ends of the cut."""
    for seed in range(4):
        group = fixed(machine, 12, seed)
        for one in (5, 6, 7, 8):
            for other in (9, 10, 11, 12):
                group.cut(one, other, both_ways=seed % 2 == 0)
        group.run(60.0)
        assert group.declared == {}
        group.vanish(12)  # and who dies meanwhile is found all the same
        group.settle(FROZEN)


def heard_by_one_member(machine: Machine) -> None:
    """One that only a single other member hears stays; and so do all others, for it."""
    for seed in range(4):
        group = fixed(machine, 8, seed)
        for other in (1, 2, 3, 5, 6, 7):
            group.cut(8, other)
        group.run(40.0)
        assert group.declared == {}


def random_cuts(machine: Machine) -> None:
    """Whatever links are cut, one way or both: nobody is lost who is heard over one other member (HEARD)."""
    for seed in range(40):
        chance = random.Random(seed)
        group = fixed(machine, chance.randrange(4, 14), seed)
        share = chance.random() * 0.8
        for one in group.workers:
            for other in group.workers:
                if one < other and chance.random() < share:
                    both = chance.random() < 0.7
                    group.cut(*chance.sample([one, other], 2), both_ways=both)
        group.run(25.0)
        group.heal()
        group.run(5.0)


def cut_off(machine: Machine) -> None:
    """One that reached nobody for a while is lost, or is not; but it never takes others with it, whenever that ends."""
    for seed in range(80):
        group = fixed(machine, 4 + seed % 3, seed)
        group.part([3])
        group.run(8.0 + seed / 30)
        group.heal()
        group.run(15.0)
        others = set(group.workers) - {3}
        assert set(group.there()) >= others
        views = [set(group.workers[number].machine.members.here) - {3} for number in others]
        assert views == [others] * len(others)


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
    watcher_cut_off_while_it_asks, many_gone_at_once, hosts_lost_in_turn, silent_for_almost_the_patience,
    three_hosts, heard_by_one_member, random_cuts,
    news_lost_on_the_way, coming_and_going_at_once, frozen_for_too_long, joiner_that_knows_only_one,
    leave_with_a_dead_neighbour, churn,
]  # fmt: skip

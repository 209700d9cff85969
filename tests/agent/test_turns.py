"""Taking turns: the bells, and when it rests. Who is let out is tested with `reading.py`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from farcall.agent import turns as turns_module
from farcall.agent.turns import Bell, Bells, Turn, Turns


def no_descriptors() -> Bell:
    raise OSError("too many open files")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(turns_module, "monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


# Bells


def test_a_ring_wakes_who_naps() -> None:
    bell, woken = Bell(), []
    thread = threading.Thread(target=lambda: woken.append(bell.nap(60.0, before=1 << 16)))
    thread.start()
    bell.ring()
    thread.join()
    assert woken == [True]


def test_a_bell_that_rang_before_wakes_the_next_one_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.nap(1.0, 0)
    assert not bell.nap(0.0, 0)


def test_a_nap_ends_by_itself_and_at_the_deadline() -> None:
    bell = Bell()
    asked = []

    def poll(milliseconds: int) -> list[object]:
        asked.append(milliseconds)
        return []

    bell._poll = poll  # type: ignore[assignment]
    assert not bell.nap(60.0, 0)
    assert not bell.nap(60.0, 80)
    assert not bell.nap(0.0015, 80)
    assert not bell.nap(float("inf"), 0)
    assert asked == [5, 15, 2, 5]


def test_a_bell_is_closed_when_nobody_has_it() -> None:
    bell = Bell()
    ends = bell._ends
    for end in ends:
        os.fstat(end)
    del bell
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_nobody_waits_for_a_bell_that_has_rung_very_often() -> None:
    bell = Bell()
    for _ in range(1 << 17):  # more than fit into a pipe
        bell.ring()
    assert bell.nap(1.0, 0)


def test_bells_are_used_again() -> None:
    bells = Bells()
    one, other = bells.take(), bells.take()
    assert one is not None
    assert one is not other
    bells.put_back(one)
    assert bells.take() is one


def test_no_more_bells_are_kept_than_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "_KEPT", 2)
    bells = Bells()
    for bell in [Bell() for _ in range(3)]:
        bells.put_back(bell)
    assert len(bells._bells) == 2


def test_bells_that_come_back_after_the_end_are_not_kept() -> None:
    bells = Bells()
    used, kept = bells.take(), bells.take()
    assert used is not None
    assert kept is not None
    bells.put_back(kept)
    bells.close()
    bells.put_back(used)
    assert not bells._bells


def test_without_descriptors_nobody_naps() -> None:
    assert Turns(Bells(no_descriptors)).bell() is None


# When it rests


def rest(turns: Turns) -> int:
    """How many waits go without a nap."""
    count = 0
    while turns.bell() is None:
        count += 1
    return count


def let_out(turns: Turns, clock: Callable[[float], None], late: float = 0.0, times: int = 1) -> None:
    """Somebody is let out so many seconds after the turn before was over."""
    for _ in range(times):
        clock(turns.turn.until - turns_module.monotonic() + late)
        turns.begin(1, 0.0, 0)


def test_turns_after_which_nobody_comes_in_time_rest_for_longer_and_longer(clock: Callable[[float], None]) -> None:
    turns = Turns(Bells())
    assert turns.bell() is not None
    rests = []
    for _ in range(10):
        while not turns._resting:
            let_out(turns, clock, late=1e-3)
        rests.append(rest(turns))
    assert rests == [min(16 << number, turns_module._LONGEST_REST) for number in range(10)]


def test_turns_that_save_more_than_is_lost_do_not_rest(clock: Callable[[float], None]) -> None:
    turns = Turns(Bells())
    for _ in range(50):
        let_out(turns, clock, late=2e-3)
        let_out(turns, clock, times=120)
        assert turns.bell() is not None


def test_a_moment_is_not_late(clock: Callable[[float], None]) -> None:
    turns = Turns(Bells())
    let_out(turns, clock, late=0.9 * turns_module._LATE, times=1000)
    assert turns.bell() is not None


def test_who_lines_up_long_after_the_last_turn_has_not_waited(clock: Callable[[float], None]) -> None:
    turns = Turns(Bells())
    for _ in range(100):
        clock(1.0)
        turns.begin(1, turns_module.monotonic(), 0)
    assert turns.bell() is not None


def test_after_enough_was_saved_the_next_rest_is_short_again(clock: Callable[[float], None]) -> None:
    turns = Turns(Bells())
    for _ in range(3):
        while not turns._resting:
            let_out(turns, clock, late=1e-3)
        rest(turns)
    let_out(turns, clock, times=round(turns_module._MOST_SAVED / turns_module._SAVES) + 1)
    while not turns._resting:
        let_out(turns, clock, late=1e-3)
    assert rest(turns) == turns_module._FIRST_REST


def test_naps_that_end_by_themselves_together_count_once(clock: Callable[[float], None]) -> None:
    turns = Turns(Bells())
    clock(1.0)
    for _ in range(100):
        turns.broken()
    assert turns.bell() is not None, "once is no reason"
    clock(1.0)
    turns.broken()
    assert rest(turns) == turns_module._FIRST_REST


# How long one lasts


def test_a_turn_is_that_of_the_thread_that_was_let_out_until_its_time_is_over(clock: Callable[[float], None]) -> None:
    turn = Turn()
    assert not turn.lasts(1)
    assert turn.is_over(1)
    turn.begin(1, 0, turns_module.monotonic())
    assert turn.lasts(1)
    assert not turn.lasts(2)
    assert turn.is_over(1), "whose turn it is may end it"
    assert not turn.is_over(2)
    clock(0.9 * turns_module._TURN)
    assert turn.lasts(1)
    clock(0.2 * turns_module._TURN)
    assert not turn.lasts(1)
    assert turn.is_over(2)
    turn.begin(2, 0, turns_module.monotonic())
    assert turn.lasts(2)
    assert not turn.lasts(1)


@pytest.mark.parametrize("threads", [1, 16, 1000])
def test_who_naps_does_so_for_longer_than_the_turns_of_all_before_it(
    threads: int, clock: Callable[[float], None]
) -> None:
    turn, bell, asked = Turn(), Bell(), []
    bell._poll = asked.append  # type: ignore[assignment]
    bell.nap(60.0, threads)
    spent = 0.0
    for number in range(threads):
        turn.begin(number, threads - number - 1, turns_module.monotonic())
        while turn.lasts(number):
            clock(1e-6)
            spent += 1e-6
    assert spent < asked[0] / 1000


def test_turns_in_which_replies_do_not_come_at_once_last_for_one_call(clock: Callable[[float], None]) -> None:
    turn = Turn()
    assert not turn.in_doubt, "who goes on need not tell that it has paid"

    def tried() -> int:
        """Looks in vain until it does not look any more; how often."""
        for number in range(100):
            turn.begin(1, 0, turns_module.monotonic())
            if not turn.lasts(1):
                return number
            turn.missed()
        pytest.fail("it never rests")

    assert tried() > 1, "once is no reason"
    turn.begin(1, 0, turns_module.monotonic())
    rest = 1
    while not turn.lasts(1):
        rest += 1
    assert rest > 10
    turn.missed()
    assert not turn.lasts(1), "it was on trial"
    while not turn.lasts(1):
        pass
    assert turn.in_doubt
    paid = 0
    while turn.in_doubt:
        turn.paid()
        paid += 1
    assert paid > 10, "until all trust is won back"
    assert tried() > 1

"""Who is silent for how long: only time in which the watcher was there itself counts."""

from __future__ import annotations

import pytest

from farcall.errors import UsageError
from farcall.protocol.watching import Watching


def watch(*workers: int) -> Watching:
    watching = Watching(1.0, 8.0)
    watching.advance(100.0)
    watching.follow(workers)
    return watching


def tick(watching: Watching, times: int, now: float = 100.0, *, hearing: int | None = None) -> float:
    for _ in range(times):
        now += 1.0
        watching.advance(now)
        if hearing is not None:
            watching.heard(hearing)
    return now


def test_a_silent_worker_is_suspect_and_then_dead() -> None:
    watching = watch(1, 2)
    now = tick(watching, 5, hearing=2)
    assert watching.suspects() == watching.dead(False) == []
    now = tick(watching, 1, now, hearing=2)
    assert watching.suspects() == [1]
    now = tick(watching, 1, now, hearing=2)
    assert watching.dead(False) == []
    tick(watching, 1, now, hearing=2)
    assert watching.dead(False) == [1]
    assert watching.silence(1) == 8.0
    assert watching.silence(2) == 0.0


def test_a_sign_of_life_ends_the_silence() -> None:
    watching = watch(1, 2)
    now = tick(watching, 7, hearing=2)
    watching.heard(1)
    tick(watching, 5, now, hearing=2)
    assert watching.suspects() == []


def test_a_new_neighbour_has_all_the_time() -> None:
    watching = watch(1, 2)
    now = tick(watching, 7, hearing=2)
    watching.follow([2, 3])
    tick(watching, 5, now, hearing=2)
    assert watching.suspects() == []
    with pytest.raises(KeyError):
        watching.silence(1)


def test_one_that_stays_a_neighbour_keeps_its_silence() -> None:
    watching = watch(1, 2)
    now = tick(watching, 7, hearing=2)
    watching.follow([1, 3])
    tick(watching, 1, now, hearing=2)
    assert watching.dead(False) == [1]


def test_the_time_that_the_watcher_missed_is_nobodys_silence() -> None:
    watching = watch(1, 2)
    watching.advance(160.0)
    assert watching.silence(1) == 1.0
    assert watching.suspects() == []


def test_at_a_late_tick_nobody_is_blamed_as_answers_may_lie_unread() -> None:
    watching = watch(1)
    now = tick(watching, 7)
    watching.advance(now + 5.0)
    assert watching.dead(True) == []
    watching.advance(now + 6.0)
    assert watching.dead(True) == [1]


def test_a_watcher_that_is_always_late_finds_the_dead_all_the_same() -> None:
    watching = watch(1)
    found = []
    for now in range(105, 200, 5):
        watching.advance(float(now))
        found += watching.dead(True)
    assert found


def test_a_watcher_that_hears_nobody_doubts_itself_first() -> None:
    watching = watch(1, 2)
    now = tick(watching, 8)
    assert watching.dead(False) == []
    assert watching.dead(True) == [1, 2]  # where there is nobody else, hearing nobody means nothing
    tick(watching, 1, now)
    assert watching.dead(False) == [1, 2]


def test_a_watcher_that_hears_somebody_again_asks_once_more() -> None:
    watching = watch(1, 2)
    now = tick(watching, 8)
    watching.heard(3)
    now = tick(watching, 1, now, hearing=3)
    assert watching.suspects() == [1, 2]
    assert watching.dead(False) == []
    tick(watching, 1, now, hearing=3)
    assert watching.dead(False) == [1, 2]


def test_ticks_that_come_a_little_early_make_no_difference() -> None:
    watching = watch(1, 2)
    for count in range(1, 9):
        assert watching.dead(False) == []
        watching.advance(100.0 + count * 0.998)
        watching.heard(2)
    assert watching.dead(False) == [1]


def test_one_round_in_which_nobody_was_heard_yet_is_not_loneliness() -> None:
    watching = watch(1, 2)
    now = tick(watching, 7, hearing=2)
    watching.advance(now + 1.0)  # the answers to this tick's pings are still under way
    assert watching.dead(False) == [1]


def test_a_clock_that_goes_back_does_no_harm() -> None:
    watching = watch(1)
    watching.advance(50.0)
    assert watching.silence(1) == 0.0


@pytest.mark.parametrize(("interval", "patience"), [(0.0, 8.0), (-1.0, 8.0), (1.0, 2.9)])
def test_times_that_do_not_go_together_are_refused(interval: float, patience: float) -> None:
    with pytest.raises(UsageError, match="give an interval above 0 and a patience of at least 3 intervals"):
        Watching(interval, patience)

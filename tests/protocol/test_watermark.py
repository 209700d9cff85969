"""Which numbers were seen: as a set would say it, in the memory of the gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol import watermark as watermarks
from farcall.protocol.ranges import ranges_of
from farcall.protocol.watermark import Watermark


@given(st.lists(st.integers(1, 30)))
def test_it_says_what_a_set_would_say(numbers: list[int]) -> None:
    watermark, seen = Watermark(), set[int]()
    for number in numbers:
        assert watermark.add(number) == (number not in seen)
        seen.add(number)
        assert [n in watermark for n in range(1, 32)] == [n in seen for n in range(1, 32)]


@given(st.lists(st.integers(1, 30)))
def test_the_mark_is_the_end_of_what_has_no_gap_and_only_what_is_beyond_is_kept(numbers: list[int]) -> None:
    watermark = Watermark()
    for number in numbers:
        watermark.add(number)
    seen = set(numbers)
    assert watermark.mark == next(n for n in range(32) if n + 1 not in seen)
    assert tuple(watermark.beyond) == ranges_of(number for number in seen if number > watermark.mark)


@given(st.integers(0, 40).flatmap(lambda most: st.permutations(range(1, most + 1))))
def test_nothing_is_kept_when_all_have_come(numbers: list[int]) -> None:
    watermark = Watermark()
    for number in numbers:
        watermark.add(number)
    assert (watermark.mark, watermark.beyond) == (len(numbers), [])


def test_numbers_below_the_first_count_as_seen() -> None:
    assert 0 in Watermark()
    assert not Watermark().add(0)


def test_its_repr_shows_what_is_out_of_order() -> None:
    watermark = Watermark()
    watermark.add(1)
    assert repr(watermark) == "Watermark(1)"
    watermark.add(4)
    watermark.add(3)
    assert repr(watermark) == "Watermark(1, [(3, 4)])"


def test_any_number_after_one_that_is_missing_takes_the_memory_of_one_range() -> None:
    watermark = Watermark()
    for number in range(2, 10_000):
        assert watermark.add(number)
    assert watermark.beyond == [(2, 9_999)]


def test_gaps_are_bounded_and_a_number_that_opens_no_other_is_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermarks, "MAX_RANGES", 3)
    watermark = Watermark()
    for number in (2, 4, 6):
        assert watermark.add(number)
    with pytest.raises(ProtocolError, match="left out too many numbers: 8 is the beginning of range 4"):
        watermark.add(8)
    assert 8 not in watermark
    assert watermark.add(7)
    assert watermark.add(1)
    assert watermark.add(9)
    assert (watermark.mark, watermark.beyond) == (2, [(4, 4), (6, 7), (9, 9)])


def test_an_interrupted_addition_is_completed_by_the_next() -> None:
    watermark = Watermark()
    watermark.add(2)
    watermark.mark = 2  # what is left if a signal handler raises an error in the middle of add(1)
    assert not watermark.add(2)
    assert watermark.add(3)
    assert (watermark.mark, watermark.beyond) == (3, [])

"""Which numbers were seen: as a set would say it, in the memory of what is out of order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
    assert watermark.beyond == {number for number in seen if number > watermark.mark}


@given(st.integers(0, 40).flatmap(lambda most: st.permutations(range(1, most + 1))))
def test_nothing_is_kept_when_all_have_come(numbers: list[int]) -> None:
    watermark = Watermark()
    for number in numbers:
        watermark.add(number)
    assert (watermark.mark, watermark.beyond) == (len(numbers), set())


def test_numbers_below_the_first_count_as_seen() -> None:
    assert 0 in Watermark()
    assert not Watermark().add(0)


def test_its_repr_shows_what_is_out_of_order() -> None:
    watermark = Watermark()
    watermark.add(1)
    assert repr(watermark) == "Watermark(1)"
    watermark.add(4)
    watermark.add(3)
    assert repr(watermark) == "Watermark(1, [3, 4])"

"""Ranges: a set of numbers, whatever the order in which it grew."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol.ranges import LARGEST, Range, Ranges, mixed, ranges_of

pairs = st.tuples(st.integers(1, 40), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def numbers(ranges: list[Range] | tuple[Range, ...]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}


@given(st.lists(pairs), pairs)
def test_it_is_a_set_of_numbers(added: list[Range], asked: Range) -> None:
    ranges = Ranges(added)
    truth = numbers(added)
    assert numbers(ranges.pairs()) == truth
    assert ranges.pairs() == ranges_of(truth)  # sorted, and no two of them touch
    assert {number for number in range(50) if number in ranges} == truth
    missing = ranges.missing(*asked)
    assert numbers(missing) == numbers([asked]) - truth
    assert tuple(missing) == ranges_of(numbers(missing))


@given(st.sets(st.integers(1, 60)), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order(members: set[int], chance: random.Random) -> None:
    shuffled = list(members)
    chance.shuffle(shuffled)
    one, other = Ranges(), Ranges(ranges_of(members))
    for number in shuffled:
        one.add(number, number)
        one.add(number, number)
    assert one == other
    assert one.digest == other.digest


def test_other_sets_have_other_digests() -> None:
    subsets = [ranges_of(n for n in range(1, 11) if bits >> n & 1) for bits in range(0, 2048, 2)]
    assert len({Ranges(subset).digest for subset in subsets}) == len(subsets) == 1024


def test_memory_is_for_gaps_only() -> None:
    ranges = Ranges()
    for number in range(1, 10_000):
        if number != 5000:
            ranges.add(number, number)
    assert repr(ranges) == "Ranges(1-4999, 5001-9999)"
    assert ranges != Ranges([(1, 9999)])


@pytest.mark.parametrize("pair", [(-1, 1), (2, 1), (1, LARGEST + 1), (-3, -1)])
def test_what_is_no_range_is_refused_with_nothing_changed(pair: Range) -> None:
    ranges = Ranges([(4, 6)])
    with pytest.raises(ProtocolError, match="is no range of workers' numbers"):
        ranges.add(*pair)
    assert ranges == Ranges([(4, 6)])


def test_mixed_numbers_differ_and_are_spread_evenly() -> None:
    upper_bytes = [mixed(number) >> 56 for number in range(256 * 64)]
    assert len({mixed(number) for number in range(256 * 64)}) == 256 * 64
    assert all(30 <= upper_bytes.count(byte) <= 110 for byte in range(256))

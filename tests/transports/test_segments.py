"""The layout of segments: where buffers are put, and at which places they may be said to be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farcall.transports.segments import ALIGNMENT, are_apart, begins, ends, views

some_sizes = st.lists(st.integers(0, 5 * ALIGNMENT), min_size=1, max_size=6)


@given(some_sizes, st.randoms())
def test_buffers_are_put_apart_in_whatever_order_they_are_told(sizes: list[int], random: st.DataObject) -> None:
    places = list(zip(begins(ends(sizes)), sizes, strict=True))
    random.shuffle(places)  # type: ignore[attr-defined]
    assert are_apart([at for at, _ in places], [size for _, size in places], ends(sizes)[-1])


@given(st.lists(st.tuples(st.integers(-100, 700), st.integers(0, 300)), min_size=1, max_size=4), st.integers(0, 1000))
def test_they_are_apart_if_no_byte_is_in_two_and_none_outside(places: list[tuple[int, int]], capacity: int) -> None:
    taken = [byte for at, size in places for byte in range(at, at + size)]
    inside = all(at >= 0 and at + size <= capacity for at, size in places)
    right = inside and len(set(taken)) == len(taken) and all(at % ALIGNMENT == 0 for at, _ in places)
    found = are_apart([at for at, _ in places], [size for _, size in places], capacity)
    if any(not size for _, size in places):
        assert found <= right, "one of no bytes may be refused where another begins, and nothing is lost by that"
    else:
        assert found == right


def test_views_show_what_is_there() -> None:
    data = memoryview(bytes(range(200)))
    assert [bytes(view) for view in views(data, [64, 0], [3, 2])] == [bytes([64, 65, 66]), bytes([0, 1])]

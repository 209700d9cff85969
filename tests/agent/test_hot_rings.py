"""The rings that the leader looks into: few, each empty before it makes room, none of a closed connection."""

from __future__ import annotations

from farcall.agent.hot_rings import HotRings
from farcall.transports.rings import AWAKE, HEAD, RING_SIZE, RingReader


def new_ring() -> RingReader:
    ring = RingReader(memoryview(bytearray(RING_SIZE)), "it")
    ring.words[AWAKE] = 1
    return ring


def test_the_last_few_that_brought_something_are_warm() -> None:
    hot, rings = HotRings(), [new_ring() for _ in range(5)]
    for ring in rings:
        hot.warm(ring)
        hot.warm(ring)
    assert hot.rings == (rings[4], rings[3], rings[2])


def test_one_that_makes_room_rests() -> None:
    hot, rings = HotRings(), [new_ring() for _ in range(4)]
    for ring in rings:
        hot.warm(ring)
    assert [ring.words[AWAKE] for ring in rings] == [0, 1, 1, 1]


def test_one_that_has_something_makes_no_room() -> None:
    hot, rings = HotRings(), [new_ring() for _ in range(4)]
    rings[0].words[HEAD] = 8
    for ring in rings:
        hot.warm(ring)
    assert rings[0] in hot.rings
    assert rings[3] not in hot.rings


def test_that_of_a_closed_connection_is_never_warm_again() -> None:
    hot, ring, other = HotRings(), new_ring(), new_ring()
    hot.warm(ring)
    hot.warm(other)
    hot.cool(ring)
    hot.cool(ring)
    hot.warm(ring)
    assert hot.rings == (other,)

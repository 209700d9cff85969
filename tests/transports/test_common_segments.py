"""Segments that several readers map: written once, private to each reader, free when all have dropped them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from math import inf

import pytest
from segment_ends import MIN_CAPACITY, data, descriptor_count, mapping_count

from farcall.transports.shm_segments import (
    CommonSegment,
    Lease,
    Place,
    SegmentPool,
    SegmentReader,
    SegmentWriter,
)

SIZE = MIN_CAPACITY


class Readers:
    """A pool, and two readers of it with their writers, all in this process."""

    def __init__(self) -> None:
        self.pool = SegmentPool(1 << 26, 64, print)
        self.writers = [SegmentWriter(self.pool) for _ in range(2)]
        self.readers = [SegmentReader(os.getpid(), self.pool.token) for _ in range(2)]

    def write(self, content: bytes) -> CommonSegment:
        """Puts it into a common segment, which is held."""
        common = self.pool.write_common([memoryview(content)])
        assert common is not None
        return common

    def send(self, common: CommonSegment, to: int, size: int = SIZE) -> memoryview:
        """Returns what one of the readers gets."""
        lease = self.issue(common, to)
        (view,) = self.readers[to].read_common(common.segment.place, lease.place, [size])
        return view

    def issue(self, common: CommonSegment, to: int) -> Lease:
        """Returns a lease for one of the readers, which does not read yet."""
        lease = self.writers[to].new_lease()
        assert lease is not None
        common.leases.append(lease)
        return lease

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.pool.close()
        for reader in self.readers:
            reader.sweep(inf)


@pytest.fixture
def both(segments_from_here: None) -> Iterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()


def test_what_a_reader_changes_no_other_sees(both: Readers) -> None:
    common = both.write(data(1))
    one, other = both.send(common, 0), both.send(common, 1)
    assert one == other == data(1)
    one[:3] = b"abc"
    assert (bytes(one[:4]), bytes(other)) == (b"abc" + data(1, 1), data(1))
    assert bytes(common.contents([SIZE])[0]) == data(1)
    assert both.readers[0].find_returnable([one]) is None


def test_it_is_written_again_when_all_readers_have_dropped_it(both: Readers) -> None:
    first = both.write(data(1))
    one, other = both.send(first, 0), both.send(first, 1)
    one[:] = data(7)  # its pages are its own now, and must not be seen when the segment is read again
    del one
    assert not first.is_free(), "it is held, and the other reader has it"
    first.is_held = False
    assert not first.is_free(), "the other reader has it"
    second = both.write(data(2))
    assert second is not first
    assert bytes(other) == data(1)
    del other
    assert first.is_free()
    third = both.write(data(3))
    assert third is first
    assert bytes(both.send(third, 0)) == data(3)


def test_a_held_segment_is_not_written(both: Readers) -> None:
    first = both.write(data(1))
    del first.leases[:]
    assert not first.is_free()
    assert both.write(data(2)) is not first


def test_a_lease_is_used_for_nothing_else_while_its_segment_is_not_written(both: Readers) -> None:
    common = both.write(data(1))
    view = both.send(common, 0)
    del view
    place = both.writers[0].write([memoryview(data(5, 10))])
    assert place is not None
    assert place.number != common.leases[0].place.number


def test_a_lease_does_not_take_a_large_segment(both: Readers) -> None:
    place = both.writers[0].write([memoryview(data(5, 10 * SIZE))])
    assert place is not None
    both.writers[0].free(place.number)
    assert both.issue(both.write(data(1)), 0).place.number != place.number


def test_a_reader_that_is_lost_keeps_its_views_and_the_segment_is_given_up(both: Readers) -> None:
    common = both.write(data(1))
    one, other = both.send(common, 0), both.send(common, 1)
    common.is_held = False
    both.writers[0].close()
    del other
    assert (common.is_free(), common.is_over()) == (False, True)
    assert both.write(data(2)) is not common
    both.pool.sweep_common(inf)
    assert bytes(one) == data(1)
    assert common.segment.descriptor < 0


def test_idle_segments_are_given_up(both: Readers) -> None:
    for _ in range(3):
        common = both.write(data(1))
        for reader in range(2):
            both.send(common, reader)
        common.is_held = False
    before = descriptor_count(), mapping_count()
    both.pool.sweep_common(0.0)
    assert (descriptor_count(), mapping_count()) == before, "it was used just now"
    both.pool.sweep_common(inf)
    del common
    gc.collect()
    assert (descriptor_count(), mapping_count()) == (before[0] - 2, before[1] - 1)  # its own, and that of its mapping


def test_a_segment_that_a_forked_child_may_have_is_not_written_again(both: Readers) -> None:
    common = both.write(data(1))
    view = both.send(common, 0)
    common.is_held = False
    both.readers[0].prepare_fork()
    del view
    assert not common.is_free()


def test_places_that_are_wrong(both: Readers) -> None:
    common = both.write(data(1))
    lease = both.issue(common, 0)
    reader, place = both.readers[0], common.segment.place
    for wrong, sizes in ((Place(place.descriptor, 99), [SIZE]), (place, [2 * common.segment.capacity])):
        with pytest.raises(OSError, match="too small"):
            reader.read_common(wrong, lease.place, sizes)
    with pytest.raises(OSError, match="not in segment"):
        common.contents([2 * common.segment.capacity])
    views = reader.read_common(place, lease.place, [SIZE])
    with pytest.raises(OSError, match="perhaps in use"):
        reader.read_common(place, lease.place, [SIZE])
    assert bytes(views[0]) == data(1)


def test_without_shared_memory_there_is_none(both: Readers) -> None:
    assert SegmentPool(0, 64, print).write_common([memoryview(data(1))]) is None
    both.pool.close()
    assert both.pool.write_common([memoryview(data(1))]) is None

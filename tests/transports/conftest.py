"""The two ends of shared memory, for the tests of the transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared_memory_stage import Ends, count_from_here


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def segments_from_here() -> None:
    """`mapped` and `descriptors` count only what the test makes."""
    count_from_here()

"""The workers of the tests of references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall.testing import LocalGroup


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    """Three workers, whose tables must be empty in the end unless the test has failed."""
    with LocalGroup(3) as group:
        yield group


@pytest.fixture
def this_worker(group: LocalGroup) -> LocalGroup:
    """Worker 0 is the one of this process, for `farcall.remote` and `RRef(value)`."""
    return group

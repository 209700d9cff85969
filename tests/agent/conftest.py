"""Groups of workers, and the stages of books and serving pools, for the tests of the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from book_stage import Books
from serving_stage import Stage

from farcall.agent import serving
from farcall.options import RpcBackendOptions
from farcall.testing import LocalGroup
from reference_stage import call, echo

NewGroup = Callable[..., LocalGroup]


@pytest.fixture
def new_group() -> Iterator[NewGroup]:
    """Makes groups with these options; they are taken down at the end."""
    groups: list[LocalGroup] = []

    def new_group(size: int = 2, **options: Any) -> LocalGroup:
        groups.append(LocalGroup(size, RpcBackendOptions(**options)))
        return groups[-1]

    yield new_group
    for group in groups:
        group.shutdown(graceful=False)


@pytest.fixture
def group(new_group: NewGroup) -> LocalGroup:
    """Three workers with the usual options."""
    return new_group(3)


@pytest.fixture
def warm(group: LocalGroup) -> LocalGroup:
    """Three workers, all connected with all."""
    for agent in group:
        for to in range(3):
            call(agent, to, echo, 0)
    return group


@pytest.fixture
def books() -> Books:
    """The books of three workers that know each other."""
    return Books()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """For pools of the test's own. What is slow is for the test to say, not for a machine that is busy otherwise."""
    monkeypatch.setattr(serving, "SLOW", 1000.0)
    stage = Stage()
    yield stage
    stage.close()

"""What is larger than the other side takes is refused where it is sent, by name, and harms nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall import RpcBackendOptions, SerializationError, UsageError
from farcall.testing import LocalGroup
from group_stage import call, echo

pytestmark = pytest.mark.timeout(30)

LIMITED = RpcBackendOptions(max_message_size=1_000_000, max_head_size=1024)


def make(count: int) -> bytes:
    return bytes(count)


@pytest.fixture
def group() -> Any:
    with LocalGroup(2, LIMITED) as group:
        yield group


def remote(group: LocalGroup, *args: Any) -> Any:
    return group[0].remote(1, echo, args, None)


@pytest.mark.parametrize("ask", [lambda group, value: call(group[0], 1, echo, value), remote])
@pytest.mark.parametrize("value", [bytes(2_000_000), ["x" * 2_000_000]])
def test_a_call_that_is_too_large_is_not_sent(
    group: LocalGroup, ask: Callable[[LocalGroup, Any], Any], value: Any
) -> None:
    first = call(group[0], 1, echo, "first")
    with pytest.raises(
        UsageError, match=r"`\w*\.?echo` was not sent to worker 'worker1': it has about 2,000,\d+ bytes"
    ):
        ask(group, value)
    (connection,) = group[0]._connections
    assert call(group[0], 1, echo, bytes(900_000)) == bytes(900_000)
    assert first == "first"
    assert list(group[0]._connections) == [connection]
    assert connection.pending == {}


def test_a_result_that_is_too_large_is_told_to_the_caller(group: LocalGroup) -> None:
    with pytest.raises(
        SerializationError, match=r"from worker 'worker1' to worker 'worker0': it has about 2,000,\d+ by"
    ):
        call(group[0], 1, make, 2_000_000)
    assert call(group[0], 1, make, 900_000) == bytes(900_000)

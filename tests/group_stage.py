"""Groups of workers in the process of the test, and how a test calls from one of them to another.

What the workers run sees the same globals as the test does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farcall import Future, RpcAgent
from farcall.testing import LocalGroup
from gates import SOON

NewGroup = Callable[..., LocalGroup]

runs: list[Any] = []
"""What the workers of this test have run by `run`."""


@contextmanager
def local_groups() -> Iterator[NewGroup]:
    """Makes groups as `LocalGroup` does; they are taken down at the end, whatever they are doing.

    Nothing has been run before.
    """
    runs.clear()
    groups: list[LocalGroup] = []

    def new(*args: Any, **kwargs: Any) -> LocalGroup:
        groups.append(LocalGroup(*args, **kwargs))
        return groups[-1]

    yield new
    for group in groups:
        group.shutdown(graceful=False)
    runs.clear()


def start(
    caller: RpcAgent, to: Any, function: Callable[..., Any], *args: Any, timeout: float = SOON, **kwargs: Any
) -> Future[Any]:
    """The future of a call, as `rpc_async` gives it."""
    return caller.call(to, function, args, kwargs, timeout, unattended=True)


def call(
    caller: RpcAgent, to: Any, function: Callable[..., Any], *args: Any, timeout: float = SOON, **kwargs: Any
) -> Any:
    """The result of a call, as `rpc_sync` gives it."""
    return caller.call(to, function, args, kwargs, timeout).wait()


def echo(value: Any) -> Any:
    return value


def run(value: Any) -> Any:
    runs.append(value)
    return value


def connect_all(group: LocalGroup) -> None:
    """Every worker calls every worker, so that all connections are there."""
    for caller in group.agents:
        for to in group.agents:
            call(caller, to.info.name, echo, 0)

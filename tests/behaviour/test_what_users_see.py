"""What a person sees of a failure: the lines of the library in a traceback, and where warnings point."""

from __future__ import annotations

import asyncio
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall.testing import LocalGroup

pytestmark = pytest.mark.timeout(60)


def fail(what: str) -> None:
    raise ValueError(what)


class Thing:
    def fail(self) -> None:
        raise KeyError("inside")


def library_lines(error: BaseException) -> list[str]:
    """The source lines of farcall in what is shown of the error, without those that mark a place in them."""
    lines = traceback.format_exception(error)
    frames = [line for line in lines if "/farcall/" in line.split("\n")[0] and line.startswith('  File "')]
    return [frame.split("\n")[1].strip() for frame in frames]


async def awaited(future: Any) -> Any:
    return await future


WAYS: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("alone", fail, args=("here",)),
    "rpc_async": lambda: rpc.rpc_async("alone", fail, args=("here",)).wait(),
    "result": lambda: rpc.rpc_async("alone", fail, args=("here",)).result(),
    "then": lambda: rpc.rpc_async("alone", fail, args=("here",)).then(lambda done: done.wait()).wait(),
    "await": lambda: asyncio.run(awaited(rpc.rpc_async("alone", fail, args=("here",)))),
    "to_here": lambda: rpc.remote("alone", fail, args=("here",)).to_here(),
    "proxy": lambda: rpc.remote("alone", Thing).rpc_sync().fail(),
    "proxy later": lambda: rpc.remote("alone", Thing).rpc_async().fail().wait(),
    "proxy remote": lambda: rpc.remote("alone", Thing).remote().fail().to_here(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_library_shows_few_lines_and_none_that_suspects_the_network(alone: None, way: str) -> None:
    try:
        WAYS[way]()
    except (ValueError, KeyError) as error:
        lines = library_lines(error)
        shown = "".join(traceback.format_exception(error))
        del error
    assert len(lines) <= 4, lines
    assert any(line.startswith("raise ") and "# what the function raised" in line for line in lines)
    assert not any(word in line for line in lines for word in ("lost", "connection", "unsettled"))
    assert "Remote traceback (worker 'alone', in `" in shown
    assert "execution.py" not in shown


def test_a_remote_error_of_another_worker_is_shown_the_same_way() -> None:
    with LocalGroup(2) as group:
        try:
            group.agents[0].call("worker1", fail, ("there",), None, timeout=30).wait()
        except ValueError as error:
            lines = library_lines(error)
            shown = "".join(traceback.format_exception(error))
            del error
    assert lines == ["raise self._value  # what the function raised, or why the call failed"]
    remote = shown[shown.index("Remote traceback (worker 'worker1', in `fail`):") :]
    assert remote.count('File "') == 1, "the frames of farcall are left out"
    assert "in fail\n    raise ValueError(what)" in remote


# Warnings


@pytest.fixture
def seen() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of this test, as the interpreter would show them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def line_with(text: str) -> int:
    """The number of the one line of this file that ends with that comment."""
    with open(__file__) as source:
        (number,) = [number for number, line in enumerate(source, 1) if line.rstrip().endswith(f"# {text}")]
    return number


def places(seen: list[warnings.WarningMessage]) -> list[tuple[str, int]]:
    return [(each.filename, each.lineno) for each in seen if each.category.__name__ == "UnseenFailureWarning"]


def test_a_failure_that_nobody_looked_at_points_at_the_call(alone: None, seen: list[warnings.WarningMessage]) -> None:
    def were(count: int) -> bool:
        rpc.rpc_sync("alone", int)  # a thread that sleeps may hold on to the last thing it did
        gc.collect()
        return len(places(seen)) == count

    rpc.rpc_async("alone", fail, args=("first",))  # dropped at once
    eventually(lambda: were(1))
    later = rpc.rpc_async(  # dropped later
        "alone", fail, args=("second",)
    )
    eventually(later.done)
    del later
    eventually(lambda: were(2))
    rref = rpc.remote("alone", Thing)
    rref.rpc_async().fail()  # by a proxy
    del rref
    eventually(lambda: were(3))
    rpc.rpc_async("alone", int).then(lambda done: fail("third"))  # by a callback
    eventually(lambda: were(4))
    expected = [line_with(text) for text in ("dropped at once", "dropped later", "by a proxy", "by a callback")]
    assert places(seen) == [(__file__, line) for line in expected]
    assert "`fail` on worker 'alone': ValueError: first" in str(seen[0].message)


def test_a_future_made_by_hand_points_at_the_line_that_failed_it(seen: list[warnings.WarningMessage]) -> None:
    future: rpc.Future[int] = rpc.Future()
    future.set_exception(ValueError("by hand"))  # failed here
    del future
    assert places(seen) == [(__file__, line_with("failed here"))]


def test_the_same_line_is_shown_once(alone: None) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            future = rpc.rpc_async("alone", fail, args=("again",))
            eventually(future.done)
            del future
            rpc.rpc_sync("alone", int)
    assert len(places(seen)) == 1

"""What functions raise that run for others, and how it arrives at who has called them."""

from __future__ import annotations

import asyncio
import threading
import traceback

import pytest
from agent_stage import Odd, add_async, fail, raise_odd

from farcall import RemoteError
from farcall.testing import LocalGroup
from group_stage import call, echo

pytestmark = pytest.mark.timeout(30)


class Silent(Exception):
    def __init__(self) -> None:
        pass


class Rude(Exception):
    def __str__(self) -> str:
        raise ValueError("no text of mine")

    __repr__ = __str__


def raise_with_cause() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        failure = ValueError("outer", 3)
        failure.add_note("a note of its own")
        raise failure from error


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("of a class that only this function knows")


def raise_unpicklable() -> None:
    raise ValueError("with a lock", threading.Lock())


def raise_group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), Odd(2, reason="two")])


def test_an_exception_arrives_with_type_args_cause_notes_and_remote_traceback(group: LocalGroup) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        call(group[0], 1, raise_with_cause)
    error = caught.value
    assert type(error) is ValueError
    assert error.args == ("outer", 3)
    assert error.__notes__[0] == "a note of its own"
    assert type(error.__cause__) is KeyError
    assert error.__cause__.args == ("missing",)
    shown = "".join(traceback.format_exception(error))
    assert "worker 'worker1'" in shown
    assert "in raise_with_cause" in shown
    assert "raise failure from error" in shown
    assert shown.index("KeyError") < shown.index("ValueError: ")


def test_an_exception_with_an_odd_constructor(group: LocalGroup) -> None:
    with pytest.raises(Odd) as caught:
        call(group[0], 1, raise_odd)
    assert (caught.value.code, caught.value.reason, caught.value.args) == (7, "odd", ("odd (7)",))


@pytest.mark.parametrize("error", [Silent(), Rude("rude"), StopIteration(3), AssertionError(), UnicodeError("é")])
def test_odd_exceptions(group: LocalGroup, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        call(group[0], 1, fail, error)
    assert caught.value.args == error.args


@pytest.mark.parametrize("text", ["Grüße", "日本語", "Привет", "مرحبا", "🙂", "\x00\udcff", "x" * 100_000])
def test_text_in_any_script(group: LocalGroup, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        call(group[0], 1, fail, ValueError(text))
    assert caught.value.args == (text,)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("here"), GeneratorExit(), asyncio.CancelledError()])
def test_a_base_exception_is_the_callers_and_ends_no_worker(group: LocalGroup, error: BaseException) -> None:
    for _ in range(20):  # more than there are threads
        with pytest.raises(type(error)) as caught:
            call(group[0], 1, fail, error)
        assert caught.value.args == error.args
    assert call(group[0], 1, echo, "alive") == "alive"


async def fail_async(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize("error", [ValueError(1), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_coroutine_may_raise_anything(group: LocalGroup, error: BaseException) -> None:
    for _ in range(3):
        with pytest.raises(type(error)):
            call(group[0], 1, fail_async, error)
    assert call(group[0], 1, add_async, 1, 2) == 3


def test_an_exception_that_cannot_be_rebuilt_is_told(group: LocalGroup) -> None:
    with pytest.raises(Exception, match="of a class that only this function knows") as caught:
        call(group[0], 1, raise_local)
    assert type(caught.value).__name__ in ("Local", "RemoteError")
    with pytest.raises((ValueError, RemoteError), match="with a lock"):
        call(group[0], 1, raise_unpicklable)


def test_a_group_of_exceptions(group: LocalGroup) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        call(group[0], 1, raise_group)
    one, two = caught.value.exceptions
    assert (type(one), type(two)) == (ValueError, Odd)


def test_an_exception_is_no_result(group: LocalGroup) -> None:
    returned = call(group[0], 1, echo, ValueError("returned, not raised"))
    assert type(returned) is ValueError


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1)


def test_a_function_that_recurses_without_end(group: LocalGroup) -> None:
    with pytest.raises(RecursionError):
        call(group[0], 1, recurse)
    assert call(group[0], 1, echo, "alive") == "alive"


def test_an_error_passes_through_nested_calls_with_both_tracebacks(group: LocalGroup) -> None:
    with pytest.raises(Odd) as caught:
        call(group[0], 1, call_on, group, "worker1", "worker2")
    shown = "".join(traceback.format_exception(caught.value))
    assert "worker 'worker1'" in shown
    assert "worker 'worker2'" in shown


def call_on(group: LocalGroup, here: str, there: str) -> None:
    call(group[here], there, raise_odd)

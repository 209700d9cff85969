"""What a remote function raises, and how it arrives at the caller."""

from __future__ import annotations

import asyncio
import threading
import traceback

import pytest

from farcall import RemoteError
from farcall.testing import LocalGroup
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


class Odd(Exception):
    """The arguments of its constructor are not in `args`."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("this exception cannot be printed")

    __repr__ = __str__


def fail(error: BaseException) -> None:
    raise error


async def fail_async(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def raise_odd() -> None:
    raise Odd(7, reason="odd")


def raise_with_cause() -> None:
    try:
        dict[str, int]()["missing"]
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


def recurse() -> int:
    return recurse() + 1


def call_on(group: LocalGroup, here: str, there: str) -> None:
    call(group.agents[here], there, raise_odd)


def test_an_exception_arrives_with_its_type_arguments_cause_notes_and_remote_traceback(group: LocalGroup) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        call(group.agents[0], 1, raise_with_cause)
    error = caught.value
    assert type(error) is ValueError
    assert error.args == ("outer", 3)
    assert error.__notes__[0] == "a note of its own"
    assert type(error.__cause__) is KeyError
    assert error.__cause__.args == ("missing",)
    shown = "".join(traceback.format_exception(error))
    assert "worker 'worker1', in `raise_with_cause`" in shown
    assert "raise failure from error" in shown


def test_an_exception_arrives_whatever_its_constructor_takes(group: LocalGroup) -> None:
    with pytest.raises(Odd) as caught:
        call(group.agents[0], 1, raise_odd)
    assert (caught.value.code, caught.value.reason, caught.value.args) == (7, "odd", ("odd (7)",))


@pytest.mark.parametrize(
    "error",
    [
        NoText("x"),
        StopIteration(3),
        AssertionError(),
        ValueError("Grüße 日本語 🙂 \x00\udcff"),
        ValueError("x" * 100_000),
    ],
    ids=["cannot be printed", "StopIteration", "empty", "any text", "long text"],
)
def test_unusual_exceptions_arrive_as_they_are(group: LocalGroup, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        call(group.agents[0], 1, fail, error)
    assert caught.value.args == error.args


@pytest.mark.parametrize("function", [fail, fail_async], ids=["function", "coroutine"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("here"), GeneratorExit()], ids=repr)
def test_a_base_exception_is_raised_at_the_caller_and_ends_no_thread(
    group: LocalGroup, function: object, error: BaseException
) -> None:
    for _ in range(20):  # more than there are threads
        with pytest.raises(type(error)) as caught:
            call(group.agents[0], 1, function, error)  # type: ignore[arg-type]
        assert caught.value.args == error.args
    assert call(group.agents[0], 1, echo, "alive") == "alive"


@pytest.mark.parametrize(
    ("function", "text"), [(raise_local, "only this function knows"), (raise_unpicklable, "with a lock")]
)
def test_an_exception_that_cannot_be_rebuilt_arrives_as_text(group: LocalGroup, function: object, text: str) -> None:
    with pytest.raises(Exception, match=text) as caught:
        call(group.agents[0], 1, function)  # type: ignore[arg-type]
    error = caught.value
    assert isinstance(error, RemoteError) or type(error).__name__ in ("Local", "ValueError")
    assert "Remote traceback (worker 'worker1'" in "".join(traceback.format_exception(error))
    assert call(group.agents[0], 1, echo, "alive") == "alive"


def test_a_group_of_exceptions_arrives_with_its_members(group: LocalGroup) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        call(group.agents[0], 1, raise_group)
    one, two = caught.value.exceptions
    assert (type(one), type(two)) == (ValueError, Odd)


def test_an_exception_that_is_returned_is_a_result(group: LocalGroup) -> None:
    returned = call(group.agents[0], 1, echo, ValueError("returned, not raised"))
    assert type(returned) is ValueError


def test_endless_recursion_fails_the_call_only(group: LocalGroup) -> None:
    with pytest.raises(RecursionError):
        call(group.agents[0], 1, recurse)
    assert call(group.agents[0], 1, echo, "alive") == "alive"


def test_an_error_of_a_nested_call_has_the_tracebacks_of_both_workers(group: LocalGroup) -> None:
    with pytest.raises(Odd) as caught:
        call(group.agents[0], 1, call_on, group, "worker1", "worker2")
    shown = "".join(traceback.format_exception(caught.value))
    assert "worker 'worker1'" in shown
    assert "worker 'worker2'" in shown


def test_every_way_to_the_result_raises_the_same_exception(group: LocalGroup) -> None:
    future = start(group.agents[0], 1, raise_odd)
    error = future.exception()
    assert isinstance(error, Odd)
    for read in (future.wait, future.value, future.result):
        with pytest.raises(Odd) as caught:
            read()
        assert caught.value is error

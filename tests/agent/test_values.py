"""The values of references at their owner: given once, refused at most once, and an error anew for every use."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import warnings
import weakref
from typing import Any

import pytest
from book_stage import Sensitive, made

from farcall.agent.values import Value
from farcall.errors import ReferenceRefused
from farcall.serialization import encode_failure
from reference_stage import ShelfError

pytestmark = pytest.mark.timeout(20)


def failed(error: BaseException | None = None) -> Value:
    value = Value()
    value.fail(encode_failure(error or ShelfError("empty", 7), "w1", "take"))
    return value


def refused() -> Value:
    value = Value()
    value.refuse(lambda: ReferenceRefused("it is gone"))
    return value


@pytest.mark.parametrize("content", [5, None, "", ValueError("a value like any other")])
def test_what_is_given_is_there(content: Any) -> None:
    value = Value()
    assert not value.done()
    value.give(content)
    assert value.done()
    assert value.value() is value.wait() is content
    assert value.exception() is None
    assert value.failure == b""


def test_a_value_to_come_is_waited_for() -> None:
    value = Value()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(value.wait()))
    thread.start()
    doubled = value.then(lambda done: 2 * done.value())
    value.give(21)
    thread.join()
    assert found == [21]
    assert doubled.wait() == 42


def test_a_value_to_come_is_awaited() -> None:
    async def both(value: Value) -> Any:
        asyncio.get_running_loop().call_soon(value.give, 5)
        return await value

    assert asyncio.run(both(Value())) == 5


def test_a_wait_for_a_value_may_end_before_it_comes() -> None:
    value = Value()
    with pytest.raises(TimeoutError):
        value.exception(timeout=0)
    with pytest.raises(TimeoutError):
        value.result(timeout=0)
    with pytest.raises(RuntimeError, match="not done"):
        value.value()


def test_a_failure_is_raised_with_its_own_type_and_travels_as_it_came() -> None:
    value = failed()
    with pytest.raises(ShelfError) as caught:
        value.wait()
    assert caught.value.args == ("empty", 7)
    assert "worker 'w1', in `take`" in "".join(traceback.format_exception(caught.value))
    assert value.failure == encode_failure(ShelfError("empty", 7), "w1", "take")


def test_a_refusal_is_no_failure_of_a_function() -> None:
    value = refused()
    with pytest.raises(ReferenceRefused, match="it is gone"):
        value.wait()
    assert value.failure == b""


@pytest.mark.parametrize("make", [failed, refused])
def test_every_use_meets_an_error_of_its_own(make: Any) -> None:
    value = make()
    errors = [value.exception(), value.exception()]
    for use in (value.wait, value.value, value.result):
        with pytest.raises(type(errors[0])) as caught:
            use()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 5
    assert errors[0].__traceback__ is None, "it has gathered nothing of others"


@pytest.mark.parametrize("make", [failed, refused])
def test_an_error_keeps_nothing_of_those_who_met_it(make: Any) -> None:
    class Local:
        pass

    value = make()

    def meet() -> weakref.ref[Local]:
        local = Local()
        with pytest.raises(Exception, match=r"empty|gone"):
            value.wait()
        return weakref.ref(local)

    met = meet()
    gc.collect()
    assert met() is None
    assert value.done()


def test_those_who_wait_are_woken_by_a_failure_too() -> None:
    value = Value()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(value.exception()))
    thread.start()
    derived = value.then(lambda done: done.value())
    value.refuse(lambda: ReferenceRefused("it is gone"))
    thread.join()
    assert isinstance(found[0], ReferenceRefused)
    assert isinstance(derived.exception(), ReferenceRefused)


def test_what_is_there_is_not_refused() -> None:
    value = Value()
    value.give(5)
    value.refuse(lambda: ReferenceRefused("too late"))
    assert value.value() == 5
    assert value.exception() is None
    twice = failed()
    twice.refuse(lambda: ReferenceRefused("too late"))
    assert isinstance(twice.exception(), ShelfError)


@pytest.mark.parametrize("make", [failed, refused])
def test_an_error_that_nobody_asks_for_is_nobodys_fault(make: Any) -> None:
    """The program that made the reference hears of it when it uses it; here nobody has failed to look."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make()
        gc.collect()
    assert said == []


def test_it_is_described_for_people_without_running_anything() -> None:
    there = Value()
    assert there.describe() == ""
    there.give([1, 2])
    assert there.describe() == "list"
    assert refused().describe() == "refused"
    value = failed(Sensitive("seven"))
    made.clear()
    assert value.describe() == "failed: book_stage.Sensitive: seven"
    assert made == []
    assert isinstance(value.exception(), Sensitive)
    assert made == ["seven"]

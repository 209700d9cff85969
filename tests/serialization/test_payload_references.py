"""Handles travel beside the pickle: collected while it is made, offered while it is read, refused at any other time."""

from __future__ import annotations

import pickle
import threading
from time import monotonic
from typing import Any

import pytest

from farcall.errors import SerializationError
from farcall.serialization.references import collect, collecting, offered, offering, take_offered


class Handle:
    """Travels by its place."""

    def __reduce__(self) -> Any:
        return take_offered, (collect(self, "the handle"),)


def test_what_is_met_is_collected_in_its_order() -> None:
    first, second = Handle(), Handle()
    with collecting() as handles:
        data = pickle.dumps([first, {"a": second}])
    assert handles == {first: 0, second: 1}
    with offering(["one", "two"]):
        assert pickle.loads(data) == ["one", {"a": "two"}]


def test_what_is_met_twice_has_one_place() -> None:
    handle, other = Handle(), Handle()
    with collecting() as handles:
        assert [collect(one, "") for one in (handle, other, handle, other)] == [0, 1, 0, 1]
    assert list(handles.items()) == [(handle, 0), (other, 1)]


def test_outside_a_call_it_is_refused_saying_what_to_do() -> None:
    with pytest.raises(SerializationError, match=r"'the handle' can be pickled only .* send it with rpc_sync.*to_here"):
        pickle.dumps(Handle())
    with collecting():
        pass
    with pytest.raises(SerializationError):
        collect(Handle(), "the handle")


@pytest.mark.parametrize("place", [0, 2])
def test_a_place_where_nothing_came_is_refused(place: int) -> None:
    with offering(["one", "two"] if place else []), pytest.raises(SerializationError, match="outside the call"):
        take_offered(place)
    with offering(["one"]):
        pass
    with pytest.raises(SerializationError, match="outside the call"):
        take_offered(0)


def test_a_place_before_the_first_is_refused() -> None:
    """Python would take it for one from the end."""
    with offering(["one", "two"]), pytest.raises(SerializationError, match="outside the call"):
        take_offered(-1)


@pytest.mark.parametrize("place", [None, "0", 0.5, (0,)])
def test_what_is_no_place_is_refused(place: Any) -> None:
    with offering(["one", "two"]), pytest.raises(SerializationError, match="outside the call"):
        take_offered(place)


def test_messages_made_and_read_inside_one_another_do_not_mix() -> None:
    with collecting() as outer:
        collect("a", "")
        with collecting() as inner:
            assert collect("b", "") == 0
        assert collect("c", "") == 1
    assert (outer, inner) == ({"a": 0, "c": 1}, {"b": 0})
    with offering(["x"]):
        with offering(["y"]):
            assert take_offered(0) == "y"
        assert take_offered(0) == "x"


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), collecting():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), offering(["x"]):
        raise ZeroDivisionError
    with pytest.raises(SerializationError):
        collect("a", "it")
    with pytest.raises(SerializationError):
        take_offered(0)


def test_threads_do_not_see_each_other() -> None:
    refused: list[str] = []

    def other() -> None:
        for use in (lambda: collect("b", "it"), lambda: take_offered(0)):
            try:
                use()
            except SerializationError as error:
                refused.append(str(error))

    with collecting() as handles, offering(["x"]):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert handles == {}
    assert len(refused) == 2


def test_a_message_may_be_full_of_handles() -> None:
    """Each is found at once, not by a look at all before it."""
    many = [Handle() for _ in range(65_535)]
    places = []
    deadline = monotonic() + 3
    with collecting() as handles:
        for handle in many:
            places.append(collect(handle, ""))
            if monotonic() > deadline:
                raise TimeoutError(f"only {len(places)} in 3 seconds")
    assert places == list(range(65_535))
    assert list(handles) == many


def test_what_is_offered_may_be_offered_again_later() -> None:
    assert offered() == ()
    with offering(["one", "two"]):
        later = offered()
    assert offered() == ()
    with offering(later):
        assert take_offered(1) == "two"

"""Chains and groups of exceptions that travel, and the remote tracebacks they bring along."""

from __future__ import annotations

from typing import Any

import exception_stage
import pytest
from exception_stage import KeywordOnly, OtherArguments, raised, shown, travel

from farcall.errors import WorkerLostError


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, members: list[Exception], extra: int) -> OwnGroup:
        self = super().__new__(cls, "own", members)
        self.extra = extra
        return self

    extra: int


# Chains and groups


def chained() -> BaseException:
    try:
        try:
            raise KeywordOnly(code=1)
        except KeywordOnly as inner:
            raise OtherArguments("a", 2) from inner
    except OtherArguments:
        try:
            raise KeyError("late")
        except KeyError as error:
            return error


def test_cause_and_context_arrive_with_their_own_tracebacks() -> None:
    got = travel(chained())
    assert type(got) is KeyError
    assert got.__cause__ is None
    assert not got.__suppress_context__
    middle = got.__context__
    assert type(middle) is OtherArguments
    assert middle.__suppress_context__
    assert type(middle.__cause__) is KeywordOnly
    assert middle.__cause__ is middle.__context__
    for error in (got, middle, middle.__cause__):
        assert "in chained\n" in error.__notes__[-1]


def test_raise_from_none_arrives() -> None:
    error = chained()
    error.__suppress_context__ = True
    got = travel(error)
    assert got.__cause__ is None
    assert got.__context__ is not None
    assert got.__suppress_context__


def test_circles_arrive() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    first.me = first  # type: ignore[attr-defined]
    got = travel(first)
    assert got.__cause__.__context__ is got
    assert got.me is got


def test_exceptions_in_arguments_and_attributes_arrive_as_those() -> None:
    error = ValueError("outer", KeywordOnly(code=1))
    error.original = error.args[1]  # type: ignore[attr-defined]
    got = travel(error)
    assert type(got.args[1]) is KeywordOnly
    assert got.original is got.args[1]


def test_a_long_chain_is_bounded() -> None:
    error = first = ValueError(0)
    for number in range(1, 5000):
        error.__context__ = ValueError(number)
        error = error.__context__
    got = travel(first)
    length = 0
    while got is not None:
        assert got.args == (length,)
        got, length = got.__context__, length + 1
    assert length == 1000


def test_groups_arrive_with_their_members() -> None:
    lost = WorkerLostError("gone", "worker2")
    lost.__cause__ = KeyError("inner")
    nested: Any = ExceptionGroup("nested", [raised(lost)])  # type: ignore[type-var]
    group = ExceptionGroup("several", [KeywordOnly(code=1), nested])
    group.add_note("own")
    got = travel(raised(group))
    assert type(got) is ExceptionGroup
    assert got.message == "several"
    first: Any
    first, nested = got.exceptions
    assert (type(first), first.code) == (KeywordOnly, 1)
    assert nested.exceptions[0].worker == "worker2"
    assert type(nested.exceptions[0].__cause__) is KeyError
    assert "in raised\n" in nested.exceptions[0].__notes__[-1]
    assert got.__notes__[0] == "own"
    matching, _ = got.split(KeywordOnly)
    assert matching is not None
    assert len(matching.exceptions) == 1


def test_groups_of_base_exceptions_and_of_own_classes_arrive() -> None:
    got = travel(BaseExceptionGroup("b", [KeyboardInterrupt(), ValueError(1)]))
    assert type(got) is BaseExceptionGroup
    assert [type(member) for member in got.exceptions] == [KeyboardInterrupt, ValueError]
    got = travel(OwnGroup([ValueError(1)], 5))
    assert type(got) is OwnGroup
    assert got.extra == 5
    assert got.exceptions[0].args == (1,)


def test_a_group_may_hold_what_it_is_the_cause_of() -> None:
    error = ValueError("member")
    error.__cause__ = ExceptionGroup("g", [error])
    got = travel(error)
    assert got.__cause__.exceptions == (got,)


def test_deeply_nested_and_very_large_groups_arrive() -> None:
    group: ExceptionGroup[Exception] = ExceptionGroup("0", [ValueError()])
    for number in range(1, 900):
        group = ExceptionGroup(str(number), [group])
    got, depth = travel(group), 0
    while isinstance(got, ExceptionGroup):
        got, depth = got.exceptions[0], depth + 1
    assert depth == 900
    got = travel(ExceptionGroup("large", [ValueError(number) for number in range(3000)]))
    assert len(got.exceptions) == 999
    assert "2001 more exceptions of this group were left out" in got.__notes__


# The remote traceback


def test_the_remote_traceback_is_a_note_below_its_own() -> None:
    error = raised(ValueError("x"))
    error.add_note("own one")
    error.add_note("own two")
    got = travel(error, "worker1", "train")
    assert got.__notes__[:2] == ["own one", "own two"]
    (note,) = got.__notes__[2:]
    first, *rest = note.removeprefix("\n").splitlines()
    assert first == "Remote traceback (worker 'worker1', in `train`):"
    assert rest[0].startswith(f'  File "{exception_stage.__file__}", line ')
    assert rest[0].endswith(", in raised")
    assert rest[1] == "    raise error"
    assert shown(got).endswith(f"ValueError: x\nown one\nown two\n{note}\n")


def test_each_worker_on_the_way_adds_its_note() -> None:
    first = travel(raised(ValueError("x")), "worker2", "inner")
    second = travel(raised(first), "worker1", "outer")
    assert [note.splitlines()[1] for note in second.__notes__] == [
        "Remote traceback (worker 'worker2', in `inner`):",
        "Remote traceback (worker 'worker1', in `outer`):",
    ]


def test_an_exception_without_frames_says_where_it_comes_from() -> None:
    got = travel(ValueError("x"), "worker1", "int")
    assert "worker 'worker1', in `int`" in got.__notes__[-1]


@pytest.mark.parametrize("notes", [("a",), ["a", 5], 7, None])
def test_odd_notes_do_no_harm(notes: Any) -> None:
    error = raised(ValueError("x"))
    error.__notes__ = notes
    got = travel(error)
    assert all(type(note) is str for note in got.__notes__)
    assert "Remote traceback" in got.__notes__[-1]
    assert shown(got)

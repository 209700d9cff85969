"""What a worker with the option `allow` takes from others, and what a caller takes from those it calls.

A hostile member of the group sends what honest programs never send: through the public API where pickle can be made to
say it (`Reduced`), and else from a process whose `pickle.dumps` gives bytes that were written by hand.
"""

from __future__ import annotations

import copyreg
import datetime
import subprocess
import sys
import textwrap
import traceback
import uuid
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farcall.collectives import _look_for_missing, _time_is_over, coming_to_the_others, waiting_for_each_other
from farcall.errors import NotAllowedError, RemoteError, RpcError
from farcall.options import RpcBackendOptions
from farcall.testing import LocalGroup

pytestmark = pytest.mark.timeout(60)

SOON = 20.0


class Reduced:
    """What a pickle can be made to say."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


class New:
    """An object of that class with that state, whose constructor does not run."""

    def __init__(self, cls: type, state: Any) -> None:
        self._cls, self._state = cls, state

    @property
    def __class__(self) -> type:  # type: ignore[override]  # pickle compares it with what is to be made
        return self._cls

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (self._cls,), self._state  # type: ignore[attr-defined]


class Settings:
    """There is one of it in a process."""

    _only: Settings | None = None
    limit = 5

    def __new__(cls) -> Settings:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only


class Named:
    """Makes a new one each time, by a `__new__` of its own."""

    name: str

    def __new__(cls, name: str) -> Named:
        self = super().__new__(cls)
        self.name = name
        return self

    def __getnewargs__(self) -> tuple[str]:
        return (self.name,)


received: list[Any] = []


def receive(value: Any) -> str:
    received.append(value)
    return type(value).__name__


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def raise_import_error(module: str) -> None:
    error = ImportError("no such name", name=module)
    error.name_from = "x"  # type: ignore[attr-defined]
    raise error


def raise_shared_groups(levels: int) -> None:
    group: ExceptionGroup[Exception] = ExceptionGroup("0", [ValueError("inner")])
    for level in range(1, levels):
        group = ExceptionGroup(str(level), [group, group])
    raise group


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    received.clear()
    with LocalGroup(2, RpcBackendOptions(allow=[__name__])) as group:
        yield group
    received.clear()


def call(group: LocalGroup, function: Any, *args: Any) -> Any:
    return group.agents[0].call("worker1", function, args, None, SOON).wait()


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that must not be imported."""
    name = "farcall_test_trap"
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    assert name not in sys.modules, "it was imported"
    sys.modules.pop(name, None)


# Exceptions that have the interpreter do something


def test_printing_an_import_error_from_a_caller_imports_nothing(group: LocalGroup, trap: str) -> None:
    forged = Reduced(ImportError, ("no such name",), {"name": trap, "name_from": "x"})
    assert "no such name" in call(group, printed, forged)
    call(group, receive, forged)
    assert received[-1].name == trap
    assert getattr(received[-1], "name_from", None) is None


@pytest.mark.parametrize("allow", [None, [__name__]])
def test_printing_an_import_error_from_a_callee_imports_nothing(trap: str, allow: list[str] | None) -> None:
    with LocalGroup(2, RpcBackendOptions(allow=allow)) as group:  # type: ignore[arg-type]
        with pytest.raises(ImportError) as raised:
            call(group, raise_import_error, trap)
        assert raised.value.name == trap
        assert getattr(raised.value, "name_from", None) is None
        assert "no such name" in printed(raised.value)


class OwnState(ImportError):
    """Restores itself, as some classes do."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)


def test_nor_one_that_restores_itself(group: LocalGroup, trap: str) -> None:
    with pytest.raises(NotAllowedError):
        call(group, printed, Reduced(OwnState, ("no such name",), {"name": trap, "name_from": "x"}))
    assert "no such name" in call(group, printed, Reduced(OwnState, ("no such name",), {"name": trap}))


class Asked:
    def __dir__(self) -> list[str]:
        received.append("asked")
        return []


@pytest.mark.parametrize(
    "forged",
    [
        Reduced(AttributeError, ("a",), {"name": "nome", "obj": Asked()}),
        Reduced(NameError, ("a",), {"name": "receivd"}),
        Reduced(SyntaxError, ("a",), {"print_file_and_line": 1}),
    ],
)
def test_printing_an_error_asks_nobody_for_a_better_name(group: LocalGroup, forged: Any) -> None:
    text = call(group, printed, forged)
    assert "Did you mean" not in text
    assert received == []


@pytest.mark.parametrize(
    "forged",
    [
        Reduced(SyntaxError, ("a", ("f", 1, 1, "text", 1, 1 << 40))),
        Reduced(SyntaxError, ("a", ("f", 1, 1 << 40, "text"))),
        Reduced(SyntaxError, ("a",), {"text": ["x"], "lineno": 1}),
        Reduced(SyntaxError, ("a",), {"filename": 0}),
        Reduced(NameError, ("a",), {"args": ("a",), "__notes__": "no list"}),
        Reduced(ValueError, ("a",), {"__notes__": [[1]]}),
        Reduced(ValueError, ("a",), {"__cause__": ValueError()}),
        Reduced(ValueError, ("a",), {"__traceback__": None}),
        Reduced(ValueError, ("a",), {"add_note": receive}),
        Reduced(ValueError, ("a",), {"with_traceback": receive}),
        Reduced(ImportError, ("a",), {"name": 5}),
        Reduced(UnicodeDecodeError, ("utf8", b"abc", 0, 1, "r"), {"reason": ["x"]}),
        Reduced(UnicodeDecodeError, ("utf8", b"abc", 0, 1, "r"), {"start": 1 << 40}),
        Reduced(SyntaxError, ("a", range(1 << 40))),
        Reduced(ExceptionGroup, ("g", range(1 << 40))),
    ],
)
def test_an_exception_that_must_not_be_looked_at_is_refused(group: LocalGroup, forged: Any) -> None:
    with pytest.raises(NotAllowedError):
        call(group, receive, forged)
    assert received == []


def shared_lists(levels: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value, value]
    return value


def circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("argument", [shared_lists(60), circle(), ["x" * (1 << 16)] * (1 << 12)])
def test_an_exception_that_takes_all_memory_to_print_is_refused(group: LocalGroup, argument: Any) -> None:
    with pytest.raises(NotAllowedError, match="cannot be printed"):
        call(group, receive, ValueError(argument))
    assert call(group, receive, argument) == "list", "that is for exceptions alone"


def test_usual_exceptions_arrive(group: LocalGroup) -> None:
    try:
        compile("a b", "f.py", "exec")
    except SyntaxError as error:
        sent: list[BaseException] = [error]
    own = ValueError("v", [1, {"a": (2,)}])
    own.code = 5  # type: ignore[attr-defined]
    own.add_note("noted")
    sent += [own, FileNotFoundError(2, "no", "x"), ExceptionGroup("g", [own, own]), StopIteration(5)]
    for error in sent:
        call(group, receive, error)
        assert type(received[-1]) is type(error)
        assert printed(received[-1]).splitlines()[-1] == printed(error).splitlines()[-1]
    assert (received[1].code, received[1].__notes__) == (5, ["noted"])


def test_arguments_by_a_state_are_left_out(group: LocalGroup) -> None:
    """They would be made a tuple, however many there are."""
    call(group, receive, Reduced(ValueError, ("v",), {"args": range(1 << 40)}))
    assert received[0].args == ("v",)


def exit_remotely() -> None:
    sys.exit(5)


def test_what_would_end_a_restricted_program_arrives_as_text(group: LocalGroup) -> None:
    with pytest.raises(RemoteError, match="SystemExit"):
        call(group, exit_remotely)


@pytest.mark.parametrize("allow", [None, [__name__]])
def test_groups_that_hold_the_same_too_often_arrive_as_text(allow: list[str] | None) -> None:
    with LocalGroup(2, RpcBackendOptions(allow=allow)) as group:  # type: ignore[arg-type]
        with pytest.raises(RemoteError, match=r"29 \(2 sub-exceptions\)") as raised:
            call(group, raise_shared_groups, 30)
        assert len(printed(raised.value)) < 10_000
        with pytest.raises(ExceptionGroup):
            call(group, raise_shared_groups, 3)


# Plain types with states that cannot be


@pytest.mark.parametrize(
    "forged",
    [
        Reduced(datetime.date, (b"\0\0\1\0",)),
        Reduced(datetime.date, (b"\7\xe4\2\x1e",)),
        Reduced(datetime.datetime, (b"\7\xe4\1\1\xff\0\0\0\0\0",)),
        Reduced(datetime.datetime, (b"\7\xe4\1\1\0\xff\xff\xff\xff\xff",)),
        Reduced(datetime.time, (b"\0\xff\xff\0\0\0",)),
        Reduced(datetime.time, (b"\0\0\0\xff\xff\xff", datetime.UTC)),
        New(uuid.UUID, {"int": -1}),
        New(uuid.UUID, {"int": "x"}),
        New(uuid.UUID, {"int": 1, "is_safe": receive}),
        Reduced(uuid.UUID, ("0" * 32,)),
        Reduced(type(Path()), (["a"],)),
        Reduced(Fraction, (1 << 10_000_000, 3)),
        Reduced(bytearray, ("x", "rot13")),
    ],
)
def test_a_plain_value_with_a_state_that_cannot_be_is_refused(group: LocalGroup, forged: Any) -> None:
    with pytest.raises(NotAllowedError):
        call(group, receive, forged)
    assert received == []


@pytest.mark.parametrize(
    "value",
    [
        datetime.date(1, 1, 1),
        datetime.date(9999, 12, 31),
        datetime.datetime(2024, 2, 29, 23, 59, 59, 999_999, datetime.UTC, fold=1),
        datetime.time(1, 2, 3, 4, fold=1),
        datetime.timedelta(-1, 2, 3),
        datetime.timezone(datetime.timedelta(hours=2), "there"),
        uuid.UUID(int=(1 << 128) - 1),
    ],
)
def test_plain_values_arrive(group: LocalGroup, value: Any) -> None:
    call(group, receive, value)
    assert received == [value]
    assert getattr(received[0], "fold", 0) == getattr(value, "fold", 0)


def test_a_type_of_elements_is_not_printed_whatever_that_takes(group: LocalGroup) -> None:
    bomb = shared_lists(60)
    states: list[Any] = [
        (3, "|", (np.dtype("i4"), bomb), None, None, 4, 4, 0),
        (3, "|", None, (bomb,), {}, 4, 4, 0),
        (3, bomb, None, None, None, 4, 4, 0),
        (3, "|", None, ("a",), {"a": (np.dtype("i4"), bomb)}, 4, 4, 0),
    ]
    for state in states:
        with pytest.raises(RpcError, match="cannot be rebuilt"):
            call(group, receive, Reduced(np.dtype, ("V4", False, True), state))


# What a pickle changes and calls


def test_what_a_class_hands_out_again_is_not_changed(group: LocalGroup) -> None:
    Settings()
    with pytest.raises(NotAllowedError, match="has not created"):
        call(group, receive, Reduced(Settings, (), {"limit": 0}))
    assert Settings().limit == 5
    call(group, receive, Named("own"))
    assert received[0].name == "own", "one that makes a new object each time gets its state"


# The functions by which workers wait for each other


@pytest.mark.parametrize(
    ("function", "rest"),
    [(_look_for_missing, ()), (coming_to_the_others, ()), (waiting_for_each_other, ("a", 1)), (_time_is_over, (1.0,))],
)
def test_what_is_no_key_is_refused(function: Any, rest: tuple[Any, ...]) -> None:
    with LocalGroup(2, RpcBackendOptions(allow=[])) as group:
        keys: list[Any] = [5, ("a",), [[]], (("a",), (0,), 0)]
        for key in keys:
            with pytest.raises(RpcError, match="key for _all_gather that is not valid"):
                group.agents[0].call("worker1", function, (key, *rest), None, SOON).wait()


# From a process that pickles by hand

_HOSTILE = """
import pickle, sys, threading
payloads = {}
def dumps(value, *args, real=pickle.dumps, **kwargs):
    if type(value) is tuple and len(value) == 1 and type(value[0]) is bytes and value[0] in payloads:
        return payloads[value[0]]
    return real(value, *args, **kwargs)
pickle.dumps = dumps  # before farcall takes it
import farcall as rpc
from farcall import collectives

kind, port = sys.argv[1:]
options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", allow=[])
if kind == "honest":
    rpc.init_rpc("honest", rank=0, world_size=2, rpc_backend_options=options)
    rpc.shutdown()
    print("survived")
else:
    rpc.init_rpc("hostile", rank=1, world_size=2, rpc_backend_options=options)
    deep = b")" + b"\\x85" * 400_000
    payloads[b"deep"] = b"\\x80\\x05" + deep + b"\\x85."
    payloads[b"set"] = b"\\x80\\x05\\x8f(" + deep + b"\\x90\\x85."
    payloads[b"memo"] = b"\\x80\\x05Nr\\xff\\xff\\xff\\x0f\\x85."
    payloads[b"bytes"] = b"\\x80\\x05\\x96" + (1 << 33).to_bytes(8, "little") + b"\\x85."
    payloads[b"hash"] = b"\\x80\\x05\\x8f(K\\x00\\x94" + b"".join(
        b"h" + bytes([n]) + b"\\x86\\x94" for n in range(100)
    ) + b"\\x90\\x85."
    for name in payloads:
        try:
            rpc.rpc_sync("honest", collectives._look_for_missing, args=(name,), timeout=20)
        except rpc.NotAllowedError as error:
            print(name.decode(), "refused")
        except rpc.RpcError as error:
            print(name.decode(), type(error).__name__, error)
    rpc.shutdown()
"""


def test_a_pickle_that_would_end_the_process_is_refused(free_port: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_HOSTILE)]
    honest, hostile = (
        subprocess.Popen([*command, kind, str(free_port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for kind in ("honest", "hostile")
    )
    try:
        said, errors = hostile.communicate(timeout=50)
        assert honest.communicate(timeout=10)[0].strip() == "survived", errors
    finally:
        for process in (honest, hostile):
            process.kill()
            process.communicate()
    lines = said.splitlines()
    assert [line.split()[0] for line in lines] == ["deep", "set", "memo", "bytes", "hash"]
    assert [line for line in lines if "refused" not in line and "cannot be rebuilt" not in line] == []

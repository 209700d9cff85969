"""Exceptions that travel: their types, arguments, attributes and texts arrive."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from exception_stage import KeywordOnly, OtherArguments, raised, travel
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import RemoteError, RpcTimeoutError, WorkerLostError
from farcall.serialization import encode_failure


class Wrapping(Exception):
    """Its constructor adds to the message: run twice, it would add twice."""

    def __init__(self, text: str) -> None:
        super().__init__(f"<{text}>")


class WithoutSuper(Exception):
    def __init__(self, a: int, b: int) -> None:
        self.total = a + b


class Slotted(Exception):
    __slots__ = ("__secret", "absent", "nothing", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.nothing = None
        self.__secret = "s"

    def secret(self) -> str:
        return self.__secret


class CreatedOnce(Exception):
    """Its constructor works only once."""

    created = False

    def __init__(self, text: str) -> None:
        if CreatedOnce.created:
            raise RuntimeError("only once")
        CreatedOnce.created = True
        super().__init__(text)


class OwnNew(Exception):
    def __new__(cls, a: int, b: int) -> OwnNew:
        return super().__new__(cls, a)

    def __init__(self, a: int, b: int) -> None:
        self.b = b


class OddOsError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)
        self.path = path


class Mixed(RpcTimeoutError, ConnectionError):
    """Laid out as an OSError, though RuntimeError comes first among its bases."""

    def __init__(self, *, worker: str) -> None:
        super().__init__(f"{worker} is late")
        self.worker = worker


class OwnReduce(Exception):
    """Holds what cannot be pickled, and says how to do without."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return OwnReduce, self.args


class WrongReduce(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> Any:
        return WrongReduce, ("too", "many")


class Base(BaseException):
    pass


# Types, arguments, attributes


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (ValueError("x", 1, None), []),
        (ValueError(), []),
        (KeyError("k"), []),
        (Base(1), []),
        (KeyboardInterrupt(), []),
        (GeneratorExit(), []),
        (SystemExit(3), ["code"]),
        (SystemExit(), ["code"]),
        (StopIteration("v"), ["value"]),
        (StopAsyncIteration(1), []),
        (asyncio.CancelledError("c"), []),
        (MemoryError("m"), []),
        (RecursionError("r"), []),
        (OSError("text only"), ["errno", "strerror"]),
        (OSError(5, "broken"), ["errno", "strerror", "filename"]),
        (FileNotFoundError(2, "gone", "a"), ["errno", "strerror", "filename", "filename2"]),
        (OSError(18, "cross", "a", None, "b"), ["errno", "filename", "filename2"]),
        (BlockingIOError(11, "later", 7), ["errno", "characters_written"]),
        (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "bad"), ["encoding", "object", "start", "end", "reason"]),
        (UnicodeEncodeError("ascii", "aé", 1, 2, "bad"), ["encoding", "object", "start", "end", "reason"]),
        (UnicodeTranslateError("aé", 1, 2, "bad"), ["object", "start", "end", "reason"]),
        (
            SyntaxError("s", ("f.py", 3, 2, "x = (", 3, 4)),
            ["msg", "filename", "lineno", "offset", "text", "end_lineno"],
        ),
        (ImportError("i", name="n", path="p"), ["msg", "name", "path"]),
        (NameError("n", name="x"), ["name"]),
        (AttributeError("a", name="x"), ["name"]),
        (subprocess.CalledProcessError(2, ["ls"], b"out", b"err"), ["returncode", "cmd", "output", "stderr"]),
        (json.JSONDecodeError("bad", "doc", 1), ["msg", "doc", "pos", "lineno", "colno"]),
        (asyncio.IncompleteReadError(b"ab", 5), ["partial", "expected"]),
        (np.exceptions.AxisError(3, 2), ["axis", "ndim"]),
        (KeywordOnly(code=5), ["code"]),
        (OtherArguments("a", 2), ["first", "second"]),
        (Wrapping("x"), []),
        (WithoutSuper(1, 2), ["total"]),
        (Slotted(4), ["value", "nothing"]),
        (CreatedOnce("first"), []),
        (OwnNew(1, 2), ["b"]),
        (OddOsError("p"), ["errno", "strerror", "filename", "path"]),
        (WrongReduce("x"), []),
        (Mixed(worker="worker3"), ["worker", "errno"]),
        (RpcTimeoutError("late"), []),
        (WorkerLostError("lost", "worker3"), ["worker", "errno"]),
        (RemoteError("m", "T", "r", "t"), ["type_name", "message", "traceback"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_type_args_text_and_attributes_arrive(error: BaseException, attributes: list[str]) -> None:
    got = travel(error)
    assert type(got) is type(error)
    assert got.args == error.args
    assert str(got) == str(error)
    assert repr(got) == repr(error)
    for name in attributes:
        assert getattr(got, name) == getattr(error, name)
    assert (vars(got) | {"__notes__": []}) == (vars(error) | {"__notes__": []})


def test_slots_arrive_unset_if_they_are_unset() -> None:
    got = travel(Slotted(4))
    assert not hasattr(got, "absent")
    assert got.secret() == "s"


def test_attributes_of_all_kinds_arrive() -> None:
    error = ValueError("x", {"a": [1]}, np.arange(3))
    error.config = {"b": (1, 2)}  # type: ignore[attr-defined]
    error.function = lambda x: x + 1  # type: ignore[attr-defined]
    got = travel(error)
    assert got.args[:2] == ("x", {"a": [1]})
    assert got.args[2].tolist() == [0, 1, 2]
    assert got.config == {"b": (1, 2)}
    assert got.function(1) == 2


def test_what_an_attribute_error_was_about_stays_at_home() -> None:
    try:
        threading.absent  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        got = travel(error)
    assert got.name == "absent"
    assert got.obj is None


def test_a_class_that_says_how_to_pickle_is_obeyed() -> None:
    error = OwnReduce("x")
    error.extra = 1  # type: ignore[attr-defined]
    error.add_note("own")
    got = travel(error)
    assert type(got) is OwnReduce
    assert got.args == ("x",)
    assert not got.lock.locked()
    assert not hasattr(got, "extra")
    assert got.__notes__[0] == "own"


def test_a_local_class_arrives() -> None:
    class Local(Exception):
        def __init__(self, *, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    got = travel(Local(code=3))
    assert type(got) is Local
    assert got.code == 3


def test_a_local_class_arrives_in_another_process() -> None:
    class Local(ValueError):
        def doubled(self) -> int:
            return 2 * int(self.args[0])

    payload = encode_failure(raised(Local(4)), "worker1", "train")
    program = (
        "import sys; from farcall.serialization import decode_failure\n"
        "error = decode_failure(sys.stdin.buffer.read())\n"
        "print(type(error).__name__, isinstance(error, ValueError), error.doubled())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=payload, capture_output=True, timeout=50, check=True)
    assert done.stdout == b"Local True 8\n"


def test_what_cannot_be_pickled_arrives_as_text() -> None:
    lock = threading.Lock()
    with socket.socket() as connection:
        error = ValueError("x", lock, [1, lock])
        error.connection = connection  # type: ignore[attr-defined]
        error.fine = 1  # type: ignore[attr-defined]
        got = travel(error)
        assert got.connection == repr(connection)
    assert type(got) is ValueError
    assert got.args == ("x", repr(lock), f"[1, {lock!r}]")
    assert vars(got)["fine"] == 1


def test_the_exception_that_travels_is_not_changed() -> None:
    error = ValueError("x", threading.Lock())
    error.add_note("own")
    args, attributes = error.args, dict(vars(error))
    encode_failure(error, "worker1", "train")
    assert error.args is args
    assert vars(error) == attributes
    assert error.__notes__ == ["own"]


# Texts


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_arrives(text: str) -> None:
    error = ValueError(text)
    error.add_note(text)
    got = travel(error, text, text)
    assert got.args == (text,)
    assert got.__notes__[0] == text


def test_an_enormous_message_arrives() -> None:
    text = "ж" * 5_000_000
    got = travel(ValueError(text))
    assert got.args == (text,)
    error = ValueError("x")
    error.add_note(text)
    assert len(encode_failure(error, "worker1", "train")) < 2 * len(text.encode())  # once, that is


def test_a_recursion_error_arrives() -> None:
    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    got = travel(caught.value)
    assert type(got) is RecursionError
    assert "frames left out" in got.__notes__[-1]
    assert len(got.__notes__[-1]) < 20_000

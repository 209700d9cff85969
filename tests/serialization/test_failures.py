from __future__ import annotations

import asyncio
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import RemoteError, RpcTimeoutError, WorkerLost
from farcall.serialization import decode_failure, encode_failure
from farcall.serialization import failures as module_under_test


def travel(error: BaseException, worker: str = "worker1", function: str = "train") -> Any:
    return decode_failure(encode_failure(error, worker, function))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OtherArguments(ValueError):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first}-{second}")
        self.first, self.second = first, second


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


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, members: list[Exception], extra: int) -> OwnGroup:
        self = super().__new__(cls, "own", members)
        self.extra = extra
        return self

    extra: int


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
        (WorkerLost("lost", "worker3"), ["worker", "errno"]),
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
    assert got.fine == 1


def test_the_exception_that_travels_is_not_changed() -> None:
    error = ValueError("x", threading.Lock())
    error.add_note("own")
    args, attributes = error.args, dict(vars(error))
    encode_failure(error, "worker1", "train")
    assert error.args is args
    assert vars(error) == attributes
    assert error.__notes__ == ["own"]


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
    lost = WorkerLost("gone", "worker2")
    lost.__cause__ = KeyError("inner")
    group = ExceptionGroup("several", [KeywordOnly(code=1), ExceptionGroup("nested", [raised(lost)])])  # type: ignore[list-item]
    group.add_note("own")
    got = travel(raised(group))
    assert type(got) is ExceptionGroup
    assert got.message == "several"
    first, nested = got.exceptions
    assert (type(first), first.code) == (KeywordOnly, 1)
    assert nested.exceptions[0].worker == "worker2"
    assert type(nested.exceptions[0].__cause__) is KeyError
    assert "in raised\n" in nested.exceptions[0].__notes__[-1]
    assert got.__notes__[0] == "own"
    assert len(got.split(KeywordOnly)[0].exceptions) == 1


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
    group = ExceptionGroup("0", [ValueError()])
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
    assert rest[0].startswith(f'  File "{__file__}", line ')
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


# What cannot be rebuilt


class Vanishing(Exception):
    pass


def vanish(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Any:
    payload = encode_failure(error, "worker1", "train")
    monkeypatch.delattr(sys.modules[__name__], "Vanishing")
    return decode_failure(payload)


def test_a_class_that_is_not_here_becomes_a_remote_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(Vanishing("told", 5))
    error.add_note("own")
    error.__cause__ = KeyError("inner")
    got = vanish(error, monkeypatch)
    assert type(got) is RemoteError
    assert got.type_name == f"{__name__}.Vanishing"
    assert got.message == "('told', 5)"
    assert "in raised" in got.traceback
    assert str(got).startswith(f"worker 'worker1' raised {__name__}.Vanishing in `train`: ('told', 5)\n(it cannot be ")
    assert "Vanishing" in str(got).splitlines()[1]
    assert got.__notes__[0] == "own"
    assert "in raised" in got.__notes__[1]
    assert type(got.__cause__) is KeyError


def test_a_missing_class_within_does_not_cost_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Vanishing("inner")
    error = ValueError("x", [inner])
    error.kind = Vanishing  # type: ignore[attr-defined]
    error.__cause__ = ExceptionGroup("g", [inner, KeyError(1)])
    got = vanish(error, monkeypatch)
    assert type(got) is ValueError
    assert got.args[0] == "x"
    assert got.args[1] == "[Vanishing('inner')]"
    assert "Vanishing" in got.kind
    assert [type(member) for member in got.__cause__.exceptions] == [RemoteError, KeyError]


def test_a_class_that_cannot_be_pickled_becomes_a_remote_error() -> None:
    class Holding(Exception):
        lock = threading.Lock()

    got = travel(raised(Holding("told")))
    assert type(got) is RemoteError
    assert got.message == "told"
    assert "in raised" in got.traceback


@pytest.mark.parametrize("payload", [b"", b"garbage", pickle.dumps(5), pickle.dumps(("w", "f", [])), memoryview(b"x")])
def test_garbage_becomes_a_remote_error(payload: Any) -> None:
    assert type(decode_failure(payload)) is RemoteError


def test_a_payload_of_something_else_than_an_exception_becomes_a_remote_error() -> None:
    node = ("builtins.int", "m", [], ("whole", pickle.dumps(5)), None, None, False)
    got = decode_failure(pickle.dumps(("w", "f", [node])))
    assert type(got) is RemoteError
    assert got.message == "m"


# Hostile exceptions


class EvilText(Exception):
    def __str__(self) -> str:
        raise SystemExit("in str")

    __repr__ = __str__


class EvilString(str):
    def __reduce__(self) -> Any:
        raise SystemExit("in reduce")


class EvilStringText(Exception):
    def __str__(self) -> str:
        return EvilString("text")


class EvilAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt

    def __setattr__(self, name: str, value: Any) -> None:
        raise KeyboardInterrupt


class EvilReduce(Exception):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SystemExit("in reduce")


class EvilRebuild(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, ("in rebuild",)


class EvilState(Exception):
    def __setstate__(self, state: Any) -> None:
        raise KeyboardInterrupt


class EvilProperties(Exception):
    __dict__ = args = __cause__ = __context__ = __notes__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __class__ = int  # type: ignore[assignment]


class EvilMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise ZeroDivisionError

    def __hash__(cls) -> int:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "cls", [EvilText, EvilStringText, EvilAttributes, EvilReduce, EvilRebuild, EvilState, EvilProperties]
)
def test_hostile_exceptions_arrive_with_their_type(cls: Any) -> None:
    got = travel(raised(cls("told")), "worker1", "train")
    assert type(got) is cls
    assert vars(BaseException)["args"].__get__(got) == ("told",)
    notes = vars(BaseException)["__dict__"].__get__(got)["__notes__"]
    assert "in raised" in notes[-1]


def test_a_hostile_metaclass_leaves_the_text() -> None:
    cls = EvilMeta("Evil", (Exception,), {})
    got = travel(raised(cls("told")))
    assert type(got) is RemoteError
    assert got.message == "told"
    assert got.type_name.endswith("Evil")


class Evil:
    def __reduce__(self) -> Any:
        raise SystemExit

    def __repr__(self) -> str:
        raise KeyboardInterrupt


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupting:
    def __reduce__(self) -> Any:
        return interrupt, ()

    def __repr__(self) -> str:
        return "an interrupting one"


def test_hostile_values_arrive_as_text() -> None:
    error = ValueError(Evil(), EvilString("text"), Interrupting())
    vars(error)[Evil()] = "a key that is no name"
    error.add_note(EvilString("note"))
    got = travel(error)
    assert type(got) is ValueError
    assert got.args[0].endswith("Evil>")
    assert got.args[1:] == ("'text'", "an interrupting one")
    assert got.__notes__[0] == "note"
    assert list(vars(got)) == ["__notes__"]


def test_a_hostile_cause_does_not_cost_the_whole() -> None:
    error = ValueError("told")
    error.__cause__ = EvilMeta("Evil", (Exception,), {})("cause")
    got = travel(error)
    assert type(got) is ValueError
    assert type(got.__cause__) is RemoteError
    assert got.__cause__.message == "cause"


def test_a_class_that_cannot_be_made_again_leaves_the_text() -> None:
    class Once(Exception):
        made = False

        def __init_subclass__(cls) -> None:
            if Once.made:
                raise KeyboardInterrupt
            Once.made = True

    class Local(Once):
        pass

    payload = encode_failure(Local("told"), "worker1", "train")
    got = decode_failure(payload)
    assert type(got) is RemoteError
    assert got.message == "told"


def test_an_encoder_that_fails_altogether_leaves_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "format_frames", lambda trace: 1 / 0)
    got = travel(ValueError("told"))
    assert (type(got), got.type_name, got.message) == (RemoteError, "ValueError", "told")
    monkeypatch.setattr(module_under_test, "_Encoder", None)
    got = travel(ValueError("told"))
    assert (type(got), got.type_name, got.message) == (RemoteError, "ValueError", "told")


def test_an_interrupt_passes_through_the_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode_failure(ValueError("x"), "worker1", "train")
    monkeypatch.setattr(module_under_test, "loads", lambda payload: interrupt())
    with pytest.raises(KeyboardInterrupt):
        decode_failure(payload)


def test_an_exit_by_a_signal_handler_passes_through_the_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(*_: object) -> None:
        sys.exit(3)

    def signalled(_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, terminate)
    try:
        payload = encode_failure(ValueError("x"), "worker1", "train")
        monkeypatch.setattr(module_under_test, "loads", signalled)
        with pytest.raises(SystemExit):
            decode_failure(payload)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_exit_by_what_is_rebuilt_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode_failure(ValueError("x"), "worker1", "train")
    monkeypatch.setattr(module_under_test, "loads", lambda payload: sys.exit(3))
    assert type(decode_failure(payload)) is RemoteError

"""Exceptions that cannot be rebuilt, or do harm where they can: the text is left, and nothing else happens."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from typing import Any

import pytest
from exception_stage import raised, travel

from farcall.errors import RemoteError
from farcall.serialization import decode_failure, describe_failure, encode_failure
from farcall.serialization import exceptions as module_under_test

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
    assert "Vanishing" in vars(got)["kind"]
    assert isinstance(got.__cause__, ExceptionGroup)
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
    node: tuple[Any, ...] = ("builtins.int", "m", [], ("whole", pickle.dumps(5)), None, None, False)
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
    vars(error)[Evil()] = "a key that is no name"  # type: ignore[index]
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


# From a worker that is not trusted


def forged(cls: type, slots: dict[str, Any], attributes: dict[str, Any]) -> bytes:
    """A failure with that state."""
    values = [{name: (1, pickle.dumps(value), "") for name, value in each.items()} for each in (slots, attributes)]
    recipe = "bare", pickle.dumps(cls), ([], *values)
    return pickle.dumps(("worker1", "train", [(cls.__name__, "text", [], recipe, None, None, False)]))


def test_what_is_not_trusted_sets_no_attributes_of_pickles() -> None:
    payload = forged(ValueError, {"__dict__": {"b": 1}}, {"__reduce_ex__": "x", "__module__": "antigravity", "a": 1})
    got = decode_failure(payload, pickle.loads)
    assert type(got) is ValueError
    assert vars(got) == {"a": 1}
    assert vars(decode_failure(payload)) == {"b": 1}, "workers that trust each other do not look"


@pytest.mark.parametrize(
    "slots",
    [
        {"encoding": "utf8", "object": b"abc", "start": -(10**12), "end": -(10**12) + 1, "reason": "r"},
        {"encoding": "utf8", "object": 5, "start": 0, "end": 1, "reason": "r"},
        {"start": 0, "end": 1},
    ],
)
def test_what_is_not_trusted_does_not_show_other_memory(slots: dict[str, Any]) -> None:
    assert type(decode_failure(forged(UnicodeDecodeError, slots, {}), pickle.loads)) is RemoteError


def test_a_sound_one_arrives() -> None:
    error = UnicodeDecodeError("utf8", b"abc", 1, 2, "r")
    assert str(decode_failure(encode_failure(error, "worker1", "train"), pickle.loads)) == str(error)


def node(
    recipe: Any, cause: Any = None, context: Any = None, message: Any = "text", notes: Any = ()
) -> tuple[Any, ...]:
    return "E", message, list(notes), recipe, cause, context, False


def bare(args: Any = (), cls: Any = ValueError) -> tuple[Any, ...]:
    return "bare", pickle.dumps(cls), ([(0, arg) for arg in args], {}, {})


def group_of(*places: Any) -> tuple[Any, ...]:
    return "group", pickle.dumps(ExceptionGroup), ([], {}, {}), "g", list(places)


def payload_of(*nodes: Any) -> bytes:
    return pickle.dumps(("worker1", "train", list(nodes)))


LOADERS = [None, pickle.loads]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    "nodes",
    [
        [node(group_of(0))],
        [node(group_of(1)), node(group_of(0))],
        [node(bare()), node(group_of(2, 0)), node(group_of(3)), node(group_of(0, 1))],
    ],
)
def test_groups_in_a_circle_end(nodes: list[Any], load: Any) -> None:
    got = decode_failure(payload_of(*nodes), load)
    assert type(got) is RemoteError
    assert "text" in str(got)


@pytest.mark.parametrize("load", LOADERS)
def test_groups_that_hold_the_same_too_often_end(load: Any) -> None:
    nodes = [node(group_of(place + 1, place + 1)) for place in range(40)]
    assert type(decode_failure(payload_of(*nodes, node(bare())), load)) is RemoteError
    nodes = [node(group_of(place + 1, place + 1)) for place in range(5)]
    assert type(decode_failure(payload_of(*nodes, node(bare())), load)) is ExceptionGroup


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    "nodes",
    [
        [node(bare())] * 1001,
        [node(bare(), cause=1)],
        [node(bare(), cause=-1)],
        [node(bare(), context=True)],
        [node(group_of(-1))],
        [node(group_of("a"))],
        [node(bare([[]]))],
        [node(bare(), message=["m"])],
        [node(bare(), notes=[["n"]])],
        [node(("bare", pickle.dumps(ValueError)))],
        [node(("other", b""))],
        [node(["bare", pickle.dumps(ValueError), ([], {}, {})])],
        [node(("bare", "class", ([], {}, {})))],
        [node(("bare", pickle.dumps(ValueError), ([], {5: (0, 1)}, {})))],
        [("E", "m", [], None, None, None)],
    ],
)
def test_what_is_no_failure_becomes_a_remote_error(nodes: list[Any], load: Any) -> None:
    payload = payload_of(*nodes)
    assert type(decode_failure(payload, load)) is RemoteError
    assert describe_failure(payload) == "an exception that cannot be read here"


@pytest.mark.parametrize("cls", [int, type, "x", 5])
def test_only_exceptions_are_made(cls: Any) -> None:
    assert type(decode_failure(payload_of(node(bare(cls=cls))))) is RemoteError


def test_causes_in_a_circle_are_cut_if_the_sender_is_not_trusted() -> None:
    nodes = [node(bare([place]), cause=(place + 1) % 4, context=(place + 2) % 4) for place in range(4)]
    got: Any = decode_failure(payload_of(*nodes), pickle.loads)
    for link in ("__cause__", "__context__"):
        error, seen = got, []
        while error is not None:
            seen.append(error)
            assert len(seen) <= 4
            error = getattr(error, link)
    assert got.__cause__ is not None
    straight = [
        node(bare([place]), cause=place + 1 if place < 3 else None, context=3 if place < 3 else None)
        for place in range(4)
    ]
    error = decode_failure(payload_of(*straight), pickle.loads)
    for place in range(4):
        assert error is not None
        assert error.args == (place,)
        assert (error.__context__ is not None) == (place < 3)
        error = error.__cause__


def test_an_exception_that_takes_all_memory_to_print_is_left_out() -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    recipe: tuple[Any, ...] = ("bare", pickle.dumps(ValueError), ([(1, pickle.dumps(value), "text")], {}, {}))
    assert type(decode_failure(payload_of(node(recipe)), pickle.loads)) is RemoteError


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(ImportError, "name_from", "x"), (AttributeError, "obj", "x"), (SyntaxError, "print_file_and_line", 1)],
)
@pytest.mark.parametrize("load", LOADERS)
def test_what_has_the_interpreter_do_something_is_left_out(cls: Any, name: str, value: Any, load: Any) -> None:
    for slots, attributes in (({name: value}, {}), ({}, {name: value})):
        got = decode_failure(forged(cls, slots, attributes), load)
        assert type(got) is cls
        assert getattr(got, name, None) is None


def test_no_method_is_replaced_by_who_is_not_trusted() -> None:
    got = decode_failure(forged(ValueError, {}, {"add_note": print, "with_traceback": print, "mine": 1}), pickle.loads)
    assert vars(got) == {"mine": 1}


def test_a_deep_payload_becomes_a_remote_error() -> None:
    deep = b"\x80\x05}" + b")" + b"\x85" * 400_000 + b"Ns."
    assert type(decode_failure(deep)) is RemoteError
    assert describe_failure(deep) == "an exception that cannot be read here"

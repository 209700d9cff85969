"""Arguments and results of functions that run for others, and cannot be pickled, rebuilt or afforded."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from agent_stage import add, settled

from farcall import RemoteError, SerializationError
from farcall.agent import execution
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.protocol import wire
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


# -- what cannot be pickled


def returns_a_lock() -> Any:
    return {"nested": [threading.Lock()]}


class Breaks:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _broken, ()


def _broken() -> None:
    raise ValueError("cannot be made")


def returns_breaks() -> Breaks:
    return Breaks()


def test_an_argument_that_cannot_be_pickled_is_refused_here_by_name(group: LocalGroup) -> None:
    before = group[0].calls_started()
    for args, kwargs, name in [
        ((1, threading.Lock()), {}, "argument 2 ('right')"),
        ((1,), {"right": threading.Lock()}, "argument 'right'"),
        (([1, {"k": threading.Lock()}],), {}, "left[1]['k']"),
    ]:
        with pytest.raises(SerializationError) as caught:
            start(group[0], 1, add, *args, **kwargs)
        assert name in str(caught.value)
        assert "`add`" in str(caught.value)
        assert "_thread.lock" in str(caught.value)
        assert isinstance(caught.value, TypeError)
    assert group[0].calls_started() == before


def test_a_function_that_cannot_be_pickled_is_refused_here(group: LocalGroup) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"the function `<lambda>`.*'lock'"):
        start(group[0], 1, lambda: lock)


def test_a_result_that_cannot_be_pickled_names_function_and_type(group: LocalGroup) -> None:
    with pytest.raises(SerializationError) as caught:
        call(group[0], 1, returns_a_lock)
    for part in ("`returns_a_lock`", "worker1", "_thread.lock"):
        assert part in str(caught.value)


def test_what_cannot_be_unpickled_is_told_on_both_ways(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match="the result of `returns_breaks` from worker 'worker1' cannot be reb"):
        call(group[0], 1, returns_breaks)
    with pytest.raises(
        SerializationError,
        match=r"the arguments of `group_stage\.echo` cannot be rebuilt on worker 'worker1' \(ValueErr",
    ):
        call(group[0], 1, echo, Breaks())
    with pytest.raises(
        SerializationError, match=r"a function sent by value, or its arguments, cannot .* on worker"
    ) as e:
        call(group[0], 1, lambda broken: None, Breaks())
    assert "(worker 'worker1', in `a function sent by value`)" in "".join(e.value.__notes__)
    assert call(group[0], 1, echo, "alive") == "alive"


class ManyBuffers:
    """Pickles into more out-of-band buffers than a message can have."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        shared = bytearray(1 << 14)
        return list, (), None, iter([pickle.PickleBuffer(shared) for _ in range(70_000)])


def returns_many_buffers() -> ManyBuffers:
    return ManyBuffers()


def test_too_many_buffers_in_an_argument_are_refused_and_harm_no_other_call(group: LocalGroup) -> None:
    gate = new_gate("other")
    other = start(group[0], 1, wait_at, "other", "unharmed")
    assert arrived["other"].wait(SOON)
    with pytest.raises(SerializationError, match=r"argument 1.*of worker1's `len`.*65535"):
        start(group[0], 1, len, ManyBuffers())
    gate.set()
    assert other.wait() == "unharmed"


def test_too_many_buffers_in_a_result_are_told(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match=r"the result of worker1's `returns_many_buffers`.*65535"):
        call(group[0], 1, returns_many_buffers)
    assert call(group[0], 1, echo, "alive") == "alive"


def returns_a_future() -> Future[int]:
    return Future()


def test_a_future_is_not_sent(group: LocalGroup) -> None:
    with pytest.raises(SerializationError):
        start(group[0], 1, echo, Future())
    with pytest.raises(SerializationError, match="async_execution"):
        call(group[0], 1, returns_a_future)


# -- results that make trouble


class Gone:
    pass


def returns_a_dead_proxy() -> Any:
    return weakref.proxy(Gone())


class Lazy:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not loaded")


def test_a_result_whose_class_cannot_be_asked_for(group: LocalGroup) -> None:
    with pytest.raises(SerializationError):
        call(group[0], 1, returns_a_dead_proxy)
    with pytest.raises(SerializationError):
        call(group[0], 1, Lazy)
    assert call(group[0], 1, echo, 1) == 1


def no_memory(*_: object) -> Any:
    raise MemoryError("for the reply")


def a_number() -> int:
    return 7


async def a_number_later() -> int:
    return 7


@async_execution
def a_number_in_a_future() -> Future[int]:
    return settled(7)


@pytest.mark.parametrize("function", [a_number, a_number_later, a_number_in_a_future])
def test_no_memory_for_a_reply_is_told(
    group: LocalGroup, function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(kind: int, *rest: Any) -> bytes:
        return no_memory() if kind == wire.RESULT else wire.encode(kind, *rest)  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(execution, "encode", encode)
        with pytest.raises(MemoryError, match="for the reply"):
            call(group[0], 1, function)
    assert call(group[0], 1, function) == 7


@pytest.mark.parametrize("function", [a_number, a_number_later, a_number_in_a_future])
def test_no_memory_even_to_tell_what_is_wrong_is_told(
    group: LocalGroup, function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(execution, "dumps_plain_result", no_memory)
        patch.setattr(execution, "encode_failure", no_memory)
        with pytest.raises(RemoteError, match="there was not even memory to tell what is wrong"):
            call(group[0], 1, function)
    assert call(group[0], 1, function) == 7

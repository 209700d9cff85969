"""What runs for others: callees of every kind, what they raise, what they return, and who waits for whom."""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from agent_stage import Counter, add, call, echo, fail, settled, start, thread_name

from farcall import RemoteError, RpcTimeoutError, SerializationError
from farcall.agent import execution
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.gathering import collect_all
from farcall.protocol import wire
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at

pytestmark = pytest.mark.timeout(30)


# -- callees of every kind


def outer(base: int) -> Callable[[int], int]:
    def inner(value: int) -> int:
        return base + value

    return inner


def default_and_keyword(a: int, /, b: int = 2, *rest: int, c: int, **more: int) -> tuple[Any, ...]:
    return a, b, rest, c, more


async def add_async(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        (add, (1, 2), 3),
        (Counter, (5,), Counter(5)),
        (Counter.double, (4,), 8),
        (Counter.name_and, (4,), ("Counter", 4)),
        (Counter(10).plus, (4,), 14),
        (Counter(10), (4,), 14),
        (Counter(10).double, (4,), 8),
        (Counter.plus, (Counter(1), 2), 3),
        (outer(100), (1,), 101),
        (lambda value: value * 3, (2,), 6),
        (functools.partial(add, 1), (2,), 3),
        (functools.partial(functools.partial(add, 1), 2), (), 3),
        (functools.partial(lambda a, b: a - b, 5), (3,), 2),
        (max, (1, 5, 3), 5),
        (len, ("four",), 4),
        (int, ("7",), 7),
        (dict, ([("a", 1)],), {"a": 1}),
        ([1, 2, 3].count, (2,), 1),
        ("a-b".split, ("-",), ["a", "b"]),
        (str.upper, ("x",), "X"),
        (operator.itemgetter(1), ("ab",), "b"),
        (operator.attrgetter("real"), (3,), 3),
        (operator.methodcaller("upper"), ("x",), "X"),
        (functools.reduce, (operator.add, [1, 2, 3]), 6),
        (add_async, (1, 2), 3),
        (functools.partial(add_async, 1), (2,), 3),
        (dict.fromkeys, ("ab",), {"a": None, "b": None}),
    ],
)
def test_every_kind_of_callee(
    group: LocalGroup, function: Callable[..., Any], args: tuple[Any, ...], result: Any
) -> None:
    for to in (1, 0, 1):
        assert call(group[0], to, function, *args) == result


def test_parameters_of_every_kind(group: LocalGroup) -> None:
    assert call(group[0], 1, default_and_keyword, 1, c=3) == (1, 2, (), 3, {})
    assert call(group[0], 1, default_and_keyword, 1, 4, 5, 6, c=3, d=9) == (1, 4, (5, 6), 3, {"d": 9})
    assert call(group[0], 1, lambda *args, **kwargs: (args, kwargs), 1, x=2) == ((1,), {"x": 2})


def test_a_lambda_sees_the_values_it_had(group: LocalGroup) -> None:
    functions = [lambda number=number: number for number in range(3)]
    assert [call(group[0], 1, function) for function in functions] == [0, 1, 2]


@functools.cache
def cached(value: int) -> int:
    return value + 1


def test_a_decorated_function(group: LocalGroup) -> None:
    assert call(group[0], 1, cached, 4) == 5


# -- what they raise


class Odd(Exception):
    """Its constructor takes what `args` does not hold."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class Silent(Exception):
    def __init__(self) -> None:
        pass


class Rude(Exception):
    def __str__(self) -> str:
        raise ValueError("no text of mine")

    __repr__ = __str__


def raise_odd() -> None:
    raise Odd(7, reason="odd")


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
        match=r"the arguments of `agent_stage\.echo` cannot be rebuilt on worker 'worker1' \(ValueErr",
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


# -- async def


async def hold_async(name: str) -> str:
    arrived[name].set()
    while not _open(name):
        await asyncio.sleep(0.001)
    return name


def _open(name: str) -> bool:
    from gates import gates

    return gates[name].is_set()


def test_coroutines_run_side_by_side_and_hold_up_nobody(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=1)
    gate = new_gate("coroutine")
    futures = [start(group[0], 1, hold_async, "coroutine") for _ in range(50)]
    assert arrived["coroutine"].wait(SOON)
    assert call(group[0], 1, echo, "served") == "served"
    assert call(group[0], 1, add_async, 1, 2) == 3
    gate.set()
    assert [future.wait() for future in futures] == ["coroutine"] * 50


def test_a_coroutine_that_waits_ends_with_its_worker(group: LocalGroup) -> None:
    new_gate("coroutine")
    future = start(group[0], 1, hold_async, "coroutine")
    assert arrived["coroutine"].wait(SOON)
    began = monotonic()
    group[1].shutdown(graceful=False, timeout=0)
    assert monotonic() - began < 2
    assert future.exception(SOON) is not None


async def await_call(group: LocalGroup, here: str, there: str) -> int:
    one, two = await asyncio.gather(_add_on(group, here, there, 1), _add_on(group, here, there, 2))
    return one + two


async def _add_on(group: LocalGroup, here: str, there: str, value: int) -> int:
    return await start(group[here], there, add_async, value, 10)  # type: ignore[no-any-return]


def test_a_coroutine_awaits_calls_of_its_own(group: LocalGroup) -> None:
    assert call(group[0], 1, await_call, group, "worker1", "worker2") == 23
    assert call(group[0], 1, await_call, group, "worker1", "worker1") == 23


def test_futures_are_awaited_in_a_loop_of_the_users(group: LocalGroup) -> None:
    async def main() -> list[int]:
        results = await asyncio.gather(*(_add_on(group, "worker0", "worker1", n) for n in range(20)))
        with pytest.raises(Odd):
            await start(group[0], 1, raise_odd)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_add_on(group, "worker0", "worker1", 1), 0)
        with pytest.raises(RpcTimeoutError):
            await start(group[0], 1, hold_async, "coroutine", timeout=0.05)
        return results

    gate = new_gate("coroutine")
    assert asyncio.run(main()) == list(range(10, 30))
    gate.set()


# -- async_execution


class Server:
    """Its functions answer later."""

    waiting: Future[str] = Future()

    @staticmethod
    @async_execution
    def static(value: int) -> Future[int]:
        return settled(value).then(lambda future: future.value() + 1)

    @classmethod
    @async_execution
    def of_class(cls, value: int) -> Future[tuple[str, int]]:
        return settled((cls.__name__, value))

    @async_execution
    def bound(self, value: int) -> Future[int]:
        return settled(value * 2)


@async_execution
def later(group: LocalGroup, here: str, there: str, value: int) -> Future[int]:
    return start(group[here], there, add, value).then(lambda future: future.value() + 10)  # type: ignore[no-any-return]


@async_execution
def all_later(group: LocalGroup, here: str, values: list[int]) -> Future[list[int]]:
    futures = [start(group[here], rank % 3, add, value) for rank, value in enumerate(values)]
    return collect_all(futures).then(lambda done: [future.value() for future in done.value()])


@async_execution
def hold_future() -> Future[str]:
    arrived["held"].set()
    return Server.waiting


@async_execution
def fails_later() -> Future[int]:
    return settled(0).then(lambda _: raise_odd())  # type: ignore[arg-type,return-value]


@async_execution
def fails_now() -> Future[int]:
    raise Odd(1, reason="now")


@async_execution
def forgets_the_future() -> Future[int]:
    return 5  # type: ignore[return-value]


@async_execution
def cannot_be_pickled_later() -> Future[Any]:
    return settled(threading.Lock())


def test_async_execution_beneath_every_kind_of_method(group: LocalGroup) -> None:
    assert call(group[0], 1, Server.static, 1) == 2
    assert call(group[0], 1, Server().static, 1) == 2
    assert call(group[0], 1, Server.of_class, 1) == ("Server", 1)
    assert call(group[0], 1, Server().bound, 4) == 8
    assert call(group[0], 1, functools.partial(Server.static, 1)) == 2
    assert call(group[0], 1, async_execution(lambda value: settled(value)), 3) == 3


def test_async_execution_chains_over_workers(group: LocalGroup) -> None:
    assert call(group[0], 1, later, group, "worker1", "worker2", 5) == 16
    assert call(group[0], 1, later, group, "worker1", "worker1", 5) == 16
    assert call(group[0], 1, all_later, group, "worker1", [1, 2, 3, 4]) == [2, 3, 4, 5]


def test_async_execution_holds_no_thread(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=1)
    Server.waiting = Future()
    new_gate("held")
    futures = [start(group[0], 1, hold_future) for _ in range(20)]
    assert arrived["held"].wait(SOON)
    assert call(group[0], 1, thread_name).startswith("farcall-worker1-")
    assert not any(future.done() for future in futures)
    Server.waiting.set_result("released")
    assert [future.wait() for future in futures] == ["released"] * 20


def test_async_execution_fails_now_and_later(group: LocalGroup) -> None:
    for function in (fails_later, fails_now):
        with pytest.raises(Odd):
            call(group[0], 1, function)
    with pytest.raises(TypeError, match="must return a Future, but what `forgets_the_future` returned is of type int"):
        call(group[0], 1, forgets_the_future)
    with pytest.raises(SerializationError, match="`cannot_be_pickled_later`"):
        call(group[0], 1, cannot_be_pickled_later)


def test_async_execution_times_out_like_any_call(group: LocalGroup) -> None:
    Server.waiting = Future()
    new_gate("held")
    began = monotonic()
    with pytest.raises(RpcTimeoutError, match="`hold_future`"):
        call(group[0], 1, hold_future, timeout=0.1)
    assert monotonic() - began < 0.6
    Server.waiting.set_result("too late")
    assert call(group[0], 1, echo, "alive") == "alive"


# -- who waits for whom


def test_a_function_that_blocks_does_not_delay_others(group: LocalGroup) -> None:
    gate = new_gate("slow")
    slow = [start(group[0], 1, wait_at, "slow", n) for n in range(8)]
    assert arrived["slow"].wait(SOON)
    for caller in group:
        began = monotonic()
        assert call(caller, 1, echo, "quick") == "quick"
        assert monotonic() - began < 0.5
    assert not any(future.done() for future in slow)
    gate.set()
    assert [future.wait() for future in slow] == list(range(8))


def test_no_more_functions_run_at_once_than_allowed(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=3)
    new_gate("go")
    _running.clear()
    futures = [start(group[0], 1, count_running) for _ in range(40)]
    highest = max(future.wait() for future in futures)
    assert 1 <= highest <= 3


_running: list[int] = []


def count_running() -> int:
    _running.append(1)
    count = len(_running)
    sum(itertools.islice(itertools.count(), 20_000))
    _running.pop()
    return count


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
        patch.setattr(execution, "dumps_result", no_memory)
        patch.setattr(execution, "encode_failure", no_memory)
        with pytest.raises(RemoteError, match="there was not even memory to tell what is wrong"):
            call(group[0], 1, function)
    assert call(group[0], 1, function) == 7


# -- callbacks


def test_a_callback_that_raises_a_base_exception_ends_no_thread(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for _ in range(3):
        done = threading.Event()
        future = start(group[0], 1, echo, 1)
        future.add_done_callback(lambda _, done=done: (done.set(), fail(SystemExit(3))))
        assert done.wait(SOON)
    assert call(group[1], 0, echo, "alive") == "alive"
    group.shutdown(graceful=True, timeout=2)


def test_a_callback_that_fails_is_logged(group: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    future = start(group[0], 1, echo, 1)
    future.add_done_callback(lambda _: fail(ValueError("in the callback")))
    assert future.then(lambda done: done.value()).wait() == 1
    deadline = monotonic() + SOON
    while "in the callback" not in caplog.text and monotonic() < deadline:
        call(group[0], 1, echo, 1)
    assert "in the callback" in caplog.text

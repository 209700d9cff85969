"""The mark of `async_execution`, and where it is found."""

from __future__ import annotations

import functools
import pickle

import pytest

from farcall.functions import async_execution, is_async_execution
from farcall.futures import Future


def in_future(value: object) -> Future[object]:
    future: Future[object] = Future()
    future.set_result(value)
    return future


@async_execution
def add_later(x: int, y: int = 1) -> Future[object]:
    """Adds, later."""
    return in_future(x + y)


class Server:
    @async_execution
    def bound(self, x: int) -> Future[object]:
        return in_future(("bound", x))

    @staticmethod
    @async_execution
    def static(x: int) -> Future[object]:
        return in_future(("static", x))

    @classmethod
    @async_execution
    def of_class(cls, x: int) -> Future[object]:
        return in_future((cls, x))

    def plain(self, x: int) -> int:
        return x


def test_a_marked_function_is_called_as_before() -> None:
    assert add_later(1, y=2).wait() == 3
    with pytest.raises(TypeError):
        add_later()  # type: ignore[call-arg]


def test_a_marked_function_keeps_its_name_and_its_place() -> None:
    assert add_later.__name__ == "add_later"
    assert add_later.__doc__ == "Adds, later."
    assert pickle.loads(pickle.dumps(add_later)) is add_later


def test_a_coroutine_function_is_refused_with_advice() -> None:
    async def wait() -> Future[object]:
        return in_future(1)

    with pytest.raises(TypeError, match=r"wait` is an `async def` function: leave async_execution out"):
        async_execution(wait)  # type: ignore[arg-type]


def test_the_mark_has_the_name_that_torch_gives_it() -> None:
    assert add_later._wrapped_async_rpc_function is add_later.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        (add_later, (1,), 2),
        (Server().bound, (1,), ("bound", 1)),
        (Server.static, (1,), ("static", 1)),
        (Server().static, (1,), ("static", 1)),
        (Server.of_class, (1,), (Server, 1)),
        (functools.partial(add_later, 1), (5,), 6),
        (functools.partial(functools.partial(add_later, 1), y=3), (), 4),
        (functools.partial(Server().bound, 4), (), ("bound", 4)),
        (functools.partial(Server.of_class, 4), (), (Server, 4)),
        (async_execution(lambda: in_future("lambda")), (), "lambda"),
    ],
)
def test_the_mark_is_found_through_methods_and_partials(
    function: object, args: tuple[int, ...], result: object
) -> None:
    assert callable(function)
    assert is_async_execution(function)
    assert function(*args).wait() == result


def test_the_mark_is_found_through_partials_that_python_keeps_apart() -> None:
    inner = functools.partial(add_later, 1)
    inner.note = "with an attribute it is not merged"  # type: ignore[attr-defined]
    outer = functools.partial(inner, y=3)
    assert outer.func is inner
    assert is_async_execution(outer)


def test_a_decorator_that_keeps_attributes_keeps_the_mark() -> None:
    @functools.wraps(add_later)
    def logged(*args: int) -> Future[object]:
        return add_later(*args)

    assert is_async_execution(logged)


@pytest.mark.parametrize("function", [len, print, Server, Server().plain, functools.partial(len), lambda: None])
def test_others_are_not_marked(function: object) -> None:
    assert not is_async_execution(function)  # type: ignore[arg-type]

"""The functions of the package, in one process that is a group of its own."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from time import monotonic
from typing import Any

import pytest

import farcall as rpc
from farcall.api import current_agent
from farcall.options import UNSET_RPC_TIMEOUT
from interruption import Interrupt, interrupt

pytestmark = pytest.mark.timeout(30)


def options(port: int, **changes: Any) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=10, **changes)


def sleep_at(gate: str) -> None:
    _gates[gate].wait(10)


_gates: dict[str, threading.Event] = {}


# -- names and signatures


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        ("init_rpc", "(name=None, backend=None, rank=-1, world_size=None, rpc_backend_options=None)"),
        ("rpc_sync", "(to, func, args=None, kwargs=None, timeout=-1.0)"),
        ("rpc_async", "(to, func, args=None, kwargs=None, timeout=-1.0)"),
        ("get_worker_info", "(worker_name=None)"),
        ("get_worker_infos", "()"),
        ("get_metrics", "()"),
        ("_get_debug_info", "()"),
        ("register_backend", "(backend_name, construct_rpc_backend_options_handler, init_backend_handler)"),
        ("backend_registered", "(backend_name)"),
        ("construct_rpc_backend_options", "(backend, rpc_timeout=60.0, init_method='env://', **kwargs)"),
        ("init_backend", "(backend, *args, **kwargs)"),
        ("shutdown", "(graceful=True, timeout=0.0)"),
        ("get_rpc_timeout", "()"),
        ("_set_rpc_timeout", "(timeout)"),
        ("is_available", "()"),
        ("collect_all", "(futures)"),
        ("wait_all", "(futures)"),
    ],
)
def test_signatures(function: str, signature: str) -> None:
    parameters = inspect.signature(getattr(rpc, function)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(bare)) == signature
    assert function in rpc.__all__


def test_everything_public_is_there_and_documented() -> None:
    for name in rpc.__all__:
        assert inspect.getdoc(getattr(rpc, name)), name
    for name in ("wait", "then", "value", "done", "set_result", "set_exception", "add_done_callback", "result"):
        assert inspect.getdoc(getattr(rpc.Future, name)), name
    assert rpc.is_available() is True
    assert UNSET_RPC_TIMEOUT == -1.0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("TensorPipeAgent", r"as torch\.distributed\.rpc has: init_rpc makes it"),
        ("nothing", "module 'farcall' has no 'nothing'$"),
    ],
)
def test_a_name_that_is_not_there_comes_with_advice_if_torch_has_it(name: str, advice: str) -> None:
    assert not hasattr(rpc, name)
    with pytest.raises(AttributeError, match=advice):
        getattr(rpc, name)


def test_worker_info_is_equal_hashable_and_picklable() -> None:
    info = rpc.WorkerInfo("trainer", 3)
    assert (info.name, info.id) == ("trainer", 3)
    assert info == rpc.WorkerInfo("trainer", 3) != rpc.WorkerInfo("trainer", 4)
    assert hash(info) == hash(rpc.WorkerInfo("trainer", 3))
    assert pickle.loads(pickle.dumps(info)) == info


# -- calls


@pytest.mark.usefixtures("alone")
def test_a_worker_calls_itself_by_name_rank_and_info() -> None:
    for to in ("alone", 0, rpc.get_worker_info(), rpc.get_worker_info("alone"), rpc.get_worker_info(0)):
        assert rpc.rpc_sync(to, divmod, args=(7, 2)) == (3, 1)
        assert rpc.rpc_async(to, int, kwargs={}).wait() == 0
        assert rpc.rpc_async(to, int, ("11",), {"base": 2}).result(5) == 3


@pytest.mark.usefixtures("alone")
def test_futures_of_calls() -> None:
    future = rpc.rpc_async("alone", divmod, args=(7, 2))
    assert future.then(lambda done: done.value()[0]).then(lambda done: done.value() + 1).wait() == 4
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(5)
    futures = [rpc.rpc_async("alone", pow, args=(n, 2)) for n in range(5)]
    assert rpc.wait_all(futures) == [0, 1, 4, 9, 16]
    assert [one.value() for one in rpc.collect_all(futures).wait()] == [0, 1, 4, 9, 16]

    async def wait() -> int:
        return await rpc.rpc_async("alone", pow, args=(2, 5))

    assert asyncio.run(wait()) == 32


@pytest.mark.usefixtures("alone")
def test_wrong_names() -> None:
    for to in ("nobody", 1, rpc.WorkerInfo("alone", 1)):
        for call in (rpc.rpc_sync, rpc.rpc_async):
            with pytest.raises(rpc.UnknownWorkerError, match=r"no worker .*; there are 'alone' \(rank 0\)"):
                call(to, int)
        with pytest.raises(rpc.UnknownWorkerError):
            rpc.get_worker_info(to)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(rpc.SerializationError, match=r"argument 2 .*of alone's `divmod`.*_thread\.lock"):
            call("alone", divmod, args=(1, lock))
    with pytest.raises(rpc.SerializationError, match=r"the result of alone's `RLock`.*_thread\.RLock"):
        rpc.rpc_sync("alone", threading.RLock)
    assert isinstance(rpc.rpc_async("alone", threading.RLock).exception(), TypeError)


@pytest.mark.usefixtures("alone")
def test_an_error_arrives_with_its_own_type() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        rpc.rpc_sync("alone", divmod, args=(1, 0))
    assert "worker 'alone'" in "".join(caught.value.__notes__)


@pytest.mark.usefixtures("alone")
def test_reports() -> None:
    assert rpc.get_worker_infos() == [rpc.WorkerInfo("alone", 0)]
    before = rpc.get_metrics()
    rpc.wait_all([rpc.rpc_async("alone", int) for _ in range(10)])
    now = rpc.get_metrics()
    assert now["calls_made"] - before["calls_made"] == 10
    assert now["peers"]["alone"]["calls_made"] == now["calls_made"]
    info = rpc._get_debug_info()
    assert (info["agent.calls_made"], info["num_owner_rrefs"]) == (str(now["calls_made"]), "0")
    assert all(isinstance(value, str) for value in info.values())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("callback", [None, 3])
def test_a_membership_callback_that_cannot_be_called_is_refused_at_once(callback: Any) -> None:
    with pytest.raises(rpc.UsageError, match=f"a membership callback must be a function .*, not {callback}"):
        rpc.add_membership_callback(callback)
    rpc.remove_membership_callback(callback)


# -- timeouts


@pytest.mark.usefixtures("alone")
def test_the_default_timeout() -> None:
    assert rpc.get_rpc_timeout() == 60
    rpc._set_rpc_timeout(0.1)
    assert rpc.get_rpc_timeout() == 0.1
    _gates["slow"] = threading.Event()
    for call in (lambda: rpc.rpc_sync("alone", sleep_at, ("slow",)), rpc.rpc_async("alone", sleep_at, ("slow",)).wait):
        began = monotonic()
        with pytest.raises(rpc.RpcTimeoutError, match=r"'alone' did not answer `sleep_at` within 0\.1 s"):
            call()
        assert monotonic() - began < 0.6
    future = rpc.rpc_async("alone", sleep_at, ("slow",), timeout=0)
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_sync("alone", sleep_at, ("slow",), timeout=0.15)
    assert not future.done()
    _gates["slow"].set()
    assert future.wait() is None
    with pytest.raises(rpc.UsageError, match="0 \\(no timeout\\) or more"):
        rpc._set_rpc_timeout(-3)
    assert rpc.get_rpc_timeout() == 0.1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrong", [None, "3", [1]])
def test_a_timeout_that_is_no_number(wrong: Any) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(rpc.UsageError, match=r"a timeout must be a number of seconds \(0 means no timeout\), not "):
            call("alone", int, timeout=wrong)
    with pytest.raises(rpc.UsageError, match=r"0 \(no timeout\) or more seconds, not "):
        rpc._set_rpc_timeout(wrong)
    for wrong_or_negative in (wrong, -1):
        with pytest.raises(rpc.UsageError, match=r"timeout of shutdown must be 0 \(no limit\) or more seconds, not "):
            rpc.shutdown(timeout=wrong_or_negative)
    assert rpc.rpc_sync("alone", int) == 0


def test_the_timeout_of_the_options(free_port: int) -> None:
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port, rpc_timeout=7))
    assert rpc.get_rpc_timeout() == 7
    rpc.shutdown()


# -- before, after, twice


@pytest.mark.parametrize(
    "use",
    [
        lambda: rpc.rpc_sync("alone", int),
        lambda: rpc.rpc_async("alone", int),
        rpc.get_worker_info,
        rpc.get_worker_infos,
        rpc.get_metrics,
        rpc._get_debug_info,
        rpc.get_rpc_timeout,
        lambda: rpc._set_rpc_timeout(5),
    ],
)
def test_before_init_and_after_shutdown(use: Any, free_port: int) -> None:
    with pytest.raises(rpc.NotInitializedError, match=r"Call farcall\.init_rpc"):
        use()
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port))
    use()
    rpc.shutdown()
    with pytest.raises(rpc.NotInitializedError, match=r"Call farcall\.init_rpc"):
        use()


def test_shutdown_without_init_is_harmless() -> None:
    rpc.shutdown()
    rpc.shutdown(graceful=False)


@pytest.mark.usefixtures("alone")
def test_a_second_init_is_refused_and_changes_nothing() -> None:
    with pytest.raises(rpc.AlreadyInitializedError, match="worker 'alone' already; call shutdown"):
        rpc.init_rpc("other", rank=0, world_size=1)
    assert rpc.rpc_sync("alone", int) == 0


def test_again_on_the_same_port(free_port: int) -> None:
    for turn in range(5):
        rpc.init_rpc(f"turn{turn}", rank=0, world_size=1, rpc_backend_options=options(free_port))
        assert rpc.rpc_sync(f"turn{turn}", int, args=(turn,)) == turn
        rpc.shutdown(graceful=turn % 2 == 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": ""}, "name must be a str"),
        ({"name": 3}, "name must be a str"),
        ({"backend": "TENSORPIPE"}, "Argument backend must be a member of BackendType, not 'TENSORPIPE'"),
        ({"rpc_backend_options": {"rpc_timeout": 4}}, "must be an instance of RpcBackendOptions, .* not dict"),
        ({"rank": 2}, "rank"),
        ({"world_size": 0}, "world_size"),
    ],
)
def test_wrong_arguments_of_init(free_port: int, arguments: dict[str, Any], text: str) -> None:
    right = {"name": "alone", "rank": 0, "world_size": 1, "rpc_backend_options": options(free_port)}
    with pytest.raises(rpc.UsageError, match=text):
        rpc.init_rpc(**{**right, **arguments})
    with pytest.raises(rpc.NotInitializedError):
        rpc.get_worker_info()


def test_heartbeats_that_leave_no_time_are_refused_before_anybody_is_met(free_port: int) -> None:
    hasty = options(free_port, heartbeat_interval=1.0, heartbeat_patience=2.0)
    hasty.init_timeout = 1.0
    with pytest.raises(rpc.UsageError, match="heartbeat_patience to at least 3 intervals"):
        rpc.init_rpc("early", rank=0, world_size=2, rpc_backend_options=hasty)


def test_an_unknown_transport_is_named(free_port: int) -> None:
    with pytest.raises(rpc.UsageError, match="no transport named 'pigeon'"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port, transports=("pigeon",)))


def test_init_from_the_environment(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    rpc.init_rpc("alone")
    assert rpc.get_worker_info() == rpc.WorkerInfo("alone", 0)
    rpc.shutdown()


def test_a_graceful_shutdown_inside_a_served_function_is_refused(free_port: int) -> None:
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port))
    with pytest.raises(rpc.UsageError, match="graceful"):
        rpc.rpc_sync("alone", rpc.shutdown, timeout=5)
    assert rpc.rpc_sync("alone", int) == 0
    rpc.shutdown()


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_shutdown_that_is_interrupted_frees_everything_or_the_next_one_does(
    free_port: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port))
    store = current_agent()._rendezvous.store  # type: ignore[attr-defined]
    close, left = store.close, times

    def interrupted(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            interrupt()
        close(*args)

    monkeypatch.setattr(store, "close", interrupted)
    with pytest.raises(Interrupt):
        rpc.shutdown(graceful=False)
    if times == 4:
        rpc.shutdown()
    assert left < 0
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port))
    rpc.shutdown()

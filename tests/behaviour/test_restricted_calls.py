"""A worker with the option `allow`: what others may call there, and what is loaded from what they send."""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

import pytest

import farcall
import service_stage
from farcall import NotAllowedError, RpcBackendOptions, UsageError
from farcall.testing import LocalGroup
from group_stage import NewGroup, call
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def restricted(make_group: NewGroup) -> LocalGroup:
    service_stage.ran.clear()
    return make_group(2, allow=[service_stage.predict, service_stage.Model])


def test_functions_on_the_list_and_exposed_functions_can_be_called(restricted: LocalGroup) -> None:
    assert call(restricted.agents[0], 1, service_stage.predict, {"x": [1]}) == {"x": [1]}
    assert call(restricted.agents[0], 1, service_stage.marked, value=3) == 3
    assert restricted.remote(0, 1, service_stage.predict, (5,)).to_here() == 5


REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "another function": (operator.add, (1, 2), "calls of `_operator.add` are not allowed"),
    "private name": (vars(service_stage)["_private"], (1,), "_private`"),
    "builtin": (eval, ("1",), "calls of `builtins.eval` are not allowed"),
    "import of the module": (service_stage.system, ("true",), "calls of `posix.system` are not allowed"),
    "lambda": (lambda: 1, (), "functions that are sent by value"),
    "partial": (functools.partial(service_stage.predict, 1), (), "its arguments separately"),
    "bound method": (service_stage.Model().step, (1,), "for a method, create the object there with farcall.remote"),
    "argument that runs code": (
        service_stage.predict,
        (service_stage.Bomb(),),
        "messages that contain `service_stage._explode`",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_everything_else_is_refused_before_anything_runs_and_both_sides_are_told(
    restricted: LocalGroup, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    function, args, what = REFUSED[kind]
    with caplog.at_level(logging.WARNING, "farcall"), pytest.raises(NotAllowedError, match="not allowed") as refused:
        call(restricted.agents[0], 1, function, *args)
    assert what in str(refused.value)
    assert "worker 'worker1'" in str(refused.value)
    assert "worker 'worker1' refused a call" in caplog.text
    with pytest.raises(NotAllowedError):
        restricted.remote(0, 1, function, args).to_here()
    assert service_stage.ran == []
    assert call(restricted.agents[0], 1, service_stage.predict, "alive") == "alive"


def test_methods_of_references_are_allowed_by_their_class(restricted: LocalGroup) -> None:
    model = restricted.remote(0, 1, service_stage.Model, (5,))
    assert model.rpc_sync().step(3) == 15
    assert model.rpc_sync().helper() == "helped"
    with pytest.raises(NotAllowedError, match=r"Model\._tune"):
        operator.methodcaller("_tune")(model.rpc_sync())
    numbers = restricted.rref(1, [1, 2])
    assert numbers.local_value() == [1, 2]


def test_an_empty_list_allows_exposed_names_only(make_group: NewGroup) -> None:
    service_stage.ran.clear()
    group = make_group(2, allow=[])
    assert call(group.agents[0], 1, service_stage.marked, 3) == 3
    assert group.remote(0, 1, service_stage.Marked).rpc_sync().step() == "stepped"
    with pytest.raises(NotAllowedError):
        call(group.agents[0], 1, service_stage.predict, 1)
    assert service_stage.ran == []


def test_results_are_checked_by_the_list_of_the_caller(restricted: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def marked(value: Any) -> Any:
        return service_stage.Bomb()

    marked.__module__, marked.__qualname__ = "service_stage", "marked"
    monkeypatch.setattr(service_stage, "marked", farcall.exposed(marked))
    with pytest.raises(NotAllowedError, match="the result of `marked` from worker 'worker1' was refused here"):
        call(restricted.agents[0], 1, service_stage.marked, 1)
    assert service_stage.ran == []


def test_no_module_is_imported_for_a_name_that_is_not_allowed(workers: StartWorkers) -> None:
    script = """
    @rpc.exposed
    def imported(name): return name in sys.modules
    open("only_there.py", "w").write("def function(): return 1\\nclass Thing: pass")
    start(allow=[])
    if RANK == 0:
        sys.path.insert(0, os.getcwd())
        import only_there
        report(call=outcome(rpc.rpc_sync, "w1", only_there.function)["error"],
               argument=outcome(rpc.rpc_sync, "w1", imported, args=(only_there.Thing(),))["error"],
               imported=rpc.rpc_sync("w1", imported, args=("only_there",)))
    rpc.shutdown()
    """
    facts = workers(script).finish(quiet=False)[0]
    assert facts == {"call": "NotAllowedError", "argument": "NotAllowedError", "imported": False}


def test_errors_of_allowed_functions_arrive_as_themselves(restricted: LocalGroup) -> None:
    with pytest.raises(TypeError, match="predict"):
        call(restricted.agents[0], 1, service_stage.predict)


@pytest.mark.parametrize("entry", ["service.", "service.[a", "", 5])
def test_an_entry_that_can_be_no_name_is_refused(entry: Any) -> None:
    with pytest.raises(UsageError):
        RpcBackendOptions(allow=[entry])

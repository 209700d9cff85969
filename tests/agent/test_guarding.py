"""A worker that restricts what others may do: what passes, what does not, and what is said on both sides."""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import service_stage
from farcall.agent.calls import Reply
from farcall.agent.execution import CallJob, RemoteJob
from farcall.agent.guarding import jobs_for, reply_for
from farcall.agent.values import Value
from farcall.errors import NotAllowedError
from farcall.options import RpcBackendOptions
from farcall.protocol.wire import METHOD
from farcall.rref import RRef
from farcall.security.allowed import Allowed
from farcall.testing import LocalGroup
from group_stage import call

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def guarded() -> Iterator[LocalGroup]:
    options = RpcBackendOptions(allow=[service_stage.predict, service_stage.Model])  # type: ignore[arg-type]
    service_stage.ran.clear()
    with LocalGroup(2, options) as group:
        yield group


def test_without_a_list_nothing_is_looked_at() -> None:
    assert jobs_for(None, "w") == (CallJob, RemoteJob)
    assert reply_for(None, "w") is Reply


def test_what_is_on_the_list_is_called_and_what_is_marked(guarded: LocalGroup) -> None:
    assert call(guarded[0], 1, service_stage.predict, {"x": [1]}) == {"x": [1]}
    assert call(guarded[0], 1, service_stage.marked, value=3) == 3


@pytest.mark.parametrize(
    ("function", "args", "what"),
    [
        (operator.add, (1, 2), "to call `_operator.add`"),
        (service_stage._private, (1,), "_private`"),
        (eval, ("1",), "to call `builtins.eval`"),
        (lambda: 1, (), "to send a function by value"),
        (
            functools.partial(service_stage.predict, 1),
            (),
            "Call a function of a module by its name, with its arguments",
        ),
        (service_stage.Model().step, (1,), "for a method, make the object there (farcall.remote), and call it on the"),
        (service_stage.predict, (service_stage.Bomb(),), "to load `service_stage._explode`"),
    ],
)
def test_what_is_not_is_refused_and_both_sides_hear_what(
    guarded: LocalGroup, function: Any, args: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "farcall"), pytest.raises(NotAllowedError, match="not allowed") as refused:
        call(guarded[0], 1, function, *args)
    assert what in str(refused.value)
    assert "worker 'worker1'" in str(refused.value)
    assert ("option allow there" in str(refused.value)) == ("by value" not in str(refused.value))
    assert "worker 'worker1' refused a call" in caplog.text
    assert "worker 'worker0'" in caplog.text
    assert what in caplog.text
    assert service_stage.ran == []


def test_methods_of_references_are_judged_by_their_class(guarded: LocalGroup) -> None:
    model = RRef.of(guarded[0].remote(1, service_stage.Model, (5,), None))
    assert model.rpc_sync().step(3) == 15
    with pytest.raises(NotAllowedError, match=r"Model\._tune"):
        model.rpc_sync()._tune()
    refused = RRef.of(guarded[0].remote(1, operator.add, (1, 2), None))
    with pytest.raises(NotAllowedError, match=r"_operator\.add"):
        refused.to_here()


def test_replies_are_looked_at_too(guarded: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_stage, "marked", lambda value: service_stage.Bomb())
    service_stage.marked._farcall_exposed = True  # type: ignore[attr-defined]
    monkeypatch.setattr(service_stage.marked, "__module__", service_stage.__name__)
    monkeypatch.setattr(service_stage.marked, "__qualname__", "marked")
    with pytest.raises(NotAllowedError) as refused:
        call(guarded[0], 1, service_stage.marked, 1)
    assert str(refused.value).startswith(
        "the result of `marked` from worker 'worker1' was refused here: it is not allowed to load "
        "`service_stage._explode` on worker 'worker0'; add it to the option allow there, or,"
    )
    assert "same code" not in str(refused.value)
    assert service_stage.ran == []


def test_an_error_of_ours_or_of_the_language_arrives_as_itself(guarded: LocalGroup) -> None:
    with pytest.raises(TypeError, match="predict"):
        call(guarded[0], 1, service_stage.predict)


def job_of(callee: bytes, resubmitted: list[Any]) -> Any:
    """A call of that callee at a worker that exposes nothing but the service's model."""
    place: Any = SimpleNamespace(
        worker="guarded", serving=SimpleNamespace(submit=resubmitted.append), failure_to_send=None
    )
    origin: Any = SimpleNamespace()
    return jobs_for(["service_stage.Model"], "guarded")[0](place, origin, 1, callee, b"", ())


@pytest.mark.parametrize("callee", [b"this", b"antigravity", b"this\0", b"\xffthis\0s"])
def test_nothing_is_imported_for_a_callee_of_another_form(callee: bytes) -> None:
    assert b"NotAllowedError" in job_of(callee, []).run()
    assert "this" not in sys.modules
    assert "antigravity" not in sys.modules


def test_what_cannot_be_judged_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no verdict")

    monkeypatch.setattr(Allowed, "check_found", fail)
    reply = job_of(b"service_stage\0Model.helper", []).run()
    assert b"no verdict" in reply
    assert b"helped" not in reply


def test_a_value_that_comes_between_two_looks_is_judged_all_the_same() -> None:
    class JustGiven(Value):
        def done(self) -> bool:
            was_done = super().done()
            if not was_done:
                self.give(service_stage.Model())
            return was_done

    resubmitted: list[Any] = []
    job = job_of(b"service_stage\0Model", resubmitted)
    job._callee, job.kind, job._subject = METHOD, METHOD + b"_tune", JustGiven()
    assert job.run() is None
    assert resubmitted == [job]
    reply = job.run()
    assert b"NotAllowedError" in reply
    assert b"tuned" not in reply

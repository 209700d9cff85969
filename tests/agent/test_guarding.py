"""A worker that restricts what others may do: what passes, what does not, and what is said on both sides."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from agent_stage import call

import service_stage
from farcall.agent.calls import Reply
from farcall.agent.execution import CallJob, RemoteJob
from farcall.agent.guarding import jobs_for, reply_for
from farcall.errors import NotAllowedError, SerializationError
from farcall.options import RpcBackendOptions
from farcall.rref import RRef
from farcall.testing import LocalGroup

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def guarded() -> Iterator[LocalGroup]:
    options = RpcBackendOptions(allow=[service_stage.predict, service_stage.Model])  # type: ignore[arg-type]
    service_stage.ran.clear()
    with LocalGroup(2, options) as group:
        yield group


def test_without_a_list_nothing_is_looked_at() -> None:
    assert jobs_for(None) == (CallJob, RemoteJob)
    assert reply_for(None) is Reply


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
        (service_stage.predict, (service_stage.Bomb(),), "to load `service_stage._explode`"),
    ],
)
def test_what_is_not_is_refused_and_both_sides_hear_what(
    guarded: LocalGroup, function: Any, args: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "farcall"), pytest.raises(NotAllowedError, match="not allowed") as refused:
        call(guarded[0], 1, function, *args)
    assert what in str(refused.value)
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
    with pytest.raises(SerializationError, match=r"the result of `marked` .*NotAllowedError: .*to load"):
        call(guarded[0], 1, service_stage.marked, 1)
    assert service_stage.ran == []


def test_an_error_of_ours_or_of_the_language_arrives_as_itself(guarded: LocalGroup) -> None:
    with pytest.raises(TypeError, match="predict"):
        call(guarded[0], 1, service_stage.predict)

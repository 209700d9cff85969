"""A group in one process, as a user's test has it: its arguments, and references at its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall.errors import OwnerLostError, UsageError, WorkerLostError
from farcall.testing import FaultyRpcBackendOptions, LocalGroup, faults
from farcall.transports.tls import TlsSocket
from gates import SOON
from group_stage import NewGroup
from reference_stage import expect_nothing_left

ABOUT_REFERENCES = ["PYTHON_REMOTE_CALL", "RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"]


def total(rref: rpc.RRef[list[int]]) -> int:
    return sum(rref.to_here())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((0,), "a LocalGroup has a number of workers, at least 1, not 0"),
        (("2",), "a LocalGroup has a number of workers, at least 1, not '2'"),
        ((2, {"x": 1}), r"the options of a LocalGroup must be RpcBackendOptions or, .* not \{'x': 1\}"),
        ((2, rpc.BackendOptions()), "the options of a LocalGroup must be RpcBackendOptions"),
        ((2, rpc.RpcBackendOptions), "the options of a LocalGroup must be RpcBackendOptions"),
    ],
)
def test_what_a_group_cannot_be_made_of(given: tuple[Any, ...], reason: str) -> None:
    before = threading.active_count()
    with pytest.raises(UsageError, match=reason):
        LocalGroup(*given)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("names", "reason"),
    [("ab", "must be a list of texts, not 'ab'"), (["a", 3], r"must be a list of texts, not \['a', 3\]")],
)
def test_what_cannot_be_names(names: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        LocalGroup(2, names=names)


def test_workers_can_be_connected_by_encrypted_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = TlsSocket.send

    def recorded(sock: TlsSocket, data: bytes, flags: int = 0) -> int:
        sent.append(bytes(data))
        return send(sock, data)

    monkeypatch.setattr(TlsSocket, "send", recorded)
    with LocalGroup(2, transport="tls") as group:
        assert group.worker("worker1").call(str, "text that is encrypted") == "text that is encrypted"
    assert any(b"text that is encrypted" in data for data in sent)


# -- references


def test_a_reference_that_one_worker_makes_at_another(new_group: NewGroup) -> None:
    group = new_group(3)
    numbers: rpc.RRef[list[int]] = group.remote(0, "worker1", list, ((3, 1, 2),))
    assert numbers.owner_name() == "worker1"
    numbers.rpc_sync(timeout=SOON).append(4)
    assert numbers.to_here(timeout=SOON) == [3, 1, 2, 4]
    assert group.agents[0].call("worker2", total, (numbers,), None, timeout=SOON).wait() == 10
    assert group.remote("worker0", 1, int, ["7"], {"base": 8}).to_here() == 7
    (owned,) = [each for each in group.references("worker1").owned if each.type == "list"]
    assert "worker0" in owned.holders  # and perhaps worker2 still
    (held,) = [each for each in group.references(0).held if each.reference == owned.reference]
    assert Path(__file__).name in held.created_at
    del numbers
    expect_nothing_left(group.agents)


def test_a_reference_to_a_value_of_a_worker(new_group: NewGroup) -> None:
    group = new_group(2)
    numbers = group.rref("worker0", [1, 2])
    assert numbers.is_owner()
    assert numbers.local_value() == [1, 2]
    assert group.agents[0].call(1, total, (numbers,), None, timeout=SOON).wait() == 3
    assert [owned.handles for owned in group.references(0).owned] == [1]
    del numbers
    expect_nothing_left(group.agents)


def test_there_is_no_such_worker(new_group: NewGroup) -> None:
    group = new_group(1)
    uses: list[Callable[[], object]] = [
        lambda: group.remote(3, 0, list),
        lambda: group.rref("nobody", 3),
        lambda: group.references(1),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=r"there is no worker .* in this group; there are \('worker0',\)"):
            use()
    with pytest.raises(rpc.UnknownWorkerError):
        group.remote(0, "nobody", list)


@pytest.mark.parametrize("message", ABOUT_REFERENCES)
def test_each_message_about_references_may_get_lost(new_group: NewGroup, message: str) -> None:
    group = new_group(3, messages_to_fail=[message], num_fail_sends=2)
    numbers: rpc.RRef[list[int]] = group.remote(0, "worker1", list, ((3, 1, 2),))
    assert group.agents[0].call("worker2", total, (numbers,), None, timeout=SOON).wait() == 6
    assert numbers.to_here(timeout=SOON) == [3, 1, 2]
    del numbers
    eventually(lambda: not group.references("worker1").owned)


def test_a_fetch_that_fails_can_be_tried_again(new_group: NewGroup) -> None:
    group = new_group(2, messages_to_fail=["PYTHON_RREF_FETCH_CALL"])
    numbers: rpc.RRef[list[int]] = group.remote(0, "worker1", list, ((3, 1, 2),))
    with pytest.raises(WorkerLostError, match="the faulty agent let this PYTHON_RREF_FETCH_CALL fail"):
        numbers.to_here(timeout=SOON)
    assert numbers.to_here(timeout=SOON) == [3, 1, 2]


def test_a_reference_whose_owner_has_gone() -> None:
    with LocalGroup(1, is_open=True) as group:
        group.join("worker1")
        there: rpc.RRef[list[Any]] = group.remote("worker1", "worker0", list)
        assert there.to_here(timeout=SOON) == []
        group.leave("worker0")

        def is_lost() -> bool:
            try:
                there.to_here(timeout=SOON)
            except WorkerLostError as error:
                return isinstance(error, OwnerLostError)
            return False

        eventually(is_lost)


# -- faults


@pytest.mark.parametrize("wrong", [3, "worker0", FaultyRpcBackendOptions()])
def test_what_is_no_agent_has_no_faults(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"is no agent: give faults\(\) one of a LocalGroup, group\.agents\[0\], or nothing"
    ):
        faults(wrong)

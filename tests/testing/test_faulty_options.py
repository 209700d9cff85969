from __future__ import annotations

from typing import Any

import pytest

from farcall import BackendType, UsageError, construct_rpc_backend_options
from farcall.testing import Failure, FaultyRpcBackendOptions, FaultyTensorPipeRpcBackendOptions
from farcall.testing.faulty_options import MESSAGES, meaning

RETRIED = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "CLEANUP_AUTOGRAD_CONTEXT_REQ"]


def test_they_are_made_as_torchs_are() -> None:
    options = construct_rpc_backend_options(
        BackendType.FAULTY_TENSORPIPE,
        init_method="file:///nowhere",
        num_worker_threads=8,
        num_fail_sends=3,
        messages_to_fail=RETRIED,
        messages_to_delay={"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5},
    )
    assert isinstance(options, FaultyTensorPipeRpcBackendOptions)
    assert (options.num_worker_threads, options.num_fail_sends, options.rpc_timeout) == (8, 3, 60.0)
    assert options.messages_to_fail == RETRIED
    assert options.messages_to_delay == {"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5}


def test_by_default_nothing_fails() -> None:
    options = FaultyRpcBackendOptions()
    assert (options.messages_to_fail, options.messages_to_delay, options.failures) == ([], {}, {})
    assert options.num_fail_sends == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("messages_to_fail", ["PYTHON_CAL"], "there is no message 'PYTHON_CAL'; there are PYTHON_CALL, "),
        ("messages_to_fail", [7], "there is no message 7"),
        ("messages_to_fail", "PYTHON_CALL", "must be a list of names"),
        ("messages_to_fail", 7, "must be a list of names"),
        ("messages_to_delay", ["PYTHON_CALL"], "messages_to_delay must be a dict"),
        ("messages_to_delay", {"PYTHON_CAL": 1}, "there is no message 'PYTHON_CAL'"),
        ("messages_to_delay", {"PYTHON_CALL": -1}, "a delay must be 0 or more seconds, not -1"),
        ("messages_to_delay", {"PYTHON_CALL": "1"}, "a delay must be 0 or more seconds, not '1'"),
        ("messages_to_delay", {"PYTHON_CALL": float("inf")}, "a delay must be 0 or more seconds, not inf"),
        ("num_fail_sends", -1, "must be 0 or more, not -1"),
        ("num_fail_sends", 1.5, "must be 0 or more, not 1.5"),
        ("failures", {"PYTHON_CALL": "burnt"}, "cannot fail by 'burnt'; the ways are 'error', 'request lost'"),
        ("failures", {"PYTHON_CAL": "late"}, "there is no message 'PYTHON_CAL'"),
        ("num_worker_threads", 0, "num_worker_threads must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FaultyRpcBackendOptions(**{name: value})
    options = FaultyRpcBackendOptions()
    with pytest.raises(UsageError, match=message):
        setattr(options, name, value)
    assert options == FaultyRpcBackendOptions()


def test_ways_to_fail_may_be_texts() -> None:
    assert FaultyRpcBackendOptions(failures={"PYTHON_CALL": "late"}).failures == {"PYTHON_CALL": Failure.LATE}  # type: ignore[dict-item]


def test_those_of_an_agent_cannot_be_changed() -> None:
    taken = FaultyRpcBackendOptions(messages_to_fail=["PYTHON_CALL"]).frozen_copy()
    assert taken.messages_to_fail == ["PYTHON_CALL"]
    with pytest.raises(UsageError, match="these options are in use by an agent"):
        taken.num_fail_sends = 3


def test_scripted_functions_are_functions() -> None:
    assert {name: meaning(name) for name in MESSAGES if name.startswith("SCRIPT")} == {
        "SCRIPT_CALL": "PYTHON_CALL",
        "SCRIPT_RREF_FETCH_CALL": "PYTHON_RREF_FETCH_CALL",
        "SCRIPT_REMOTE_CALL": "PYTHON_REMOTE_CALL",
    }
    assert meaning("CLEANUP_AUTOGRAD_CONTEXT_REQ") == ""

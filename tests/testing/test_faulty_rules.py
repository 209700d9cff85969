from __future__ import annotations

from farcall.protocol.frames import METHOD, PRESENCE, VALUE
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import (
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    UserDeleted,
)
from farcall.testing import Failure, FaultyRpcBackendOptions
from farcall.testing.faulty_options import Names
from farcall.testing.faulty_rules import Rules, Verdict, name_of_reference_message

REFERENCE, FORK = RRefId(1, 0, 1), ForkId(0, 1)


def rules(**options: object) -> Rules:
    return Rules(FaultyRpcBackendOptions(**options))  # type: ignore[arg-type]


def test_so_many_sends_of_each_message_fail() -> None:
    judge = rules(messages_to_fail=["PYTHON_CALL"], num_fail_sends=2).judge
    failures = [judge("PYTHON_CALL", "a"), judge("PYTHON_CALL", "b"), judge("PYTHON_CALL", "a")]
    assert failures == [Verdict(Failure.ERROR, 1, 2), Verdict(Failure.ERROR, 1, 2), Verdict(Failure.ERROR, 2, 2)]
    assert judge("PYTHON_CALL", "a") == Verdict()
    assert judge("PYTHON_CALL", "b").failure is Failure.ERROR
    assert judge("PYTHON_CALL", "b") == Verdict()
    assert judge("PYTHON_REMOTE_CALL", "c") == Verdict()


def test_no_sends_fail_if_none_shall() -> None:
    assert rules(messages_to_fail=["PYTHON_CALL"], num_fail_sends=0).judge("PYTHON_CALL", "a") == Verdict()


def test_each_message_fails_in_its_way() -> None:
    judge = rules(
        messages_to_fail=["PYTHON_CALL", "RREF_USER_DELETE"], failures={"RREF_USER_DELETE": Failure.LATE}
    ).judge
    assert judge("PYTHON_CALL", 1).failure is Failure.ERROR
    assert judge("RREF_USER_DELETE", 1).failure is Failure.LATE


def test_what_failed_is_counted_anew_when_the_rule_is_set() -> None:
    mine = rules(messages_to_fail=["PYTHON_CALL", "SCRIPT_REMOTE_CALL"])
    assert mine.judge("PYTHON_CALL", 1).failure
    assert mine.judge("PYTHON_REMOTE_CALL", 1).failure
    mine.fail("PYTHON_CALL", 1, Failure.REPLY_LOST)
    assert mine.judge("PYTHON_CALL", 1) == Verdict(Failure.REPLY_LOST, 1, 1)
    assert mine.judge("PYTHON_REMOTE_CALL", 1) == Verdict()


def test_what_goes_through_is_delayed() -> None:
    mine = rules(messages_to_fail=["PYTHON_CALL"], messages_to_delay={"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1})
    assert mine.judge("PYTHON_CALL", 1).delay == 0
    assert mine.judge("PYTHON_CALL", 1) == Verdict(delay=1.5)
    mine.delay("SCRIPT_CALL", 0.25)
    assert mine.judge("PYTHON_CALL", 1) == Verdict(delay=0.25)


def test_calls_have_the_names_that_torch_gives_them() -> None:
    mine = rules()
    for callee in (b"builtins\0max", b"", METHOD + b"x" * 44 + b"put", PRESENCE + b"x" * 44):
        assert mine.name_of_call(callee) == "PYTHON_CALL"
        assert mine.name_of_remote_call(callee) == "PYTHON_REMOTE_CALL"
    assert mine.name_of_call(VALUE + b"x" * 44) == "PYTHON_RREF_FETCH_CALL"


def test_reference_messages_have_them_too() -> None:
    kinds = (ForkRequest, ChildAccepted, UserDeleted, ForkAccepted, ForkRefused, CreateRequest)
    assert [name_of_reference_message(kind(REFERENCE, FORK)) for kind in kinds] == [
        "RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "", "", "",
    ]  # fmt: skip


def test_calls_are_told_apart_if_the_agent_says_how() -> None:
    named = {b"m\0script": Names("SCRIPT_CALL", "SCRIPT_REMOTE_CALL"), b"m\0other": Names()}
    options = FaultyRpcBackendOptions(messages_to_delay={"PYTHON_CALL": 1, "SCRIPT_CALL": 2, "SCRIPT_REMOTE_CALL": 3})
    mine = Rules(options, named)

    callees = (b"m\0script", b"m\0any", b"m\0other")
    assert [mine.judge(mine.name_of_call(callee), 1).delay for callee in callees] == [2, 1, 0]
    assert [mine.judge(mine.name_of_remote_call(callee), 1).delay for callee in callees] == [3, 0, 0]
    mine.fail("SCRIPT_CALL", 1, Failure.ERROR)
    assert mine.judge("PYTHON_CALL", 1).failure is None
    assert mine.judge("SCRIPT_CALL", 1).failure is Failure.ERROR


def test_without_that_one_name_means_both() -> None:
    mine = rules(messages_to_delay={"SCRIPT_CALL": 2})
    assert mine.name_of_call(b"m\0script") == "PYTHON_CALL"
    assert mine.delay_of("PYTHON_CALL") == 2


def test_what_has_no_name_is_meant_by_no_rule_also_not_by_one_for_what_is_never_sent() -> None:
    every = ["PYTHON_CALL", "CLEANUP_AUTOGRAD_CONTEXT_REQ"]
    mine = Rules(FaultyRpcBackendOptions(messages_to_fail=every), {b"m\0other": Names()})
    assert mine.judge(mine.name_of_call(b"m\0other"), 1) == Verdict()
    assert mine.judge(mine.name_of_call(b"m\0any"), 1).failure is Failure.ERROR


def test_a_function_can_stand_for_a_message_that_farcall_has_not() -> None:
    options = FaultyRpcBackendOptions(messages_to_fail=["CLEANUP_AUTOGRAD_CONTEXT_REQ"])
    mine = Rules(options, {b"m\0clean": Names("CLEANUP_AUTOGRAD_CONTEXT_REQ")})
    assert mine.judge(mine.name_of_call(b"m\0clean"), 1).failure is Failure.ERROR


def test_a_fetch_has_two_names_in_any_case() -> None:
    mine = Rules(FaultyRpcBackendOptions(messages_to_delay={"SCRIPT_RREF_FETCH_CALL": 2}), {})
    assert mine.judge(mine.name_of_call(VALUE + b"x" * 44), 1).delay == 2

"""The options of the faulty agent: which messages fail or are delayed, by torch's names, and how each of them fails.

torch sends calls of builtin operators and scripted functions under names of their own (`SCRIPT_CALL` ...). farcall has
one kind of call, so a `SCRIPT_` name means the same as the `PYTHON_` name, unless the agent says which functions stand
for scripted ones (`Names`). A fetch does not tell what made the value, so both of its names always mean it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import Any, Final, NamedTuple

from farcall.errors import UsageError
from farcall.options import RpcBackendOptions

CALL: Final = "PYTHON_CALL"
FETCH: Final = "PYTHON_RREF_FETCH_CALL"
REMOTE_CALL: Final = "PYTHON_REMOTE_CALL"
FORK_REQUEST: Final = "RREF_FORK_REQUEST"
CHILD_ACCEPT: Final = "RREF_CHILD_ACCEPT"
USER_DELETE: Final = "RREF_USER_DELETE"

CLEANUP: Final = "CLEANUP_AUTOGRAD_CONTEXT_REQ"
SCRIPT_CALL: Final = "SCRIPT_CALL"
SCRIPT_REMOTE_CALL: Final = "SCRIPT_REMOTE_CALL"

_MEANING: Final[Mapping[str, str]] = {
    **{name: name for name in (CALL, FETCH, REMOTE_CALL, FORK_REQUEST, CHILD_ACCEPT, USER_DELETE)},
    SCRIPT_CALL: CALL,
    "SCRIPT_RREF_FETCH_CALL": FETCH,
    SCRIPT_REMOTE_CALL: REMOTE_CALL,
    CLEANUP: "",  # farcall has no such message: the name is accepted, and nothing is sent under it
}
"""Maps each message name of torch to the name that farcall uses; to an empty text if farcall sends no such message."""
MESSAGES: Final = tuple(_MEANING)
"""All message names that the options of the faulty agent and the methods of `Faults` accept. They are torch's."""


class Names(NamedTuple):
    """The message names under which torch sends the calls of one function.

    `Names()` means that no rule applies to them.

    Attributes:
        call: The name of calls by `rpc_sync` and `rpc_async`, for example `SCRIPT_CALL`; empty if it is none of
            `MESSAGES`, so that no rule of the faulty agent applies to them. Not checked.
        remote_call: The name of calls by `remote`, for example `SCRIPT_REMOTE_CALL`; empty if no rule applies to them.
    """

    call: str = ""
    remote_call: str = ""


class Failure(StrEnum):
    """How a message that a faulty agent sends fails, for `Faults.fail` and the option `failures`.

    The members are `ERROR` (the sender is told at once), `REQUEST_LOST` (the message does not arrive), `REPLY_LOST`
    (its answer does not arrive) and `LATE` (it arrives after a later message). Each is a str, such as "reply lost",
    which can be given instead of the member. `Failure("late")` is `Failure.LATE`; any other text raises `ValueError`.
    """

    ERROR = "error"
    """As in torch: the sender is told at once. A call fails with `WorkerLostError`. Other messages are sent again."""
    REQUEST_LOST = "request lost"
    """The message does not arrive, and the sender is not told. A call ends by its timeout."""
    REPLY_LOST = "reply lost"
    """The message arrives, its answer does not: the result of a call, the acknowledgement of any other message."""
    LATE = "late"
    """The message arrives after a later one, or after 5 seconds if there is none. The later one is the next send of the
    same message or, for calls, the next call of the same message name to that worker.
    """


@dataclass(kw_only=True)
class FaultyRpcBackendOptions(RpcBackendOptions):
    """The options of the faulty agent: all options of the default backend, and which messages fail or are delayed.

    All options are keyword arguments and attributes. Without arguments nothing fails.

    Args:
        messages_to_fail: The names of messages that fail, such as `RREF_FORK_REQUEST`, each one of `MESSAGES`.
        messages_to_delay: How many seconds later messages arrive, by the name of the message.
        num_fail_sends: How many sends of each failing message fail before it goes through; 0 for none.
        failures: How messages fail, by the name of the message. Names that are not here fail by `Failure.ERROR`.

    Raises:
        UsageError: An option is set, here or later, to a value that it cannot have. The option keeps its value.
        BackendError: A keyword argument names no option.

    Example:
        >>> FaultyRpcBackendOptions(messages_to_fail=["PYTHON_CALL"], failures={"PYTHON_CALL": "late"})
    """

    messages_to_fail: list[str] = field(default_factory=list)
    """The names of messages that fail, each one of `MESSAGES`. By default none. An unknown name raises `UsageError`."""

    messages_to_delay: dict[str, float] = field(default_factory=dict)
    """How many seconds later messages arrive, by the name of the message. By default none is delayed. A message that
    fails is not delayed as well.
    """

    num_fail_sends: int = 1
    """How many sends of each message in `messages_to_fail` fail before it goes through; 0 for none. Two calls with the
    same function and arguments count as the same message, as in torch.
    """

    failures: dict[str, Failure] = field(default_factory=dict)
    """How messages fail, by the name of the message. Names that are not here fail by `Failure.ERROR`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks and sets one option. A name that is no option is set without a check.

        Raises `UsageError`, and changes nothing, if the option cannot have this value, or an agent uses these options
        already.
        """
        check = _CHECKS.get(name)
        super().__setattr__(name, check(value) if check is not None else value)


FaultyTensorPipeRpcBackendOptions = FaultyRpcBackendOptions
"""torch's name for these options."""


def meaning(message: str) -> str:
    """Returns farcall's name for a message name of torch, for example `PYTHON_CALL` for `SCRIPT_CALL`.

    Returns an empty text if farcall sends no such message.

    Raises:
        UsageError: `message` is not one of `MESSAGES`, the names that the faulty agent knows.
    """
    found = _MEANING.get(message) if isinstance(message, str) else None
    if found is None:
        raise UsageError(f"there is no message {message!r}; there are {', '.join(MESSAGES)}")
    return found


def check_seconds(seconds: float) -> float:
    """Returns a delay in seconds as a float; 0 is valid.

    Raises `UsageError` if it is negative, infinite, nan or not a number.
    """
    if not isinstance(seconds, Real) or not 0 <= seconds < float("inf"):
        raise UsageError(f"a delay must be 0 or more seconds, not {seconds!r}")
    return float(seconds)


def check_sends(sends: int) -> int:
    """Returns `sends`, a number of sends that fail; 0 is valid. Raises `UsageError` if it is negative or not an int."""
    if not isinstance(sends, int) or sends < 0:
        raise UsageError(f"the number of sends that fail must be 0 or more, not {sends!r}")
    return sends


def check_failure(failure: str) -> Failure:
    """Returns the `Failure` for a member or its text, for example "late".

    Raises `UsageError`, which lists the texts, for anything else.
    """
    try:
        return Failure(failure)
    except ValueError:
        ways = ", ".join(repr(each.value) for each in Failure)
        raise UsageError(f"a message cannot fail by {failure!r}; the ways are {ways}") from None


def _check_list(value: Any) -> list[str]:
    """Returns the names of messages in `value` as a list; empty for an empty iterable.

    Raises `UsageError` if `value` is a single str or not iterable, or contains a name that is not one of `MESSAGES`.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"messages_to_fail must be a list of names such as ['RREF_FORK_REQUEST'], not {value!r}")
    names = list(value)
    for name in names:
        meaning(name)
    return names


def _check_dict(option: str, check: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    """Returns a copy of a dict from message names to values, with each value as `check` returns it.

    Raises `UsageError` if `value` is not a mapping, or has a key that is not one of `MESSAGES`.

    Args:
        option: The name of the option, for the message of the error.
        check: Takes a value and returns it, perhaps converted, or raises `UsageError`.
        value: The dict; may be empty.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"{option} must be a dict by the names of messages, not {value!r}")
    for name in value:
        meaning(name)
    return {name: check(each) for name, each in value.items()}


_CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "messages_to_fail": _check_list,
    "messages_to_delay": partial(_check_dict, "messages_to_delay", check_seconds),
    "num_fail_sends": check_sends,
    "failures": partial(_check_dict, "failures", check_failure),
}
"""For each option of the faulty agent, a function that returns the value to store, or raises `UsageError`."""

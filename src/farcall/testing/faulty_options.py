"""What the faulty agent is told to do: messages by torch's names for them, and how each of them fails.

torch sends builtin operators and scripted functions under names of their own (`SCRIPT_CALL` ...). farcall has one kind
of call, so such a name means what its `PYTHON_` brother means; unless the agent says which functions stand for those
(`Names`). A fetch does not tell what has made the value, so both of its names mean it in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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
    CALL: CALL,
    FETCH: FETCH,
    REMOTE_CALL: REMOTE_CALL,
    FORK_REQUEST: FORK_REQUEST,
    CHILD_ACCEPT: CHILD_ACCEPT,
    USER_DELETE: USER_DELETE,
    SCRIPT_CALL: CALL,
    "SCRIPT_RREF_FETCH_CALL": FETCH,
    SCRIPT_REMOTE_CALL: REMOTE_CALL,
    CLEANUP: "",  # nothing of farcall's: accepted, and never sent
}
MESSAGES: Final = tuple(_MEANING)
"""The names that are understood."""


class Names(NamedTuple):
    """Under which names torch would send calls and remote calls of a function; empty: under none that is known here."""

    call: str = ""
    remote_call: str = ""


class Failure(StrEnum):
    """How a message fails."""

    ERROR = "error"
    """torch's way: the sender is told at once. A call raises `WorkerLost`; what must arrive is sent again."""
    REQUEST_LOST = "request lost"
    """It does not arrive, and the sender is not told. A call ends by its timeout."""
    REPLY_LOST = "reply lost"
    """It arrives, but the answer does not: the result of a call, the acknowledgement of anything else."""
    LATE = "late"
    """It is in flight while the sender sends again, and arrives behind that."""


@dataclass(kw_only=True)
class FaultyRpcBackendOptions(RpcBackendOptions):
    """The options of the faulty agent: those of the default backend, and what goes wrong.

    Raises `UsageError` for what cannot be, also when a value is set, as the other options do.
    """

    messages_to_fail: list[str] = field(default_factory=list)
    """The names of messages that fail."""

    messages_to_delay: dict[str, float] = field(default_factory=dict)
    """For a message's name: the seconds by which it arrives later."""

    num_fail_sends: int = 1
    """How many sends of each such message fail before it goes through. A call with the same function and arguments is
    the same message, as in torch."""

    failures: dict[str, Failure] = field(default_factory=dict)
    """For the name of a message in `messages_to_fail`: how it fails, if not by `Failure.ERROR`."""

    def __setattr__(self, name: str, value: Any) -> None:
        check = _CHECKS.get(name)
        super().__setattr__(name, check(value) if check is not None else value)


FaultyTensorPipeRpcBackendOptions = FaultyRpcBackendOptions
"""The name that torch gives to them."""


def meaning(message: str) -> str:
    """The name of farcall's message that is meant; empty if it has none. Raises `UsageError` for an unknown name."""
    found = _MEANING.get(message) if isinstance(message, str) else None
    if found is None:
        raise UsageError(f"there is no message {message!r}; there are {', '.join(MESSAGES)}")
    return found


def check_seconds(seconds: float) -> float:
    """Raises `UsageError` for what cannot be a delay."""
    if not isinstance(seconds, Real) or not 0 <= seconds < float("inf"):
        raise UsageError(f"a delay must be 0 or more seconds, not {seconds!r}")
    return float(seconds)


def check_sends(sends: int) -> int:
    """Raises `UsageError` for what cannot be a number of sends."""
    if not isinstance(sends, int) or sends < 0:
        raise UsageError(f"the number of sends that fail must be 0 or more, not {sends!r}")
    return sends


def check_failure(failure: str) -> Failure:
    """Raises `UsageError` for what is no way to fail."""
    try:
        return Failure(failure)
    except ValueError:
        ways = ", ".join(repr(each.value) for each in Failure)
        raise UsageError(f"a message cannot fail by {failure!r}; the ways are {ways}") from None


def _messages(value: Iterable[str]) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"messages_to_fail must be a list of names such as ['RREF_FORK_REQUEST'], not {value!r}")
    names = list(value)
    for name in names:
        meaning(name)
    return names


def _by_message(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a dict by the names of messages, not {value!r}")
    for name in value:
        meaning(name)
    return dict(value)


def _delays(value: Any) -> dict[str, float]:
    delays = _by_message("messages_to_delay", value)
    for seconds in delays.values():
        check_seconds(seconds)
    return delays


def _failures(value: Any) -> dict[str, Failure]:
    return {name: check_failure(failure) for name, failure in _by_message("failures", value).items()}


_CHECKS: Final[Mapping[str, Any]] = {
    "messages_to_fail": _messages,
    "messages_to_delay": _delays,
    "num_fail_sends": check_sends,
    "failures": _failures,
}

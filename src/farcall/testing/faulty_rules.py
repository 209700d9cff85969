"""What is to happen to a message that is being sent: the rules of a faulty agent, and how often each has struck.

It knows the messages of `protocol.wire` by torch's names, and nothing of connections. Pure: no thread, no clock.

Rules
- A message is known again by what it says, not by when it is sent: a reference message by its number, a call by its
  function and arguments. So one that is sent again is the same, and goes through in the end.
- A message that fails is not delayed as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from farcall.protocol.control import unpack_section
from farcall.protocol.reference_messages import ChildAccepted, ForkRequest, UserDeleted
from farcall.protocol.reference_messages import Message as ReferenceMessage
from farcall.protocol.wire import CALL_CARRYING, PLAIN, VALUE
from farcall.testing import faulty_options as names
from farcall.testing.faulty_options import Failure, FaultyRpcBackendOptions, Names, meaning

_NAMES: Final[dict[type, str]] = {
    ForkRequest: names.FORK_REQUEST,
    ChildAccepted: names.CHILD_ACCEPT,
    UserDeleted: names.USER_DELETE,
}


class Verdict(NamedTuple):
    """What happens to one send of a message."""

    failure: Failure | None = None
    attempt: int = 0
    """Which of the sends that fail it is, from 1 on, and how many there are in all."""
    attempts: int = 0
    delay: float = 0.0
    """Seconds."""


class _Failing(NamedTuple):
    failure: Failure
    sends: int


class Rules:
    """Which messages fail, how, and how often; and which are delayed."""

    def __init__(self, options: FaultyRpcBackendOptions, named: Mapping[bytes, Names] | None = None) -> None:
        """`named`: functions, by what a call says of whom it calls, whose calls have other names than `PYTHON_CALL`."""
        self._named = named or {}
        self._told_apart = {name for each in self._named.values() for name in each if name}
        self._failing: dict[str, _Failing] = {}
        self._delays: dict[str, float] = {}
        self._failed: dict[tuple[str, Hashable], int] = {}
        for name in options.messages_to_fail:
            self.fail(name, options.num_fail_sends, options.failures.get(name, Failure.ERROR))
        for name, seconds in options.messages_to_delay.items():
            # Of two names for one message, the longer delay counts.
            self.delay(name, max(seconds, self._delays.get(self._meaning(name), 0.0)))

    def fail(self, message: str, sends: int, failure: Failure) -> None:
        """From now on, that many sends of each such message fail; 0: none. Counts anew."""
        name = self._meaning(message)
        self._failing[name] = _Failing(failure, sends)
        self._failed = {key: count for key, count in self._failed.items() if key[0] != name}

    def delay(self, message: str, seconds: float) -> None:
        """From now on, each such message arrives so much later; 0: as usual."""
        self._delays[self._meaning(message)] = seconds

    def _meaning(self, message: str) -> str:
        return message if message in self._told_apart else meaning(message)

    def name_for(self, name: str, callee: bytes) -> str:
        """The name of a call of that function, given what it is to farcall; empty if no rule can mean it."""
        names_of = self._named.get(callee)
        if names_of is None:
            return name
        return names_of.remote_call if name == names.REMOTE_CALL else names_of.call

    def judge(self, name: str, message: Hashable) -> Verdict:
        """What happens to this send of a message of that name; it counts as one."""
        failing = self._failing.get(name) if name else None
        if failing is not None:
            count = self._failed.get((name, message), 0)
            if count < failing.sends:
                self._failed[name, message] = count + 1
                return Verdict(failing.failure, count + 1, failing.sends)
        return Verdict(delay=self.delay_of(name))

    def delay_of(self, name: str) -> float:
        """By how many seconds a message of that name is late, unless it fails."""
        return self._delays.get(name, 0.0) if name else 0.0


def name_of_call(kind: int, head: bytes) -> str:
    """The name of a call. Raises `ProtocolError`."""
    return names.FETCH if callee_of(kind, head).startswith((VALUE, PLAIN)) else names.CALL


def callee_of(kind: int, head: bytes) -> bytes:
    """What a call says of whom it calls, without the references that it carries. Raises `ProtocolError`."""
    return unpack_section(head)[2] if kind == CALL_CARRYING else head


def name_of_reference_message(message: ReferenceMessage) -> str:
    """Its name; empty for those that torch sends as answers, which have none of their own here."""
    return _NAMES.get(type(message), "")

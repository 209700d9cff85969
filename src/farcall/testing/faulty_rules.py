"""The rules of a faulty agent: what happens to a message that is being sent, and how often it has happened.

Rules
- A message is recognised by its contents: a reference message by its number, a call by its function and arguments. So
  a message that is sent again is the same message, and goes through in the end.
- A message that fails is not delayed as well.

Pure: no thread, no clock, no connection. Names are torch's (`faulty_options`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from farcall.protocol.frames import VALUE
from farcall.protocol.reference_messages import ChildAccepted, ForkRequest, Message, UserDeleted
from farcall.testing import faulty_options as names
from farcall.testing.faulty_options import Failure, FaultyRpcBackendOptions, Names, meaning

_REFERENCE_MESSAGES: Final[dict[type, str]] = {
    ForkRequest: names.FORK_REQUEST,
    ChildAccepted: names.CHILD_ACCEPT,
    UserDeleted: names.USER_DELETE,
}


class Verdict(NamedTuple):
    """What happens to one send of a message."""

    failure: Failure | None = None
    attempt: int = 0
    """Which of the sends that fail this is, counted from 1."""
    attempts: int = 0
    """How many sends of the message fail in all."""
    delay: float = 0.0
    """Seconds."""


class _FailRule(NamedTuple):
    failure: Failure
    sends: int


class Rules:
    """Which messages fail, how, and how often; and which are delayed."""

    def __init__(self, options: FaultyRpcBackendOptions, named: Mapping[bytes, Names] | None = None) -> None:
        """Creates the rules that the options describe.

        Args:
            options: Those of the faulty agent.
            named: Functions, by their callee in a frame, that torch calls under other names than `PYTHON_CALL`.
        """
        self._named = named or {}
        self._told_apart = {name for each in self._named.values() for name in each if name}
        self._failing: dict[str, _FailRule] = {}
        self._delays: dict[str, float] = {}
        self._failed: dict[tuple[str, Hashable], int] = {}
        for name in options.messages_to_fail:
            self.fail(name, options.num_fail_sends, options.failures.get(name, Failure.ERROR))
        for name, seconds in options.messages_to_delay.items():
            # Of two names for one message, the longer delay counts.
            self.delay(name, max(seconds, self._delays.get(self._meaning(name), 0.0)))

    def fail(self, message: str, sends: int, failure: Failure) -> None:
        """Lets so many sends of each such message fail from now on, counted anew; 0 for none. Raises `UsageError`."""
        name = self._meaning(message)
        self._failing[name] = _FailRule(failure, sends)
        self._failed = {key: count for key, count in self._failed.items() if key[0] != name}

    def delay(self, message: str, seconds: float) -> None:
        """Lets each such message arrive so much later from now on; 0 for as usual. Raises `UsageError`."""
        self._delays[self._meaning(message)] = seconds

    def _meaning(self, message: str) -> str:
        return message if message in self._told_apart else meaning(message)

    def name_of_call(self, callee: bytes) -> str:
        """Returns the name of a call with that callee; empty if no rule can mean it."""
        named = self._named.get(callee)
        if named is not None:
            return named.call
        return names.FETCH if callee[:1] == VALUE else names.CALL

    def name_of_remote_call(self, callee: bytes) -> str:
        """Returns the name of a remote call with that callee; empty if no rule can mean it."""
        named = self._named.get(callee)
        return named.remote_call if named is not None else names.REMOTE_CALL

    def judge(self, name: str, message: Hashable) -> Verdict:
        """Returns what happens to this send of a message, and counts it.

        Args:
            name: The name of the message. Nothing happens to a message without one.
            message: By what the message is recognised.
        """
        rule = self._failing.get(name) if name else None
        count = self._failed.get((name, message), 0)
        if rule is None or count >= rule.sends:
            return Verdict(delay=self.delay_of(name))
        self._failed[name, message] = count + 1
        return Verdict(rule.failure, count + 1, rule.sends)

    def delay_of(self, name: str) -> float:
        """Returns by how many seconds a message of that name is delayed, unless it fails."""
        return self._delays.get(name, 0.0) if name else 0.0


def name_of_reference_message(message: Message) -> str:
    """Returns the name of a message about a reference; empty for the answers of owners, which have none in torch."""
    return _REFERENCE_MESSAGES.get(type(message), "")

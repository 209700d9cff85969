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
    """What happens to one send of a message. The default is: the message goes through without delay."""

    failure: Failure | None = None
    attempt: int = 0
    """Which of the sends that fail this is, counted from 1."""
    attempts: int = 0
    """How many sends of the message fail in all."""
    delay: float = 0.0
    """Seconds."""


class _FailRule(NamedTuple):
    """How messages of one name fail, and how many sends of each."""

    failure: Failure
    sends: int


class Rules:
    """Which messages fail, how, and how often; and which messages are delayed."""

    def __init__(self, options: FaultyRpcBackendOptions, named: Mapping[bytes, Names] | None = None) -> None:
        """Creates the rules that the options describe.

        Args:
            options: The options of the faulty agent.
            named: The names under which torch sends calls of certain functions, by the callee in the frame of the call.
                None means that torch calls all functions `PYTHON_CALL`.
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
        """Makes sends of messages fail from now on. Earlier failures do not count any more.

        Args:
            message: The name of the messages.
            sends: How many sends of each such message fail; 0 for none.
            failure: How they fail.

        Raises:
            UsageError: `message` is not a known name.
        """
        name = self._meaning(message)
        self._failing[name] = _FailRule(failure, sends)
        self._failed = {key: count for key, count in self._failed.items() if key[0] != name}

    def delay(self, message: str, seconds: float) -> None:
        """Delays all messages of a name from now on. 0 seconds ends the delay.

        Raises `UsageError` for an unknown name.
        """
        self._delays[self._meaning(message)] = seconds

    def _meaning(self, message: str) -> str:
        """Returns farcall's name for a message. Raises `UsageError` for an unknown name."""
        return message if message in self._told_apart else meaning(message)

    def name_of_call(self, callee: bytes) -> str:
        """Returns the name of a call of `callee`; empty if no rule can apply to it."""
        named = self._named.get(callee)
        if named is not None:
            return named.call
        return names.FETCH if callee[:1] == VALUE else names.CALL

    def name_of_remote_call(self, callee: bytes) -> str:
        """Returns the name of a remote call of `callee`; empty if no rule can apply to it."""
        named = self._named.get(callee)
        return named.remote_call if named is not None else names.REMOTE_CALL

    def judge(self, name: str, message: Hashable) -> Verdict:
        """Returns what happens to this send of a message, and counts it if it fails.

        Args:
            name: The name of the message. A message with an empty name always goes through.
            message: Identifies the message, so that a second send of the same message is recognised.
        """
        rule = self._failing.get(name) if name else None
        count = self._failed.get((name, message), 0)
        if rule is None or count >= rule.sends:
            return Verdict(delay=self.delay_of(name))
        self._failed[name, message] = count + 1
        return Verdict(rule.failure, count + 1, rule.sends)

    def delay_of(self, name: str) -> float:
        """Returns by how many seconds messages of a name are delayed; 0 for an empty name, or if not delayed."""
        return self._delays.get(name, 0.0) if name else 0.0


def name_of_reference_message(message: Message) -> str:
    """Returns torch's name for a message about a reference.

    Returns an empty text for messages that torch does not have, such as the answers of owners.
    """
    return _REFERENCE_MESSAGES.get(type(message), "")

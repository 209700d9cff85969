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
"""torch's name for each type of message about references that torch has as well."""


class Verdict(NamedTuple):
    """What happens to one send of a message. `Verdict()` means that the message goes through without delay.

    Attributes:
        failure: How this send fails; None if it goes through.
        attempt: If it fails, which of the failing sends of this message it is, counted from 1; else 0.
        attempts: If it fails, how many sends of this message fail in all; else 0.
        delay: By how many seconds the message is delayed; 0 for not at all. A send that fails is not delayed.
    """

    failure: Failure | None = None
    attempt: int = 0
    """If it fails: which of the failing sends of this message it is, counted from 1. Else 0."""
    attempts: int = 0
    """If it fails: how many sends of this message fail in all. Else 0."""
    delay: float = 0.0
    """By how many seconds the message is delayed; 0 for not at all."""


class _FailRule(NamedTuple):
    """How messages of one name fail.

    Attributes:
        failure: How they fail.
        sends: How many sends of each such message fail before it goes through; 0 for none.
    """

    failure: Failure
    sends: int


class Rules:
    """Says of each message that a faulty agent sends whether it fails, and how, and by how much it is delayed.

    It counts the sends of each message. It has no lock: the caller must hold the lock of the agent's `Relay`.

    Args:
        options: The options of the faulty agent, with the messages that fail or are delayed from the beginning.
        named: The functions whose calls torch sends under special message names. Maps a function, as encoded in the
            frame of a call, to the names of its calls. None for none.

    Raises:
        UsageError: The options contain an unknown message name.
    """

    def __init__(self, options: FaultyRpcBackendOptions, named: Mapping[bytes, Names] | None = None) -> None:
        """Creates the rules that the options describe.

        Args:
            options: The options of the faulty agent.
            named: The functions whose calls torch sends under special message names. Maps a function, as encoded in the
                frame of a call, to the names of its calls. The calls of all other functions are `PYTHON_CALL` or
                `PYTHON_REMOTE_CALL`. None for no such functions.

        Raises:
            UsageError: The options contain an unknown message name.
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
        """Sets how messages of one name fail from now on. Failures of earlier sends do not count any more.

        Args:
            message: torch's name of the messages, for example `RREF_FORK_REQUEST`.
            sends: How many sends of each such message fail before it goes through; 0 for none. Not checked.
            failure: How they fail.

        Raises:
            UsageError: `message` is not a known name. Nothing has changed.
        """
        name = self._meaning(message)
        self._failing[name] = _FailRule(failure, sends)
        self._failed = {key: count for key, count in self._failed.items() if key[0] != name}

    def delay(self, message: str, seconds: float) -> None:
        """Sets by how many seconds messages of one name are delayed from now on; 0 for no delay.

        `seconds` is not checked. Raises `UsageError` if `message` is not a name that the faulty agent knows.
        """
        self._delays[self._meaning(message)] = seconds

    def _meaning(self, message: str) -> str:
        """Returns the name under which the rule of a message name is stored; empty if farcall sends no such message.

        A `message` that is one of the names in `named`, the argument of this class, is returned as it is. Otherwise
        returns farcall's name for it, such as `PYTHON_CALL` for `SCRIPT_CALL`. Raises `UsageError` for an unknown name.
        """
        return message if message in self._told_apart else meaning(message)

    def name_of_call(self, callee: bytes) -> str:
        """Returns the message name of a call by `rpc_sync` or `rpc_async`, or of a fetch of a reference's value.

        Args:
            callee: The function, method or value, as encoded in the frame of the call. It is not checked.

        Returns:
            For a function in `named`, the argument of this class, the name that is given there, which may be empty.
            Otherwise `PYTHON_RREF_FETCH_CALL` for a fetch, and `PYTHON_CALL` for a call.
        """
        named = self._named.get(callee)
        if named is not None:
            return named.call
        return names.FETCH if callee[:1] == VALUE else names.CALL

    def name_of_remote_call(self, callee: bytes) -> str:
        """Returns the message name of a call by `remote`.

        Args:
            callee: The function or method, as encoded in the frame of the call. It is not checked.

        Returns:
            For a function in `named`, the argument of this class, the name that is given there, which may be empty.
            Otherwise `PYTHON_REMOTE_CALL`.
        """
        named = self._named.get(callee)
        return named.remote_call if named is not None else names.REMOTE_CALL

    def judge(self, name: str, message: Hashable) -> Verdict:
        """Decides what happens to one send of a message. Each call counts as one send.

        Args:
            name: The name of the message, such as `PYTHON_CALL`. A message with an empty name always goes through
                without delay.
            message: Identifies the message, so that it is recognised when it is sent again.

        Returns:
            How the send fails, if fewer sends of this message have failed so far than the rule wants. Otherwise, or
            without a rule, only the delay.
        """
        rule = self._failing.get(name) if name else None
        count = self._failed.get((name, message), 0)
        if rule is None or count >= rule.sends:
            return Verdict(delay=self.delay_of(name))
        self._failed[name, message] = count + 1
        return Verdict(rule.failure, count + 1, rule.sends)

    def delay_of(self, name: str) -> float:
        """Returns by how many seconds messages of a name are delayed; 0 if they are not."""
        return self._delays.get(name, 0.0) if name else 0.0


def name_of_reference_message(message: Message) -> str:
    """Returns torch's name for a message about a reference, for example `RREF_USER_DELETE`.

    Returns an empty text for messages that torch does not have, such as the answers of owners.
    """
    return _REFERENCE_MESSAGES.get(type(message), "")

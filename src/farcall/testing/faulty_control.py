"""`Faults`: what goes wrong between one faulty agent and the others, and how a test changes it while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from farcall.protocol.ids import Worker
from farcall.testing.faulty_link import Link
from farcall.testing.faulty_options import (
    REMOTE_CALL,
    Failure,
    FaultyRpcBackendOptions,
    Names,
    check_failure,
    check_seconds,
    check_sends,
)
from farcall.testing.faulty_relay import Relay
from farcall.testing.faulty_rules import Rules
from farcall.transports.base import Channel


class Conditions(NamedTuple):
    """How it is on the way to and from one worker."""

    cut: bool = False
    frozen: bool = False
    slow: float = 0.0
    """Seconds that every message takes longer."""


@dataclass
class Correspondence:
    """What is kept about the messages to one worker, whatever connection they go on."""

    hidden: set[int]
    """The numbers of those whose acknowledgements are lost, until they are sent again."""
    late: dict[int | str, list[Callable[[], None]]]

    def hold(self, until_sent: int | str, release: Callable[[], None]) -> None:
        """Has it released when something of that number or name is sent again."""
        self.late.setdefault(until_sent, []).append(release)

    def sent_again(self, what: int | str) -> list[Callable[[], None]]:
        """Something of that number or name is sent: the releases of what waited for it."""
        if isinstance(what, int):
            self.hidden.discard(what)
        return self.late.pop(what, [])


_USUAL: Final = Conditions()


class Faults:
    """What goes wrong at one worker; `farcall.testing.faults()` gives that of a faulty agent.

    Any thread may change it at any time, and what it says of messages and workers holds when the method returns.
    """

    def __init__(self, name: str, options: FaultyRpcBackendOptions, named: Mapping[bytes, Names] | None = None) -> None:
        self.name = name
        self.rules = Rules(options, named)
        self.relay = Relay()
        self.check_name: Callable[[str], object] = lambda name: None
        """Raises if there is no such worker; set by the agent."""
        self._conditions: dict[str | None, Conditions] = {}
        self._correspondence: defaultdict[Worker, Correspondence] = defaultdict(lambda: Correspondence(set(), {}))

    # Messages

    def fail(self, message: str, sends: int = 1, failure: Failure | str = Failure.ERROR) -> None:
        """From now on, so many sends of each message of that name fail; 0: none. Raises `UsageError`."""
        sends, failure = check_sends(sends), check_failure(failure)
        with self.relay.lock:
            self.rules.fail(message, sends, failure)

    def delay(self, message: str, seconds: float) -> None:
        """From now on, messages of that name arrive so much later; 0: as usual. Raises `UsageError`."""
        seconds = check_seconds(seconds)
        with self.relay.lock:
            self.rules.delay(message, seconds)

    # Workers

    def cut(self, worker: str) -> None:
        """Breaks all connections with that worker, and lets none be made until `heal`. Raises `UnknownWorkerError`.

        If that lasts longer than the `heartbeat_patience`, the group takes one of the two for dead.
        """
        self._set(worker, Conditions(cut=True))

    def freeze(self, worker: str) -> None:
        """Lets nothing through to and from that worker until `heal`; connections stay open, and nothing gets lost.

        Raises `UnknownWorkerError`. As for `cut`, the group's patience has an end.
        """
        self._set(worker, Conditions(frozen=True))

    def slow(self, worker: str, seconds: float) -> None:
        """Has every message to and from that worker take so much longer. Raises `UnknownWorkerError`, `UsageError`."""
        self._set(worker, Conditions(slow=check_seconds(seconds)))

    def heal(self, worker: str | None = None) -> None:
        """All is well again between this worker and that one; by default, all of them. Raises `UnknownWorkerError`."""
        if worker is not None:
            self._set(worker, _USUAL)
            return
        with self.relay.lock:
            for each in list(self._conditions):
                if each is not None:
                    self._set(each, _USUAL)

    def _set(self, worker: str, conditions: Conditions) -> None:
        if conditions is not _USUAL or worker not in self._conditions:
            self.check_name(worker)
        with self.relay.lock:
            self._conditions[worker] = conditions
            if conditions is _USUAL:
                del self._conditions[worker]
            for link in list(self.relay.links):
                if link.peer == worker:
                    link.conditions_changed()

    def own_remote_call_delay(self, callee: bytes) -> float:
        """By how much a remote call of the worker to itself is late: it goes on no connection."""
        with self.relay.lock:
            return self.rules.delay_of(self.rules.name_for(REMOTE_CALL, callee))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Has it done after so many seconds, by the relay's thread; not at all if the end comes before."""
        with self.relay.lock:
            self.relay.start()
            self.relay.later(seconds, action)

    # For links, under the relay's lock

    def conditions(self, worker: str | None) -> Conditions:
        """How it is on the way to that worker."""
        return self._conditions.get(worker, _USUAL)

    def correspondence(self, number: Worker) -> Correspondence:
        """What is kept about the messages to that worker."""
        return self._correspondence[number]

    def connect(self, inner: Channel, ours: Channel) -> Link | None:
        """Puts a link between these from now on; None if it is over with the agent, and nothing was done."""
        with self.relay.lock:
            if self.relay.is_closing:
                return None
            link = Link(self, inner, ours)
            self.relay.add(link)
            return link

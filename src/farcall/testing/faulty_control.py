"""`Faults`: what goes wrong between one faulty agent and the others, and how a test changes it while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from farcall.protocol.ids import Worker
from farcall.testing.faulty_options import (
    Failure,
    FaultyRpcBackendOptions,
    Names,
    check_failure,
    check_seconds,
    check_sends,
)
from farcall.testing.faulty_relay import Relay
from farcall.testing.faulty_rules import Rules


class Conditions(NamedTuple):
    """The state of the network between a faulty worker and another one. `Conditions()` is a network without faults.

    Attributes:
        is_cut: True if connections between the two are broken, and none can be made.
        is_frozen: True if messages between the two are held. Connections stay open.
        slow_s: By how many seconds every message is delayed; 0 for not at all.
    """

    is_cut: bool = False
    is_frozen: bool = False
    slow_s: float = 0.0
    """By how many seconds every message between the two is delayed; 0 for not at all."""


_USUAL: Final = Conditions()


class SentMessages:
    """What a faulty agent remembers about its messages to one worker, whichever connection they were sent on.

    A new object remembers nothing. It has no lock: the caller must hold the lock of the agent's `Relay`.

    Attributes:
        unacknowledged: The numbers of messages whose acknowledgements are dropped. A message is removed from it when it
            is sent again.
    """

    def __init__(self) -> None:
        self.unacknowledged: set[int] = set()
        """The numbers of messages whose acknowledgements are dropped, until the messages are sent again."""
        self._late: dict[int | str, list[Callable[[], None]]] = {}

    def add_late(self, key: int | str, release: Callable[[], None]) -> None:
        """Stores the function that delivers a late message: one that must arrive after a later message.

        Args:
            key: For a control message or a call by `remote`, its number. For any other call, its message name. A key
                may have several late messages.
            release: Delivers the late message. `take_late` with the same key returns it.
        """
        self._late.setdefault(key, []).append(release)

    def take_late(self, key: int | str) -> list[Callable[[], None]]:
        """Removes and returns the functions that `add_late` has stored under `key`; an empty list if there are none.

        Each delivers one late message. The key is the number or the message name of the message that is sent now.
        """
        return self._late.pop(key, [])


class Faults:
    """What goes wrong at one worker. `farcall.testing.faults()` returns the object for a faulty agent.

    `fail` and `delay` affect messages of one name. `cut`, `freeze` and `slow` affect all messages between this worker
    and another one, until `heal`. Any thread may call these methods at any time. When such a method returns, its change
    applies to everything that is sent afterwards.

    Args:
        name: The name of the worker.
        options: What goes wrong from the beginning.
        check_worker: Called with the name of a worker. Raises `UnknownWorkerError` if there is none.
        named: The functions whose calls torch sends under special message names. Maps a function, as encoded in the
            frame of a call, to the names of its calls. None for none.

    Example:
        >>> faults(group.agents[0]).cut("worker1")
    """

    def __init__(
        self,
        name: str,
        options: FaultyRpcBackendOptions,
        check_worker: Callable[[str], object],
        named: Mapping[bytes, Names] | None = None,
    ) -> None:
        """Creates the faults of an agent.

        Its relay, the thread that delivers delayed messages, starts with the first use.

        Args:
            name: The name of its worker.
            options: What goes wrong from the beginning.
            check_worker: Called with the name of a worker. Raises `UnknownWorkerError` if there is none.
            named: The functions whose calls torch sends under special message names. Maps a function, as encoded in the
                frame of a call, to the names of its calls. None for none.

        Raises:
            UsageError: The options contain an unknown message name.
        """
        self.name = name
        self.rules = Rules(options, named)
        self.relay = Relay()
        self._check_worker = check_worker
        self._conditions: dict[str, Conditions] = {}
        self._sent: defaultdict[Worker, SentMessages] = defaultdict(SentMessages)

    # Messages

    def fail(self, message: str, sends: int = 1, failure: Failure | str = Failure.ERROR) -> None:
        """Makes messages of one name that this worker sends fail from now on. Replaces an earlier `fail` of that name.

        Args:
            message: The name of the messages, one of `MESSAGES` of `faulty_options`, for example `RREF_FORK_REQUEST`.
            sends: How many sends of each such message fail before it goes through; 0 for none. Earlier failures do not
                count.
            failure: How they fail: a `Failure` or its text, such as "late".

        Raises:
            UsageError: `message` or `failure` is unknown, or `sends` is not an int of at least 0. Nothing has changed.
        """
        sends, failure = check_sends(sends), check_failure(failure)
        with self.relay.lock:
            self.rules.fail(message, sends, failure)

    def delay(self, message: str, seconds: float) -> None:
        """Delays all messages of one name that this worker sends from now on.

        Args:
            message: The name of the messages, one of `MESSAGES` of `faulty_options`, for example `PYTHON_CALL`.
            seconds: How much later they arrive; 0 ends the delay.

        Raises:
            UsageError: `message` is unknown, or `seconds` is negative, infinite or not a number. Nothing has changed.
        """
        seconds = check_seconds(seconds)
        with self.relay.lock:
            self.rules.delay(message, seconds)

    # Workers

    def cut(self, worker: str) -> None:
        """Breaks all connections between this worker and another one, and lets none be made until `heal`.

        Ends an earlier `freeze` or `slow` of that worker. If the cut lasts longer than the option `heartbeat_patience`,
        and no third worker reaches both, one of the two is declared lost.

        Args:
            worker: The name of the other worker.

        Raises:
            UnknownWorkerError: There is no such worker. Nothing has changed.
        """
        self._set_conditions(worker, Conditions(is_cut=True))

    def freeze(self, worker: str) -> None:
        """Holds all messages between this worker and another one until `heal`. Connections stay open; nothing is lost.

        Ends an earlier `cut` or `slow` of that worker. If the freeze lasts longer than the option `heartbeat_patience`,
        and no third worker reaches both, one of the two is declared lost.

        Args:
            worker: The name of the other worker.

        Raises:
            UnknownWorkerError: There is no such worker. Nothing has changed.
        """
        self._set_conditions(worker, Conditions(is_frozen=True))

    def slow(self, worker: str, seconds: float) -> None:
        """Makes every message between this worker and another one arrive later, until `heal`.

        Ends an earlier `cut` or `freeze` of that worker.

        Args:
            worker: The name of the other worker.
            seconds: How much later; 0 for not at all.

        Raises:
            UnknownWorkerError: There is no such worker. Nothing has changed.
            UsageError: `seconds` is negative, infinite or not a number. Nothing has changed.
        """
        self._set_conditions(worker, Conditions(slow_s=check_seconds(seconds)))

    def heal(self, worker: str | None = None) -> None:
        """Ends `cut`, `freeze` and `slow` between this worker and another one. Does nothing if there are none.

        Failures and delays by `fail` and `delay` stay.

        Args:
            worker: The name of the other worker; None for all others.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        with self.relay.lock:
            for each in list(self._conditions) if worker is None else [worker]:
                self._set_conditions(each, _USUAL)

    def _set_conditions(self, worker: str, conditions: Conditions) -> None:
        """Sets the state of the network between this worker and `worker`, and applies it to the open links there.

        `_USUAL`, the state without faults, removes an earlier state, also that of a worker that has left. Otherwise
        raises `UnknownWorkerError` if there is no such worker.
        """
        if conditions is not _USUAL or worker not in self._conditions:
            self._check_worker(worker)
        with self.relay.lock:
            self._conditions[worker] = conditions
            if conditions is _USUAL:
                del self._conditions[worker]
            for link in list(self.relay.links):
                if link.peer == worker:
                    link.apply_conditions()

    def own_remote_call_delay(self, callee: bytes) -> float:
        """Returns by how many seconds a call by `remote` of this worker to itself is delayed; 0 for not at all.

        Such a call sends no message, so no link can delay it.

        Args:
            callee: The function or method, as encoded in the frame of a call. It is not checked.
        """
        with self.relay.lock:
            return self.rules.delay_of(self.rules.name_of_remote_call(callee))

    # For links, under the relay's lock

    def conditions(self, worker: str) -> Conditions:
        """Returns the state of the network between this worker and another one; `Conditions()` if nothing was set.

        The caller must hold `relay.lock`.

        Args:
            worker: The name of the other worker. An unknown or empty name counts as one for which nothing was set.
        """
        return self._conditions.get(worker, _USUAL)

    def sent_to(self, number: Worker) -> SentMessages:
        """Returns what is remembered about messages to the worker with the id `number`; an empty object at first.

        The caller must hold `relay.lock`. Whether there is such a worker is not checked.
        """
        return self._sent[number]

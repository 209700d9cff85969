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
    """The state of the network between this worker and another one."""

    is_cut: bool = False
    is_frozen: bool = False
    slow_s: float = 0.0
    """Seconds by which every message takes longer."""


_USUAL: Final = Conditions()


class SentMessages:
    """What is remembered about messages to one worker, whatever connection they were sent on."""

    def __init__(self) -> None:
        self.unacknowledged: set[int] = set()
        """Numbers of messages whose acknowledgements are dropped, until the messages are sent again."""
        self._late: dict[int | str, list[Callable[[], None]]] = {}

    def add_late(self, key: int | str, release: Callable[[], None]) -> None:
        """Remembers a late message, and the function that delivers it after another of that number or name."""
        self._late.setdefault(key, []).append(release)

    def take_late(self, key: int | str) -> list[Callable[[], None]]:
        """Returns what delivers the late messages of that number or name. To be called when another has been sent."""
        return self._late.pop(key, [])


class Faults:
    """What goes wrong at one worker. `farcall.testing.faults()` returns that of a faulty agent.

    Any thread may call any method at any time. A change holds when the method returns, for what is sent from then on.

    Example:
        faults(group[0]).cut("worker1")
    """

    def __init__(
        self,
        name: str,
        options: FaultyRpcBackendOptions,
        check_worker: Callable[[str], object],
        named: Mapping[bytes, Names] | None = None,
    ) -> None:
        """Creates the faults of an agent.

        Args:
            name: The name of its worker.
            options: What goes wrong from the beginning.
            check_worker: Raises `UnknownWorkerError` if there is no worker of that name.
            named: See `Rules`.
        """
        self.name = name
        self.rules = Rules(options, named)
        self.relay = Relay()
        self._check_worker = check_worker
        self._conditions: dict[str, Conditions] = {}
        self._sent: defaultdict[Worker, SentMessages] = defaultdict(SentMessages)

    # Messages

    def fail(self, message: str, sends: int = 1, failure: Failure | str = Failure.ERROR) -> None:
        """Lets messages fail.

        Args:
            message: The name of the message.
            sends: How many sends of each such message fail, counted anew; 0 for none.
            failure: How they fail.

        Raises:
            UsageError: There is no such message, number of sends or way to fail.
        """
        sends, failure = check_sends(sends), check_failure(failure)
        with self.relay.lock:
            self.rules.fail(message, sends, failure)

    def delay(self, message: str, seconds: float) -> None:
        """Lets messages of that name arrive so many seconds later; 0 for as usual. Raises `UsageError`."""
        seconds = check_seconds(seconds)
        with self.relay.lock:
            self.rules.delay(message, seconds)

    # Workers

    def cut(self, worker: str) -> None:
        """Breaks all connections with a worker, and lets none be made until `heal`.

        If that lasts longer than `heartbeat_patience`, and no third worker reaches both, one of the two is lost.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        self._set_conditions(worker, Conditions(is_cut=True))

    def freeze(self, worker: str) -> None:
        """Lets nothing pass to and from a worker until `heal`. Connections stay open, and nothing gets lost.

        As for `cut`, one of the two is lost if that lasts too long.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        self._set_conditions(worker, Conditions(is_frozen=True))

    def slow(self, worker: str, seconds: float) -> None:
        """Lets every message to and from a worker take so many seconds longer.

        Raises:
            UnknownWorkerError: There is no such worker.
            UsageError: The seconds cannot be a delay.
        """
        self._set_conditions(worker, Conditions(slow_s=check_seconds(seconds)))

    def heal(self, worker: str | None = None) -> None:
        """Ends `cut`, `freeze` and `slow` between this worker and that one; by default, all others.

        Raises:
            UnknownWorkerError: There is no such worker.
        """
        with self.relay.lock:
            for each in list(self._conditions) if worker is None else [worker]:
                self._set_conditions(each, _USUAL)

    def _set_conditions(self, worker: str, conditions: Conditions) -> None:
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
        """Returns by how many seconds a remote call of the worker to itself is late: no message is sent for it."""
        with self.relay.lock:
            return self.rules.delay_of(self.rules.name_of_remote_call(callee))

    # For links, under the relay's lock

    def conditions(self, worker: str) -> Conditions:
        """Returns the state of the network between this worker and that one."""
        return self._conditions.get(worker, _USUAL)

    def sent_to(self, number: Worker) -> SentMessages:
        """Returns what is remembered about messages to the worker of that number."""
        return self._sent[number]

"""A worker's connection to the store of an open group. It survives the end of the worker that hosts the store.

The store is only the way into the group: it assigns numbers, keeps names unique, and tells new workers who the members
are. The members find out among themselves who is alive. So the store may end with its host at any time, and a member
starts the next one with what it knows (`ensure_store`).

Rules
- A worker that wants to join starts a new group only where there is none: not while workers of a group run on this
  machine, and not at once if a file still leads to a store that does not answer. A member hosts the store again without
  waiting.
- A store that serves another run is not ours, even at our address.
- A worker that is no longer a member does not host the store (`stop_hosting`). If the host was declared lost but still
  runs, members use its store until one of them hosts a new one, but go on trying to replace it.
- `close` waits for nobody. If there are other members, the location file is kept for the one that hosts the store next.
- One thread at a time looks for the store. Other threads, which only want to send a request, give up at their timeout.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from farcall.errors import RendezvousError
from farcall.rendezvous.client import Candidate, Limit, StoreClient, find_store
from farcall.rendezvous.hosted_store import HostedStore, host_open, store_candidates
from farcall.rendezvous.location_file import HostedElsewhereError, Location, read_location
from farcall.rendezvous.presence_lock import PresenceLock, is_group_on_this_machine
from farcall.rendezvous.store import Store
from farcall.rendezvous.urls import FilePlace, Plan
from farcall.security import Credentials
from farcall.transports.network import numeric_host

RUN_KEY: Final = "open/run"
"""The key of the id of the run."""
LAST_NUMBER_KEY: Final = "open/numbers"
"""The key of the last number that was assigned."""
MEMBER_PREFIX: Final = "open/here/"
"""What the keys of members start with; their numbers follow."""
NAME_PREFIX: Final = "open/name/"
"""What the keys of names start with."""

PRESENCE_WAIT_S: Final = 14.0
"""How many seconds members on this machine have to host their store again before a new worker starts another group.

Detecting that the host is lost takes a little less.
"""
FILE_WAIT_S: Final = 2.0
"""How many seconds a new worker waits before it replaces a location file whose store does not answer."""
NUMBER_GAP: Final = 1000
"""How many numbers at least a new store skips, because its predecessor may have assigned some just before it ended."""

_SEARCH_TIMEOUT_S: Final = 2.0
"""How many seconds `ensure_store` looks for the store, and waits for its answers."""
_PROBE_TIMEOUT_S: Final = 0.5
"""How many seconds a store has to answer a probe."""
_PUBLISH_TIMEOUT_S: Final = 1.0
"""How many seconds to wait for the lock of the location file."""
_RETRY_PAUSE_S: Final = 0.05

_log = logging.getLogger(__name__)


class OpenStore(Store):
    """The store of an open group, as one worker sees it. Call `enter` before anything else, and `close` at the end.

    The constructor takes the `plan` (the group and the place of its store), the `name` of this worker, the address
    `chosen` to listen on (None for all), and the `credentials` (secret and encryption; None for those of this user). It
    checks nothing. The methods that send a request raise `RendezvousError` while no worker hosts the store.
    `ensure_store` finds it again.

    Attributes:
        peer: The store's address in the last connection to it; empty before the first.
        own: This worker's address in that connection; empty before the first.
        on_lost: A function without arguments, which is called on a thread of the store when the connection is lost. It
            must not block, and must not use the store. The default does nothing.
    """

    def __init__(self, plan: Plan, name: str, chosen: str | None, credentials: Credentials | None = None) -> None:
        """Prepares the connection; nothing is sent yet.

        Args:
            plan: The group and the place of its store.
            name: The name of this worker.
            chosen: The address of the interface to use if this worker hosts the store; None for all.
            credentials: The secret and the encryption; None means those of this user.
        """
        self._credentials = credentials or Credentials()
        self.peer = self.own = ""
        """The two addresses of the last connection to the store."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called on a thread of the store when the connection is lost. Must not block, and must not use the store."""
        self._plan = plan
        self._name = name
        self._chosen = chosen
        self._limit = Limit()
        self._lock = threading.Lock()  # held by the thread that looks for the store; guards what is below
        self._client: StoreClient | None = None
        self._host_name = ""
        self._hosted: HostedStore | None = None
        self._run = ""
        self._highest_number = 0  # the highest number that we know to be assigned
        self._own_entries: dict[str, bytes] = {}  # empty unless this worker is a member
        self._presence: PresenceLock | None = None
        self._closed = False
        self._keeps_file: bool | None = None  # decided by the first `close`
        self._may_not_host = False
        self._has_warned = False  # that another group uses our address

    # -- the interface of every store

    def set(self, key: str, value: bytes) -> None:
        """Sets a key, replacing any earlier value. The value may be empty; neither type is checked.

        Raises `RendezvousError` if the store is gone and not found again yet, or the value is too large (16 MiB), and
        `RendezvousTimeoutError` if the store does not answer within 30 seconds.
        """
        self._current().set(key, value)

    def set_new(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it exists, and returns the value that it has now: `value`, or the earlier one.

        Raises `RendezvousError` if the store is gone and not found again yet, or the value is too large (16 MiB), and
        `RendezvousTimeoutError` if the store does not answer within 30 seconds.
        """
        return self._current().set_new(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits up to `timeout` seconds for a key, and returns its value. 0 or less does not wait.

        Raises `RendezvousTimeoutError` if the key does not appear in time, and `RendezvousError` if the store is gone.
        """
        return self._current().get(key, timeout)

    def add(self, key: str, amount: int) -> int:
        """Adds `amount`, which may be negative, to the counter at `key`, and returns the sum.

        A key that does not exist counts as 0. Raises `RendezvousError` if the store is gone, the key holds no counter,
        or the sum would exceed 64 bits, `RendezvousTimeoutError` if the store does not answer within 30 seconds, and
        `OverflowError` if `amount` itself exceeds 64 bits.
        """
        return self._current().add(key, amount)

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Deletes a key; if `expected` is not None, only if the key has that value.

        Returns whether the key was deleted. Returns False if the key does not exist. Raises `RendezvousError` if the
        store is gone, and `RendezvousTimeoutError` if it does not answer within 30 seconds.
        """
        return self._current().delete(key, expected)

    def read(self, prefix: str) -> Mapping[str, bytes]:
        """Returns all keys that begin with `prefix`, with their values; empty if there are none. "" means all keys.

        Raises `RendezvousError` if the store is gone, and `RendezvousTimeoutError` if it does not answer within 30
        seconds.
        """
        return self._current().read(prefix)

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        """Waits until at least `count` keys begin with `prefix`, and returns all of them with their values.

        A `count` of 0 returns at once. Raises `RendezvousTimeoutError` after `timeout` seconds (0 or less does not
        wait), with the keys that are there in its attribute `present`, and `RendezvousError` if the store is gone.
        """
        return self._current().collect(prefix, count, timeout)

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Context manager: limits all requests of this thread inside the block to `seconds` in total.

        A request that takes longer raises `RendezvousTimeoutError`; with 0 that is every request. Of nested limits the
        shortest counts.
        """
        return self._limit.within(seconds)

    def close(self, early: bool = False, timeout: float = 0.0) -> None:
        """Disconnects, and ends the store if this worker hosts it. May be called again, and before `enter`.

        Waits for no other worker; `early` and `timeout` are ignored. Later requests raise `RendezvousError`.
        """
        self._closed = True  # before the lock: a thread that looks for the store gives up and releases it
        with self._lock:
            if self._keeps_file is None:  # else an earlier `close` was interrupted, and the store may be closed already
                self._keeps_file = self._has_other_members()
            self._disconnect(self._keeps_file)
            self._release_presence()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of descriptors. The parent stays in the group.

        Later requests in the child raise `RendezvousError`. Raises nothing.
        """
        self._lock = threading.Lock()  # a thread of the parent may have held it at the fork
        self._closed = True
        if self._client is not None:
            self._client.abandon()
        if self._presence is not None:
            self._presence.abandon()

    # -- open groups only

    @property
    def hosts(self) -> bool:
        """True if this worker hosts the store now; False if another worker does, or there is no connection."""
        return self._hosted is not None

    def is_hosted_by(self, names: Collection[str]) -> bool:
        """Returns True if the store is hosted by this worker or by a worker with one of these names, which may be none.

        The host is that of the last connection, even if the connection has ended. Returns False before the first.
        """
        return self._hosted is not None or self._host_name in names

    def enter(self, timeout: float) -> str:
        """Connects to the store, or starts a new group if there is none. Must not be called by a member; not checked.

        Args:
            timeout: How many seconds to look for the store, more than 0. With 0 there is no time for an answer, and
                `RendezvousTimeoutError` is raised.

        Returns:
            The id of the group's run, which no other run has.

        Raises:
            RendezvousTimeoutError: No store was found in time, and this worker cannot host one.
            RendezvousError: The store refused this worker, or was closed in this process.
        """
        deadline = time.monotonic() + timeout
        begin = {RUN_KEY: uuid.uuid4().hex.encode()}
        why_not = self._reasons_not_to_start()
        with self._lock:
            while True:
                self._disconnect()
                client = self._connect_or_host(max(0.0, deadline - time.monotonic()), lambda: begin, why_not)
                try:
                    with self.within(max(0.0, deadline - time.monotonic())):
                        self._run = client.read(RUN_KEY)[RUN_KEY].decode()
                    return self._run
                except RendezvousError as error:  # the host has just died; another worker will host the store
                    if time.monotonic() + _RETRY_PAUSE_S > deadline:
                        raise
                    _log.info("worker %r found the store and lost it again: %s", self._name, error)
                    time.sleep(_RETRY_PAUSE_S)

    def remember_own_entries(self, mine: Mapping[str, bytes], number: int) -> None:
        """Records that this worker is a member, and its entries. `ensure_store` writes them into each later store.

        Args:
            mine: The entries of this worker in the store: keys and values for its number and its name.
            number: The number of this worker, which the store has assigned. Not checked.
        """
        with self._lock:
            self._own_entries, self._highest_number = dict(mine), number
            self._presence = self._presence or PresenceLock(self._plan.place)

    def forget_own_entries(self) -> None:
        """Records that this worker leaves: its entries are not written into stores that start later.

        Sends nothing. Does nothing if this worker has no entries.
        """
        self._own_entries = {}

    def stop_hosting(self) -> None:
        """Ends the store if this worker hosts it, and never hosts it again.

        Requests to another worker's store still work. May wait for another thread that is looking for the store. Raises
        nothing.
        """
        self._may_not_host = True
        with self._lock:
            if self._hosted is not None:
                self._disconnect(keep_file=True)
            self._release_presence()

    def reconnect(self, timeout: float) -> bool:
        """Looks for the store again, if another worker hosts it. Never hosts it here.

        Does not look for it if this worker hosts the store, or after `close`.

        Args:
            timeout: How many seconds to look, more than 0. With 0 there is no time for an answer.

        Returns:
            True if this worker is connected to the store of its own run (of the group that it joined); False if not.
            Raises nothing.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            return False
        try:
            if self._hosted is not None or self._closed:
                return self._client is not None and not self._client.is_ended
            self._disconnect()
            self._connect_or_host(max(0.0, deadline - time.monotonic()), None, None)
            with self.within(max(0.0, deadline - time.monotonic())):
                return self._serves_our_run()
        except RendezvousError as error:
            _log.debug("worker %r found no store at %s: %s", self._name, self._plan.place, error)
            return False
        finally:
            self._lock.release()

    def ensure_store(
        self, values: Mapping[str, bytes], names: Collection[str], next_number: int, gone: Collection[str] = ()
    ) -> bool:
        """Makes sure that the group has a store, after the worker that hosted it may have gone.

        Connects to the store if another member hosts it, else hosts it here. Does nothing if the store still answers,
        unless its host is among `gone`. May take several seconds. Raises nothing.

        Args:
            values: The entries of all current members: keys and values for their numbers and names. A store that is
                started here begins with them.
            names: The names of the current members.
            next_number: A store that is started here assigns numbers well above this one.
            gone: The names of workers that have left or were lost; may be empty.

        Returns:
            True if the store is up, here or on another member; False if not, and after `close` or `stop_hosting`.
        """
        with self._lock:
            if self._closed or self._may_not_host:
                return False
            if self._is_answering(names, gone):
                return True
            self._disconnect()
            first = max(next_number, self._highest_number + 1) + NUMBER_GAP + random.randrange(9 * NUMBER_GAP)
            seed = {**values, **self._own_entries, RUN_KEY: self._run.encode(), LAST_NUMBER_KEY: b"%d" % (first - 1)}
            try:
                client = self._connect_or_host(_SEARCH_TIMEOUT_S, lambda: seed, lambda: None)
                with self.within(_SEARCH_TIMEOUT_S):
                    if not self._serves_our_run() or (self._hosted is None and self._host_name in gone):
                        return False
                    last = client.read(LAST_NUMBER_KEY).get(LAST_NUMBER_KEY, b"0")
                    self._highest_number = max(self._highest_number, int(last) if last.isdigit() else 0)
                    for key, value in self._own_entries.items():
                        client.set_new(key, value)
            except RendezvousError as error:
                _log.info("worker %r: the store of the group is gone and not up again: %s", self._name, error)
                return False
            if self._hosted is not None:
                _log.info("worker %r now hosts the store of the group, at %s", self._name, self._plan.place)
            return True

    # -- finding or starting the store

    def _connect_or_host(
        self,
        timeout: float,
        seed: Callable[[], Mapping[str, bytes]] | None,
        why_not: Callable[[], str | None] | None,
    ) -> StoreClient:
        """Connects to the store, and returns the connection. Hosts the store if no worker does.

        If `seed` or `why_not` is None, only looks for a store and does not host it.

        Args:
            timeout: How many seconds to look for the store. Each address is tried once even with 0.
            seed: Returns the keys of a store that is started here, with their values.
            why_not: Returns why this worker must not host the store now, or None if it may.

        Raises:
            RendezvousTimeoutError: No store was found in time.
            RendezvousError: The store refused this worker, or was closed in this process, or the location file (the
                file with its address) cannot be used.
        """
        plan = self._plan
        candidates, only_one = store_candidates(plan)
        hosted: HostedStore | None = None
        tried: Location | None = None

        def where() -> Sequence[Candidate]:
            nonlocal tried
            if self._closed:
                raise RendezvousError(f"the store was closed by this worker, {self._name!r}")
            if isinstance(plan.place, FilePlace):
                tried = read_location(plan.place.path)
            return candidates() if hosted is None else hosted.reached_at

        def host_store(vacant: Sequence[Candidate]) -> str | None:
            nonlocal hosted
            if seed is None or why_not is None:
                return "it only looks for an existing store"
            if not vacant and not isinstance(plan.place, FilePlace):
                return "another program listens there but does not answer"
            if (reason := why_not()) is not None:
                return reason
            port = vacant[0].port if vacant else 0
            try:
                hosted = host_open(
                    plan,
                    self._name,
                    self._chosen,
                    port,
                    seed(),
                    _PUBLISH_TIMEOUT_S,
                    self._credentials,
                    lambda at: at == tried,
                )
            except HostedElsewhereError:
                return "another worker has just started to host it"
            except OSError as error:
                return f"it cannot listen there ({error})"
            return None

        try:
            sock, welcome = find_store(
                where, only_one, str(plan.place), self._name, plan.rank, timeout, host_store, self._credentials
            )
        except BaseException:
            if hosted is not None:
                hosted.close()
            raise
        self.peer, self.own = numeric_host(sock.getpeername()), numeric_host(sock.getsockname())
        self._hosted = hosted
        self._client = StoreClient(
            sock,
            welcome,
            hosted=None if hosted is None else hosted.server,
            limit=self._limit,
            on_lost=self._report_loss,
            good_bye_timeout=0.0,
        )
        self._host_name = welcome.name
        return self._client

    def _reasons_not_to_start(self) -> Callable[[], str | None]:
        """Returns a function that says why this worker, which is no member yet, must not start a new group now.

        The function returns None if the worker may start one. It returns a reason if a group at this place may host its
        store again soon: workers of a group run on this machine, in the first `PRESENCE_WAIT_S` seconds after this
        call, or the location file still holds an address, in the first `FILE_WAIT_S` seconds.
        """
        place = self._plan.place
        since = time.monotonic()

        def why_not() -> str | None:
            waited = time.monotonic() - since
            if waited < PRESENCE_WAIT_S and is_group_on_this_machine(place):
                return "workers of a group at this address run on this machine and should host it again soon"
            if waited < FILE_WAIT_S and isinstance(place, FilePlace) and read_location(place.path) is not None:
                return "the file leads to a store that a worker of its group may host again soon"
            return None

        return why_not

    def _serves_our_run(self) -> bool:
        """Returns True if the connected store serves this worker's run, that is the group that this worker has joined.

        If not, logs a warning, disconnects and returns False. Raises `RendezvousError` if there is no connection, or
        the store does not answer.
        """
        run = self._current().read(RUN_KEY).get(RUN_KEY, b"").decode()
        if run != self._run:
            level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True  # checked repeatedly
            _log.log(
                level,
                "worker %r: another open group has started at %s, so no worker can join the group of this worker any "
                "more. Shut one of the two groups down",
                self._name,
                self._plan.place,
            )
            self._disconnect()
        return run == self._run

    def _is_answering(self, names: Collection[str], gone: Collection[str]) -> bool:
        """Returns True if the current connection to the store can be used.

        Returns False if there is none or it has ended, if its host is among `gone` (the names of lost workers), or if a
        host that is not among `names` (the members) does not answer a request within `_PROBE_TIMEOUT_S` seconds.
        """
        client = self._client
        if client is None or client.is_ended:
            return False
        if self._hosted is None and self._host_name in gone:
            return False  # another member may host a new store by now
        if self._hosted is not None or self._host_name in names:
            return True  # the store may be slow, but the group knows that its host is alive
        try:
            with self.within(_PROBE_TIMEOUT_S):
                client.read(RUN_KEY)
        except RendezvousError:
            return False
        return True

    def _has_other_members(self) -> bool:
        """Returns True if this worker hosts the store and other members could host it next.

        Returns False if it does not host the store, has no other members in it, or the store does not answer.
        """
        client = self._client
        if self._hosted is None or client is None:
            return False
        try:
            with self.within(_PROBE_TIMEOUT_S):
                return any(key not in self._own_entries for key in client.read(MEMBER_PREFIX))
        except RendezvousError:
            return False

    def _current(self) -> StoreClient:
        """Returns the current connection. Raises `RendezvousError` if there is none."""
        client = self._client
        if client is None:
            raise RendezvousError(f"the store at {self._plan.place} is gone and has not been found again yet")
        return client

    def _disconnect(self, keep_file: bool = False) -> None:
        """Closes the connection, and the store if this worker hosts it. Does nothing if there is neither.

        Args:
            keep_file: Leaves the location file, which holds the store's address, for the worker that hosts the store
                next.
        """
        # Close first, forget second: after an interrupt in between, the next call closes again.
        if self._client is not None:
            self._client.close(timeout=0.0)
            self._client = None
        if self._hosted is not None:
            self._hosted.close(keep_file)
            self._hosted = None

    def _release_presence(self) -> None:
        """Releases the lock that tells other workers of this machine that the group exists.

        Does nothing if it is not held.
        """
        if self._presence is not None:
            self._presence.release()
            self._presence = None

    def _report_loss(self) -> None:
        """Calls `on_lost`, unless this worker has closed the store itself."""
        if not self._closed:
            self.on_lost()

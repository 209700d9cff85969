"""A worker's end of the store of an open group: it finds the store again when the one that hosted it is gone, and hosts
it itself where nobody does.

The store is only the way into the group. It hands out numbers, keeps names apart and tells who comes who is there; who
is alive is what the workers tell each other. So it may vanish with its host at any time, and the next one begins with
what a member knows (`host_again`).

Rules
- Whoever wants to join begins a new group only where none is: not while workers of one are on this machine, nor at once
  where a file still leads to a store that does not answer. A member hosts the store again without waiting.
- A store that serves another run than ours is not ours, though it is at our place.
- Who is no member any more does not host it (`hand_over`): a member does. A store of one who was taken for dead is used
  by members while they wait for that, but they neither settle in it nor are content with it.
- Nobody is waited for: `close` hangs up. The store's place is kept if others are there who may host it.
- One thread at a time looks for the store; others that only want to tell it something give up in time.
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
from farcall.rendezvous.client import Limit, StoreClient
from farcall.rendezvous.hosting import Hosted, candidates_of, host_open
from farcall.rendezvous.locate import Candidate, find_store
from farcall.rendezvous.location_file import HostedElsewhereError, Location, read_location
from farcall.rendezvous.presence import Presence, is_anybody_here
from farcall.rendezvous.store import Store
from farcall.rendezvous.urls import FilePlace, Plan
from farcall.security import Credentials
from farcall.transports.network import numeric_host

RUN: Final = "open/run"
NUMBERS: Final = "open/numbers"
HERE: Final = "open/here/"
NAME: Final = "open/name/"

PRESENCE_PATIENCE: Final = 14.0
"""Seconds that workers on this machine have to host their store again: a little more than finding a dead host takes."""
FILE_PATIENCE: Final = 2.0
"""Seconds for which nobody replaces a file whose store does not answer, if it is not a member."""
GAP: Final = 1000
"""So many numbers are left out when a store begins again: for those that its forerunner gave shortly before it died."""

_SEARCH: Final = 2.0
_PROBE: Final = 0.5
_PUBLISH: Final = 1.0
_AGAIN: Final = 0.05

_log = logging.getLogger(__name__)


class OpenStore(Store):
    """The store of the open group of a plan, at this worker. `enter` it first."""

    def __init__(self, plan: Plan, name: str, chosen: str | None, credentials: Credentials | None = None) -> None:
        """The `credentials` are by default those of this user."""
        self._credentials = credentials or Credentials()
        self.peer = self.own = ""
        """The two addresses of the last connection to the store."""
        self.when_lost: Callable[[], None] = lambda: None
        """Called on a thread of the store when the connection to it is lost; must not block, nor ask the store."""
        self._plan = plan
        self._name = name
        self._chosen = chosen
        self._limit = Limit()
        self._lock = threading.Lock()  # held by whoever looks for the store; guards what is below
        self._client: StoreClient | None = None
        self._host_name = ""
        self._hosted: Hosted | None = None
        self._run = ""
        self._highest = 0  # of the numbers that we know to be given
        self._mine: dict[str, bytes] = {}  # our own entries, once we are a member
        self._presence: Presence | None = None
        self._closed = False
        self._keeps_file: bool | None = None  # decided when it is closed
        self._hosts_no_more = False
        self._has_warned = False  # that another group is at our place

    # What every store does

    def set(self, key: str, value: bytes) -> None:
        self._current().set(key, value)

    def set_new(self, key: str, value: bytes) -> bytes:
        return self._current().set_new(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        return self._current().get(key, timeout)

    def add(self, key: str, amount: int) -> int:
        return self._current().add(key, amount)

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        return self._current().delete(key, expected)

    def read(self, prefix: str) -> Mapping[str, bytes]:
        return self._current().read(prefix)

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        return self._current().collect(prefix, count, timeout)

    def within(self, seconds: float) -> AbstractContextManager[None]:
        return self._limit.within(seconds)

    def close(self, early: bool = False, patience: float = 0.0) -> None:
        """Hangs up; a store that is hosted here ends. Waits for nobody, whatever is said. May be called twice."""
        self._closed = True  # who looks for the store gives up
        with self._lock:
            if self._keeps_file is None:  # else this was interrupted, and the store cannot be asked any more
                self._keeps_file = self._others_are_here()
            self._let_go(self._keeps_file)
            self._end_presence()

    def abandon(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._closed = True
        if self._client is not None:
            self._client.abandon()
        if self._presence is not None:
            self._presence.abandon()

    # What only that of an open group does

    @property
    def hosts(self) -> bool:
        """Whether the store is in this worker."""
        return self._hosted is not None

    def is_hosted_by(self, names: Collection[str]) -> bool:
        """Whether the store is in this worker, or in one of those of these names."""
        return self._hosted is not None or self._host_name in names

    def enter(self, timeout: float) -> str:
        """Finds the store, or begins a new group where there is none; gives the id of the group. Not for members.

        Raises `RendezvousTimeoutError` if there is none in time and this worker cannot host it; `RendezvousError` if
        it refuses this worker, or was closed here.
        """
        deadline = time.monotonic() + timeout
        begin = {RUN: uuid.uuid4().hex.encode()}
        why_not = self._why_not_begin()
        with self._lock:
            while True:
                self._let_go()
                client = self._look(max(0.0, deadline - time.monotonic()), lambda: begin, why_not)
                try:
                    with self.within(max(0.0, deadline - time.monotonic())):
                        self._run = client.read(RUN)[RUN].decode()
                    return self._run
                except RendezvousError as error:  # its host has just died: another one will host it
                    if time.monotonic() + _AGAIN > deadline:
                        raise
                    _log.info("worker %r has found the store, and lost it again: %s", self._name, error)
                    time.sleep(_AGAIN)

    def settle(self, mine: Mapping[str, bytes], number: int) -> None:
        """This worker is a member now, by these entries; they are made again when somebody else hosts the store."""
        with self._lock:
            self._mine, self._highest = dict(mine), number
            self._presence = self._presence or Presence(self._plan.place)

    def unsettle(self) -> None:
        """It is leaving: its entries are not made again."""
        self._mine = {}

    def hand_over(self) -> None:
        """This worker is out, and hosts the store no more: who is in the group does. It may still be asked.

        May wait for whoever looks for the store here; raises nothing.
        """
        self._hosts_no_more = True
        with self._lock:
            if self._hosted is not None:
                self._let_go(keep_file=True)
            self._end_presence()

    def find_again(self, timeout: float) -> bool:
        """Looks for the store if the connection to it is gone or silent, but does not host it. Raises nothing."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            return False
        try:
            if self._hosted is not None or self._closed:
                return self._client is not None and not self._client.is_ended
            self._let_go()
            self._look(max(0.0, deadline - time.monotonic()), None, None)
            with self.within(max(0.0, deadline - time.monotonic())):
                return self._is_ours()
        except RendezvousError as error:
            _log.debug("worker %r finds no store at %s: %s", self._name, self._plan.place, error)
            return False
        finally:
            self._lock.release()

    def host_again(
        self, values: Mapping[str, bytes], names: Collection[str], next_number: int, gone: Collection[str] = ()
    ) -> bool:
        """Whether the group has its store: as before, hosted by another one, or by this worker from now on.

        `values` are the entries of those who are here, `names` their names; `gone` are names of others, who are not.
        Takes up to some seconds; raises nothing.
        """
        with self._lock:
            if self._closed or self._hosts_no_more:
                return False
            if self._is_answering(names, gone):
                return True
            self._let_go()
            first = max(next_number, self._highest + 1) + GAP + random.randrange(9 * GAP)
            seed = {**values, **self._mine, RUN: self._run.encode(), NUMBERS: b"%d" % (first - 1)}
            try:
                client = self._look(_SEARCH, lambda: seed, lambda: None)
                with self.within(_SEARCH):
                    if not self._is_ours() or (self._hosted is None and self._host_name in gone):
                        return False
                    self._highest = max(self._highest, int(client.read(NUMBERS).get(NUMBERS, b"0")))
                    for key, value in self._mine.items():
                        client.set_new(key, value)
            except RendezvousError as error:
                _log.info("worker %r: the store of the group is gone, and not here again: %s", self._name, error)
                return False
            if self._hosted is not None:
                _log.info("worker %r hosts the store of the group now, at %s", self._name, self._plan.place)
            return True

    # Looking for it

    def _look(
        self,
        timeout: float,
        seed: Callable[[], Mapping[str, bytes]] | None,
        why_not: Callable[[], str | None] | None,
    ) -> StoreClient:
        """Connects to the store; if nobody hosts it, and `why_not` gives no reason against it, hosts it with `seed`."""
        plan = self._plan
        candidates, only_one = candidates_of(plan)
        hosted: Hosted | None = None
        tried: Location | None = None

        def where() -> Sequence[Candidate]:
            nonlocal tried
            if self._closed:
                raise RendezvousError(f"the store was closed by this worker, {self._name!r}")
            if isinstance(plan.place, FilePlace):
                tried = read_location(plan.place.path)
            return candidates() if hosted is None else hosted.reached_at

        def nobody(vacant: Sequence[Candidate]) -> str | None:
            nonlocal hosted
            if seed is None or why_not is None:
                return "it only looks for it"
            if not vacant and not isinstance(plan.place, FilePlace):
                return "somebody listens there, but does not answer"
            if (reason := why_not()) is not None:
                return reason
            port = vacant[0].port if vacant else 0
            try:
                hosted = host_open(
                    plan, self._name, self._chosen, port, seed(), _PUBLISH, self._credentials, lambda at: at == tried
                )
            except HostedElsewhereError:
                return "another worker has just begun to host it"
            except OSError as error:
                return f"it cannot listen there ({error})"
            return None

        try:
            sock, welcome = find_store(
                where, only_one, str(plan.place), self._name, plan.rank, timeout, nobody, self._credentials
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
            on_lost=self._tell_lost,
            farewell=0.0,
        )
        self._host_name = welcome.name
        return self._client

    def _why_not_begin(self) -> Callable[[], str | None]:
        """Says why a worker that is no member should not begin a new group now, while there may be one."""
        place = self._plan.place
        since = time.monotonic()

        def why_not() -> str | None:
            waited = time.monotonic() - since
            if waited < PRESENCE_PATIENCE and is_anybody_here(place):
                return "workers of a group that meets here are on this machine, and should host it again soon"
            if waited < FILE_PATIENCE and isinstance(place, FilePlace) and read_location(place.path) is not None:
                return "the file leads to a store that may be hosted again soon by a worker of its group"
            return None

        return why_not

    def _is_ours(self) -> bool:
        """Whether the store is that of our run; if not, it is let go of."""
        run = self._current().read(RUN).get(RUN, b"").decode()
        if run != self._run:
            level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True  # it is asked again
            _log.log(
                level,
                "worker %r: another open group has begun at %s, while this one goes on; nobody can join this one any "
                "more. Shut one of them down",
                self._name,
                self._plan.place,
            )
            self._let_go()
        return run == self._run

    def _is_answering(self, names: Collection[str], gone: Collection[str]) -> bool:
        client = self._client
        if client is None or client.is_ended:
            return False
        if self._hosted is None and self._host_name in gone:
            return False  # there may be another one by now
        if self._hosted is not None or self._host_name in names:
            return True  # it may be slow, but the group knows it to be alive
        try:
            with self.within(_PROBE):
                client.read(RUN)
        except RendezvousError:
            return False
        return True

    def _others_are_here(self) -> bool:
        """Whether somebody else could go on hosting the store that is here."""
        client = self._client
        if self._hosted is None or client is None:
            return False
        try:
            with self.within(_PROBE):
                return any(key not in self._mine for key in client.read(HERE))
        except RendezvousError:
            return False

    def _current(self) -> StoreClient:
        client = self._client
        if client is None:
            raise RendezvousError(f"the store at {self._plan.place} is gone, and was not found again yet")
        return client

    def _let_go(self, keep_file: bool = False) -> None:
        # Each is closed before it is forgotten: who is interrupted in between does it again.
        if self._client is not None:
            self._client.close(patience=0.0)
            self._client = None
        if self._hosted is not None:
            self._hosted.close(keep_file)
            self._hosted = None

    def _end_presence(self) -> None:
        if self._presence is not None:
            self._presence.end()
            self._presence = None

    def _tell_lost(self) -> None:
        if not self._closed:
            self.when_lost()

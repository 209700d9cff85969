"""What all workers do together, on top of calls: gather something from everybody, and wait for everybody.

The worker with the smallest name leads. Each of the others calls it once, with what it brings; the leader answers all
of these calls when everybody has come, with what all have brought. So N workers need N - 1 calls.

Who has not come after a moment is looked for: whoever waits asks the leader to, and the leader calls those that are
missing. Such a call is answered when they come; if they die, it fails, and the whole gathering with it, at once. All of
that is no more than two calls for each worker.

Rules
- A gathering is told from others by its members and by how many of the same members there were before. So several in a
  row, in several threads, and of different members at once, do not mix.
- A gathering succeeds for all who wait for it, or fails for all: with `WorkerLost` if a member was lost before it came,
  with `RpcTimeoutError` when the time of one who waits is over. Who comes late to one that failed hears how it did, so
  all have gone through the same gatherings and can try again.
- Whoever waits looks now and then whether its own agent is closed: the leader waits for calls of others, which do not
  end with it, and would wait for ever where the group has taken it for dead.
- Who has brought its part is needed no more: it may die, and the others have its part.
- What is kept of a gathering goes when all its members have come or are lost; else with the agent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Final, NamedTuple

from farcall.api import current_agent
from farcall.backends.interface import RpcAgent
from farcall.errors import NotAllowedError, RpcError, RpcTimeoutError, UsageError, WorkerLost
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT

_FOREVER: Final = float("inf")
_A_MOMENT: Final = 0.1
"""Seconds after which whoever waits has the missing looked for."""
_LOOK: Final = 5.0
"""Seconds that one look takes at most. So none keeps a worker from shutting down for long."""
_GLANCE: Final = 1.0
"""Seconds after which whoever waits looks at its own agent again."""
_ANSWER: Final = 1.0
"""Seconds that the leader has to say who is missing, when the time is over."""


class Key(NamedTuple):
    """Which gathering: of whom, and the how many of those."""

    members: tuple[str, ...]
    ids: tuple[int, ...]
    """Of the members: one that was started again in an open group is another one, and has been to none before."""
    number: int


class Gathering:
    """One gathering, as its leader sees it."""

    def __init__(self, members: Iterable[str]) -> None:
        self.missing = set(members)
        self.brought: dict[str, Any] = {}
        self.outcome: Future[dict[str, Any]] = Future()
        self.is_looked_for = False


class Gatherings:
    """The gatherings of one worker. Decides under its lock; futures are settled outside it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in its midst
        self._numbers: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._led: dict[Key, Gathering] = {}
        self._looks: dict[Key, list[Future[None]]] = {}  # answered when this worker comes to that gathering

    def enter(self, members: tuple[str, ...], ids: tuple[int, ...]) -> Key:
        """This worker comes to the next gathering of these members."""
        with self._lock:
            key = Key(members, ids, self._numbers.get((members, ids), 0))
            self._numbers[members, ids] = key.number + 1
            looks = self._looks.pop(key, [])
        for look in looks:
            look.set_result(None)
        return key

    def leave(self, key: Key) -> None:
        """It was never known to the leader that this worker came: the next gathering has that number."""
        with self._lock:
            if self._numbers[key.members, key.ids] == key.number + 1:
                self._numbers[key.members, key.ids] = key.number

    def look(self, key: Key) -> Future[None]:
        """Done when this worker has come to that gathering."""
        future: Future[None] = Future()
        with self._lock:
            if self._numbers.get((key.members, key.ids), 0) <= key.number:
                self._looks.setdefault(key, []).append(future)
                del self._looks[key][:-8]  # those before are answered to nobody any more
                return future
        future.set_result(None)
        return future

    # At the leader

    def bring(self, key: Key, name: str, part: Any) -> Future[dict[str, Any]]:
        """A member comes; the future of what all bring, in the order of their names.

        Raises `UsageError` if it has come before.
        """
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None:
                gathering = self._led[key] = Gathering(key.members)
            if name not in gathering.missing:
                raise UsageError(f"worker {name!r} came twice to gathering {key.number} of {_listed(key.members)}")
            gathering.missing.discard(name)
            gathering.brought[name] = part
            complete = self._settle(key, gathering)
        if complete and not gathering.outcome.done():
            gathering.outcome.set_result({member: gathering.brought[member] for member in key.members})
        return gathering.outcome

    def fail(self, key: Key, error: RpcError, lost: str | None = None) -> None:
        """Ends a gathering for all that wait for it, unless it is complete; `lost` will never come to it."""
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None:
                return
            fails = bool(gathering.missing) and not gathering.outcome.done()
            gathering.missing.discard(lost or "")
            self._settle(key, gathering)
        if fails:
            gathering.outcome.set_exception(error)
            gathering.outcome.exception()  # it may be that nobody waits any more

    def _settle(self, key: Key, gathering: Gathering) -> bool:
        if gathering.missing:
            return False
        del self._led[key]
        return True

    def missing(self, key: Key) -> list[str]:
        """Who has not come yet."""
        with self._lock:
            gathering = self._led.get(key)
            return sorted(gathering.missing) if gathering is not None else []

    def elsewhere(self, key: Key) -> dict[str, tuple[str, ...]]:
        """Of those who have not come yet, who has come to a gathering of others, which is not complete: with whom."""
        with self._lock:
            gathering = self._led.get(key)
            missing = gathering.missing if gathering is not None else set()
            return {
                name: other.members
                for other, there in sorted(self._led.items())
                for name in sorted(missing & there.brought.keys())
                if other.members != key.members
            }

    def begin_to_look(self, key: Key) -> list[str]:
        """Who is to be looked for, if nobody has begun to."""
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None or gathering.is_looked_for or gathering.outcome.done():
                return []
            gathering.is_looked_for = True
            return sorted(gathering.missing)

    def is_awaited(self, key: Key, name: str) -> bool:
        """Whether a gathering still waits for that member."""
        with self._lock:
            gathering = self._led.get(key)
            return gathering is not None and name in gathering.missing and not gathering.outcome.done()


def gatherings_of(agent: RpcAgent) -> Gatherings:
    """Those of that worker; they live and go with its agent."""
    found: Gatherings = vars(agent).setdefault("_gatherings", Gatherings())
    return found


# The functions that workers call on each other. People read the names of the first two, when a call of them fails.


@async_execution
def waiting_for_each_other(key: Key, name: str, part: Any) -> Future[dict[str, Any]]:
    _check_key(key)
    if type(name) is not str or name not in key.members:
        raise UsageError(f"a worker that is none of {_listed(key.members)} came to where they wait for each other")
    return gatherings_of(current_agent()).bring(key, name, part)


@async_execution
def coming_to_the_others(key: Key) -> Future[None]:
    _check_key(key)
    return gatherings_of(current_agent()).look(key)


def _time_is_over(key: Key, timeout: float) -> None:
    """The time of one who waits is over: nobody waits any longer, so that all hear the same."""
    _check_key(key)
    if type(timeout) not in (int, float):  # it is printed, and a Decimal may have a billion digits
        raise UsageError(f"a {type(timeout).__name__} came from another worker in place of a time")
    gatherings = gatherings_of(current_agent())
    gatherings.fail(key, _too_late(gatherings.missing(key), timeout, gatherings.elsewhere(key)))


def _look_for_missing(key: Key) -> None:
    _check_key(key)
    agent = current_agent()
    gatherings = gatherings_of(agent)
    for name in gatherings.begin_to_look(key):
        _look_for(agent, gatherings, key, name)


def _check_key(key: Any) -> None:
    """Raises `UsageError` for what is no key: it came from another worker, which may call these functions always.

    Keys are hashed, sorted and printed; nothing else than names and numbers is.
    """
    if (
        type(key) is not Key
        or type(key.members) is not tuple
        or type(key.ids) is not tuple
        or type(key.number) is not int
        or any(type(member) is not str for member in key.members)
        or any(type(number) is not int for number in key.ids)
    ):
        raise UsageError("a worker came to a gathering of no workers: its version of farcall may be another one")


def _look_for(agent: RpcAgent, gatherings: Gatherings, key: Key, name: str) -> None:
    """Calls a member that is missing, and again and again, until it comes, is lost, or is waited for no more."""

    def looked(future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, RpcTimeoutError) and gatherings.is_awaited(key, name):
            _look_for(agent, gatherings, key, name)
        elif isinstance(error, WorkerLost):
            _lost(error)

    def _lost(error: WorkerLost) -> None:
        text = f"worker {name!r} was lost before it came to where {_listed(key.members)} wait for each other: {error}"
        gatherings.fail(key, WorkerLost(text, name), lost=name)

    try:
        agent.call(name, coming_to_the_others, (key,), None, _LOOK, unattended=True).then(looked)
    except WorkerLost as error:
        _lost(error)
    except RpcError:
        pass  # this worker shuts down: its own calls end, too


# What programs call


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """What each of these workers (all by default) has given to it, by name, when all of them have called it.

    `timeout` is in seconds; 0 is without end, and the default is the `rpc_timeout` of this worker. Raises
    `RpcTimeoutError`, saying who did not come, or came to wait for others, if that is known; `WorkerLost` as soon as it
    is known that one was lost; `UsageError` if this worker is not among them, or the names are one text;
    `UnknownWorkerError` for names that are none; `NotAllowedError` if the option `allow` of this worker refuses what
    another one brought, or that of the first by name what this one did; `ExpelledError` or
    `NotInitializedError` if this worker is taken for dead, or shut down, while it waits.
    """
    agent = current_agent()
    members = _members(agent, worker_names)
    name = agent.info.name
    leader = members[0]
    seconds = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    deadline = monotonic() + seconds if seconds else _FOREVER
    gatherings = gatherings_of(agent)
    key = gatherings.enter(members, tuple(agent.get_worker_info(member).id for member in members))
    if leader == name:
        outcome = gatherings.bring(key, name, obj)
    else:
        try:
            # With some time more than there is: who waits decides, as it wants to hear who was missing.
            limit = seconds + 2 * _ANSWER if seconds else 0.0
            outcome = agent.call(leader, waiting_for_each_other, (key, name, obj), None, limit, unattended=True)
        except BaseException:
            gatherings.leave(key)
            raise
    return _wait(agent, outcome, key, deadline, seconds)


def _wait(
    agent: RpcAgent, outcome: Future[dict[str, Any]], key: Key, deadline: float, seconds: float
) -> dict[str, Any]:
    leads = key.members[0] == agent.info.name

    def at_leader(function: Callable[..., None], *args: Any) -> None:
        if leads:
            function(*args)
        else:
            agent.call(key.members[0], function, args, None, _ANSWER, unattended=True).then(
                lambda done: done.exception()
            )

    if not outcome.block(min(deadline, monotonic() + _A_MOMENT)) and monotonic() < deadline:
        at_leader(_look_for_missing, key)
    while not outcome.block(min(deadline, monotonic() + _GLANCE)) and monotonic() < deadline:
        if agent.closed is not None:
            raise agent.closed
    if not outcome.done():
        at_leader(_time_is_over, key, seconds)
        if not outcome.block(monotonic() + _ANSWER):
            raise _too_late([key.members[0]], seconds)
    try:
        return outcome.value()
    except NotAllowedError as error:
        # The reason alone: a program knows nothing of the call by which it was brought.
        reason = error.__cause__ if isinstance(error.__cause__, NotAllowedError) else error
        raise NotAllowedError(f"what was brought to _all_gather was refused: {reason}; or bring plain data") from error


def _barrier(worker_names: Iterable[str]) -> None:
    """Returns when all these workers have called it. Raises as `_all_gather`, with the `rpc_timeout` of this worker."""
    _all_gather(None, worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when all workers of the group have called it. Raises as `_all_gather`; by default there is no limit."""
    _all_gather(None, timeout=timeout)


def _members(agent: RpcAgent, worker_names: Iterable[str] | None) -> tuple[str, ...]:
    """Sorted, so that all agree on who leads. As in torch, no names are all workers."""
    if isinstance(worker_names, str | bytes):
        raise UsageError(f"worker_names must be a list of names, not one text; write [{worker_names!r}]")
    names = {agent.get_worker_info(name).name for name in worker_names or ()}
    if not names:
        names = {info.name for info in agent.get_worker_infos()}
    if agent.info.name not in names:
        others = _listed(sorted(names))
        raise UsageError(f"worker {agent.info.name!r} is not among {others}, so it cannot wait with them")
    return tuple(sorted(names))


def _too_late(
    missing: Iterable[str], seconds: float, elsewhere: Mapping[str, Iterable[str]] | None = None
) -> RpcTimeoutError:
    if elsewhere:
        others = "; ".join(f"{name!r} came to where {_listed(there)} wait" for name, there in elsewhere.items())
        advice = f"But {others}: all must name the same workers"
    else:
        advice = "Every worker that is waited for must call it; give it a longer timeout, or 0 for none"
    return RpcTimeoutError(
        f"worker {_listed(missing)} did not come: timed out in _all_gather after {seconds:.2f} seconds. {advice}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)

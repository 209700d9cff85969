"""Operations of several workers together: `_all_gather` collects a value from each, `_barrier` waits for all.

The worker with the smallest name is the leader. Every other worker calls the leader once, with its value. The leader
answers all of these calls when all workers have called, with the values of all. N workers need N - 1 calls.

A worker that waits for more than a moment asks the leader to look for the missing workers. The leader calls each of
them. Such a call is answered when the missing worker takes part. If the worker dies, the call fails, and the whole
gathering fails at once. This costs at most two calls for each worker.

Rules
- A gathering is identified by its members and by the number of earlier gatherings of the same members. So gatherings in
  a row, in several threads, or of different members do not mix.
- A gathering succeeds for all workers that wait for it, or fails for all of them: with `WorkerLostError` if a member
  was lost before it took part, with `RpcTimeoutError` when the timeout of one waiting worker expires. A worker that
  is late for a failed gathering gets the same error. So all workers have counted the same gatherings, and can try
  again.
- A waiting worker checks now and then whether its own agent is closed. The leader waits for calls of other workers,
  which do not end with its agent, and would otherwise wait for ever after the group has declared it lost.
- A worker that has given its value is not needed any more. If it dies, the others still get the value.
- The state of a gathering is deleted when all members have taken part or were lost, else with the agent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Final, NamedTuple

from farcall.api import current_agent
from farcall.backends.interface import RpcAgent
from farcall.errors import NotAllowedError, RpcError, RpcTimeoutError, UsageError, WorkerLostError
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
    """Identifies a gathering: its members, and the number of earlier gatherings of the same members."""

    members: tuple[str, ...]
    ids: tuple[int, ...]
    """Of the members: one that was started again in an open group is another one, and has been to none before."""
    number: int


class Gathering:
    """The state of one gathering on its leader.

    Args:
        members: The names of the workers that take part.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self.missing = set(members)
        self.brought: dict[str, Any] = {}
        self.outcome: Future[dict[str, Any]] = Future()
        self.is_looked_for = False


class Gatherings:
    """The gatherings of one worker. Decides under its lock, and completes futures outside of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in its midst
        self._numbers: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._led: dict[Key, Gathering] = {}
        self._looks: dict[Key, list[Future[None]]] = {}  # answered when this worker comes to that gathering

    def enter(self, members: tuple[str, ...], ids: tuple[int, ...]) -> Key:
        """Counts this worker as taking part in the next gathering of these members. Returns the key of that gathering.

        Every call counts, and starts the next one. Raises nothing.

        Args:
            members: The names of the members, sorted.
            ids: Their ids, in the same order.
        """
        with self._lock:
            key = Key(members, ids, self._numbers.get((members, ids), 0))
            self._numbers[members, ids] = key.number + 1
            looks = self._looks.pop(key, [])
        for look in looks:
            look.set_result(None)
        return key

    def leave(self, key: Key) -> None:
        """Undoes `enter` when the leader could not be told, so that the next gathering has the same number.

        Does nothing if another gathering of these members has begun here since. Raises `KeyError` for a key that
        `enter` never returned.
        """
        with self._lock:
            if self._numbers[key.members, key.ids] == key.number + 1:
                self._numbers[key.members, key.ids] = key.number

    def look(self, key: Key) -> Future[None]:
        """Returns a future that completes with None when this worker takes part in the gathering; at once if it has.

        Of one gathering, only the last 8 futures are kept; earlier ones are never completed.
        """
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
        """Records the value of a member. Called on the leader.

        Args:
            key: The gathering.
            name: The name of the member.
            part: Its value.

        Returns:
            A future of the values of all members by name, in the order of the names.

        Raises:
            UsageError: The member has given a value already.
        """
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None:
                gathering = self._led[key] = Gathering(key.members)
            if name not in gathering.missing:
                raise UsageError(f"worker {name!r} took part twice in gathering {key.number} of {_listed(key.members)}")
            gathering.missing.discard(name)
            gathering.brought[name] = part
            complete = self._settle(key, gathering)
        if complete and not gathering.outcome.done():
            gathering.outcome.set_result({member: gathering.brought[member] for member in key.members})
        return gathering.outcome

    def fail(self, key: Key, error: RpcError, lost: str | None = None) -> None:
        """Fails a gathering for all workers that wait for it.

        Does nothing if it is complete, has failed, or is unknown.

        Args:
            key: The gathering.
            error: The exception that the workers get.
            lost: The name of a member that will never take part; None if there is none.
        """
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
        """Deletes the gathering and returns True if no member is missing, else returns False. The lock must be held."""
        if gathering.missing:
            return False
        del self._led[key]
        return True

    def missing(self, key: Key) -> list[str]:
        """Returns the names of the members that have not taken part yet, sorted; empty for an unknown gathering."""
        with self._lock:
            gathering = self._led.get(key)
            return sorted(gathering.missing) if gathering is not None else []

    def elsewhere(self, key: Key) -> dict[str, tuple[str, ...]]:
        """Returns the missing members that wait in another gathering instead, with the members of that gathering.

        Only gatherings that this worker leads are known here. Returns an empty dict if there are none. For an error
        message.
        """
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
        """Returns the missing members that have to be looked for, sorted.

        Returns an empty list if the search has begun before, or the gathering is unknown or over.
        """
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None or gathering.is_looked_for or gathering.outcome.done():
                return []
            gathering.is_looked_for = True
            return sorted(gathering.missing)

    def is_awaited(self, key: Key, name: str) -> bool:
        """Returns whether a gathering is still waiting for a member; False if the gathering is unknown or over."""
        with self._lock:
            gathering = self._led.get(key)
            return gathering is not None and name in gathering.missing and not gathering.outcome.done()


def gatherings_of(agent: RpcAgent) -> Gatherings:
    """Returns the gatherings of an agent, which are created in the first call and live as long as the agent."""
    found: Gatherings = vars(agent).setdefault("_gatherings", Gatherings())
    return found


# The functions that workers call on each other. People read the names of the first two, when a call of them fails.


@async_execution
def waiting_for_each_other(key: Key, name: str, part: Any) -> Future[dict[str, Any]]:
    """Called on the leader by a member: records its value, and answers with the values of all members.

    Raises:
        UsageError: `key` is not a key, `name` is not a member, or the member has given a value already.
    """
    _check_key(key)
    if type(name) is not str or name not in key.members:
        raise UsageError(f"a worker that is not one of {_listed(key.members)} called _all_gather for them")
    return gatherings_of(current_agent()).bring(key, name, part)


@async_execution
def coming_to_the_others(key: Key) -> Future[None]:
    """Called on a missing member by the leader: answers with None when this worker takes part.

    Raises:
        UsageError: `key` is not a key.
    """
    _check_key(key)
    return gatherings_of(current_agent()).look(key)


def _time_is_over(key: Key, timeout: float) -> None:
    """Called on the leader by a member whose timeout expired: fails the gathering for all members.

    Raises:
        UsageError: `key` is not a key, or `timeout` is not an int or float.
    """
    _check_key(key)
    if type(timeout) not in (int, float):  # it is printed, and a Decimal may have a billion digits
        raise UsageError(f"another worker sent a {type(timeout).__name__} in place of a time")
    gatherings = gatherings_of(current_agent())
    gatherings.fail(key, _too_late(gatherings.missing(key), timeout, gatherings.elsewhere(key)))


def _look_for_missing(key: Key) -> None:
    """Called on the leader by a member that waits: begins to look for the missing members, if that has not begun yet.

    Raises:
        UsageError: `key` is not a key.
    """
    _check_key(key)
    agent = current_agent()
    gatherings = gatherings_of(agent)
    for name in gatherings.begin_to_look(key):
        _look_for(agent, gatherings, key, name)


def _check_key(key: Any) -> None:
    """Raises `UsageError` if `key` is not a `Key` of names and numbers.

    The key came from another worker, which may always call these functions, whatever the allow-list says. Keys are
    hashed, sorted and printed, so nothing but exact types is accepted.
    """
    if (
        type(key) is not Key
        or type(key.members) is not tuple
        or type(key.ids) is not tuple
        or type(key.number) is not int
        or any(type(member) is not str for member in key.members)
        or any(type(number) is not int for number in key.ids)
    ):
        raise UsageError(
            "another worker sent a key for _all_gather that is not valid; it may use another version of farcall"
        )


def _look_for(agent: RpcAgent, gatherings: Gatherings, key: Key, name: str) -> None:
    """Calls a missing member again and again, until it takes part, is lost, or the gathering is over.

    If the member is lost, the gathering fails with `WorkerLostError`.
    """

    def looked(future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, RpcTimeoutError) and gatherings.is_awaited(key, name):
            _look_for(agent, gatherings, key, name)
        elif isinstance(error, WorkerLostError):
            _lost(error)

    def _lost(error: WorkerLostError) -> None:
        text = f"worker {name!r} was lost before it called _all_gather with {_listed(key.members)}: {error}"
        gatherings.fail(key, WorkerLostError(text, name), lost=name)

    try:
        agent.call(name, coming_to_the_others, (key,), None, _LOOK, unattended=True).then(looked)
    except WorkerLostError as error:
        _lost(error)
    except RpcError:
        pass  # this worker shuts down: its own calls end, too


# What programs call


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Waits until all given workers have called this function, and returns the values of all of them by name.

    Args:
        obj: The value of this worker.
        worker_names: The names of the workers that take part, the same on each of them. None or no names means all
            workers of the group.
        timeout: How many seconds to wait; 0 means no limit. The default is the `rpc_timeout` of this worker.

    Returns:
        The values by worker, in the order of the names.

    Raises:
        RpcTimeoutError: The timeout expired. The message says which workers did not call, or called with other names.
        WorkerLostError: A worker was lost before it called.
        UsageError: This worker is not one of `worker_names`, or `worker_names` is a single str.
        UnknownWorkerError: A name belongs to no worker.
        NotAllowedError: The option `allow` of this worker, or of the first worker by name, refuses a value.
        ExpelledError: The group has declared this worker lost while it was waiting.
        NotInitializedError: This process is not a worker, or was shut down while it was waiting.
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
    """Waits for the outcome of a gathering and returns it. Raises what `_all_gather` raises.

    Args:
        agent: The agent of this worker.
        outcome: The future of the values.
        key: The gathering.
        deadline: When the timeout expires, in seconds of `time.monotonic`.
        seconds: The timeout itself, for the error message.
    """
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
        raise NotAllowedError(f"a value passed to _all_gather was refused: {reason}; or pass plain data") from error


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until all given workers have called this function.

    Args:
        worker_names: The names of the workers, the same on each of them. No names means all workers of the group.

    Raises:
        RpcError: As in `_all_gather`. The timeout is the `rpc_timeout` of this worker.
    """
    _all_gather(None, worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Waits until all workers of the group have called this function.

    Args:
        timeout: How many seconds to wait; 0, the default, means no limit.

    Raises:
        RpcError: As in `_all_gather`.
    """
    _all_gather(None, timeout=timeout)


def _members(agent: RpcAgent, worker_names: Iterable[str] | None) -> tuple[str, ...]:
    """Returns the names of the workers that take part in a gathering, sorted, so that all agree on the leader.

    No names, or None, means all workers of the group. Raises `UsageError` for a single str and if this worker is not
    one of them, and `UnknownWorkerError` for a name that belongs to no worker.
    """
    if isinstance(worker_names, str | bytes):
        raise UsageError(f"worker_names must be a list of names, not one text; write [{worker_names!r}]")
    names = {agent.get_worker_info(name).name for name in worker_names or ()}
    if not names:
        names = {info.name for info in agent.get_worker_infos()}
    if agent.info.name not in names:
        others = _listed(sorted(names))
        raise UsageError(
            f"worker {agent.info.name!r} is not one of {others}: name it as well, or do not call this on it"
        )
    return tuple(sorted(names))


def _too_late(
    missing: Iterable[str], seconds: float, elsewhere: Mapping[str, Iterable[str]] | None = None
) -> RpcTimeoutError:
    """Returns the error for a gathering whose timeout expired.

    Args:
        missing: The workers that did not take part.
        seconds: The timeout.
        elsewhere: Missing workers that wait in another gathering, with its members; None or empty if there are none.
    """
    if elsewhere:
        others = "; ".join(f"{name!r} called it with {_listed(there)}" for name, there in elsewhere.items())
        advice = f"But {others}: all workers must name the same workers"
    else:
        advice = "Every named worker must call it; give it a longer timeout, or 0 for none"
    return RpcTimeoutError(
        f"worker {_listed(missing)} did not take part: timed out in _all_gather after {seconds:.2f} seconds. {advice}"
    )


def _listed(names: Iterable[str]) -> str:
    """Returns the names in quotes, separated by commas; an empty text for no names."""
    return ", ".join(repr(name) for name in names)

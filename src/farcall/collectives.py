"""Operations of several workers together: `_all_gather` collects a value from each, `_barrier` waits for all.

A *gathering* is one such operation: every member calls `_all_gather` once, and gets the values of all members.

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
"""Seconds after which a waiting worker asks the leader to look for the missing workers."""
_LOOK: Final = 5.0
"""Timeout, in seconds, of one call to a missing worker. Short, so that it does not delay a shutdown for long."""
_GLANCE: Final = 1.0
"""Seconds after which a waiting worker checks again whether its own agent is closed."""
_ANSWER: Final = 1.0
"""Seconds that the leader has to say which workers are missing, after the timeout of a worker has expired."""


class Key(NamedTuple):
    """Identifies a gathering: one `_all_gather` of certain workers, its members.

    `members` are the names of the members, sorted; the first one leads, that is, collects the values. `ids` are the ids
    of the members, in the same order. `number` is the number of earlier gatherings of the same members, 0 for their
    first one. The fields are not checked here, but by `_check_key`.
    """

    members: tuple[str, ...]
    ids: tuple[int, ...]
    """The ids of the members, in the same order. A worker that was started again under its name in an open group has
    another id, so its gatherings are counted from 0 again.
    """
    number: int


class Gathering:
    """The state of one `_all_gather` of certain workers, a gathering, on the worker that collects the values.

    Args:
        members: The names of the workers that take part. Not empty; not checked.

    Attributes:
        missing: The names of the workers that have not given their value yet; all of them at first.
        brought: The values so far, by the name of the worker.
        outcome: The future of the values of all workers by name, or of the error of a failed gathering.
        is_looked_for: Whether the leader has begun to call the missing workers, to find out whether they are alive.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self.missing = set(members)
        self.brought: dict[str, Any] = {}
        self.outcome: Future[dict[str, Any]] = Future()
        self.is_looked_for = False


class Gatherings:
    """The gatherings of one worker: those that it takes part in, and those that it leads. Created empty.

    A gathering is one `_all_gather` of certain workers, its members. The member whose name is first leads: it collects
    the values. Decisions are made under a lock. Futures are completed outside of it, because their callbacks may call
    this object again. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in its midst
        self._numbers: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._led: dict[Key, Gathering] = {}
        self._looks: dict[Key, list[Future[None]]] = {}  # answered when this worker comes to that gathering

    def enter(self, members: tuple[str, ...], ids: tuple[int, ...]) -> Key:
        """Counts this worker as taking part in the next `_all_gather` of these members, and returns its key.

        Every call starts another gathering: the first returns number 0, the next number 1. Other workers that wait for
        this one to take part (`look`) get their replies. Raises nothing.

        Args:
            members: The names of the members, sorted, this worker included. Not checked.
            ids: Their ids, in the same order. Not checked.
        """
        with self._lock:
            key = Key(members, ids, self._numbers.get((members, ids), 0))
            self._numbers[members, ids] = key.number + 1
            looks = self._looks.pop(key, [])
        for look in looks:
            look.set_result(None)
        return key

    def leave(self, key: Key) -> None:
        """Undoes `enter`, which returned `key`, so that the next gathering of these members has the same number.

        Called when the leader, which collects the values, could not be called. Does nothing if `enter` has started
        another gathering of these members since. Raises `KeyError` for members of which `enter` has never started a
        gathering.
        """
        with self._lock:
            if self._numbers[key.members, key.ids] == key.number + 1:
                self._numbers[key.members, key.ids] = key.number

    def look(self, key: Key) -> Future[None]:
        """Returns a future that completes with None when this worker takes part in the gathering `key`.

        If this worker has taken part already, the future is done. A gathering is one `_all_gather` of certain workers;
        whether this worker is one of them is not checked. For one gathering only the 8 newest futures are kept. Older
        ones never complete: the calls that wait for them have timed out.
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
        """Records the value of one member. Called on the worker that collects the values, once for each member.

        Args:
            key: The gathering: one `_all_gather` of certain workers. Its state is created if this is the first value.
            name: The name of the member.
            part: The value of the member; may be None.

        Returns:
            A future of the values of all members by name, in the order of the names. It is done when the last value is
            here. It has failed already if the gathering has failed.

        Raises:
            UsageError: The member has given a value already, was declared lost, or is not in `key.members`.
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
        """Fails a gathering for all workers that wait for it. Called on the worker that collects the values.

        Does nothing if the gathering is complete, or if this worker knows no gathering of that key. If the gathering
        has failed already, it keeps its first error, and only `lost` is recorded. Raises nothing.

        Args:
            key: The gathering: one `_all_gather` of certain workers.
            error: The exception that the waiting workers get.
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
        """Deletes `gathering`, the state under `key`, if no member is missing any more. The caller holds the lock.

        Returns True if it was deleted, and False if members are missing. Raises `KeyError` if it was deleted before.
        """
        if gathering.missing:
            return False
        del self._led[key]
        return True

    def missing(self, key: Key) -> list[str]:
        """Returns the names of the members that have not given a value to the gathering `key` yet, sorted.

        Returns an empty list if the gathering (an `_all_gather` of certain workers) is complete, or if this worker is
        not its leader, which collects the values.
        """
        with self._lock:
            gathering = self._led.get(key)
            return sorted(gathering.missing) if gathering is not None else []

    def elsewhere(self, key: Key) -> dict[str, tuple[str, ...]]:
        """Returns the missing members of `key` that have called `_all_gather` with other workers, for an error message.

        The result has the name of each such member, and the names of the workers with which it called. Only gatherings
        of which this worker collects the values are searched. Returns an empty dict if there is no such member, or if
        `key` is unknown here.
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
        """Returns the names of the workers to call, to find out whether they are alive; sorted.

        They are those that have not given a value to the gathering `key` yet. The leader, which collects the values,
        calls them. Only the first call for a gathering returns names. Returns an empty list in later calls, and if the
        gathering is unknown, complete or failed.
        """
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None or gathering.is_looked_for or gathering.outcome.done():
                return []
            gathering.is_looked_for = True
            return sorted(gathering.missing)

    def is_awaited(self, key: Key, name: str) -> bool:
        """Returns whether the gathering `key` still waits for the value of member `name`.

        A gathering is one `_all_gather` of certain workers. Returns False if the gathering is unknown here, complete or
        failed, or if `name` is not a member.
        """
        with self._lock:
            gathering = self._led.get(key)
            return gathering is not None and name in gathering.missing and not gathering.outcome.done()


def gatherings_of(agent: RpcAgent) -> Gatherings:
    """Returns the gatherings of an agent: each `_all_gather` in which its worker takes part or collects the values.

    The object is created by the first call, without any gathering, and lives as long as the agent.
    """
    found: Gatherings = vars(agent).setdefault("_gatherings", Gatherings())
    return found


# The functions that workers call on each other. People read the names of the first two, when a call of them fails.


@async_execution
def waiting_for_each_other(key: Key, name: str, part: Any) -> Future[dict[str, Any]]:
    """Called on the leader by another member: records the value of that member, and answers with the values of all.

    The leader is the member whose name is first. The reply, a dict of the values by name, is sent when all members have
    given their values. If the gathering fails, the reply is its error, `WorkerLostError` or `RpcTimeoutError`.

    Args:
        key: The gathering: one `_all_gather` of certain workers, its members.
        name: The name of the calling member.
        part: Its value; may be None.

    Raises:
        UsageError: `key` is not a valid `Key`, `name` is not one of its members, or the member has given a value
            already.
    """
    _check_key(key)
    if type(name) is not str or name not in key.members:
        raise UsageError(f"a worker that is not one of {_listed(key.members)} called _all_gather for them")
    return gatherings_of(current_agent()).bring(key, name, part)


@async_execution
def coming_to_the_others(key: Key) -> Future[None]:
    """Called on a missing member by the leader: answers with None when this worker calls `_all_gather` for `key`.

    The leader is the worker that collects the values. The reply is sent at once if this worker has called already.
    Whether it is a member is not checked.

    Raises:
        UsageError: `key` is not a valid `Key`.
    """
    _check_key(key)
    return gatherings_of(current_agent()).look(key)


def _time_is_over(key: Key, timeout: float) -> None:
    """Called on the leader by a member whose timeout expired: fails the gathering for all members.

    They get `RpcTimeoutError`. The leader is the worker that collects the values of an `_all_gather`. Does nothing if
    the gathering is complete, has failed, or is unknown.

    Args:
        key: The gathering.
        timeout: The timeout that expired, in seconds, for the error message.

    Raises:
        UsageError: `key` is not a valid `Key`, or `timeout` is not an int or float.
    """
    _check_key(key)
    if type(timeout) not in (int, float):  # it is printed, and a Decimal may have a billion digits
        raise UsageError(f"another worker sent a {type(timeout).__name__} in place of a time")
    gatherings = gatherings_of(current_agent())
    gatherings.fail(key, _too_late(gatherings.missing(key), timeout, gatherings.elsewhere(key)))


def _look_for_missing(key: Key) -> None:
    """Called on the leader by a member that waits: calls every missing member, to notice members that were lost.

    The leader is the worker that collects the values of an `_all_gather`. Does not wait for the replies. Does nothing
    if an earlier call has done so, or if the gathering `key` is unknown, complete or failed.

    Raises:
        UsageError: `key` is not a valid `Key`.
    """
    _check_key(key)
    agent = current_agent()
    gatherings = gatherings_of(agent)
    for name in gatherings.begin_to_look(key):
        _look_for(agent, gatherings, key, name)


def _check_key(key: Any) -> None:
    """Raises `UsageError` if `key` is not a `Key` of a tuple of str, a tuple of int and an int. Returns None if it is.

    The key names an `_all_gather` and came from another worker, which may be hostile. Keys are hashed, sorted and
    printed, so subclasses of these types are refused, too.
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
    """Asks the missing member `name` to reply when it takes part, without waiting for the reply.

    Asks again each time that no reply came in `_LOOK` seconds, until the member takes part or the gathering (an
    `_all_gather` of certain workers) is over. If the member is lost, the gathering fails with `WorkerLostError` for all
    members. Other errors mean that this worker shuts down, and are ignored.

    Args:
        agent: The agent of this worker, which collects the values of the gathering.
        gatherings: The gatherings of this agent.
        key: The gathering.
        name: The name of the missing member.
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
        obj: The value of this worker, anything that a call can send; may be None.
        worker_names: The names of the workers that take part, this one included, the same on each of them. The order
            does not matter. None or no names means all workers of the group.
        timeout: How many seconds to wait; 0 means no limit. The default, -1, is the `rpc_timeout` of this worker. Any
            other negative timeout has expired at once (`RpcTimeoutError`) or is refused (`UsageError`).

    Returns:
        The values by the workers' names, in the order of the names.

    Raises:
        RpcTimeoutError: The timeout expired. The message says which workers did not call, or called with other names.
        WorkerLostError: A worker was lost before it called.
        UsageError: This worker is not one of `worker_names`, or `worker_names` is a single str.
        UnknownWorkerError: A name belongs to no worker.
        SerializationError: A value cannot be pickled.
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
    """Waits for the outcome of a gathering (one `_all_gather`), and returns the values of all members by name.

    Args:
        agent: The agent of this worker.
        outcome: The future of the values.
        key: The gathering.
        deadline: When the timeout expires, in seconds of `time.monotonic`; infinity for no limit.
        seconds: The timeout itself, for the error message.

    Raises:
        RpcTimeoutError: The deadline has passed here or on another member.
        WorkerLostError: A member was lost before it took part.
        NotAllowedError: A worker with an allow-list refuses a value.
        RpcError: The agent was closed; the error says why.
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
    """Waits until all given workers have called this function. The timeout is the `rpc_timeout` of this worker.

    Args:
        worker_names: The names of the workers, this one included, the same on each of them. No names, or None, means
            all workers of the group.

    Raises:
        RpcTimeoutError: Not all of them have called in time.
        WorkerLostError: A worker was lost before it called.
        UsageError: This worker is not one of `worker_names`, or `worker_names` is a single str.
        UnknownWorkerError: A name belongs to no worker.
        RpcError: This process is not a worker, or has left the group while it was waiting.
    """
    _all_gather(None, worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Waits until all workers of the group have called this function.

    Args:
        timeout: How many seconds to wait; 0, the default, means no limit. -1 means the `rpc_timeout` of this worker.
            Any other negative timeout has expired at once (`RpcTimeoutError`) or is refused (`UsageError`).

    Raises:
        RpcTimeoutError: Not all of them have called in time.
        WorkerLostError: A worker was lost before it called.
        RpcError: This process is not a worker, or has left the group while it was waiting.
    """
    _all_gather(None, timeout=timeout)


def _members(agent: RpcAgent, worker_names: Iterable[str] | None) -> tuple[str, ...]:
    """Returns the names of the workers that take part in an `_all_gather`, sorted, so that all agree on who is first.

    `agent` is the agent of this worker. None or no names means all workers of the group. A name given twice counts
    once.

    Raises:
        UsageError: `worker_names` is a single str or bytes, or this worker is not one of them.
        UnknownWorkerError: A name belongs to no worker.
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
    """Returns the error for an `_all_gather` whose timeout expired.

    Args:
        missing: The names of the workers that did not take part. If empty, the message names none.
        seconds: The timeout.
        elsewhere: The missing workers that called `_all_gather` with other workers: the name of each, and the names of
            the workers with which it called. None or empty if there are none.
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

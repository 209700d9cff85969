"""`Group`: this process as a member of a group, for the length of a `with` block.

Rules
- Entering the block joins the group, leaving it shuts down: gracefully at its end, at once if an exception leaves it.
- In the block the group is the current one: the functions of the package act on it (`farcall.current`).
- `async with` does the same without blocking the event loop.
- A group that this object has not joined itself (that of `init_rpc`, the view of one worker of a `LocalGroup`) is made
  the current one by `with`, and is not left at the end.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextvars import Token
from copy import copy
from types import TracebackType
from typing import Any, NoReturn, Self

from farcall import current
from farcall.api import check_name, launched_name, make_agent, shut_down
from farcall.backends.interface import RpcAgent, To, worker_key
from farcall.backends.registry import choose_backend
from farcall.errors import AlreadyInitializedError, NotInitializedError, UsageError
from farcall.many.selection import Workers
from farcall.options import DEFAULT_INIT_METHOD, RpcBackendOptions
from farcall.protocol.ids import WorkerInfo
from farcall.workers import Worker


class Group:
    """This process as a member of a group of workers, for the length of a `with` block.

    Entering the block joins the group. Leaving it shuts down: gracefully at its end, at once if an exception leaves it.
    A process may be in several groups, with an object for each. An object can be entered again after it was left.

    The arguments are the `name` of this worker, the rendezvous `url`, the `rank` of this worker, the `world_size` (the
    number of workers) and the `options` of the agent. If `options` is left out, the agent has the defaults. Any other
    argument that is left out comes from the launcher or the environment. Without any world size the group is open. A
    wrong name or options raise `UsageError` here; a wrong url, rank or world size raises it when the block is entered.

    Example:
        with farcall.Group("trainer", url="tcp://10.0.0.1:4000", rank=0, world_size=2) as group:
            print(group.info)
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        url: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        options: RpcBackendOptions | None = None,
    ) -> None:
        """Describes the group. Nothing is joined before the `with` block is entered.

        Args:
            name: The name of this worker. None: the one that the launcher gives, else `worker` and the rank, else one
                that is made up of the host name, the process id and random digits.
            url: Where the workers find each other, `tcp://host:port` or `file:///path`. None: what `init_method` of the
                options says, by default MASTER_ADDR and MASTER_PORT of the environment.
            rank: The rank of this worker, from 0 on. None: what the URL or the launcher says.
            world_size: The number of workers. None: what the URL or the launcher says, else the group is open.
            options: The options of this worker. None: the defaults.

        Raises:
            UsageError: `name` or `options` is not valid, or `url` contradicts `init_method` of the options. A wrong
                `url`, `rank` or `world_size` is found when the block is entered.
        """
        self._name = check_name(name) if name is not None else None
        self._rank = -1 if rank is None else rank
        self._world_size = world_size
        self._options = _with_url(options, url)
        self._agent: RpcAgent | None = None
        self._is_owned = True
        self._blocks: list[Token[Any]] = []

    @classmethod
    def of(cls, agent: RpcAgent) -> Group:
        """Returns the group of an agent; the same object in each call.

        That is the `Group` that has joined with this agent. For an agent that was made elsewhere, such as by
        `init_rpc`, it is one whose `with` block makes the group the current one, and does not leave it. Neither the
        type of `agent` nor whether it was shut down is checked.
        """
        known = vars(agent).get("_farcall_group")
        if isinstance(known, Group):
            return known
        group = Group()
        group._agent, group._is_owned = agent, False
        vars(agent)["_farcall_group"] = group
        return group

    # Joining and leaving

    def __enter__(self) -> Self:
        """Joins the group, makes it the current one, on which `rpc_sync` acts here, and returns this object.

        A group that was joined elsewhere, by `init_rpc` or a `LocalGroup`, is not joined but only made the current one.

        Raises:
            AlreadyInitializedError: This object has joined already.
            UsageError: The rank, the world size or the URL is missing or not valid.
            RendezvousError: The other workers did not come in time, or the group refused this worker.
        """
        self._join()
        self._enter_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the group, if this object has joined it: gracefully if `kind` is None, else at once.

        Args:
            kind: The type of the exception that leaves the block; None if there is none.
            error: The exception. Ignored; it goes on after this method.
            trace: Its traceback. Ignored.

        Raises:
            ShutdownError: The graceful shutdown failed, for example because a worker was lost. The group was left
                anyway.
        """
        self._leave_block()
        self._leave(graceful=kind is None)

    async def __aenter__(self) -> Self:
        """Joins the group in another thread, makes it the current one of this task, and returns this object.

        A cancelled task leaves the group at once when the thread has joined it.

        Raises:
            AlreadyInitializedError: This object has joined already.
            UsageError: The rank, the world size or the URL is missing or not valid.
            RendezvousError: The other workers did not come in time, or the group refused this worker.
        """
        import asyncio

        joining = asyncio.ensure_future(asyncio.to_thread(self._join))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            # The thread goes on, and what it joins is left as soon as it has joined it.
            joining.add_done_callback(self._leave_after_cancel)
            raise
        self._enter_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the group in another thread, if this object has joined it: gracefully if `kind` is None, else at once.

        Args:
            kind: The type of the exception that leaves the block; None if there is none.
            error: The exception. Ignored; it goes on after this method.
            trace: Its traceback. Ignored.

        Raises:
            ShutdownError: The graceful shutdown failed, for example because a worker was lost. The group was left
                anyway.
        """
        import asyncio

        self._leave_block()
        await asyncio.shield(asyncio.to_thread(self._leave, kind is None))

    def _leave_after_cancel(self, joining: Any) -> None:
        """Leaves the group at once if `joining`, the future of the thread that joins it, succeeded or was cancelled.

        Does nothing if joining has failed. Called when the task of an `async with` was cancelled.
        """
        if joining.cancelled() or joining.exception() is None:
            self._leave(graceful=False)

    def _join(self) -> None:
        """Joins the group. Does nothing for a group that was joined elsewhere.

        Raises:
            AlreadyInitializedError: This object has joined already.
            UsageError: The rank, the world size or the URL is missing or not valid.
            RendezvousError: The other workers did not come in time, or the group refused this worker.
        """
        if not self._is_owned:
            return
        if self._agent is not None:
            raise AlreadyInitializedError(
                f"this group was entered already, as worker {self._agent.info.name!r}: make another Group() for "
                "another membership"
            )
        agent = self._new_agent()
        current.add(agent, self)
        try:
            agent.start()
            vars(agent)["_farcall_group"] = self
            self._agent = agent
        except BaseException:
            current.remove(agent)
            agent.shutdown(graceful=False, timeout=0.0)
            raise

    def _new_agent(self) -> RpcAgent:
        """Returns a new agent that has joined the group and does not run calls yet.

        A worker without a name gets the one of the launcher, else one made up of host name, process id and random
        digits. Raises `UsageError` if the rank, the world size or the URL is missing or not valid, and
        `RendezvousError` if the other workers did not come in time or the group refused this worker.
        """
        name = self._name or launched_name(self._rank)
        if name is None:  # an open group without a launcher: any name that nobody else has
            name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        backend, options = choose_backend(None, self._options)
        return make_agent(name, backend, self._rank, self._world_size, options)

    def _leave(self, graceful: bool) -> None:
        """Leaves the group if this object has joined it, else does nothing. If `graceful`, first waits for all work.

        Raises `ShutdownError` if that wait fails, and `UsageError` if this code itself runs for another worker and
        would wait for itself.
        """
        if self._is_owned:
            self.shutdown(graceful)

    def _enter_block(self) -> None:
        """Makes this group the current one of this context: the functions of the package act on it.

        Raises `NotInitializedError` if the group was not joined.
        """
        self._blocks.append(current.enter_block(self.agent))

    def _leave_block(self) -> None:
        """Undoes the last `_enter_block`: the group before is current again. Raises `IndexError` if there was none."""
        current.leave_block(self._blocks.pop())

    def shutdown(self, graceful: bool = True, timeout: float | None = None) -> None:
        """Leaves the group. Does nothing if this process has left it already, or has not joined it.

        Args:
            graceful: Whether to wait first until the work of all workers is done; in an open group, of this one.
            timeout: How many seconds to wait at most, more than 0; None for no limit. Only a graceful shutdown waits.

        Raises:
            ShutdownError: The waiting failed, for example because the timeout expired. All resources have been released
                all the same.
            UsageError: `timeout` is 0 or less, or a function that runs here for another worker calls this gracefully.
                Nothing has changed.
        """
        if timeout is not None and not timeout > 0:
            raise UsageError(
                f"the timeout of a shutdown must be more than 0 seconds, or None for no limit: {timeout!r}"
            )
        agent = self._agent
        if agent is not None:
            try:
                shut_down(agent, graceful, timeout or 0.0)
            finally:
                if agent.closed is not None:
                    self._agent = None

    # What a member can do

    @property
    def agent(self) -> RpcAgent:
        """The agent, which makes and serves the calls of this worker.

        Raises `NotInitializedError` before the group was joined and after it was left.
        """
        if self._agent is None:
            raise NotInitializedError("this process is not in the group: enter it first, `with group:`")
        return self._agent

    @property
    def info(self) -> WorkerInfo:
        """The name and the id of this process in the group.

        Raises `NotInitializedError` before the group was joined and after it was left.
        """
        return self.agent.info

    def worker(self, to: To | None = None) -> Worker:
        """Returns a handle of a worker of this group, through which functions are run there.

        Args:
            to: The name, the rank, the `WorkerInfo` or another handle of the worker. None means this worker. Whether
                there is such a worker is found out when the handle is used.

        Raises:
            UsageError: `to` is of another type, so it cannot name a worker.
            NotInitializedError: The block was not entered, or has been left.
        """
        agent = self.agent
        return Worker(agent.info if to is None else worker_key(to), agent)

    def workers(self, *names: str, where: Callable[[WorkerInfo], bool] | None = None, others: bool = False) -> Workers:
        """Returns a selection of workers of this group, through which functions are run on all of them, or on any.

        Args:
            names: Names, and patterns of names such as `"rollout*"`. Without any, all workers.
            where: Returns whether a worker of these names is in the selection; None for all.
            others: Whether to leave out this worker.

        Raises:
            UsageError: A name is not a str, or `where` cannot be called.
            NotInitializedError: The block was not entered, or has been left.
        """
        return Workers(names, where, others, self.agent)

    def __reduce__(self) -> NoReturn:
        """Raises `UsageError`: a group cannot be pickled."""
        raise UsageError(
            "a Group cannot be sent to another worker: a function that runs there finds its own, by farcall.group()"
        )

    def __repr__(self) -> str:
        agent = self._agent
        return (
            f"<{type(self).__name__}, not joined>"
            if agent is None
            else f"<{type(self).__name__} as {agent.info.name!r}>"
        )


def group() -> Group:
    """Returns the current group: that of the enclosing `with` block, of `init_rpc`, or the only one of this process.

    Raises:
        NotInitializedError: This process is in no group, or in several and this code is in the block of none of them.
    """
    return Group.of(current.current_agent())


def _with_url(options: RpcBackendOptions | None, url: str | None) -> RpcBackendOptions | None:
    """Returns a copy of the options with `url` as the option `init_method`; `options` itself if `url` is None.

    If `options` is None, the copy has defaults otherwise. Raises `UsageError` if `options` is of another type, or has
    another `init_method` already. The URL itself is not checked.
    """
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise UsageError(f"the options of a group must be RpcBackendOptions, not {options!r}")
    if url is None:
        return options
    if options is None:
        return RpcBackendOptions(init_method=url)
    if options.init_method not in (DEFAULT_INIT_METHOD, url):
        raise UsageError(
            f"the group is to be found at two places: {url!r} by its url, {options.init_method!r} by its options; "
            "leave one out"
        )
    options = copy(options)
    options.init_method = url
    return options

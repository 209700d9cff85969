"""The agents of this process, and which of them a piece of code acts for: the *current* agent.

A process may be a member of several groups, with an agent for each. The functions of the package (`rpc_sync`, `worker`
...) take no group; they act for the current agent. That is the first of these that there is:

1. The agent of the innermost enclosing block. A `with` block of a group encloses the code in it, and the tasks that
   this code creates. A call that an agent serves encloses the function that it runs, synchronous or `async def`.
2. The agent of `init_rpc`.
3. The agent of the only group that this process is in. So threads and event loops that were started outside of the
   block of a group find the group, as do the endpoints of a web application whose start-up code has entered it.

With several groups and none of these, the current agent is not known, and asking for it raises `NotInitializedError`.

Theory of operation: nearly every process has one agent. Then all three rules lead to it, and `sole` is that agent. The
call path reads this variable and nothing else. Where `sole` is None, `current_agent` applies the rules: blocks are kept
in a context variable, and the threads that serve calls know their agent (`serving`), which costs a call nothing.

This module holds the only global state of the package. User code never runs under its lock.
"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple

from farcall.errors import NotInitializedError

if TYPE_CHECKING:
    from farcall.backends.interface import ReferenceStore, RpcAgent

sole: RpcAgent | None = None
"""The agent of this process, if it has exactly one; else None. Read by every call, written by this module only."""

_groups: dict[RpcAgent, object] = {}
"""All agents of this process in the order in which they were added, each with the object that stands for its group."""
_of_init_rpc: RpcAgent | None = None
"""The agent that `init_rpc` has made; None if there is none."""
_lock = threading.RLock()  # reentrant, because a signal handler may shut down in the midst of a change


class _ServingThread(threading.local):
    """Attributes of the current thread: which agent it works for. Each thread that reads them sees its own."""

    agent: RpcAgent | None = None
    """The agent whose functions and callbacks the thread runs; None for a thread of the program."""


serving = _ServingThread()
"""The agent that the current thread works for: `serving.agent`, None on a thread of the program."""


class _Block(NamedTuple):
    """An enclosing `with` block of a group.

    `agent` is the agent of the group. `serving` is the agent for which the thread worked when it entered the block;
    None on a thread of the program.
    """

    agent: RpcAgent
    serving: RpcAgent | None


_block: ContextVar[_Block | None] = ContextVar("farcall_block", default=None)
"""The innermost `with` block of a group around the current code; None if there is none."""


# The agents of this process


def add(agent: RpcAgent, group: object, *, is_of_init_rpc: bool = False) -> None:
    """Adds an agent to those of this process, and removes those that a forked child has inherited from its parent.

    An agent that was added already gets the new `group`. Raises nothing.

    Args:
        agent: The agent.
        group: An object that stands for the group; the same for all agents of this process in that group.
        is_of_init_rpc: Whether `init_rpc` has made the agent, so that it is the current one outside of all blocks.
    """
    global _of_init_rpc
    with _lock:
        for each in [each for each in _groups if each.is_forked]:  # the parent's, which a forked child has let go
            remove(each)
        _groups[agent] = group
        if is_of_init_rpc:
            _of_init_rpc = agent
        _note_sole()


def remove(agent: RpcAgent) -> None:
    """Removes an agent that was shut down from those of this process. Does nothing if it was not added."""
    global _of_init_rpc
    with _lock:
        _groups.pop(agent, None)
        if _of_init_rpc is agent:
            _of_init_rpc = None
        _note_sole()


def _note_sole() -> None:
    """Sets `sole` to the only agent of this process, or to None if there is none or several."""
    global sole
    sole = next(iter(_groups)) if len(_groups) == 1 else None


def agents() -> list[RpcAgent]:
    """Returns all agents of this process, in the order in which they were added; an empty list if there are none."""
    return list(_groups)


def agent_of_init_rpc() -> RpcAgent | None:
    """Returns the agent that `init_rpc` has made; None if there is none."""
    return _of_init_rpc


# The current agent


def current_agent() -> RpcAgent:
    """Returns the current agent: the one for which `rpc_sync` and the other functions of the package act.

    That is the agent of the innermost enclosing `with` block of a group, or, in a function that runs for another
    worker, the agent that runs it. Without these it is the agent of `init_rpc`, else the agent of the only group of
    this process.

    Raises:
        NotInitializedError: This process has no agent; or it has several of different groups, none of them of
            `init_rpc`, and this code is in the `with` block of none of them.
    """
    agent = find_current_agent()
    if agent is not None:
        return agent
    if _groups:
        names = ", ".join(repr(agent.info.name) for agent in list(_groups))
        raise NotInitializedError(
            f"this process is in several groups (as worker {names}), and this code runs in the `with` block of none of "
            "them: use group.worker(...) of one of them, or enter its block here"
        )
    raise NotInitializedError(
        "RPC has not been initialized: this process is not a worker. Call farcall.init_rpc(...) or enter a "
        "farcall.Group() first, and again after a shutdown"
    )


def find_current_agent() -> RpcAgent | None:
    """Returns the agent for which the functions of the package act now, the current agent; None if it is not known.

    That is the agent of the innermost enclosing `with` block of a group, or, in a function that runs for another
    worker, the agent that runs it. Without these it is the agent of `init_rpc`, else the agent of the only group of
    this process. It is not known if this process has no agent, or is in several groups and has none of these.
    """
    if sole is not None:
        return sole
    block, agent = _block.get(), serving.agent
    # A block that was entered elsewhere does not enclose what an agent serves here, though its context may have been
    # inherited: since Python 3.14 threads can start with a copy of the context that starts them.
    if block is not None and (agent is None or block.serving is agent):
        return block.agent
    if agent is not None:
        return agent
    if _of_init_rpc is not None:
        return _of_init_rpc
    groups = list(_groups.values())
    return next(iter(list(_groups)), None) if groups and all(group is groups[0] for group in groups) else None


def current_reference_store() -> ReferenceStore:
    """Returns the reference store of the current agent: the references that it owns and uses.

    The current agent is that of the enclosing `with` block, of `init_rpc`, or of the only group of this process.

    Raises:
        NotInitializedError: There is no current agent, or it was shut down.
        ForkedProcessError: This process was forked, and the agent is that of its parent.
        RpcError: The agent was closed for another reason, for example because the group has expelled it.
    """
    agent = current_agent()
    if agent.closed is not None:
        raise agent.closed
    return agent.reference_store


def enter_block(agent: RpcAgent) -> Token[Any]:
    """Makes an agent the current one of this context (`contextvars`): the functions of the package act for it.

    Returns a token for `leave_block`, which undoes this. Blocks can be nested. The agent is not checked.
    """
    return _block.set(_Block(agent, serving.agent))


def leave_block(token: Token[Any]) -> None:
    """Undoes the `enter_block` that returned `token`. Does nothing in another context, such as another task's.

    Raises `RuntimeError` if the token was used already.
    """
    try:
        _block.reset(token)
    except ValueError:
        pass


# Forks of the process


def _abandon_in_child() -> None:
    """Runs in a forked child: makes the agents of the parent unusable here, without sending anything.

    Does nothing if the parent has no agents.
    """
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    serving.agent = None
    for agent in list(_groups):
        agent.abandon()


def _tell_before_fork() -> None:
    """Runs before a fork, in the parent: tells all agents, if there are any, that the process is about to fork."""
    for agent in list(_groups):
        agent.about_to_fork()


os.register_at_fork(before=_tell_before_fork, after_in_child=_abandon_in_child)

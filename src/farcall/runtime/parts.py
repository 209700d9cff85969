"""The objects that the connections, the calls and the group of one worker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farcall.deadlines import current_scope

if TYPE_CHECKING:
    from farcall.deadlines import Scope, ServingThread
    from farcall.runtime.coroutines import EventLoop
    from farcall.runtime.executor import Executor
    from farcall.runtime.interceptors import InterceptorChain
    from farcall.runtime.reference_store import ReferenceStore
    from farcall.runtime.timers import Timers
    from farcall.security import Credentials
    from farcall.security.allowed import AllowList
    from farcall.transports.base import LinkOptions, Transport
    from farcall.transports.poller import Poller


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerParts:
    """The objects that the connections, the calls and the group of one worker share. The agent creates them.

    Attributes:
        name: The name of this worker.
        poller: Waits for events on the links and listeners of this worker, for the executor.
        executor: Runs requests and callbacks.
        timers: Calls functions at given times.
        loop: Runs coroutines.
        store: The references of this worker.
        guard: The allow-list: what other workers may call and send; None for everything.
        interceptors: User code that runs around every call.
        transports: The transports by scheme, in order of preference.
        credentials: The secret and certificates with which workers authenticate each other.
        link_options: The options of links whose other end is authenticated.
        limits: The most bytes of a head (a frame without payload and buffers) and of a whole frame that this worker
            accepts.
        failure_to_send: Given a function's name and its error, returns the error to send to the caller. None means that
            the error itself is sent. For `farcall.pytorch`.
        function_runner: Given a function, returns the function to run in its place. None means that the function itself
            is run. For `farcall.pytorch`.
        honours_deadlines: Whether calls inherit deadlines, and a call is cancelled when its caller stops waiting. False
            for `farcall.pytorch`.
    """

    name: str
    poller: Poller
    executor: Executor
    timers: Timers
    loop: EventLoop
    store: ReferenceStore
    guard: AllowList | None
    interceptors: InterceptorChain
    transports: Mapping[str, Transport]
    credentials: Credentials
    link_options: LinkOptions
    limits: tuple[int, int]
    failure_to_send: Callable[[str, BaseException], BaseException] | None
    function_runner: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    honours_deadlines: bool

    @property
    def current_scope(self) -> Callable[[], Scope | ServingThread | None]:
        """A function that returns the scope of the code that calls it.

        A scope is a function that runs for another worker, or a block of `deadline` or `detached`. In a thread that
        runs functions for other workers, a `ServingThread` may be returned instead. Its `find` returns the scope, or
        None. In other threads, None is returned outside of all scopes. If `honours_deadlines` is False, the function
        always returns None.
        """
        return current_scope.get if self.honours_deadlines else _no_scope


def _no_scope() -> None:
    """Returns None: without `honours_deadlines`, calls belong to no scope."""

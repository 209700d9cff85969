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
    """The objects that the connections, the calls and the group of one worker share. The agent creates them."""

    name: str
    """The name of this worker."""
    poller: Poller
    """The poller of the executor."""
    executor: Executor
    """Runs requests and callbacks."""
    timers: Timers
    """Calls functions at given times."""
    loop: EventLoop
    """Runs coroutines."""
    store: ReferenceStore
    """The references of this worker."""
    guard: AllowList | None
    """The allow-list: what other workers may call and send; None for everything."""
    interceptors: InterceptorChain
    """User code that runs around every call."""
    transports: Mapping[str, Transport]
    """The transports by scheme, in order of preference."""
    credentials: Credentials
    """The secret and certificates with which workers authenticate each other."""
    link_options: LinkOptions
    """The options of links whose other end is authenticated."""
    limits: tuple[int, int]
    """The most bytes of a head and of a frame that this worker accepts; 0 for no limit."""
    failure_to_send: Callable[[str, BaseException], BaseException] | None
    """Given a function's name and its error, returns the error to send to the caller. For `farcall.pytorch`."""
    function_runner: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    """Given a function, returns the function to run in its place. For `farcall.pytorch`."""
    honours_deadlines: bool
    """Whether calls inherit deadlines, and the end of a caller's wait cancels its call. Not for `farcall.pytorch`."""

    @property
    def current_scope(self) -> Callable[[], Scope | ServingThread | None]:
        """Returns what leads to the scope to which a new call belongs (`deadlines`); None if it belongs to none."""
        return current_scope.get if self.honours_deadlines else _no_scope


def _no_scope() -> None:
    """Calls of `farcall.pytorch` belong to no scope."""

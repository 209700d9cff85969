"""Interceptors: code that runs around every call, at the caller or at the callee.

A `ClientInterceptor` wraps the calls that this worker makes, a `ServerInterceptor` the calls that it runs for others.
Interceptors run in the order in which they were registered: the first is the outermost. Each gets the call and
`proceed`, which runs the next interceptor; the last `proceed` sends the call or runs the function.

    class Timed(farcall.ServerInterceptor):
        def intercept(self, call, proceed):
            began = time.perf_counter()
            try:
                return proceed(call)
            finally:
                print(call.name, time.perf_counter() - began)

    farcall.add_interceptor(Timed())

Rules
- An error that an interceptor raises is raised by the call. At the caller, nothing is sent then; at the callee, the
  error is sent to the caller.
- An interceptor that does not call `proceed` must provide the result itself: a server interceptor returns it, and a
  client interceptor returns a future of it.
- `call.annotations` are sent with the call, and `call.reply_annotations` with the reply. They map text to bytes, and
  should be small.
- At the callee, the allow-list is checked and the arguments are unpickled before the first interceptor runs.
- For an `async def` function `proceed` returns the coroutine, and for an `async_execution` function the future.
  Annotations of the reply may be set until the reply is sent.
- `call.after_reply(function)` has a function called after the reply was sent, on the thread that sent it, before that
  thread runs anything else.
- Without interceptors, a call executes one additional `if` on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from farcall.errors import UsageError
from farcall.futures import Future

if TYPE_CHECKING:
    from farcall.protocol.ids import WorkerInfo


class ClientCall:
    """A call that this worker is about to make. Interceptors may change some attributes before they call `proceed`.

    Changes of `function`, `args`, `kwargs`, `timeout` and `annotations` have an effect. The last `proceed` raises
    `UsageError`, and nothing is sent, if `function` or `timeout` is not valid then.

    Attributes:
        to: The worker that is called.
        function: The function, or the name of a method of the value of a reference.
        name: The name of the function, for messages.
        args: The positional arguments.
        kwargs: The keyword arguments.
        timeout: How many seconds the call may take; 0 for no limit.
        is_kept: Whether the result stays at the callee, as with `remote`. Then `proceed` returns a reference, not a
            future.
        annotations: Annotations to send with the call; empty at first.
        reply_annotations: Annotations of the reply. They are there when the future is done, and empty before.
    """

    __slots__ = ("annotations", "args", "function", "is_kept", "kwargs", "name", "reply_annotations", "timeout", "to")

    def __init__(
        self,
        to: WorkerInfo,
        function: Callable[..., Any] | str,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float,
        is_kept: bool,
    ) -> None:
        """Creates the description of a call, without annotations. Nothing is checked.

        Args:
            to: The worker that is called.
            function: The function, or the name of a method of the value of a reference.
            name: The name of the function, for messages.
            args: The positional arguments; may be empty.
            kwargs: The keyword arguments; may be empty.
            timeout: How many seconds the call may take; 0 for no limit.
            is_kept: Whether the result stays at the callee, as with `remote`.
        """
        self.to = to
        self.function = function
        self.name = name
        self.args: Sequence[Any] = args
        self.kwargs = kwargs
        self.timeout = timeout
        self.is_kept = is_kept
        self.annotations: dict[str, bytes] = {}
        self.reply_annotations: dict[str, bytes] = {}


class ServerCall:
    """A call that this worker is about to run for another. Interceptors may change its function and its arguments.

    Attributes:
        caller: The worker that made the call; None if this worker has called itself with `remote`.
        function: The function, or a method that is bound to the value of a reference.
        name: The name of the function, for messages.
        args: The positional arguments.
        kwargs: The keyword arguments.
        annotations: The annotations of the call; empty if it has none.
        reply_annotations: Annotations to send with the reply; empty at first.
        after_reply: Given a function without arguments, calls it after the reply was sent. Errors that the function
            raises are logged.
    """

    __slots__ = ("after_reply", "annotations", "args", "caller", "function", "kwargs", "name", "reply_annotations")

    def __init__(
        self,
        caller: WorkerInfo | None,
        function: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        annotations: dict[str, bytes],
        after_reply: Callable[[Callable[[], object]], None],
    ) -> None:
        """Creates the description of a call, without annotations of the reply. Nothing is checked.

        Args:
            caller: The worker that made the call; None if this worker has called itself with `remote`.
            function: The function, or a method that is bound to the value of a reference.
            name: The name of the function, for messages.
            args: The positional arguments; may be empty.
            kwargs: The keyword arguments; may be empty.
            annotations: The annotations of the call; may be empty.
            after_reply: Given a function, calls it after the reply was sent.
        """
        self.caller = caller
        self.function = function
        self.name = name
        self.args: Sequence[Any] = args
        self.kwargs = kwargs
        self.annotations = annotations
        self.reply_annotations: dict[str, bytes] = {}
        self.after_reply = after_reply


class ClientInterceptor:
    """Wraps the calls that this worker makes. Derive a class from it, and override `intercept`."""

    def intercept(self, call: ClientCall, proceed: Callable[[ClientCall], Any]) -> Any:
        """Called for each call, on the thread that makes it. Without an override, just proceeds.

        An error that this raises is raised by the call.

        Args:
            call: The call. It may be changed before `proceed`: see `ClientCall`.
            proceed: Runs the next interceptor; the last one sends the call. Returns a future of the result, or a
                reference if `call.is_kept` is set.

        Returns:
            What `proceed` has returned, or another future (if `call.is_kept` is set, another reference).
        """
        return proceed(call)


class ServerInterceptor:
    """Wraps the calls that this worker runs for others. Derive a class from it, and override `intercept`."""

    def intercept(self, call: ServerCall, proceed: Callable[[ServerCall], Any]) -> Any:
        """Called for each call, on the thread that runs it. Without an override, just proceeds.

        An error that this raises is sent to the caller.

        Args:
            call: The call. Its function and its arguments may be changed before `proceed`.
            proceed: Runs the next interceptor, or the function if there is no other interceptor. Returns the result,
                or raises the error.

        Returns:
            The result of the call: what `proceed` has returned, or another value.
        """
        return proceed(call)


class InterceptorChain:
    """The interceptors of one worker. There are none at first.

    `client` has those for the calls that this worker makes, and `server` those for the calls that it runs for others.
    In both, the outermost interceptor is the first.
    """

    def __init__(self) -> None:
        """Creates a chain without interceptors."""
        self.client: tuple[ClientInterceptor, ...] = ()
        self.server: tuple[ServerInterceptor, ...] = ()

    def add(self, interceptor: ClientInterceptor | ServerInterceptor) -> None:
        """Registers an interceptor as the innermost one. Calls that have started are not affected.

        An object that is both a client interceptor and a server interceptor is registered for both.

        Raises:
            UsageError: `interceptor` is neither a `ClientInterceptor` nor a `ServerInterceptor`.
        """
        if isinstance(interceptor, ClientInterceptor):
            self.client = (*self.client, interceptor)
        if isinstance(interceptor, ServerInterceptor):
            self.server = (*self.server, interceptor)
        if not isinstance(interceptor, ClientInterceptor | ServerInterceptor):
            raise UsageError(f"an interceptor is a ClientInterceptor or a ServerInterceptor, not {interceptor!r}")

    def remove(self, interceptor: ClientInterceptor | ServerInterceptor) -> None:
        """Removes an interceptor, also if it was registered several times. Does nothing if it is not registered."""
        self.client = tuple(each for each in self.client if each is not interceptor)
        self.server = tuple(each for each in self.server if each is not interceptor)


def run_client_interceptors(
    interceptors: Sequence[ClientInterceptor], call: ClientCall, send: Callable[[ClientCall], Any]
) -> Any:
    """Runs the interceptors around `send`. Returns the result of the outermost one, and raises its errors.

    Args:
        interceptors: The interceptors, outermost first. Without any, only `send` is called.
        call: The call.
        send: Sends the call. Returns a future, or a reference if `call.is_kept` is set.

    Raises:
        UsageError: The result is not a future, although `call.is_kept` is not set.
    """
    result = _chain(interceptors, send)(call)
    if not call.is_kept and not isinstance(result, Future):
        raise UsageError(f"a client interceptor must return a future for `{call.name}`, as proceed() does: {result!r}")
    return result


def run_server_interceptors(
    interceptors: Sequence[ServerInterceptor], call: ServerCall, run: Callable[[ServerCall], Any]
) -> Any:
    """Runs the interceptors around `run`. Returns the result of the outermost one, and raises its errors.

    Args:
        interceptors: The interceptors, outermost first. Without any, only `run` is called.
        call: The call.
        run: Runs the function. Returns its result.
    """
    return _chain(interceptors, run)(call)


def _chain(interceptors: Sequence[Any], innermost: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of a call that runs all interceptors around `innermost`.

    The first interceptor is the outermost. Each gets the call, and a function that runs the next interceptor. The last
    one gets `innermost` as this function. Returns `innermost` itself if there are no interceptors.
    """
    proceed = innermost
    for interceptor in reversed(interceptors):
        proceed = _bind(interceptor, proceed)
    return proceed


def _bind(interceptor: Any, proceed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `interceptor.intercept` with its argument and `proceed`."""
    return lambda call: interceptor.intercept(call, proceed)

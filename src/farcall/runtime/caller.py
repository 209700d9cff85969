"""`Caller` makes the calls of a program: calls, remote calls, and calls on references.

Rules
- Wrong arguments of a call are raised at once, before anything is sent.
- A frame with references gets its number when it is created. If the thread is interrupted before the frame is sent, the
  connection is closed, and everything unacknowledged is sent again on the next connection.
- A reference is kept until its owner has answered all calls on it, even if the program drops it before.
- A call belongs to the scope in which it is made (`deadlines`): it ends no later than the scope, and is cancelled with
  it. It is added to the scope after it was sent, so that its cancellation follows its request.
- On the thread of an event loop no call waits: without a connection, it is queued and sent by the thread that connects
  (`unsent`), and its errors are those of its future.
- A remote call is a call whose result is kept at the callee. Its reply says that the owner has received the call, and
  contains the value if that is small and immutable. Nobody waits for it, so the default timeout does not apply to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

from farcall.backends.interface import To, bad_arguments, check_timeout, checked_function, worker_key
from farcall.deadlines import Scope
from farcall.errors import OwnerLostError, RpcError, RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLostError
from farcall.futures import DONE, FAILED, Future, failed_future, wait_or_cancel
from farcall.gate import must_not_sleep
from farcall.options import UNSET_RPC_TIMEOUT
from farcall.protocol.frames import (
    MAX_CALLEE_BYTES,
    METHOD,
    VALUE,
    milliseconds_left,
    pack_annotations,
    pack_handle,
    pack_request,
)
from farcall.protocol.ids import ForkId, WorkerInfo
from farcall.runtime.calls import KEPT, KeptCreation, PendingCall, timeout_error
from farcall.runtime.client import ClientConnection
from farcall.runtime.cluster import PeerTable
from farcall.runtime.executor import Job
from farcall.runtime.handles import Handle, Value, check_number, check_usable, place_of_caller
from farcall.runtime.interceptors import ClientCall, run_client_interceptors
from farcall.runtime.invocation import FEW_HANDLES, SMALL_PAYLOAD_BYTES, Invocation
from farcall.runtime.parts import WorkerParts
from farcall.runtime.peers import Peer
from farcall.runtime.reference_outbox import UnackedKeep
from farcall.runtime.server import excess_of
from farcall.runtime.unsent import Unsent, UnsentCall, UnsentKeep
from farcall.serialization import (
    callable_name,
    collecting,
    dumps_arguments,
    dumps_plain_arguments,
    encode_function,
)
from farcall.transports.base import FOREVER, Broadcast

Callee = Callable[..., Any] | str
"""A function, or the name of a method. Used in error messages."""
_SMALL_CALLEE_BYTES: Final = 400


_PackedCall: TypeAlias = tuple[Callee, bytes, bytes, list[memoryview], list[Handle], ClientCall | None]
"""A call whose arguments are pickled: the function, the encoded callee, the payload, the buffers, the handles of
references in the arguments, and the call as interceptors see it."""


class _RemoteCall(NamedTuple):
    """A call made by `remote`: the callee runs the function, and keeps the result.

    Attributes:
        function: The function, or the name of a method of the value of a reference.
        args: The positional arguments; empty for none.
        kwargs: The keyword arguments; None for none.
        annotations: Named values for the interceptors of the callee; empty for none.
        seconds: Within how many seconds the function must have its result; 0 for no limit.
    """

    function: Callee
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    annotations: Mapping[str, bytes]
    seconds: float


class Caller:
    """Makes the calls of one worker: calls that return a result, calls of `remote`, and calls on references.

    Args:
        parts: The objects that the connections and calls of this worker share, such as its executor.
        info: The name and id of this worker.
        peers: The table of the workers of the group. Its `closed` is the error of every call after this worker was
            shut down or expelled.
        rpc_timeout: The timeout in seconds of calls that do not give one; 0 for no limit.
        submit_own_call: Queues a call that this worker makes to itself with `remote`. Called with the function as
            encoded in a frame, and the job that runs the call.
    """

    def __init__(
        self,
        parts: WorkerParts,
        info: WorkerInfo,
        peers: PeerTable,
        rpc_timeout: float,
        submit_own_call: Callable[[bytes, Job], None],
    ) -> None:
        self.info = info
        self.rpc_timeout = rpc_timeout
        self._parts = parts
        self._peers = peers
        self._store = parts.store
        self._interceptors = parts.interceptors
        self._current_scope = parts.current_scope
        self._submit_own_call = submit_own_call

    @property
    def numbered(self) -> Mapping[int, Peer]:
        """The workers of the group by number, this one included.

        Workers that have left or were lost are in it as well, until this worker forgets them.
        """
        return self._peers.by_number

    # Calls

    def call(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> Future[Any]:
        """Sends a call to a worker, and returns the future of its result without waiting for the reply.

        If there is no connection, opens one and waits until it is open. On the thread of an event loop, does not wait:
        another thread connects and sends the call. Then the future fails if connecting fails.

        Args:
            to: The worker: its name, rank or `WorkerInfo`.
            function: The function to run there.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: How many seconds the call may take; 0 for no timeout, `UNSET_RPC_TIMEOUT` for the default one.
            unattended: True to make a thread of the executor read the reply, if no other thread reads it soon. False if
                the calling thread waits for the reply at once, and can read it itself.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: Another argument is not valid, or the call is too large for the other worker.
            SerializationError: An argument cannot be pickled.
            RpcTimeoutError: The timeout expired before the call was sent.
            WorkerLostError: The worker has left, was lost, or cannot be reached.
            RpcError: This worker was shut down or expelled.
        """
        peers = self._peers
        try:
            peer = peers.by_key.get(to)  # type: ignore[arg-type]
        except TypeError:  # not even hashable
            peer = None
        if peer is None or peers.closed is not None:
            peer = self._find(to)
        found, scope = self._current_scope(), None
        if found is not None:
            scope, timeout = found.find(), self.resolve_timeout(timeout)
        elif timeout == UNSET_RPC_TIMEOUT:
            timeout = self.rpc_timeout
        else:
            check_timeout(timeout)
        if args is not None and not isinstance(args, tuple | list):
            raise bad_arguments(args)
        if self._interceptors.client:
            return self._call_intercepted(peer, checked_function(function), None, args, kwargs, timeout, unattended)
        callee = encode_function(function)
        connection = peer.connection
        if callee is not None and not args and not kwargs and connection is not None:
            future: PendingCall | UnsentCall = connection.call(  # the shortest path
                function, callee, b"", _NO_BUFFERS, timeout
            )
        else:
            if callee is None:
                callee, function = b"", checked_function(function)
            future = self._call(peer, function, callee, args or (), kwargs, timeout)
        if scope is not None:
            scope.add_call(future)
        if unattended:
            future.connection.drive_in_background_later()
        return future

    def _find_scope(self) -> Scope | None:
        """Returns the scope in which the current thread runs; None if there is none.

        A scope is a function that runs for another worker, or a block of `deadline` or `detached`. The calls in a scope
        have one deadline, and are cancelled together.
        """
        found = self._current_scope()
        return found.find() if found is not None else None

    def call_many(
        self,
        workers: Sequence[WorkerInfo],
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> list[Future[Any]]:
        """Sends the same call to several workers, and returns their futures without waiting for the replies.

        The arguments are pickled once, and copied into shared memory once for all workers of this host. If there are
        client interceptors, both are done for each worker. The call is sent first to the workers that have a
        connection. Only then are connections to the others opened.

        Args:
            workers: The workers; at least one.
            function: The function to run there.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: How many seconds each call may take; 0 for no timeout, `UNSET_RPC_TIMEOUT` for the default one.

        Returns:
            A future for each worker, in the same order. If the call could not be sent to a worker, the future of that
            worker has failed.

        Raises:
            UsageError: An argument is not valid.
            SerializationError: An argument cannot be pickled.
            RpcError: This worker was shut down or expelled.
        """
        if self._peers.closed is not None:
            raise self._peers.closed
        timeout = self.resolve_timeout(timeout)
        if args is not None and not isinstance(args, tuple | list):
            raise bad_arguments(args)
        callee = encode_function(checked_function(function)) or b""
        payload, buffers, handles = self._pack_arguments("", function, callee, args or (), kwargs)
        scope = self._find_scope()
        futures: dict[WorkerInfo, Future[Any]] = {}
        with Broadcast(buffers) as broadcast:
            for worker in sorted(workers, key=self._needs_connection):
                try:
                    if self._interceptors.client:  # they may change the arguments for each worker
                        futures[worker] = self.call(worker, function, args, kwargs, timeout, unattended=True)
                        continue
                    of_link = broadcast.for_link() if len(workers) > 1 else buffers
                    packed = payload, of_link, handles
                    future = self._send_call(self._find(worker), function, callee, packed, timeout)
                    if scope is not None:
                        scope.add_call(future)
                    future.connection.drive_in_background_later()
                    futures[worker] = future
                except RpcError as error:
                    futures[worker] = failed_future(error)
        return [futures[worker] for worker in workers]

    def _needs_connection(self, worker: WorkerInfo) -> bool:
        """Returns whether there is no connection to a worker; True also if the worker is not known."""
        peer = self._peers.by_key.get(worker)
        return peer is None or peer.connection is None

    def calls_pending(self, worker: WorkerInfo) -> int:
        """Returns how many calls of this worker to `worker` are not complete yet.

        With a connection to `worker`, these are the calls that wait for a reply. Calls made by `remote` do not count
        then. Without a connection, these are the calls that wait for a connection. Calls made by `remote` do count
        then. Returns 0 if `worker` is not known.
        """
        peer = self._peers.by_key.get(worker)
        if peer is None:
            return 0
        connection = peer.connection
        return connection.calls_pending() if connection is not None else peer.count_unsent()

    def _call(
        self,
        peer: Peer,
        function: Callee,
        callee: bytes,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        intercepted: ClientCall | None = None,
    ) -> PendingCall | UnsentCall:
        """Sends a call to a worker, and returns its future. Opens a connection first if there is none.

        Waits until the connection is open, sends the call, and returns a `PendingCall`. On the thread of an event loop,
        does not wait if there is no connection: returns an `UnsentCall`, and another thread connects and sends the
        call. An `UnsentCall` fails if connecting fails.

        Args:
            peer: The worker.
            function: The function or the name of the method, for messages. It is pickled with the arguments if `callee`
                is empty.
            callee: The function or method to call, as encoded in a frame; empty if it must be pickled.
            args: The positional arguments.
            kwargs: The keyword arguments; None for none.
            timeout: How many seconds the call may take; 0 for no limit.
            intercepted: The call as interceptors see it, which has the annotations; None without interceptors.

        Raises:
            UsageError: The call is too large for the other worker.
            SerializationError: An argument cannot be pickled.
            RpcTimeoutError: The timeout expired before the call was sent.
            WorkerLostError: The worker cannot be reached.
            RpcError: This worker was shut down or expelled.
        """
        packed = self._pack_arguments(peer.info.name, function, callee, args, kwargs)
        return self._send_call(peer, function, callee, packed, timeout, intercepted)

    def _send_call(
        self,
        peer: Peer,
        function: Callee,
        callee: bytes,
        packed: tuple[bytes, list[memoryview], list[Handle]],
        timeout: float,
        intercepted: ClientCall | None = None,
    ) -> PendingCall | UnsentCall:
        """Sends a call with pickled arguments to a worker, and returns its future. Connects first if necessary.

        Waits until the connection is open, sends the call, and returns a `PendingCall`. On the thread of an event loop,
        does not wait if there is no connection: returns an `UnsentCall`, and another thread connects and sends the
        call. An `UnsentCall` fails if connecting fails.

        Args:
            peer: The worker.
            function: The function or the name of the method, for messages.
            callee: The function or method to call, as encoded in a frame; empty if it is in the payload.
            packed: The payload, the buffers, and the handles of references in the arguments. The list of buffers is
                emptied.
            timeout: How many seconds the call may take, the time to connect included; 0 for no limit.
            intercepted: The call as interceptors see it, which has the annotations; None without interceptors.

        Raises:
            UsageError: The call is too large for the other worker.
            TypeError, ValueError: An annotation is not valid, or the annotations are too large.
            SerializationError: The call has too many references for one frame.
            RpcTimeoutError: The timeout expired before the call was sent.
            WorkerLostError: The worker cannot be reached.
            RpcError: This worker was shut down or expelled, or a handle cannot be used any more.
        """
        payload, buffers, handles = packed
        connection, spent = peer.connection, 0.0
        if connection is None:
            if must_not_sleep():
                call = function, callee, payload, buffers, handles, intercepted
                return self._call_later(peer, call, timeout)
            began = monotonic()
            connection = self._connect(peer, function, timeout)
            if timeout:
                spent = min(monotonic() - began, timeout - 1e-3)  # a call without any time left would have no limit
        self._check_size(connection, function, callee, len(handles), payload, buffers)
        if not handles and intercepted is None:
            return connection.call(function, callee, payload, buffers, timeout, spent)
        call = function, callee, payload, buffers, handles, intercepted
        return self._send_packed(peer, connection, call, timeout, spent)

    def _call_later(self, peer: Peer, packed: _PackedCall, timeout: float) -> UnsentCall:
        """Returns the future of a call that is sent as soon as there is a connection. Does not wait.

        `packed` is the call with its pickled arguments; its buffers are copied. `timeout` is how many seconds the call
        may take, the time to connect included; 0 for no limit. The future fails if the timeout expires, if connecting
        fails, or if the call is too large. Raises `WorkerLostError` if the worker has left or was lost.
        """
        if peer.is_lost:
            raise peer.lost_error()
        function, callee, payload, buffers, handles, intercepted = packed
        # The program may change its buffers when this returns.
        buffers = [memoryview(bytes(buffer)) for buffer in buffers]
        packed = function, callee, payload, buffers, handles, intercepted

        def send(connection: ClientConnection, spent: float) -> PendingCall:
            self._check_size(connection, function, callee, len(handles), payload, buffers)
            if not handles and intercepted is None:
                return connection.call(function, callee, payload, buffers, timeout, spent)
            return self._send_packed(peer, connection, packed, timeout, spent)

        def error_of(error: RpcError) -> RpcError:
            return self._unconnected_error(peer, error)

        call = UnsentCall(self._parts.executor, peer.info.name, function, timeout, send, error_of)
        self._send_when_connected(peer, call)
        call.expire_by(self._parts.timers)
        return call

    def _send_when_connected(self, peer: Peer, unsent: Unsent) -> None:
        """Queues `unsent`, a call, for the thread that connects to `peer`. Never waits.

        If there is a connection by now, sends the call on it at once, and queues nothing. Otherwise, if this worker was
        shut down or expelled, all calls in the queue for `peer` fail, `unsent` included.
        """
        connection = peer.send_when_connected(unsent)
        if connection is not None:
            unsent.send(connection)
        elif self._peers.closed is not None:  # meanwhile: perhaps no thread connects any more
            peer.fail_unsent(self._peers.closed)

    def _unconnected_error(self, peer: Peer, error: RpcError) -> RpcError:
        """Returns the error of a call that was not sent because connecting failed with `error`.

        If this worker was shut down or expelled, returns the error that says so. If `error` is a `WorkerLostError`,
        returns a copy of it, because raising an error adds to its traceback. Otherwise returns `error` itself.
        """
        if self._peers.closed is not None:  # this worker was shut down or expelled meanwhile
            return self._peers.closed
        if not isinstance(error, WorkerLostError):
            return error
        if error.is_gone:
            self._store.resend(peer.number)  # that finds that the worker is gone, and tells the group
        lost = WorkerLostError(str(error), error.worker)
        lost.is_gone, lost.__cause__ = error.is_gone, error.__cause__
        return lost

    def _send_packed(
        self, peer: Peer, connection: ClientConnection, packed: _PackedCall, timeout: float, spent: float
    ) -> PendingCall:
        """Sends a call that may have references and annotations, and returns its future.

        `packed` is the call with its pickled arguments. `timeout` is how many seconds it may take; 0 for no limit.
        `spent` is how many of these were needed to connect; 0 if none.

        Raises:
            TypeError, ValueError: An annotation is not valid, or the annotations are too large.
            RpcError: A handle in the arguments cannot be used any more, or the worker is gone (`WorkerLostError`).
        """
        function, callee, payload, buffers, handles, intercepted = packed
        packed_annotations = pack_annotations(intercepted.annotations if intercepted is not None else {})
        future = connection.new_call(function, timeout, spent)
        if intercepted is not None:
            connection.intercepted[future.call_id] = intercepted
        try:
            references = self._store.pass_on(handles, peer.number, connection) if handles else b""
            left = milliseconds_left((timeout - spent) * connection.deadline_factor)
            frame = pack_request(future.call_id, callee, payload, left, b"", references, packed_annotations)
        except BaseException as error:
            connection.pending.pop(future.call_id, None)
            connection.intercepted.pop(future.call_id, None)
            if handles and not isinstance(error, RpcError):  # from a signal handler: the frame may have a number
                connection.lose(f"sending to it was interrupted by {type(error).__name__}", advice="")
            raise
        try:
            connection.send_call(future, frame, buffers)
        except BaseException as error:
            connection.lose(f"sending to it was interrupted by {type(error).__name__}", advice="")
            raise
        if handles:
            connection.expect_acknowledgement()
            if connection.is_lost():
                self._store.resend(peer.number)
        return future

    def _pack_arguments(
        self, worker: str, function: Callee, callee: bytes, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[bytes, list[memoryview], list[Handle]]:
        """Pickles the arguments of a call, and the function if `callee`, the encoded function or method, is empty.

        `worker` is the name of the worker that is called, for messages; empty if there are several. `function` is for
        messages as well. `args` may be empty, and `kwargs` empty or None.

        Returns:
            The payload, the buffers, and the handles of references in the arguments. Each may be empty.

        Raises:
            SerializationError: An argument, or the function, cannot be pickled.
        """
        if not args and not kwargs and callee:
            return b"", [], []
        plain = dumps_plain_arguments(args) if callee and args and not kwargs else None
        if plain is not None:
            payload, buffers = plain
            return payload, list(buffers), []
        with collecting() as handles:
            payload, buffers = dumps_arguments(function, args, kwargs, worker, not callee)
        return payload, list(buffers), list(handles)

    def _call_intercepted(
        self,
        peer: Peer,
        function: Callee,
        handle: Handle | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool,
    ) -> Future[Any]:
        """Runs the client interceptors around a call. Returns the future that the outermost one returns.

        Args:
            peer: The worker that is called.
            function: The function, or the name of the method.
            handle: For a method, the handle of the value that has the method; None for a function.
            args: The positional arguments; None or empty for none.
            kwargs: The keyword arguments; None or empty for none.
            timeout: How many seconds the call may take; 0 for no limit.
            unattended: True to make a thread of the executor read the reply, if no other thread reads it soon. False if
                the calling thread waits for the reply at once, and can read it itself.

        Raises:
            UsageError: An interceptor has set a function or timeout that is not valid, or returns no future.
            Exception: What an interceptor raises, and the errors of sending: an argument cannot be pickled, or the
                worker cannot be reached.
        """
        scope = self._find_scope()
        call = ClientCall(
            peer.info, function, callable_name(function), tuple(args or ()), dict(kwargs or {}), timeout, False
        )

        def send(call: ClientCall) -> Future[Any]:
            callee = self._callee_of(call, handle)
            future = self._call(peer, call.function, callee, call.args, call.kwargs, call.timeout, call)
            if handle is not None:
                _keep_until_answered(future, handle)
            if scope is not None:
                scope.add_call(future)
            if unattended:
                future.connection.drive_in_background_later()
            return future

        return run_client_interceptors(self._interceptors.client, call, send)  # type: ignore[no-any-return]

    def _callee_of(self, call: ClientCall, handle: Handle | None) -> bytes:
        """Returns `call.function`, the function or method to call, as encoded in a frame.

        Returns empty bytes if the function must be pickled. To call a method, `handle` is the handle of the value. To
        call a function, `handle` is None. Interceptors may have changed `call`. Raises `UsageError` if its function or
        timeout is not valid.
        """
        check_timeout(call.timeout)
        called = call.function
        if handle is None:
            callee = encode_function(called)  # type: ignore[arg-type]
            if callee is None:
                checked_function(called)  # type: ignore[arg-type]
            return callee or b""
        if not isinstance(called, str):
            raise UsageError(f"an interceptor set {called!r} for the method {call.name!r}: it must be a method's name")
        return self._callee_on(handle, METHOD, called)

    # Calls on references

    def call_on(
        self,
        handle: Handle,
        what: bytes,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> Future[Any]:
        """Calls a method of the value of a reference, or asks the owner for the value or its type.

        Does not wait for the reply. If the value does not exist yet, the owner answers as soon as it exists.

        Args:
            handle: A handle of the reference.
            what: METHOD to call a method, VALUE to ask for the value, TYPE to ask for its type, PRESENCE to ask for an
                answer as soon as the value exists. It is not checked.
            method: The name of the method; for other requests a name for messages.
            args: The positional arguments of the method; empty for none.
            kwargs: Its keyword arguments; None for none.
            timeout: How many seconds the call may take; 0 for no timeout, `UNSET_RPC_TIMEOUT` for the default one.
            unattended: True to make a thread of the executor read the reply, if no other thread reads it soon. False if
                the calling thread waits for the reply at once, and can read it itself.

        Returns:
            The future of the answer: the result of the method, the value, the type, or None for PRESENCE. It fails if
            the value has no such method, and with `ReferenceRefusedError` if the owner does not have the value any
            more.

        Raises:
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not know this worker's fork of the reference, because the worker that
                passed the reference on died too early.
            SerializationError: An argument cannot be pickled.
            UsageError: The handle was given up, an argument is not valid, or this worker was shut down.
            RpcTimeoutError: The timeout expired before the request was sent.
            WorkerLostError: The owner cannot be reached now.
            ExpelledError: The group has expelled this worker.
        """
        handle.check()
        if self._peers.closed is not None:
            raise self._peers.closed
        timeout = self.resolve_timeout(timeout)
        scope = self._find_scope()
        peer = self._owner_of(handle)
        if self._interceptors.client and what == METHOD:
            return self._call_intercepted(peer, method, handle, args, kwargs, timeout, unattended)
        callee = self._callee_on(handle, what, method)
        connection = peer.connection
        if not args and not kwargs and connection is not None:
            future: PendingCall | UnsentCall = connection.call(method, callee, b"", _NO_BUFFERS, timeout)
        else:
            future = self._call(peer, method, callee, args, kwargs, timeout)
        _keep_until_answered(future, handle)
        if scope is not None:
            scope.add_call(future)
        if unattended:
            future.connection.drive_in_background_later()
        return future

    def call_on_many(
        self,
        handles: Sequence[Handle],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> list[Future[Any]]:
        """Calls a method of the values of several references, and returns the futures of the results.

        Does not wait for the replies. The arguments are pickled once, and copied into shared memory once for all owners
        on this host.

        Args:
            handles: A handle of each reference; at least one.
            method: The name of the method.
            args: Its positional arguments; empty for none.
            kwargs: Its keyword arguments; None for none.
            timeout: How many seconds each call may take; 0 for no timeout, `UNSET_RPC_TIMEOUT` for the default one.

        Returns:
            A future for each handle, in the same order. If the call could not be sent, the future has failed with the
            error, such as `OwnerLostError`.

        Raises:
            SerializationError: An argument cannot be pickled.
            UsageError: `timeout` is not valid.
            RpcError: This worker was shut down or expelled.
        """
        if self._peers.closed is not None:
            raise self._peers.closed
        timeout = self.resolve_timeout(timeout)
        payload, buffers, passed_on = self._pack_arguments("", method, METHOD, args, kwargs)
        scope = self._find_scope()
        futures: list[Future[Any]] = []
        with Broadcast(buffers) as broadcast:
            for handle in handles:
                try:
                    if self._interceptors.client:  # they may change the arguments for each owner
                        futures.append(self.call_on(handle, METHOD, method, args, kwargs, timeout, unattended=True))
                        continue
                    handle.check()
                    packed = payload, broadcast.for_link() if len(handles) > 1 else buffers, passed_on
                    callee = self._callee_on(handle, METHOD, method)
                    future = self._send_call(self._owner_of(handle), method, callee, packed, timeout)
                    _keep_until_answered(future, handle)
                    if scope is not None:
                        scope.add_call(future)
                    future.connection.drive_in_background_later()
                    futures.append(future)
                except RpcError as error:
                    futures.append(failed_future(error))
        return futures

    def fetch(self, handle: Handle, timeout: float) -> Any:
        """Waits for the value of a reference that another worker owns, and returns a new copy.

        Args:
            handle: A handle of the reference.
            timeout: How many seconds to wait; 0 for no limit, `UNSET_RPC_TIMEOUT` for the default timeout.

        Raises:
            RpcTimeoutError: The value did not arrive in time.
            OwnerLostError: The owner was lost.
            RpcError: The reference cannot be used any more, the owner cannot be reached (`WorkerLostError`), or this
                worker was shut down or expelled.
            UsageError: `timeout` is not valid.
            Exception: The error of the function that should have made the value.
        """
        creation = handle.creation
        if creation is not None:
            handle.check()
            if self._peers.closed is not None:
                raise self._peers.closed
            seconds = self.resolve_timeout(timeout)
            deadline = monotonic() + seconds if seconds else FOREVER
            if not creation.block(deadline):
                raise timeout_error(creation.connection.peer.name, "to_here", seconds, None)
            handle.check()  # its owner may have been lost meanwhile
            outcome = _outcome_of(creation)
            if outcome is not KEPT:
                return outcome
            if seconds:
                timeout = max(deadline - monotonic(), 1e-3)
        return wait_or_cancel(self.call_on(handle, VALUE, "to_here", (), None, timeout))

    def _callee_on(self, handle: Handle, what: bytes, method: str) -> bytes:
        """Returns the callee field of a request to the owner of a reference: `what`, the handle and the method.

        `what` is METHOD to call the method named `method`, VALUE to get the value, TYPE to get its type, or PRESENCE to
        get an answer as soon as the value exists. `what` is not checked. `method` is used only for METHOD.
        """
        if handle.packed is None:
            handle.packed = pack_handle(handle.reference, handle.fork or ForkId(self._store.me, 0))
        return what + handle.packed + method.encode() if what == METHOD else what + handle.packed

    def _owner_of(self, handle: Handle) -> Peer:
        """Returns the owner of the reference of `handle`.

        For some time after the owner has left or was lost, it is returned all the same. After that, raises
        `OwnerLostError`.
        """
        peer = self._peers.by_number.get(handle.reference.owner)
        if peer is None:  # lost long ago, and not remembered any more
            raise OwnerLostError(f"the owner of {handle.reference} is gone, and the value with it")
        return peer

    # Remote calls

    def remote(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Handle:
        """Makes a worker run a function and keep the result. Returns a handle of the result without waiting for it.

        If there is no connection, opens one and waits until it is open. On the thread of an event loop, does not wait:
        another thread connects and sends the call. An error of the function is raised when the handle is used.

        Args:
            to: The worker: its name, rank or `WorkerInfo`. This worker is allowed.
            function: The function.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: The function is cancelled if there is no result within so many seconds. With 0 or
                `UNSET_RPC_TIMEOUT` the function has no limit, but connecting may take no longer than the default
                timeout. If the calling code has a deadline, the function is cancelled at that deadline at the latest.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: Another argument is not valid, or the call is too large for the other worker.
            SerializationError: An argument cannot be pickled.
            RpcTimeoutError: `timeout`, or the default timeout, expired before there was a connection.
            WorkerLostError: The worker has left, was lost, or cannot be reached.
            RpcError: This worker was shut down or expelled.
        """
        try:
            peer = self._peers.by_key.get(to)  # type: ignore[arg-type]
        except TypeError:  # not even hashable
            peer = None
        if peer is None or self._peers.closed is not None:
            peer = self._find(to)
        if args is not None and not isinstance(args, tuple | list):
            raise bad_arguments(args)
        callee = encode_function(function)
        if callee is None:
            callee, function = b"", checked_function(function)
        return self._remote(peer, function, callee, args, kwargs, None, timeout)

    def remote_on(
        self,
        handle: Handle,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Handle:
        """Makes the owner of a reference call a method of the value and keep the result.

        Returns a handle of the result. Does not wait for the result. An error of the method is raised when the returned
        handle is used.

        Args:
            handle: A handle of the reference.
            method: The name of the method.
            args: Its positional arguments; empty for none.
            kwargs: Its keyword arguments; None for none.
            timeout: The method is cancelled if there is no result within so many seconds. With 0 or `UNSET_RPC_TIMEOUT`
                the method has no limit, but connecting may take no longer than the default timeout. If the calling code
                has a deadline, the method is cancelled at that deadline at the latest.

        Raises:
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not know this worker's fork of the reference, because the worker that
                passed the reference on died too early.
            SerializationError: An argument cannot be pickled.
            UsageError: The handle was given up, the timeout is not valid, or this worker was shut down.
            RpcTimeoutError: `timeout`, or the default timeout, expired before there was a connection.
            WorkerLostError: The owner cannot be reached now.
            ExpelledError: The group has expelled this worker.
        """
        handle.check()
        if self._peers.closed is not None:
            raise self._peers.closed
        callee = self._callee_on(handle, METHOD, method)
        return self._remote(self._owner_of(handle), method, callee, args, kwargs, handle, timeout)

    def _remote(
        self,
        peer: Peer,
        function: Callee,
        callee: bytes,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        keeps: Handle | None,
        timeout: float,
    ) -> Handle:
        """Runs the client interceptors, if any, around a call of `remote`. Returns a handle of the result.

        Args:
            peer: The worker that runs the function; may be this one.
            function: The function, or the name of the method.
            callee: The function or method, as encoded in a frame; empty if it must be pickled.
            args: The positional arguments; None or empty for none.
            kwargs: The keyword arguments; None or empty for none.
            keeps: For a method, the handle of the value that has the method; None for a function. The handle stays
                alive until the call has arrived.
            timeout: Within how many seconds the function must have its result. 0 and `UNSET_RPC_TIMEOUT` set no limit.
                If the calling code has an earlier deadline, that holds instead.

        Raises:
            UsageError: The timeout is not valid, or the call is too large.
            RpcError: The call cannot be sent: an argument cannot be pickled (`SerializationError`), the worker cannot
                be reached (`WorkerLostError`), or the time is over (`RpcTimeoutError`).
        """
        scope, seconds = self._find_scope(), self._limit(timeout, 0.0)
        interceptors = self._interceptors.client
        if not interceptors:
            sent = _RemoteCall(function, args or (), kwargs, {}, seconds)
            return self._send_remote(peer, callee, sent, keeps, scope)
        call = ClientCall(
            peer.info, function, callable_name(function), tuple(args or ()), dict(kwargs or {}), seconds, True
        )

        def send(call: ClientCall) -> Handle:
            sent = _RemoteCall(call.function, call.args, call.kwargs, call.annotations, call.timeout)
            return self._send_remote(peer, self._callee_of(call, keeps), sent, keeps, scope)

        return run_client_interceptors(interceptors, call, send)  # type: ignore[no-any-return]

    def _send_remote(
        self, peer: Peer, callee: bytes, call: _RemoteCall, keeps: Handle | None, scope: Scope | None
    ) -> Handle:
        """Sends a call of `remote` to a worker, and returns a handle of the result. Connects first if necessary.

        If `peer` is this worker, queues the call here and sends nothing.

        Args:
            peer: The worker that runs the function.
            callee: The function or method, as encoded in a frame; empty if it must be pickled.
            call: The function, its arguments, annotations and time limit.
            keeps: For a method, the handle of the value that has the method; None for a function. The handle stays
                alive until the call has arrived.
            scope: The scope to which the call belongs, and with which it is cancelled; None for none.

        Raises:
            UsageError: The call is too large for the other worker.
            SerializationError: An argument cannot be pickled.
            RpcTimeoutError: The time was over before the connection was open.
            WorkerLostError: The worker cannot be reached.
            RpcError: This worker was shut down or expelled, or a handle in the arguments cannot be used any more.
        """
        function, args, kwargs, annotations, seconds = call
        deadline = monotonic() + seconds if seconds else FOREVER
        payload, buffers, handles = self._pack_arguments(peer.info.name, function, callee, args, kwargs)
        store = self._store
        if peer.number == store.me:
            invocation = self._remote_here(callee, payload, buffers, handles, deadline)
            return self._run_here(invocation, callee, handles, annotations, keeps, scope)
        left = seconds or self.rpc_timeout
        connection = peer.connection
        if connection is None and must_not_sleep():
            packed = function, callee, payload, buffers, handles, None
            return self._remote_later(peer, packed, pack_annotations(annotations), keeps, deadline, scope)
        connection = connection or self._connect(peer, function, left)
        self._check_size(connection, function, callee, len(handles) + 1, payload, buffers)
        packed_annotations = pack_annotations(annotations)
        send_until = monotonic() + left if left else FOREVER
        unacked = UnackedKeep(connection, keeps, deadline)
        future = connection.new_kept_call(function)
        try:
            handle, future.number = store.create_remote(
                peer.number, handles, unacked, future.call_id, callee, payload, packed_annotations
            )
            handle.creation = future
            if buffers:
                unacked.buffers = connection.send_kept(unacked.frame, buffers, send_until)
            else:
                unacked.buffers = ()
                connection.send_call(future, unacked.frame, [])
        except BaseException as error:
            if not unacked.frame:  # nothing was created
                connection.pending.pop(future.call_id, None)
                raise
            unacked.buffers = unacked.buffers or [memoryview(bytes(buffer)) for buffer in buffers]
            connection.lose(f"sending to it was interrupted by {type(error).__name__}", advice="")
            raise
        if connection.is_lost():
            connection.fail(future, peer.lost_error())  # the thread that ended the connection may have missed this call
            store.resend(peer.number)
        connection.drive_in_background_later()
        handle.made = place_of_caller(store.record_stacks, 3)
        if scope is not None:
            scope.add(KeptCreation(store, future, handle.reference, unacked.fork))
        return handle

    def _remote_later(
        self,
        peer: Peer,
        packed: _PackedCall,
        annotations: bytes,
        keeps: Handle | None,
        deadline: float,
        scope: Scope | None,
    ) -> Handle:
        """Returns a handle of the result of a remote call that is sent as soon as there is a connection. Never waits.

        If connecting fails, the call is sent on a later connection.

        Args:
            peer: The worker that runs the function.
            packed: The call with its pickled arguments. Its buffers are copied.
            annotations: The packed annotations; empty for none.
            keeps: For a method, the handle of the value that has the method; None for a function. The handle stays
                alive until the call has arrived.
            deadline: When the result must be there, as a time of the monotonic clock; `FOREVER` for no limit.
            scope: The scope with which the call is cancelled; None for none.

        Raises:
            WorkerLostError: The worker has left or was lost.
            UsageError: The call is larger than this worker itself would accept. If only the other end does not accept
                it, the handle raises an error when it is used.
            SerializationError: The call has too many references for one frame.
            RpcError: A handle in the arguments cannot be used any more.
        """
        if peer.is_lost:
            raise peer.lost_error()
        function, callee, payload, buffers, handles, _ = packed
        store, number = self._store, peer.number
        # What the other end accepts is not known yet. Nearly always that is what this worker accepts itself.
        excess = excess_of(self._parts.limits, len(callee), len(handles) + 1, payload, buffers)
        if excess is not None:
            raise too_large(function, peer.info.name, excess)
        check_number(len(handles) + 1)

        def fit(connection: ClientConnection) -> None:
            if excess_of(connection.peer_limits, len(callee), len(handles) + 1, payload, buffers) is not None:
                # The owner counts the reference all the same, and fails to read the arguments.
                unacked.frame = unacked.frame[: -len(payload)] + _NO_PICKLE if payload else unacked.frame
                unacked.buffers = ()

        kept = [memoryview(bytes(buffer)) for buffer in buffers]
        unsent = UnsentKeep(fit, lambda: store.resend(number))
        unacked = unsent.unacked = UnackedKeep(unsent, keeps, deadline)
        try:
            handle, _ = store.create_remote(number, handles, unacked, 0, callee, payload, annotations)
        finally:
            if unacked.frame:
                unacked.buffers = kept
                self._send_when_connected(peer, unsent)
        handle.made = place_of_caller(store.record_stacks, 4)
        if scope is not None:
            scope.add(KeptCreation(store, None, handle.reference, unacked.fork))
        return handle

    def _remote_here(
        self, callee: bytes, payload: bytes, buffers: list[memoryview], handles: list[Handle], deadline: float
    ) -> Invocation:
        """Returns the job that runs a call that this worker makes to itself with `remote`. The job does not run yet.

        `callee` is the function or method as encoded in a frame. `payload`, `buffers` and `handles` are the pickled
        arguments, their buffers and references; each may be empty. The buffers are copied. `deadline` is a time of the
        monotonic clock, or `FOREVER`. Raises `RpcError` if a handle cannot be used any more.
        """
        check_usable(handles, self._store)
        copies = [memoryview(bytearray(buffer)) for buffer in buffers]  # the program may change its buffers
        return Invocation(self._parts, None, 0, callee, payload, copies, deadline)

    def _run_here(
        self,
        invocation: Invocation,
        callee: bytes,
        handles: list[Handle],
        annotations: Mapping[str, bytes],
        keeps: Handle | None,
        scope: Scope | None,
    ) -> Handle:
        """Queues a call that this worker makes to itself with `remote`. Returns a handle of the later result at once.

        Args:
            invocation: The job that runs the call.
            callee: The function or method, as encoded in a frame.
            handles: The handles of references in the arguments; may be empty.
            annotations: Named values for interceptors; may be empty.
            keeps: For a method, the handle of the value that has the method; None for a function. The handle stays
                alive until the method has run.
            scope: The scope with which the call is cancelled; None for none.
        """
        value = Value()
        handle = self._store.own_later(value)
        invocation.attach(handles, dict(annotations), value, handle.reference, keeps)
        self._submit_own_call(callee, invocation)
        if scope is not None:
            scope.add(invocation)
        return handle

    # Shared by all kinds of calls

    def _check_size(
        self,
        connection: ClientConnection,
        function: Callee,
        callee: bytes,
        handles: int,
        payload: bytes,
        buffers: Sequence[memoryview],
    ) -> None:
        """Raises an error if a call is too large for the other end; otherwise does nothing.

        Args:
            connection: The connection on which the call is to be sent. It knows the limits of the other end.
            function: The function or the name of the method, for messages.
            callee: The function or method, as encoded in a frame; may be empty.
            handles: The number of references in the call.
            payload: The pickled arguments; may be empty.
            buffers: The buffers of the arguments; may be empty.

        Raises:
            UsageError: The call is larger than the other end accepts, or the name of the function is too long.
            SerializationError: The call has too many references for one frame.
        """
        is_small = len(payload) <= SMALL_PAYLOAD_BYTES and len(callee) <= _SMALL_CALLEE_BYTES
        if is_small and not buffers and handles <= FEW_HANDLES:
            return
        if handles > FEW_HANDLES:
            check_number(handles)
        if len(callee) > MAX_CALLEE_BYTES:
            size, limit = f"{len(callee):,}", f"{MAX_CALLEE_BYTES:,}"
            raise UsageError(f"the name of a function has {size} bytes; at most {limit} are allowed")
        excess = excess_of(connection.peer_limits, len(callee), handles, payload, buffers)
        if excess is not None:
            raise too_large(function, connection.peer.name, excess)

    def resolve_timeout(self, timeout: float) -> float:
        """Returns how many seconds a call may take: `timeout`, but no more than is left to the calling code.

        Returns 0 for no limit.

        Args:
            timeout: The timeout that the program has given; 0 for no limit; `UNSET_RPC_TIMEOUT` if it gave none. Then
                the time that is left to the calling code is returned. If the calling code has no deadline, the default
                timeout is returned, or 0 in a block of `deadline(None)`.

        Raises:
            UsageError: `timeout` is not a valid timeout, such as a negative number.
            CancelledError: The function that makes the call is itself cancelled, or its time is over.
            RpcTimeoutError: The time of a `deadline` block around the call is over.
        """
        return self._limit(timeout, self.rpc_timeout)

    def _limit(self, timeout: float, default: float) -> float:
        """Returns how many seconds a call may take: the timeout, but no more than is left to the running code.

        Args:
            timeout: The timeout of the call; 0 for no limit, `UNSET_RPC_TIMEOUT` if the program gave none.
            default: Returned if `timeout` is `UNSET_RPC_TIMEOUT` and the running code has no deadline; 0 for no limit.
                In a block of `deadline(None)`, 0 is returned instead.

        Returns:
            Seconds; 0 for no limit.

        Raises:
            UsageError: `timeout` is negative or not a number.
            CancelledError: The function that makes the call is itself cancelled, or its time is over.
            RpcTimeoutError: The time of a `deadline` block around the call is over.
        """
        if timeout != UNSET_RPC_TIMEOUT:
            check_timeout(timeout)
        scope = self._find_scope()
        if scope is not None:
            return scope.limit(timeout, default)
        return timeout if timeout != UNSET_RPC_TIMEOUT else default

    def _connect(self, peer: Peer, function: Callee, timeout: float) -> ClientConnection:
        """Opens the connection to a worker and returns it. Waits at most `timeout` seconds.

        If `timeout` is 0 or greater than `CONNECT_TIMEOUT_S`, waits at most `CONNECT_TIMEOUT_S` seconds. `function` is
        for messages. Raises `RpcTimeoutError` if `timeout` expired. Raises `WorkerLostError` if the worker cannot be
        reached, or not within `CONNECT_TIMEOUT_S`. Raises `NotInitializedError` or `ExpelledError` if this worker was
        shut down or expelled.
        """
        began = monotonic()
        try:
            return peer.connect(began + timeout if timeout else FOREVER)
        except WorkerLostError as error:
            if self._peers.closed is not None:  # this worker was shut down or expelled meanwhile
                raise self._peers.closed from None
            if error.is_gone:
                self._store.resend(peer.number)  # that finds that the worker is gone, and tells the group
            if timeout and monotonic() >= began + timeout:
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout: `{callable_name(function)}` was not sent within "
                    f"{timeout:g} s: {error}",
                    False,
                ) from None
            raise

    def _find(self, to: To) -> Peer:
        """Returns the worker that `to` names.

        For some time after a worker has left or was lost, it is returned all the same. Raises `UnknownWorkerError` if
        there is no such worker, `UsageError` if `to` has a wrong type, and `NotInitializedError` or `ExpelledError` if
        this worker was shut down or expelled.
        """
        if self._peers.closed is not None:
            raise self._peers.closed
        peer = self._peers.find(to)
        if peer is None:
            raise self.refusal(to)
        return peer

    def refusal(self, to: object) -> RpcError:
        """Returns the error of a call to `to`, a name, rank or `WorkerInfo` of which no worker was found.

        That is `UnknownWorkerError`. If this worker was shut down or expelled, it is `NotInitializedError` or
        `ExpelledError`. Otherwise raises `UsageError` if `to` has a wrong type.
        """
        if self._peers.closed is not None:
            return self._peers.closed
        known = ", ".join(f"{info.name!r} (rank {info.id})" for info in self._peers.present())
        return UnknownWorkerError(
            f"could not find destination: there is no worker {worker_key(to)!r} in this group; there are {known}"
        )


def too_large(function: Callee, worker: str, excess: str) -> UsageError:
    """Returns the error of a call of `function` that is larger than the worker named `worker` accepts.

    `excess` is text for the message that says what is too large, as `excess_of` returns it.
    """
    return UsageError(
        f"the call of `{callable_name(function)}` was not sent to worker {worker!r}: it has {excess}. Send it in "
        "several calls, or start that worker with a larger limit"
    )


_NO_PICKLE: Final = b"\0"
"""A payload that no unpickler accepts."""
_NO_BUFFERS: list[memoryview] = []
"""For calls without arguments. Shared, because links do not change an empty list."""


def _keep_until_answered(future: PendingCall | UnsentCall, handle: Handle) -> None:
    """Keeps `handle` alive until `future`, a call on the value of the handle, is complete.

    Does nothing if the future is complete already.
    """
    future.keeps = handle
    if future._state:  # settled already, perhaps before `keeps` was set
        future.keeps = None


def _outcome_of(creation: PendingCall) -> Any:
    """Returns the value in the reply to a call of `remote`. Raises the error of the function if it failed.

    `creation` is the future of the call, and must be complete. Returns the constant `KEPT` if the reply has no value,
    or if the connection was lost before the reply came. Then the value must be requested from the owner.
    """
    reply = creation._reply
    if reply is not None:
        # Unpickled each time, so that the program gets a new value, or an error with a new traceback.
        state, value = reply.load()
        if state == FAILED:
            try:
                raise value
            finally:
                del value
        return value
    if creation._state == DONE:
        return creation._value
    return KEPT  # its connection was lost

"""What a worker's program asks of others: calls, remote calls, and calls on references.

Rules
- What is wrong with a call itself is raised at once, before anything is sent.
- Numbers of messages are taken last, when nothing can fail any more (see `book.py`). Whatever is raised from there on,
  but for our own errors, is Ctrl-C or as bad.
- What the reference protocol has to say to a worker goes along with what is sent to it about references.
- What a remote call makes is told to the caller without being asked, if it was plain data and wanted the last time:
  one message less. It is used once, and what was not told, or is lost with its connection, is asked for as ever. So is
  what the handles stand for that a call brings, before its function runs: many such calls then wait for their values
  together, and no thread for each.
- A reference lives until the owner has answered what was asked of it, though the program drops it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from farcall.agent.book import ReferenceBook
from farcall.agent.calls import PendingCall, ToldCall
from farcall.agent.execution import Workplace
from farcall.agent.handle import Handle, check_usable, made_here
from farcall.agent.lanes import FEW_HANDLES, SMALL_BODY, SMALL_HEAD
from farcall.agent.outgoing import Outgoing
from farcall.agent.patience import Patience
from farcall.agent.peers import Peer
from farcall.agent.tending import ENOUGH, tend
from farcall.agent.values import Value
from farcall.backends.given import bad_arguments, bad_callee, check_timeout, checked_function
from farcall.errors import OwnerLost, RpcError, RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLost
from farcall.futures import DONE, FAILED
from farcall.options import UNSET_RPC_TIMEOUT
from farcall.protocol.control import pack_handle, pack_section
from farcall.protocol.ids import ForkId, Worker, WorkerInfo
from farcall.protocol.wire import CALL, CALL_CARRYING, CONTROL, METHOD, PLAIN, UNTOLD, VALUE, as_shared, encode
from farcall.serialization import (
    ATOMS,
    callable_name,
    collecting,
    dumps_arguments,
    dumps_plain_arguments,
    encode_function,
    loads_atom,
)
from farcall.sleeping import FOREVER
from farcall.transports.segments import Place

To = str | int | WorkerInfo
Asks = list[tuple[ToldCall, bytes]]
"""What is asked for before it is used, and the requests that are still to be sent."""
Callee = Callable[..., Any] | str
"""A function; or the name of a method, for messages."""
_MOST_PLAIN: Final = 1024
_BROUGHT: Final = b"\0"


class Calling:
    """The calls of one agent."""

    def __init__(self, info: WorkerInfo, book: ReferenceBook, place: Workplace, rpc_timeout: float) -> None:
        self.info = info
        self.peers: dict[To, Peer] = {}
        """All workers, by name, rank and `WorkerInfo`; and those who have gone of late."""
        self.numbered: dict[Worker, Peer] = {}
        """The same by their numbers, by which references know them."""
        self.rpc_timeout = rpc_timeout
        """Seconds; 0 is without end."""
        self.closed: RpcError | None = None
        """Set at the end: what every call raises from then on."""
        self._book = book
        self._place = place
        self._plain: dict[bytes, None] = {}
        """Functions of remote calls of which the value is worth being told without being asked: it was plain, and
        wanted here, the last time."""
        self._patience = Patience()

    # Calls

    def call(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> PendingCall:
        """Sends a call; its future. See `api.rpc_async` for what it raises.

        `unattended`: nobody is going to wait for it at once, so somebody else must see to its reply.
        """
        try:
            peer = self.peers.get(to)
        except TypeError:  # not even hashable
            peer = None
        if peer is None or self.closed is not None:
            raise self.refusal(to)
        if timeout == UNSET_RPC_TIMEOUT:
            timeout = self.rpc_timeout
        else:
            check_timeout(timeout)
        try:
            bare = not args and not kwargs
        except Exception:  # an array has no truth
            raise bad_arguments(args) from None
        head = encode_function(function)
        if head is None:
            head = b""
            future = self._call_with_arguments(peer, checked_function(function), head, args, kwargs, timeout)
        elif not bare:
            future = self._call_with_arguments(peer, function, head, args, kwargs, timeout)
        else:
            if args is not None and not isinstance(args, (tuple, list)):
                raise bad_arguments(args)
            connection = peer.connection
            if connection is not None:
                future = connection.call(function, head, b"", (), timeout)
            else:
                connection, spent = self._connect(peer, function, timeout)
                future = connection.call(function, head, b"", (), timeout, spent)
        if unattended:
            future.connection.unattended()
        return future

    def call_on(
        self,
        handle: Handle,
        what: bytes,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> PendingCall:
        """Calls a method of what a reference stands for, or asks for its value, presence or type (`wire.py`)."""
        if handle.new_error is not None:
            raise handle.new_error()
        if self.closed is not None:
            raise self.closed
        timeout = self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else self.resolve_timeout(timeout)
        peer = self.numbered.get(handle.reference.owner) or self._owner(handle)
        packed = handle.packed
        if packed is None:
            head = self._head_on(handle, what, method if what == METHOD else "")
        else:
            head = what + packed + method.encode() if what == METHOD else what + packed
        if args or kwargs:
            future = self._call_with_arguments(peer, method, head, args, kwargs, timeout)
        else:
            connection, spent = peer.connection, 0.0
            if connection is None:
                connection, spent = self._connect(peer, method, timeout)
            boxes = self._book.mailboxes
            mail: bytes | None = b""  # perhaps taken already
            try:
                mail = boxes.mail(peer.number) if boxes.outboxes else None
                future = connection.call(method, head, b"", (), timeout, spent, CALL, mail)
            except BaseException as error:
                if mail is not None:
                    connection.interrupted(error)
                raise
            if mail is not None and connection.is_lost():
                self._book.resend(peer.number)
        future.keeps = handle
        if future._state:  # answered already, and perhaps before that was set
            future.keeps = None
        if unattended:
            future.connection.unattended()
        return future

    def fetch(self, handle: Handle, timeout: float) -> Any:
        """The value of a reference that another worker owns: a copy. Raises as `call_on`, and what made it fail."""
        told = handle.told
        if told is not None:
            handle.told = None
            if handle.new_error is not None:
                raise handle.new_error()
            if self.closed is not None:
                raise self.closed
            seconds = self.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else self.resolve_timeout(timeout)
            if not told._state:
                deadline = monotonic() + seconds if seconds else FOREVER
                if handle.callee[:1] == _BROUGHT:
                    self._place.serving.doze(self._patience, told.read)
                if not told._state:
                    told.connection.drive(told, deadline)
                if not told._state and not told.block(deadline):
                    handle.told, told.timeout = told, seconds
                    raise told.too_late()
            body = told.body
            if body is not None and body != UNTOLD:
                try:
                    return loads_atom(body)
                except Exception:  # what is wrong with it is said by `outcome`
                    body = None
            state, value = told.outcome()
            if state == DONE:
                return value
            if state == FAILED:
                try:
                    raise value
                finally:
                    del value, told  # see `Future.value`
            self._plain.pop(handle.callee, None)
        value = self.call_on(handle, VALUE, "to_here", (), None, timeout).wait()
        if handle.callee and (value is None or type(value) in ATOMS):
            if len(self._plain) >= _MOST_PLAIN:
                self._plain.clear()
            self._plain[handle.callee] = None
        return value

    def ask_ahead(self, callee: bytes, handles: Sequence[Handle], asks: Asks) -> None:
        """A call of that function came with these handles: what they stand for is asked for at once, if it was wanted.

        Adds to `asks` what is to be sent. For the thread that reads what comes; does not fail.
        """
        brought = _BROUGHT + callee  # not what a remote call of the function makes
        wanted = brought in self._plain and len(handles) <= FEW_HANDLES and self.closed is None
        for handle in handles:
            handle.callee = brought
            fork = handle.fork
            if not wanted or fork is None or handle.new_error is not None:
                continue
            peer = self.numbered.get(handle.reference[0])
            if peer is not None and (connection := peer.connection) is not None:
                call_id = next(connection.told_ids)
                told = connection.pending[call_id] = ToldCall(connection, call_id)
                packed = handle.packed = handle.packed or pack_handle(handle.reference, fork)
                handle.told = told
                asks.append((told, encode(CALL, call_id, PLAIN + packed, b"")))

    def send_asks(self, asks: Asks) -> None:
        """Sends what `ask_ahead` has left, all that goes to one worker at once, and forgets it."""
        for connection in {told.connection: None for told, _ in asks}:
            messages = [message for told, message in asks if told.connection is connection]
            connection.send_control(b"".join(messages), is_told=True)
        for told, _ in asks:
            if told.connection.is_lost():  # and perhaps does not know of it
                told.connection.take_and_fail(told, RpcError("what was asked ahead was lost with its connection"))
        asks.clear()

    def told_in_vain(self, handle: Handle) -> None:
        """A reference goes, and nobody wanted to know its value. For finalizers: takes no lock."""
        self._plain.pop(handle.callee, None)

    def _call_with_arguments(
        self,
        peer: Peer,
        function: Callee,
        head: bytes,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> PendingCall:
        if args is not None and not isinstance(args, (tuple, list)):
            raise bad_arguments(args)
        handles: Mapping[Handle, int] = {}
        plain = dumps_plain_arguments(args) if head and args and not kwargs else None
        if plain is not None:
            body, buffers = plain
        else:
            with collecting() as handles:
                body, buffers = dumps_arguments(function, args or (), kwargs, peer.info.name, not head)
        connection, spent = peer.connection, 0.0
        if connection is None:
            connection, spent = self._connect(peer, function, timeout)
        if buffers or len(body) > SMALL_BODY or len(handles) > FEW_HANDLES or len(head) > SMALL_HEAD:
            self._check_size(connection, function, head, len(handles), body, buffers)
        if not handles:
            return connection.call(function, head, body, buffers, timeout, spent)
        try:
            book = self._book
            number, carried = book.pass_on(list(handles), peer.number, connection)
            mail = book.mailboxes.mail(peer.number) if book.mailboxes.outboxes else None
            full_head = pack_section(number, carried) + head
            future = connection.call(function, full_head, body, buffers, timeout, spent, CALL_CARRYING, mail)
        except RpcError:
            raise
        except BaseException as error:
            connection.interrupted(error)
            raise
        if connection.is_lost():
            self._book.resend(peer.number)
        return future

    # Remote calls

    def remote(
        self, to: To, function: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> Handle:
        """Has `to` run the function and keep the result; a handle of it, at once. Raises as `call`."""
        try:
            peer = self.peers.get(to)
        except TypeError:  # not even hashable
            peer = None
        if peer is None or self.closed is not None:
            raise self.refusal(to)
        if args is not None and not isinstance(args, (tuple, list)):
            raise bad_arguments(args)
        head = encode_function(function)
        connection = peer.connection
        if not head or args or kwargs or connection is None or len(head) > SMALL_HEAD or peer.number == self._book.me:
            return self._remote(peer, function if head else checked_function(function), head or b"", args, kwargs)
        return self._send_remote(peer.number, connection, head, b"", (), (), None, None)

    def remote_on(self, handle: Handle, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Handle:
        """As `remote`, for a method of what a reference stands for; the result stays with its owner."""
        handle.check()
        if self.closed is not None:
            raise self.closed
        head = self._head_on(handle, METHOD, method)
        return self._remote(self._owner(handle), method, head, args, kwargs, handle)

    def _remote(
        self,
        peer: Peer,
        function: Callee,
        head: bytes,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        keeps: Handle | None = None,
    ) -> Handle:
        body = b""
        handles: Sequence[Handle] = ()
        buffers: Sequence[memoryview] = ()
        if args or kwargs or not head:
            with collecting() as collected:
                body, buffers = dumps_arguments(function, args or (), kwargs, peer.info.name, by_value=not head)
            handles = list(collected)
        if peer.number == self._book.me:
            check_usable(handles, self._book)
            copies = [memoryview(bytearray(buffer)) for buffer in buffers]  # the caller may change its own
            value = Value()
            handle = self._book.make(value)
            job = self._place.own_remote_job(self._place, value, head, body, copies, handles, keeps)
            self._place.serving.submit(job)
            return handle
        connection = peer.connection
        if connection is None:
            connection, _ = self._connect(peer, function, self.rpc_timeout)
        if buffers or len(body) > SMALL_BODY or len(handles) > FEW_HANDLES or len(head) > SMALL_HEAD:
            self._check_size(connection, function, head, len(handles) + 1, body, buffers)
        lent, kept = None, buffers
        if buffers:
            # What is sent is kept until it has arrived: it may be sent again, and the caller may change its own.
            lent = connection.lane.keep(buffers)
            kept = lent[1] if lent is not None else [memoryview(bytes(buffer)) for buffer in buffers]
        return self._send_remote(peer.number, connection, head, body, handles, kept, lent, keeps)

    def _send_remote(
        self,
        owner: Worker,
        connection: Outgoing,
        head: bytes,
        body: bytes,
        handles: Sequence[Handle],
        kept: Sequence[memoryview],
        lent: tuple[Place, Sequence[memoryview]] | None,
        keeps: Handle | None,
    ) -> Handle:
        """The last part of a remote call, when it is known what is sent. `lent` are the buffers in shared memory."""
        told, book = None, self._book
        try:
            if keeps is None and head in self._plain:
                call_id = next(connection.told_ids)
                told = connection.pending[call_id] = ToldCall(connection, call_id)
            try:
                handle, message = book.call_remote(owner, handles, head, body, kept, connection, keeps, told)
            except RpcError:
                if lent is not None:
                    connection.lane.take_back(lent[0])
                raise
            if lent is not None:
                message, kept = as_shared(message, *lent[0]), ()
            connection.send_control(message, kept, self.rpc_timeout or FOREVER, told is not None)
        except RpcError:
            if told is not None:
                connection.pending.pop(told.call_id, None)
            raise
        except BaseException as error:
            connection.interrupted(error)
            raise
        if told is not None:
            handle.told = told
            if connection.is_lost():  # and perhaps does not know of it
                handle.told = None
                connection.pending.pop(told.call_id, None)
        if keeps is None:
            handle.callee = head
        handle.made = made_here(book.record_stacks, 3)
        if len(book.dropped) >= ENOUGH:
            self._tend(owner, connection)
        return handle

    def _tend(self, owner: Worker, connection: Outgoing) -> None:
        """While the owner is busy with a remote call: does what is to be done for those before it, and tells it so."""
        boxes = self._book.mailboxes
        try:
            tend(self._book)
            if owner in boxes.outboxes and (mail := boxes.mail(owner)) is not None:
                connection.send_control(encode(CONTROL, 0, b"", mail))
        except BaseException as error:
            connection.interrupted(error)
            raise
        if connection.is_lost():
            self._book.resend(owner)

    # What they share

    def _check_size(
        self,
        connection: Outgoing,
        function: Callee,
        head: bytes,
        handles: int,
        body: bytes,
        buffers: Sequence[memoryview],
    ) -> None:
        excess = connection.lane.excess(len(head), handles, body, buffers)
        if excess is not None:
            raise UsageError(
                f"the call of `{callable_name(function)}` was not sent to worker {connection.peer.name!r}: it has "
                f"{excess}. Send it in several calls, or start that worker with a larger limit"
            )

    def resolve_timeout(self, timeout: float) -> float:
        """The seconds that are meant by a `timeout` parameter; 0 is without end. Raises `UsageError`."""
        if timeout == UNSET_RPC_TIMEOUT:
            return self.rpc_timeout
        check_timeout(timeout)
        return timeout

    def _owner(self, handle: Handle) -> Peer:
        peer = self.numbered.get(handle.reference.owner)
        if peer is None:  # gone for long, and forgotten
            raise OwnerLost(f"the owner of {handle.reference} is gone, and the value with it")
        return peer

    def _head_on(self, handle: Handle, what: bytes, method: str) -> bytes:
        if handle.packed is None:
            handle.packed = pack_handle(handle.reference, handle.fork or ForkId(self._book.me, 0))
        return what + handle.packed + method.encode()

    def _connect(self, peer: Peer, function: Callee, timeout: float) -> tuple[Outgoing, float]:
        """A new connection, and how much of the call's time it has taken."""
        began = monotonic()
        try:
            connection = peer.connect(began + timeout if timeout else FOREVER)
        except WorkerLost as error:
            if self.closed is not None:  # meanwhile, or that worker's refusal has told this one that it was expelled
                raise self.closed from None
            if error.is_gone:
                self._book.resend(peer.number)  # the group will find that out, and tell all
            if timeout and monotonic() >= began + timeout:
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout: `{callable_name(function)}` was not sent within "
                    f"{timeout:g} s: {error}"
                ) from None
            raise
        return connection, monotonic() - began

    def refusal(self, to: object) -> RpcError:
        """Why nothing can be asked of `to`."""
        if self.closed is not None:
            return self.closed
        if not isinstance(to, (str, int, WorkerInfo)):
            return bad_callee(to)
        known = ", ".join(f"{info.name!r} (rank {info.id})" for info in self.worker_infos())
        return UnknownWorkerError(
            f"could not find destination: there is no worker {to!r} in this group; there are {known}"
        )

    def worker_infos(self) -> list[WorkerInfo]:
        """All workers that are there, by rank."""
        peers = list(self.numbered.values())  # at one stroke: others may come meanwhile
        return sorted({peer.info for peer in peers if not peer.is_lost}, key=lambda info: info.id)

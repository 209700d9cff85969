"""A worker of a simulation: the reference store and the outbox senders of production, without threads and sockets.

Everything that a worker of production does by itself and at some time waits here until a step of the simulation calls
for it: timers that are due, connections to be made, functions to be run, frames that have got a number and are not sent
yet. A program holds the handles. What `client`, `server`, `caller` and `invocation` do with frames that concern
references is done here, in as few lines as possible, and with the same calls of the store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from farcall.errors import (
    CallCancelledError,
    OwnerLostError,
    ProtocolError,
    ReferenceRefusedError,
    WorkerLostError,
)
from farcall.protocol.delivery import Delivery
from farcall.protocol.frames import (
    CANCEL,
    CONTROL,
    FAILURE,
    HANDLE_SIZE,
    HAS_REFERENCES,
    HEADER_SIZE,
    KEEP,
    METHOD,
    REFERENCES,
    RESULT,
    VALUE,
    pack_call,
    pack_cancel,
    pack_cancelled,
    pack_full_reply,
    pack_handle,
    pack_request,
    unpack_handle,
    unpack_header,
    unpack_references,
)
from farcall.protocol.ids import RRefId, Worker
from farcall.protocol.refcount import ForkState, ReferenceCounts
from farcall.runtime.executor import Job
from farcall.runtime.handles import Handle, Value
from farcall.runtime.reference_outbox import OutboxSender, UnackedKeep, pack_control, unpack_control
from farcall.runtime.reference_store import UNREPORTED_INTERVALS, ReferenceStore
from farcall.runtime.refusals import Refusals
from simulation.forgeries import NEVER
from simulation.invariants import CONFIRMED, ORPHANED, PENDING, REFUSED, BrokenInvariant, HandleStatus
from simulation.reference_state import Event, SimulatedTokens, is_forged

_HOLD, _USE = b"hold", b"use"
"""Functions that are called with handles: one keeps them, the other lets go of them when it returns."""


class End:
    """One end of a link: what production has a `ClientConnection` or a `ServerConnection` for."""

    __slots__ = ("_transmit", "is_client", "is_open", "me", "number", "peer", "pending", "twin")

    twin: End
    """The other end."""

    def __init__(
        self, number: int, me: Worker, peer: Worker, is_client: bool, transmit: Callable[[End, bytes], None]
    ) -> None:
        """Creates an open end.

        Args:
            number: Of this end.
            me: The worker at this end.
            peer: The worker at the other end.
            is_client: Whether the worker at this end has made the link.
            transmit: Puts a frame of this end under way.
        """
        self.number = number
        self.me = me
        self.peer = peer
        self.is_client = is_client
        self.is_open = True
        self.pending: dict[int, tuple[int, Handle | None]] = {}
        """By call id: the number of a remote call, or 0; and the handle that a call is on."""
        self._transmit = transmit

    def send(self, frame: bytes, buffers: object = None) -> None:
        """See `ClientConnection` and `ServerConnection`."""
        self._transmit(self, frame)

    def expect_acknowledgement(self) -> None:
        """See `ClientConnection`: frames of the simulation are read without that."""

    def is_lost(self) -> bool:
        """See `Connection`."""
        return not self.is_open


class _Peer:
    """What an `OutboxSender` knows about its worker."""

    def __init__(self, number: Worker, open_link: Callable[[Worker], End]) -> None:
        self.number = number
        self.connection: End | None = None
        self.is_lost = False
        self.is_cut = False
        """A connection cannot be made."""
        self._open_link = open_link

    def connect(self, deadline: float = 0.0) -> End:
        if self.connection is None:
            self.connection = self._open_link(self.number)
        return self.connection

    def is_over(self) -> bool:
        return self.is_cut  # production gives up at once, and so without a pause


class _Executor:
    """Runs jobs at once, and leaves tasks that may wait to a step of the simulation."""

    is_closing = False

    def __init__(self, run_aside: Callable[[Callable[[], None]], None]) -> None:
        self.run_aside = run_aside

    def submit(self, job: Job) -> None:
        job.run()


class _Timers:
    """Functions that are called when a step of the simulation says that they are due."""

    def __init__(self, due: list[Callable[[], None]]) -> None:
        self._due = due

    def schedule(self, when: float, function: Callable[[], None]) -> None:
        self._due.append(function)


class _StrictRefusals(Refusals):
    """The refusals of production. What an honest worker has said is refused only if there is a bug."""

    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__(worker.me, str)
        self._worker = worker
        self.is_strict = True
        """What comes is not known to be forged."""

    def add(self, worker: Worker, why: object) -> None:
        if isinstance(why, ProtocolError) and self.is_strict and not self._worker.is_dishonest:
            raise why
        self._logged.add(worker)  # so that nothing is logged
        super().add(worker, why)


class _Store(ReferenceStore):
    """The store of production. Refusals are strict, and the checks see more."""

    def __init__(self, worker: SimulatedWorker, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.refusals: _StrictRefusals = _StrictRefusals(worker)
        self.is_read_by_main_thread = True
        """Whether messages about references wait for `process`, as they do if signal handlers may raise meanwhile."""

    def _may_be_interrupted(self) -> bool:
        return self.is_read_by_main_thread

    @property
    def delivery(self) -> Delivery[Any]:
        """Returns the numbered messages between this worker and the others."""
        return self._outboxes.delivery

    def forged_values(self) -> set[RRefId]:
        """Returns the references with a wrong token of which a value is kept."""
        return {reference for reference in self._values if is_forged(reference)}

    @contextmanager
    def without_forged_values(self) -> Iterator[None]:
        """A context without the values that were asked for with a wrong token before their creation."""
        values = self._values
        self._values = {reference: value for reference, value in values.items() if not is_forged(reference)}
        try:
            yield
        finally:
            self._values = values


class Thing:
    """A value whose end can be seen."""

    __slots__ = ("__weakref__",)


class Draft(NamedTuple):
    """A frame that has got its number and is not sent yet."""

    end: End
    frame: bytes
    unacked: UnackedKeep | None


class Invocation(NamedTuple):
    """A request that is to be run."""

    end: End | None
    call_id: int
    function: bytes
    handles: Sequence[Handle]
    subject: Value | None
    """The value that the request is on."""
    kept: tuple[RRefId, Value] | None
    """Where the result is kept."""

    def is_ready(self) -> bool:
        """Returns whether the value that it is on is there."""
        return self.subject is None or self.subject.done()


class Creation:
    """A remote call whose value is not there yet. See `reference_store.Creation`."""

    def __init__(self, worker: SimulatedWorker, number: int) -> None:
        self._worker = worker
        self._number = number

    def cancel(self) -> None:
        """See `reference_store.Creation`. Two cancellations may arrive in one frame."""
        if self._number in self._worker.invocations:
            self._worker.stop(self._number)


class SimulatedWorker:
    """One worker of a simulation. Its methods are what happens to it."""

    def __init__(self, me: Worker, open_link: Callable[[Worker, Worker], End]) -> None:
        """Creates a worker that knows no other worker.

        Args:
            me: Its number.
            open_link: Returns the client end of a new link between two workers. Raises `WorkerLostError`.
        """
        self.me = me
        self.alive = True
        self.is_dishonest = False
        """It has said things it had no right to, so it gets answers that it did not ask for."""
        self.has_refused = False
        """It had no value for a handle that another worker has used."""
        self.lost: set[Worker] = set()
        self.unknown: set[Worker] = set()
        """Workers that have joined, and that this one has not heard of."""
        self.due: list[Callable[[], None]] = []
        """Timers. Those of a store only."""
        self.to_connect: dict[Worker, Callable[[], None]] = {}
        """What connects to a worker and sends what there is to send."""
        self.peers: dict[Worker, _Peer] = {}
        self.senders: dict[Worker, OutboxSender] = {}
        self.servers: dict[Worker, End] = {}
        """The last link of each worker to this one."""
        self.handles: dict[int, Handle] = {}
        self.drafts: dict[int, Draft] = {}
        self.invocations: dict[int, Invocation] = {}
        self._things: dict[RRefId, weakref.ref[Thing]] = {}
        self._open_link = open_link
        self._numbers = 0
        self.counts = ReferenceCounts(me, SimulatedTokens(me))
        self.store = _Store(
            self, self.counts, _Executor(_refuse), _Timers(self.due), str, self._send_outbox, self.examine
        )

    @property
    def delivery(self) -> Delivery[Any]:
        """See `Observed`."""
        return self.store.delivery

    # Workers and links

    def add(self, worker: Worker) -> None:
        """A worker has joined the group."""
        self.unknown.discard(worker)
        self.store.add_worker(worker)
        self.peers[worker] = _Peer(worker, lambda to: self._open_link(self.me, to))
        peer: Any = self.peers[worker]
        executor: Any = _Executor(lambda task: self.to_connect.update({worker: task}))
        servers: dict[Worker, Any] = self.servers
        self.senders[worker] = OutboxSender(
            peer, self.store, executor, lambda: servers.get(worker), on_unreachable=lambda: None
        )

    def remove(self, worker: Worker, ends: Sequence[End]) -> None:
        """A worker is dead. These are the ends of the links with it that are open here."""
        self.lost.add(worker)
        self.peers[worker].is_lost = True
        del self.senders[worker]
        self.to_connect.pop(worker, None)
        for end in ends:
            self.close(end)
        self.store.remove_worker(worker)

    def knows(self, worker: Worker) -> bool:
        """Returns whether a worker is in the group, as far as this one knows."""
        return worker in self.senders

    def close(self, end: End) -> None:
        """An end of a link closes: this worker gives it up, or notices that the other end is closed."""
        end.is_open = False
        end.pending.clear()
        if end.is_client and self.peers[end.peer].connection is end:
            self.peers[end.peer].connection = None
        elif self.servers.get(end.peer) is end:
            del self.servers[end.peer]
        self.examine(end.peer)

    def examine(self, worker: Worker) -> None:
        """See `Cluster.examine`."""
        if worker in self.senders:
            self.senders[worker].connect_and_send()

    def _send_outbox(self, worker: Worker) -> None:
        if worker in self.senders:
            self.senders[worker].send()

    def connect(self, worker: Worker, is_cut: bool) -> None:
        """Connects to a worker and sends what there is to send, or fails to connect."""
        self.peers[worker].is_cut = is_cut
        self.to_connect.pop(worker)()
        self.peers[worker].is_cut = False

    def stuck(self) -> list[OutboxSender]:
        """Returns the senders that have failed to connect."""
        return [sender for sender in self.senders.values() if sender.is_stuck]

    def _client_end(self, to: Worker) -> End | None:
        try:
            return self.peers[to].connect()
        except WorkerLostError:
            return None

    # The program

    def can_use(self, number: int) -> bool:
        """Returns whether the program has a handle of that number, and there may be a value behind it."""
        return number in self.handles and self.handles[number].new_error is None

    def make(self) -> None:
        """The program makes a reference to a value of its own."""
        thing = Thing()
        handle = self.store.own(thing)
        self._things[handle.reference] = weakref.ref(thing)
        self._hold(handle)

    def call(self, owner: Worker, numbers: Sequence[int]) -> bool:
        """The program makes a remote call with some handles. Returns False if the owner cannot be reached."""
        handles = [self.handles[number] for number in numbers]
        if owner != self.me:
            return self._call_remote(owner, _HOLD, handles, None)
        value = Value()
        handle = self.store.own_later(value)
        self._hold(handle)
        self._invoke(Invocation(None, 0, _HOLD, handles, None, (handle.reference, value)))
        return True

    def call_on(self, number: int) -> bool:
        """The program makes a remote call of a method of the value behind a handle."""
        handle = self.handles[number]
        return self._call_remote(handle.reference.owner, METHOD + _packed(handle), (), handle)

    def _call_remote(self, owner: Worker, callee: bytes, handles: Sequence[Handle], keeps: Handle | None) -> bool:
        end = self._client_end(owner)
        if end is None:
            return False
        call_id = self._next_number()
        unacked = UnackedKeep(end, keeps)
        handle, number = self.store.create_remote(owner, handles, unacked, call_id, callee, b"", b"")
        end.pending[call_id] = number, None
        self._hold(handle)
        self.drafts[self._next_number()] = Draft(end, unacked.frame, unacked)
        return True

    def pass_on(self, to: Worker, numbers: Sequence[int], is_brief: bool) -> bool:
        """The program makes a call with some handles, which the callee keeps or only uses."""
        end = self._client_end(to)
        if end is None:
            return False
        references = self.store.pass_on([self.handles[number] for number in numbers], to, end)
        draft = call_id = self._next_number()
        end.pending[call_id] = 0, None
        frame = pack_request(call_id, _USE if is_brief else _HOLD, b"", 0, b"", references, b"")
        self.drafts[draft] = Draft(end, frame, None)
        return True

    def return_handles(self, end: End, numbers: Sequence[int]) -> None:
        """The program answers a call that came on a link, perhaps on one that has closed meanwhile."""
        references = self.store.pass_on([self.handles[number] for number in numbers], end.peer, end)
        self.drafts[self._next_number()] = Draft(end, pack_full_reply(RESULT, 0, b"", references, b""), None)

    def fetch(self, number: int) -> bool:
        """The program asks for the value behind a handle, and has the handle until the answer comes."""
        handle = self.handles[number]
        end = self._client_end(handle.reference.owner)
        if end is None:
            return False
        call_id = self._next_number()
        end.pending[call_id] = 0, handle
        end.send(pack_call(call_id, VALUE + _packed(handle), b"", 0.0))
        return True

    def cancel(self, number: int) -> None:
        """The program cancels the remote call by which it got a handle, perhaps not for the first time."""
        handle = self.handles[number]
        assert handle.fork is not None
        self.store.cancel_remote(handle.reference, handle.fork)

    def give_up(self, end: End, call_id: int) -> None:
        """The program cancels a call. See `ClientConnection.cancel`."""
        del end.pending[call_id]
        end.send(pack_cancel(call_id))

    def stop(self, number: int) -> None:
        """A request is cancelled before it has run. See `Invocation.cancel` and `ServerConnection`."""
        end, call_id, _, _, _, kept = self.invocations.pop(number)
        if kept is not None:
            reference, value = kept
            del self.store.creations[reference]
            value.refuse(CallCancelledError)
        if end is not None and call_id:
            end.send(pack_cancelled(call_id, False))

    def drop(self, number: int) -> None:
        """The program lets go of a handle."""
        del self.handles[number]

    def send(self, draft: int) -> None:
        """Sends a frame that has got its number. See `Caller` and `Invocation`."""
        end, frame, unacked = self.drafts.pop(draft)
        if unacked is not None:
            unacked.buffers = ()
        end.send(frame)
        if end.is_client and end.is_lost():
            self.store.resend(end.peer)

    def interrupt(self, draft: int) -> None:
        """Ctrl-C comes before a frame that has got its number was sent: its connection is given up. See `Caller`."""
        end, _, unacked = self.drafts.pop(draft)
        if unacked is not None:
            unacked.buffers = ()
        if end.is_open:
            self.close(end)
        else:
            self.store.resend(end.peer)

    def run(self, number: int) -> bool:
        """Runs a request that has come. Returns False if the value that it is on is not there yet."""
        if not self.invocations[number].is_ready():
            return False
        end, call_id, function, handles, subject, kept = self.invocations.pop(number)
        if subject is not None and (kept is not None or (end is not None and call_id in end.twin.pending)):
            # Else its caller has got the reply to another copy, or has given the call up with the link: it need not
            # hold the reference any more.
            self.has_refused |= isinstance(subject.exception(), ReferenceRefusedError)
        if function == _HOLD:
            for handle in handles:
                self._hold(handle)
        if kept is not None:
            reference, value = kept
            del self.store.creations[reference]
            thing = Thing()
            self._things[reference] = weakref.ref(thing)
            value.give(thing)
        if end is not None and call_id and (kept is not None or subject is not None):  # else `return` answers
            end.send(pack_full_reply(RESULT, call_id, b"", b"", b"", is_kept=True))
        return True

    def _hold(self, handle: Handle) -> None:
        self.handles[self._next_number()] = handle

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # What comes

    def names_unknown(self, frame: bytes) -> bool:
        """Returns whether a frame names a worker that this one has not heard of."""
        return bool(self.unknown) and not self.unknown.isdisjoint(_workers_named(frame))

    def receive(self, end: End, frame: bytes) -> None:
        """A frame comes. See `ServerConnection` and `ClientConnection`."""
        kind, flags, callee_size, _, call_id = unpack_header(frame)
        at = HEADER_SIZE + callee_size
        number, kept = 0, None
        handles: Sequence[Handle] = ()
        if kind == CONTROL:
            self.store.receive_control(end.peer, frame[HEADER_SIZE:])
            return
        if kind == CANCEL:
            named = [n for n, each in self.invocations.items() if each.end is end and each.call_id == call_id]
            for request in named:
                if self.invocations[request].kept is None:
                    self.stop(request)
            return
        if kind == KEEP:
            reference, fork = unpack_handle(frame, at)
            number, carried, _ = unpack_references(frame, at + HANDLE_SIZE)
            taken = self.store.accept_create(end.peer, number, reference, fork, carried)
            if not call_id:
                self.store.owe_acknowledgement(end.peer)
            if taken is None:
                return
            value, handles = taken
            kept = reference, value
        elif kind == REFERENCES or flags & HAS_REFERENCES:
            number, carried, _ = unpack_references(frame, at)
            received = self.store.receive_references(end.peer, number, carried)
            if received is None or kind == REFERENCES:
                return
            handles = received
        if kind in (RESULT, FAILURE):
            self._receive_reply(end, call_id, handles)
            return
        callee = frame[HEADER_SIZE:at]
        subject = self.store.value_at(callee, lambda: end.peer) if callee[:1] in (VALUE, METHOD) else None
        self._invoke(Invocation(end, call_id, callee, handles, subject, kept))

    def _receive_reply(self, end: End, call_id: int, handles: Sequence[Handle]) -> None:
        number, _ = end.pending.pop(call_id, (0, None))
        if number:
            self.store.confirm_created(end.peer, number)
        for handle in handles:
            self._hold(handle)

    def _invoke(self, invocation: Invocation) -> None:
        number = self._next_number()
        self.invocations[number] = invocation
        if invocation.kept is not None:
            self.store.creations[invocation.kept[0]] = Creation(self, number)

    def receive_forged(self, event: Event) -> None:
        """A dishonest worker sends that, numbered so that its honest messages are not taken for duplicates."""
        number = NEVER + self._next_number()
        self.store.refusals.is_strict = False
        self.store.is_read_by_main_thread = False  # so that what is forged is refused at once
        try:
            if event[0] == "receive_handle":
                self.store.receive_references(event[2], number, [event[1]])
            elif event[0] == "receive_message":
                self.store.receive_control(event[1], pack_control(0, [(number, event[2])]))
            else:
                value = self.store.find_value(event[1], lambda: event[2])
                if value.done() and not isinstance(value.exception(), ReferenceRefusedError):
                    raise BrokenInvariant("FORGED", f"worker {self.me} found the value of {event}")
        finally:
            self.store.refusals.is_strict = True
            self.store.is_read_by_main_thread = True

    def refuse_forged(self, event: Event) -> None:
        """A dishonest worker sends what is known to be forged. FORGED: it is refused and counted."""
        sender = event[1] if event[0] == "receive_message" else event[2]
        # A handle with that token came before: an error stands for its value, and whoever uses it is not counted.
        is_use_of_error = event[0] == "may_still_be_created" and event[1] in self.store.forged_values()
        expected = self.store.refusals.counts().get(sender, 0) + (not is_use_of_error)
        self.receive_forged(event)
        if self.store.refusals.counts().get(sender, 0) != expected:
            raise BrokenInvariant("FORGED", f"worker {self.me} did not count that it refused {event}")

    # What it does by itself

    def work(self) -> None:
        """The timers that are due fire."""
        due, self.due[:] = list(self.due), []
        for function in due:
            function()

    def report_forks(self) -> None:
        """So much time passes that handles which are kept are reported to their owners."""
        for _ in range(2 * UNREPORTED_INTERVALS):
            self.work()

    # Seen from outside

    def handle_statuses(self) -> Iterator[HandleStatus]:
        """See `Observed`."""
        for handle in self.handles.values():
            yield HandleStatus(handle.reference, handle.fork, self._status(handle))

    def _status(self, handle: Handle) -> str:
        if handle.new_error is not None:
            return ORPHANED if isinstance(handle.new_error(), OwnerLostError) else REFUSED
        if handle.fork is None:
            return REFUSED if self.counts.owned[handle.reference].refused else CONFIRMED
        return CONFIRMED if handle.confirmed else PENDING

    def check(self) -> None:
        """Checks what the store adds to the counts. Raises `BrokenInvariant`.

        - HANDLES: what a handle of the program says about itself is what the tables say.
        - VALUES: a value is kept as long as its reference is counted.
        """
        for handle in self.handles.values():
            problem = self._problem_of(handle)
            if problem:
                raise BrokenInvariant("HANDLES", f"worker {self.me} has a handle of {handle.reference}, {problem}")
        for reference, thing in list(self._things.items()):
            if thing() is None:
                owned = self.counts.owned.get(reference)
                if owned is not None and not owned.refused:  # refused: its handle comes too late from a dead worker
                    raise BrokenInvariant("VALUES", f"worker {self.me} has released {reference}, which is counted")
                del self._things[reference]

    def _problem_of(self, handle: Handle) -> str:
        if handle.fork is None:
            owned = self.counts.owned.get(handle.reference)
            return "which is not counted" if owned is None or not owned.handles else ""
        held = self.counts.held.get(handle.fork)
        if held is None:
            return "which the counts do not know" if handle.new_error is None else ""
        if handle.new_error is not None:
            return "which raises, though it is held"
        if held.dropped:
            return "which is taken to be dropped"
        if handle.confirmed is not (held.state is ForkState.CONFIRMED):
            return f"{handle.confirmed=}, though it is {held.state.value}"
        return ""

    def check_quiet(self) -> None:
        """QUIET: nothing is under way and nothing is due, so nothing waits to be sent, acknowledged or released."""
        with self.store.without_forged_values():
            is_quiet = self.store.is_quiet()
        if not is_quiet:
            raise BrokenInvariant("QUIET", f"worker {self.me} still has work: {self.store.table_sizes()}")

    def check_empty(self) -> None:
        """EMPTY: all handles are gone and nothing is under way, so the store keeps nothing."""
        with self.store.without_forged_values():
            sizes = self.store.table_sizes()
        for table in ("values", "origins", "handles", "dropped", "unsent", "unacknowledged"):
            if sizes[table]:
                raise BrokenInvariant("EMPTY", f"the store of worker {self.me} still has {sizes[table]} {table}")
        forged = self.store.forged_values() - {each for named in self.counts.noted.values() for each in named}
        if forged:
            raise BrokenInvariant("FORGED", f"worker {self.me} still has values that were claimed: {forged}")
        if self._things:
            raise BrokenInvariant("EMPTY", f"worker {self.me} still has the values of {list(self._things)}")


def _packed(handle: Handle) -> bytes:
    assert handle.fork is not None
    return pack_handle(handle.reference, handle.fork)


def _workers_named(frame: bytes) -> set[Worker]:
    kind, flags, callee_size, _, _ = unpack_header(frame)
    at = HEADER_SIZE + callee_size
    named: list[Any] = []
    if kind == CONTROL:
        named += [message for _, message in unpack_control(frame[HEADER_SIZE:])[1]]
    if kind == KEEP:
        named.append(unpack_handle(frame, at))
        at += HANDLE_SIZE
    if kind in (KEEP, REFERENCES) or flags & HAS_REFERENCES:
        named += unpack_references(frame, at)[1]
    if frame[HEADER_SIZE : HEADER_SIZE + 1] in (VALUE, METHOD) and callee_size:
        named.append(unpack_handle(frame, HEADER_SIZE + 1))
    return {worker for reference, fork in named for worker in (reference.owner, reference.creator, fork.creator)}


def _refuse(task: object) -> None:
    raise AssertionError("the store starts no threads")

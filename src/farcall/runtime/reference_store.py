"""The references of one worker: the values it owns, the handles it holds, and the messages about them.

The rules of counting are in `protocol.refcount`. This module calls its methods and carries out the effects that they
return. It adds threads, values and messages.

Rules
- One lock guards all tables. Decide under the lock, act outside it: messages get their numbers under the lock, and are
  sent without it; values are released without it, because their finalizers are user code.
- When a handle is garbage-collected, it is only put into a queue (`HandleRef`), because the garbage collector may run
  while its thread holds the lock. `process` empties the queue a few milliseconds later, in the executor.
- No step that may fail follows after a message has its number. If a thread is interrupted before it has sent such a
  message, its connection is closed, and everything unacknowledged is sent again on the next connection.
- Tables that were large are cleared when they are empty, because a dict keeps its largest size otherwise.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, Protocol

from farcall.errors import ProtocolError, UsageError, WorkerLostError
from farcall.protocol.frames import (
    HANDLE_SIZE,
    milliseconds_left,
    pack_handle,
    pack_references,
    pack_request,
    unpack_handle,
)
from farcall.protocol.ids import TOKEN_SIZE, ForkId, RRefId, Worker, new_tuple
from farcall.protocol.refcount import NO_CLAIMANT, REQUESTED, ReferenceCounts
from farcall.protocol.reference_messages import (
    CancelCreate,
    Carried,
    ConfirmHandle,
    Effect,
    ForkRefused,
    OrphanHandle,
    RefuseHandle,
    ReleaseValue,
    SendMessage,
)
from farcall.runtime.handles import (
    Handle,
    HandleRef,
    HandleTable,
    Made,
    Value,
    check_usable,
    expelled,
    owner_lost,
    place_of_caller,
    refuse_in_finalizer,
    refused,
    released,
    unknown,
    watch_handle,
)
from farcall.runtime.leaks import Inventory, count_references, take_inventory
from farcall.runtime.reference_outbox import (
    ANSWERS,
    Connection,
    ControlFrame,
    Outboxes,
    Unacked,
    UnackedKeep,
    UnackedReferences,
    unpack_control,
)
from farcall.runtime.refusals import NOBODY_KNOWN, Refusals, no_such_reference
from farcall.runtime.timers import Timers

if TYPE_CHECKING:
    from farcall.runtime.caller import Caller
    from farcall.runtime.executor import Executor

PROCESS_INTERVAL_S: Final = 5e-3
"""Seconds between the scheduling of `ReferenceStore.process` and its run. One *interval* is one run."""
MAX_PROCESS_INTERVAL_S: Final = 20e-3
"""The same while there is always something to do. Each run wakes threads that take the core from those that call."""
UNREPORTED_INTERVALS: Final = 4
"""The owner of a received handle is told of it only if it is kept for at least this many intervals.

At most twice as many pass before the owner is told.
"""
_MAX_STEPS: Final = 256
"""The most changes that are made before the lock is released for other threads."""
_MIN_SHRUNK_BYTES: Final = 1 << 16
_TOKENS_AT_ONCE: Final = 256


class Creation(Protocol):
    """A call of `remote` that runs on this worker, and whose result, the value, does not exist yet."""

    def cancel(self) -> None:
        """Stops the function that makes the value, and sets an error in place of the value. Runs no user code.

        Does nothing if the value, or an error in its place, is there already.
        """


class ReferenceStore:
    """All references of one worker: the values that it owns, its handles, and the control messages about them.

    Args:
        counts: The reference counts of this worker, with empty tables. Only this store may call its methods.
        executor: Runs the method `process`, which does the work that was put off.
        timers: Decides when the executor runs `process`.
        name_of: Returns the name of a worker, given its number.
        send_outbox: Called with the number of a worker, to send the control messages that wait for it.
        resend: Called with the number of a worker, to connect to it again and send again what an earlier connection
            may have lost.
        record_stacks: Whether handles remember the whole stack of their creation; if False, only the line.

    Attributes:
        calling: Makes the calls on references. The agent sets it after it has created the store.
    """

    calling: Caller

    def __init__(
        self,
        counts: ReferenceCounts,
        executor: Executor,
        timers: Timers,
        name_of: Callable[[Worker], str],
        send_outbox: Callable[[Worker], None],
        resend: Callable[[Worker], None],
        record_stacks: bool = False,
    ) -> None:
        self.me = counts.me
        self._executor = executor
        self._timers = timers
        self._name_of = name_of
        self._send_outbox = send_outbox
        self.resend = resend
        self.record_stacks = record_stacks
        self._lock = threading.RLock()  # so that a finalizer that interrupts its thread gets an error, not a deadlock
        self._counts = counts
        self._outboxes = Outboxes()
        self.refusals = Refusals(self.me, name_of)
        """Counts the messages and requests of other workers that were refused."""
        self._values: dict[RRefId, Value] = {}
        self.creations: dict[RRefId, Creation] = {}
        """The remote calls whose values are not there yet. The thread that removes one settles its value."""
        self._to_cancel: list[Creation] = []  # remote calls to cancel without the lock
        self._origins: dict[RRefId, Made] = {}  # where references to own values were created
        self._handles = HandleTable()
        self._own_handles: set[HandleRef] = set()
        self.dropped: deque[HandleRef] = deque()
        """Handles that were garbage-collected and are not processed yet."""
        # Control messages that the thread of signal handlers has read, by the frames in which they came.
        self._arrived: deque[tuple[Worker, Sequence[tuple[int, Any]]]] = deque()
        self._to_end: deque[tuple[Worker, int]] = deque()  # remote calls that arrived after their handle was dropped
        self._refused: list[tuple[RRefId, Value]] = []  # values that will never exist, to be settled without the lock
        self._released: list[Value | None] = []  # values to release without the lock
        self._senders: dict[Worker, str] = {}  # text that says which worker sent a handle
        self._to_report: deque[tuple[RRefId, ForkId]] = deque()
        self._unreported_before: list[ForkId] = []
        self._intervals = 0
        self._is_scheduled = False
        self._interval_s = PROCESS_INTERVAL_S
        self._processed_at = 0.0
        self.is_ended = False
        """Whether `clear` was called. Handles that are dropped after it are ignored."""
        self._is_cut_off = False

    # Workers

    def add_worker(self, worker: Worker) -> None:
        """Adds a worker that has joined the group, given its number. Does nothing if this worker was expelled.

        Raises `ProtocolError` if the worker was added before and not removed.
        """
        with self._lock:
            if not self._is_cut_off:
                self._counts.add_worker(worker)
                self._outboxes.delivery.joined(worker)

    def remove_worker(self, worker: Worker) -> None:
        """Removes another worker that has left or was lost. Does nothing if it was not added.

        If `worker` owned a value, later uses of its handles here raise `OwnerLostError`. Handles on `worker` do not
        keep values alive any more. Control messages to `worker` are dropped.

        Args:
            worker: The number of the worker.
        """
        with self._lock:
            if worker not in self._counts.workers:
                return
            self._outboxes.remove_worker(worker)
            self._senders.pop(worker, None)
            self.refusals.remove_worker(worker)
            effects = self._counts.remove_worker(worker)
            # Nobody is left who could ask for these values: the functions that make them need not run on.
            released = [effect.reference for effect in effects if isinstance(effect, ReleaseValue)]
            self._to_cancel += [self.creations[each] for each in released if each in self.creations]
            self._decide(effects)
            # Values that were requested before they were created, and that this worker should have created.
            awaited = [each for each in self._values if each.creator == worker and each not in self._counts.owned]
            self._refused += [(reference, self._values.pop(reference)) for reference in awaited]
        self._act()

    def cut_off(self) -> None:
        """Removes all other workers, after the group has expelled this one.

        Later uses of handles of values that other workers own raise `ExpelledError`. Values of this worker stay.
        """
        with self._lock:
            self._is_cut_off = True
            for fork, held in list(self._counts.held.items()):
                self._handles.fail(fork, partial(expelled, held.reference, self._name_of(self.me)))
            others = [worker for worker in self._counts.workers if worker != self.me]
        for worker in others:
            self.remove_worker(worker)

    # Creating

    def own(self, value: Any) -> Handle:
        """Makes this worker the owner of a value, and returns a handle of it.

        Raises `UsageError` if a finalizer calls this while its own thread is changing the tables of references.
        """
        there = Value()
        there.give(value)
        return self.own_later(there)

    def own_later(self, value: Value) -> Handle:
        """Makes this worker the owner of a value that may not exist yet, and returns a handle of it.

        Args:
            value: The future of the value.

        Raises:
            UsageError: A finalizer called this while its own thread was changing the tables of references.
        """
        refuse_in_finalizer(self._lock)
        made = place_of_caller(self.record_stacks)
        with self._lock:
            reference = self._counts.new_reference(self.me)
            self._decide(self._counts.create_value(reference))
            self._values[reference] = value
            self._origins[reference] = made
            handle = self._new_own_handle(reference, value, made)
        self._act()
        return handle

    def share_own(self, reference: RRefId, made: Made) -> Handle:
        """Returns another handle of a value that this worker owns.

        The caller must make sure that another handle or a fork holds the reference until this returns.

        Args:
            reference: The id of the reference.
            made: Where the program creates the new handle, for leak reports.

        Raises:
            ReferenceRefusedError: This worker owns no value with that reference. That is counted in `refusals`.
        """
        with self._lock:
            value = self._values.get(reference)
            owned = self._counts.owned.get(reference)
            if value is None or owned is None or owned.refused or not owned.created:
                self.refusals.add(NOBODY_KNOWN, no_such_reference(reference))
                raise unknown(reference, self._name_of(self.me))
            self._counts.add_own_handle(reference)
            return self._new_own_handle(reference, value, made)

    def create_remote(
        self,
        owner: Worker,
        passed: Sequence[Handle],
        unacked: UnackedKeep,
        call_id: int,
        callee: bytes,
        payload: bytes,
        annotations: bytes,
    ) -> tuple[Handle, int]:
        """Prepares a call of `remote`: creates its reference and its frame. The caller must send the frame.

        Args:
            owner: The number of the worker that will create the value and keep it.
            passed: The handles in the arguments; may be empty.
            unacked: A new `UnackedKeep`, which keeps the call until the owner acknowledges it. This method stores the
                frame in it. If its frame is not empty afterwards, the frame must be sent, even after an error.
            call_id: The id of the call, which the reply repeats.
            callee: The function or method to call, as encoded in a frame (`protocol.frames`).
            payload: The pickled arguments; may be empty.
            annotations: The packed annotations; may be empty.

        Returns:
            The handle of the value, and the number under which the owner acknowledges the frame.

        Raises:
            WorkerLostError: The owner has left the group or was lost.
            RpcError: A handle in `passed` cannot be used any more. No fork was created then.
            UsageError: A finalizer called this while its own thread was changing the tables of references.
        """
        refuse_in_finalizer(self._lock)
        if passed:
            check_usable(passed, self)
        with self._lock:
            if owner not in self._counts.workers:
                raise self._lost_error(owner)
            reference, fork = self._counts.create_remote(owner)
            references: list[Carried] = []
            try:
                handle = Handle(self, reference, fork, None)
                self._handles[fork] = watch_handle(handle)
                packed = handle.packed = pack_handle(reference, fork)
                unacked.reference, unacked.fork = reference, fork
                if passed:
                    self._fork_all(passed, owner, references)
                number = self._outboxes.delivery.next_number(owner)
                packed_references = pack_references(number, references)
                left = milliseconds_left(unacked.seconds_left())
                unacked.frame = pack_request(call_id, callee, payload, left, packed, packed_references, annotations)
                self._outboxes.delivery.send(owner, unacked)
            except BaseException:  # from a signal handler: no other worker knows the reference yet
                unacked.frame = b""
                self._cancel_forks(passed, references)
                self._handles.pop(fork, None)
                self._counts.cancel_create(fork)
                raise
        return handle, number

    def pass_on(self, handles: Sequence[Handle], to: Worker, via: Connection) -> bytes:
        """Creates a fork of each handle for another worker. Returns the references as encoded in a frame.

        The caller must put them into a frame and send it on `via` at once.

        Args:
            handles: The handles; may be empty.
            to: The number of the worker.
            via: The connection on which the frame will be sent.

        Raises:
            WorkerLostError: The worker has left the group or was lost.
            RpcError: A handle cannot be used any more, or there are more than `MAX_REFERENCES`. No fork was created
                then.
            UsageError: A finalizer called this while its own thread was changing the tables of references.
        """
        refuse_in_finalizer(self._lock)
        check_usable(handles, self)
        with self._lock:
            if to not in self._counts.workers:
                raise self._lost_error(to)
            carried: list[Carried] = []
            try:
                self._fork_all(handles, to, carried)
                number = self._outboxes.delivery.send(to, UnackedReferences(carried, via))
            except BaseException:  # from a signal handler
                self._cancel_forks(handles, carried)
                raise
        if via.is_lost():  # messages may have been sent again before this one had its number
            self.resend(to)
        return pack_references(number, carried)

    def _lost_error(self, worker: Worker) -> WorkerLostError:
        """Returns the error for a call that needs a worker which has left the group or was lost."""
        name = self._name_of(worker)
        return WorkerLostError(f"worker {name!r} was lost: nothing can be asked of it any more; use another one", name)

    def _fork_all(self, handles: Sequence[Handle], to: Worker, carried: list[Carried]) -> None:
        """Creates a fork of each handle for the worker `to`. The caller holds the lock.

        Adds each fork to `carried` before it is counted, so that `_cancel_forks` can undo it. Raises `RpcError` if a
        handle cannot be passed on; the forks before it are in `carried`.
        """
        counts = self._counts
        for handle in handles:
            reference, child = handle.reference, counts.new_fork()
            carried.append(new_tuple(Carried, (reference, child)))
            counts.pass_handle(reference, handle.fork, child, to)

    def _cancel_forks(self, handles: Sequence[Handle], carried: Sequence[Carried]) -> None:
        """Undoes `_fork_all`, given its handles and the forks that it added to `carried`. The caller holds the lock."""
        for handle, (reference, child) in zip(handles, carried, strict=False):
            self._counts.cancel_pass(reference, handle.fork, child)

    # Receiving

    def receive_references(self, sender: Worker, number: int, carried: Sequence[Carried]) -> list[Handle] | None:
        """Returns new handles of the references in a received frame; None if the same frame was received before.

        Returns None also if the sender has left or was lost. Otherwise the sender is sent an acknowledgement a few
        milliseconds later.

        Args:
            sender: The number of the worker that sent the frame.
            number: The number of the frame, which `sender` has assigned for the acknowledgement.
            carried: The references and forks in the frame; may be empty.

        Raises:
            ProtocolError: The sender has no right to pass one of the references on, or too many frames before this one
                are missing.
        """
        try:
            with self._lock:
                self._owe_acknowledgement(sender)
                if not self._outboxes.delivery.receive(sender, number):
                    return None
                handles = self._receive_all(sender, carried[:_MAX_STEPS])
            for at in range(_MAX_STEPS, len(carried), _MAX_STEPS):
                sleep(0)  # so that a thread that waits for the lock gets it
                with self._lock:
                    handles += self._receive_all(sender, carried[at : at + _MAX_STEPS])
            return handles
        finally:
            self._act()

    def _owe_acknowledgement(self, sender: Worker) -> None:
        """Notes that a worker must be sent an acknowledgement. Does nothing if it is gone. The caller holds the lock.

        To be called also for a message that arrives a second time: its sender may have missed the acknowledgement.
        """
        if sender in self._counts.workers:
            self._outboxes.owed[sender] = None

    def _receive_all(self, sender: Worker, carried: Sequence[Carried]) -> list[Handle]:
        """Counts the received references and returns a new handle of each, in order. The caller holds the lock.

        Raises `ProtocolError` if the sender has no right to pass one of them on.
        """
        made = self._senders.get(sender)
        if made is None:
            made = self._senders[sender] = f"a message of {self._name_of(sender)!r}"
        handles = []
        for each in carried:
            effects = self._counts.receive_handle(each, sender)
            handles.append(self._new_handle(each, made))
            if effects:
                if type(effects[0]) is RefuseHandle:
                    self.refusals.add(sender, no_such_reference(each.reference))
                self._decide(effects)
        return handles

    def _new_handle(self, carried: Carried, made: Made) -> Handle:
        """Returns a new handle of the received reference in `carried`. Any worker may own its value, also this one.

        `made` says where the handle was created, for leak reports. The caller holds the lock.
        """
        reference, fork = carried
        if reference[0] == self.me:
            value = self._values.get(reference)
            if value is None:
                value = self._values[reference] = Value()
            return self._new_own_handle(reference, value, made)
        handle = Handle(self, reference, fork, None, made)
        self._handles[fork] = watch_handle(handle)
        return handle

    def _new_own_handle(self, reference: RRefId, value: Value, made: Made) -> Handle:
        """Returns a new handle of a value that this worker owns. `made` says where it was created, for leak reports."""
        handle = Handle(self, reference, None, value, made)
        self._own_handles.add(watch_handle(handle))
        return handle

    def accept_create(
        self, sender: Worker, number: int, reference: RRefId, fork: ForkId, carried: Sequence[Carried]
    ) -> tuple[Value, Sequence[Handle]] | None:
        """Accepts a call that another worker has made with `remote`: this worker becomes the owner of the result.

        Args:
            sender: The number of the worker that made the call.
            number: The number of the frame, which `sender` has assigned for the acknowledgement.
            reference: The id of the new reference, which `sender` has chosen.
            fork: The id of the fork that `sender` holds.
            carried: The references and forks in the arguments; may be empty.

        Returns:
            The future of the value, which the caller must settle, and handles of the references in the arguments. None
            if the same frame was received before, or if the sender has left or was lost.

        Raises:
            ProtocolError: The sender has no right to create `reference`, or to pass on one of the references in
                `carried`. Or too many frames before this one are missing.
        """
        delivery = self._outboxes.delivery
        effects: Sequence[Effect] = ()
        try:
            with self._lock:
                if not delivery.receive(sender, number):
                    return None
                if delivery.acknowledgement(sender) > number:
                    # Later messages arrived first and could not be acknowledged. The reply acknowledges only this one.
                    self._owe_acknowledgement(sender)
                    self.work_soon()
                effects = self._counts.accept_create(sender, reference, fork)
                value = self._values.get(reference)  # not None if a request for the value came first
                if value is None:
                    value = self._values[reference] = Value()
                self._decide(effects)
                handles = self._receive_all(sender, carried) if carried else ()
        finally:  # also after a ProtocolError: the effects so far must be carried out
            if effects or carried:
                self._act()
        return value, handles

    def owe_acknowledgement(self, sender: Worker) -> None:
        """Has an acknowledgement sent to a worker in a few milliseconds. Does nothing if the worker is gone.

        Used for a call of `remote` that gets no reply.
        """
        with self._lock:
            self._owe_acknowledgement(sender)
        self.work_soon()

    def confirm_created(self, owner: Worker, number: int) -> None:
        """Notes that the owner has replied to a call of `remote`, and so has received its frame.

        Does nothing if the frame was acknowledged before.

        Args:
            owner: The number of the worker that has replied.
            number: The number of the frame, as `create_remote` has returned it.
        """
        with self._lock:
            self._confirm(owner, number)
        if self._to_end or self._outboxes.unsent:
            self.work_soon()

    def _confirm(self, owner: Worker, number: int) -> None:
        """Forgets the message with this number, because `owner` has acknowledged it. The caller holds the lock.

        If the message is a call of `remote`, first marks its fork as confirmed. If the handle of that fork was dropped,
        leaves the message to `process`, which ends the fork. Does nothing if there is no such message.

        A signal handler of the program may raise at any line here. Then the connection is closed, the message is sent
        again, and its acknowledgement calls this again. So it must be harmless to interrupt this method and to call it
        twice. To end a fork twice would do harm, so `process` does that: it never runs in the thread of signal
        handlers.
        """
        unacked = self._outboxes.delivery.find(owner, number)
        held = self._counts.held.get(unacked.fork) if isinstance(unacked, UnackedKeep) else None
        if held is not None and isinstance(unacked, UnackedKeep):
            if held.state is not REQUESTED:  # an earlier call was interrupted
                self._decide([ConfirmHandle(unacked.reference, unacked.fork)])
            elif held.dropped:
                self._to_end.append((owner, number))
                return
            else:
                self._decide(self._counts.confirm_created(unacked.reference, unacked.fork))
        self._outboxes.delivery.taken(owner, number)

    def _end_confirmed(self) -> None:
        """Ends the forks that `_confirm` has left to `process`. The caller holds the lock.

        Each was created by a call of `remote`. The program dropped its handle before the owner had received the call.
        """
        while self._to_end:
            owner, number = self._to_end.popleft()
            unacked = self._outboxes.delivery.taken(owner, number)  # None if it is here twice
            if isinstance(unacked, UnackedKeep) and unacked.fork in self._counts.held:
                self._decide(self._counts.confirm_created(unacked.reference, unacked.fork))

    def cancel_remote(self, reference: RRefId, fork: ForkId) -> None:
        """Asks the owner of `reference` at once to stop the function that makes the value.

        Does nothing if the owner has left or was lost.

        Args:
            reference: A reference that this worker has created with `remote`. The owner ignores a request for
                any other.
            fork: The fork of the reference that this worker holds.
        """
        with self._lock:
            self._decide([SendMessage(reference.owner, CancelCreate(reference, fork))])
        self._send_outbox(reference.owner)  # at once: every millisecond that the function still runs is wasted

    def _take_creation(self, sender: Worker, reference: RRefId) -> None:
        """Processes the request of `sender` to cancel the call of `remote` that makes the value of `reference`.

        The caller holds the lock. `_act` cancels the call later. Does nothing if the value is there, or the reference
        is not known. If `sender` has not created the reference, only counts a refusal.
        """
        if reference.creator != sender:
            self.refusals.add(sender, ProtocolError(f"worker {sender} did not create {reference}, and cancels it"))
            return
        creation = self.creations.get(reference)
        if creation is not None:
            self._to_cancel.append(creation)

    def receive_control(self, sender: Worker, payload: bytes | memoryview) -> None:
        """Processes the payload of a CONTROL frame: an acknowledgement, and messages about references.

        A message that the sender has no right to send is ignored and counted in `refusals`. On Python's main thread,
        the messages are only queued, and `process` handles them later: an exception of a signal handler could
        interrupt them halfway.

        Args:
            sender: The number of the worker that sent the frame.
            payload: The payload of the frame, as `pack_control` encodes it.

        Raises:
            ProtocolError: The payload cannot be decoded, or it acknowledges a message that was never sent; nothing was
                changed then. Or too many numbers before that of a message are missing; it and the messages after it
                are not processed then.
        """
        acknowledged, messages = unpack_control(payload)
        try:
            with self._lock:
                for number in self._outboxes.delivery.kept_upto(sender, acknowledged):
                    self._confirm(sender, number)
                if messages and self._may_be_interrupted():
                    self._arrived.append((sender, messages))
                elif messages:
                    self._receive_messages(sender, messages)
        finally:
            self._act()

    def _may_be_interrupted(self) -> bool:
        """Returns whether signal handlers of the program run, and may raise, in this thread: Python's main thread."""
        return threading.get_ident() == threading.main_thread().ident

    def _receive_messages(self, sender: Worker, messages: Sequence[tuple[int, Any]]) -> None:
        """Processes messages about references. Skips those that have arrived before, and all if `sender` is gone.

        `messages` has pairs of number and message. Each number is marked as received first, and then the message is
        processed. An exception of a signal handler in between would lose the message, so this must not run on Python's
        main thread. The caller holds the lock. Raises `ProtocolError` if too many numbers are missing.
        """
        self._owe_acknowledgement(sender)
        outboxes = self._outboxes
        for number, message in messages:
            if not outboxes.delivery.receive(sender, number):
                continue
            if type(message) is CancelCreate:
                self._take_creation(sender, message.reference)
                continue
            try:
                effects = self._counts.receive_message(sender, message)
            except ProtocolError as error:  # nothing was changed: the sender has no right to send this
                self.refusals.add(sender, error)
                continue
            self._decide(effects)
            if type(message) in ANSWERS:
                outboxes.asked[sender] = max(0, outboxes.asked.get(sender, 0) - 1)

    # Values

    def value_at(self, callee: bytes, claimant: Callable[[], Worker] | None = None) -> Value:
        """Returns the future of the value whose reference a request names.

        If this worker does not own the value and will not own it, the future has failed with `ReferenceRefusedError`.

        Args:
            callee: The encoded callee of the request: one byte, and then the reference.
            claimant: Returns the number of the worker that sent the request; None if this worker did.

        Raises:
            ProtocolError: `callee` is too short to contain a reference.
        """
        if len(callee) < 1 + HANDLE_SIZE:
            raise ProtocolError("a request about a reference does not say which")
        return self.find_value(unpack_handle(callee, 1)[0], claimant)

    def find_value(self, reference: RRefId, claimant: Callable[[], Worker] | None = None) -> Value:
        """Returns the future of a value that this worker owns, or may own soon.

        It may own the value soon if the call of `remote` that creates the value can still arrive. If it cannot, the
        future has failed with `ReferenceRefusedError`, and `refusals` counts that.

        Args:
            reference: The id of the reference.
            claimant: Returns the number of the worker that requests the value; None if this worker does.
        """
        value = self._values.get(reference)
        if value is not None:
            return value
        worker = claimant() if claimant is not None else NO_CLAIMANT
        with self._lock:
            value = self._values.get(reference)
            if value is None and self._counts.may_still_be_created(reference, worker):
                value = self._values[reference] = Value()
        if value is None:
            value = Value()
            value.refuse(partial(unknown, reference, self._name_of(self.me)))
            self.refusals.add(worker if claimant is not None else NOBODY_KNOWN, no_such_reference(reference))
        return value

    # Carrying out effects

    def _decide(self, effects: Iterable[Effect]) -> None:
        """Carries out `effects`, the decisions of `ReferenceCounts`. The caller holds the lock.

        An effect sends a message, releases a value, or confirms or fails a handle. Work that must be done without the
        lock is only queued: `_act` sets errors in place of values, and `process` sends messages and releases values.
        Messages to workers that are gone are dropped.
        """
        for effect in effects:
            if isinstance(effect, SendMessage):
                if effect.to in self._counts.workers:
                    self._outboxes.add(effect.to, effect.message)
                    if type(effect.message) is ForkRefused:
                        self.refusals.add(effect.to, no_such_reference(effect.message.reference))
            elif isinstance(effect, ReleaseValue):
                self._released.append(self._values.pop(effect.reference, None))
                self._origins.pop(effect.reference, None)
            elif isinstance(effect, ConfirmHandle):
                handle = self._handles.find(effect.fork)
                if handle is not None:
                    handle.confirmed = True
            elif isinstance(effect, OrphanHandle):
                owner = self._name_of(effect.reference.owner)
                self._handles.fail(effect.fork, partial(owner_lost, effect.reference, owner))
            elif effect.fork is not None:
                self._handles.fail(effect.fork, partial(refused, effect.reference))
            else:  # keep an error in place of the value until no handle is left
                value = self._values.setdefault(effect.reference, Value())
                self._refused.append((effect.reference, value))

    def _act(self) -> None:
        """Does queued work that must be done without the lock, and schedules `process` if there is work for it.

        Puts `ReferenceRefusedError` in place of values that will never exist. Cancels a call of `remote` if no worker
        is left that could use its value, or if the call's creator has asked for that.
        """
        outboxes = self._outboxes
        is_due = self._arrived or self._to_end or outboxes.unsent or outboxes.owed
        if is_due or self._released or self._counts.unreported:
            self.work_soon()
        if self._refused:
            with self._lock:
                refused_values, self._refused = self._refused, []
            for reference, value in refused_values:
                value.refuse(partial(refused, reference))
        if self._to_cancel:
            with self._lock:
                to_cancel, self._to_cancel = self._to_cancel, []
            for creation in to_cancel:
                creation.cancel()

    def work_soon(self) -> None:
        """Schedules `process` in a few milliseconds. Takes no lock, so finalizers may call it.

        Does nothing if `process` is scheduled already, or after `clear`.
        """
        if not self._is_scheduled and not self.is_ended:
            self._is_scheduled = True
            try:
                self._timers.schedule(monotonic() + self._interval_s, self._submit_process)
            except BaseException:  # from a signal handler
                self._is_scheduled = False
                raise

    def look_for_work(self) -> None:
        """Schedules `process` if it has something to do. Takes no lock.

        Called regularly, because Ctrl-C may have prevented a finalizer from calling `work_soon`, and because
        acknowledgements may have emptied a large table since `process` ran.
        """
        if self._has_work() or self._large_empty_tables():
            self.work_soon()

    def _submit_process(self) -> None:
        """Queues a run of `process` in the executor."""
        from farcall.runtime.executor import Task

        self._executor.submit(Task(self.process))

    def process(self) -> None:
        """Does all work that was put off: drops handles, sends control messages, and releases values.

        If this worker has kept a received handle for some time, also asks the owner to count it. Frees the memory of
        tables that were large and are empty.

        While this runs, `work_soon` schedules no second run, which would only wait for the lock. But while values are
        being released, `work_soon` does schedule one, because a finalizer of a value may wait for it.
        """
        self._is_scheduled = True
        now = monotonic()
        is_steady = now - self._processed_at < 2 * self._interval_s
        self._interval_s = min(2 * self._interval_s, MAX_PROCESS_INTERVAL_S) if is_steady else PROCESS_INTERVAL_S
        self._processed_at = now
        try:
            has_more, is_interval = True, True
            while has_more:
                with self._lock:
                    has_more = self._drop_handles()
                    has_more = self._receive_arrived() or has_more
                    self._end_confirmed()
                    has_more = self._report_forks(is_interval) or has_more
                    is_interval = False
                    self._shrink()
                    receivers = self._outboxes.receivers()
                    values, self._released = self._released, []
                self._act()
                for worker in receivers:
                    self._send_outbox(worker)
                if values:
                    has_more = True  # they may have contained references
                    self._is_scheduled = False  # their finalizers may wait for another run of `process`
                    values.clear()
                    self._is_scheduled = True
        finally:
            self._is_scheduled = False
            self.look_for_work()

    def _receive_arrived(self) -> bool:
        """Processes the messages of one frame that the thread of signal handlers has read. Returns whether more wait.

        The caller holds the lock.
        """
        if self._arrived:
            sender, messages = self._arrived.popleft()
            try:
                self._receive_messages(sender, messages)
            except ProtocolError as error:  # too many gaps in its numbers: the rest is not acknowledged
                self.refusals.add(sender, error)
        return bool(self._arrived)

    def _drop_handles(self) -> bool:
        """Stops counting some handles that were garbage-collected. Returns whether more are left.

        The caller holds the lock.
        """
        dropped, counts = self.dropped, self._counts
        for _ in range(min(len(dropped), _MAX_STEPS)):
            entry = dropped.popleft()
            fork = entry.fork
            if fork is None:
                self._own_handles.discard(entry)
            else:
                self._handles.pop(fork, None)
                held = counts.held.get(fork)
                if held is None or held.dropped:  # refused, lost with its owner, or given up before
                    continue
            self._decide(counts.drop_handle(entry.reference, fork))
        return bool(dropped)

    def _report_forks(self, is_interval: bool) -> bool:
        """Asks owners to count forks on this worker that they do not know yet. Other workers passed them to this one.

        A fork is due when this worker has kept it for at least `UNREPORTED_INTERVALS` runs of `process`. One call asks
        for a limited number of due forks. Returns whether more are due. The caller holds the lock.

        `process` may call this several times in a run. It passes True for `is_interval` in the first call only, so that
        the run is counted once.
        """
        due, unreported = self._to_report, self._counts.unreported
        if is_interval:
            self._intervals += 1
            if self._intervals % UNREPORTED_INTERVALS == 0:
                before, self._unreported_before = self._unreported_before, list(unreported)
                due.extend((unreported[fork].reference, fork) for fork in before if fork in unreported)
        for _ in range(min(len(due), _MAX_STEPS)):
            reference, fork = due.popleft()
            held = unreported.get(fork)
            if held is not None and not held.dropped:
                self._decide(self._counts.report_fork(reference, fork))
        if not unreported:
            self._unreported_before = []
        return bool(due)

    def _shrink(self) -> None:
        """Frees the memory of tables that were large and are empty."""
        for table in self._large_empty_tables():
            table.clear()

    def _large_empty_tables(self) -> list[dict[Any, Any] | set[Any]]:
        """Returns the tables that are empty and still use much memory; an empty list if there are none."""
        counts = self._counts
        tables: list[dict[Any, Any] | set[Any]] = [
            counts.owned, counts.held, counts.unreported, counts.parents, self._handles, self._own_handles,
            self._values, self._origins, self.creations,
        ]  # fmt: skip
        tables += [link.unacknowledged for link in list(self._outboxes.delivery.links.values())]
        return [table for table in tables if not table and table.__sizeof__() > _MIN_SHRUNK_BYTES]

    def _has_work(self) -> bool:
        """Returns whether `process` has something to do.

        That is so if there are dropped handles, unsent messages, owed acknowledgements, values to release, forks to
        end, received messages to process, or forks on this worker of which the owner does not know yet.
        """
        outboxes = self._outboxes
        is_due = self.dropped or self._arrived or self._to_end or outboxes.unsent or outboxes.owed
        return bool(is_due or self._released or self._counts.unreported)

    # For the senders of outboxes

    def take_control_frame(self, to: Worker) -> ControlFrame | None:
        """Removes control messages to a worker from its outbox, and returns them as a frame. The caller must send it.

        Takes at most `MAX_MESSAGES_PER_FRAME` messages. Returns None if there is nothing to send.
        """
        with self._lock:
            return self._outboxes.take_frame(to)

    def take_unacked(self, to: Worker) -> list[tuple[int, Unacked]]:
        """Returns the messages to the worker `to` that it has not acknowledged, as pairs of number and message.

        They are in the order of their numbers. The list is empty if there are none, or if `to` is gone. The messages in
        the outbox for `to` are in the list, too, and the outbox is emptied.
        """
        with self._lock:
            return self._outboxes.take_unacked(to)

    def take_acknowledgement(self, to: Worker) -> int:
        """Returns the number up to which this worker has received all messages from the worker `to`.

        The caller must send the number to `to`: no other acknowledgement is sent for these messages. Returns 0 if the
        first message was not received, or if `to` is gone.
        """
        with self._lock:
            return self._outboxes.take_acknowledgement(to)

    def awaits_acknowledgement(self, worker: Worker) -> bool:
        """Returns whether `worker` still has to acknowledge a message, or to answer a request to count a fork.

        Returns False if `worker` is gone.
        """
        with self._lock:
            return self._outboxes.awaits(worker)

    # Reports

    def inventory(self) -> Inventory:
        """Calls `process`. Then returns the references that this worker owns (`owned`) and holds (`held`).

        Both fields are empty if there are none.
        """
        self.process()
        with self._lock:
            return take_inventory(self._counts, self._values, self._origins, self._handles.find, self._name_of)

    def debug_info(self) -> dict[str, str]:
        """Returns some numbers of references as text, by the names that torch uses.

        `num_owner_rrefs`: owned references that other workers hold, or whose value does not exist yet.
        `num_pending_users`: forks on this worker that their owner has not confirmed. `num_pending_futures`: owned
        values that do not exist yet. `num_forks`: forks on other workers of owned references.
        """
        with self._lock:
            return count_references(self._counts, self._pending_values())

    def table_sizes(self) -> dict[str, int]:
        """Returns the number of entries of each table, by name. All are 0 when no reference is left in the group."""
        with self._lock:
            counts, links = self._counts, self._outboxes.delivery.links.values()
            return {
                "owned": len(counts.owned),
                "held": len(counts.held),
                "parents": len(counts.parents),
                "values": len(self._values),
                "origins": len(self._origins),
                "handles": len(self._handles),
                "dropped": len(self.dropped),
                "unreported": len(counts.unreported) + len(self._unreported_before),
                "unsent": len(self._outboxes.unsent),
                "unacknowledged": sum(len(link.unacknowledged) for link in links),
                "received out of turn": sum(len(link.received.beyond) for link in links),
            }

    def messages_sent(self) -> int:
        """Returns how many numbered messages this worker has sent to workers that are not gone.

        Control messages, calls made by `remote`, and frames with references have numbers. A message that is sent again
        counts once.
        """
        with self._lock:
            return self._outboxes.delivery.sent()

    def is_quiet(self) -> bool:
        """Returns whether `process` has nothing to do, all messages are acknowledged, and all owned values exist."""
        with self._lock:
            return not self._has_work() and self._outboxes.delivery.is_quiet() and not self._pending_values()

    def _pending_values(self) -> set[RRefId]:
        """Returns the references of values that do not exist yet; an empty set if there are none."""
        return {reference for reference, value in self._values.items() if not value.done()}

    # The end

    def give_up_handles(self, reason: str) -> None:
        """Releases all handles of values that other workers own. Does nothing if there are none.

        Args:
            reason: The message of the `UsageError` that later uses of these handles raise.
        """
        with self._lock:
            for fork, held in list(self._counts.held.items()):
                if not held.dropped:
                    self._handles.fail(fork, partial(UsageError, reason))
                    self._decide(self._counts.drop_handle(held.reference, fork))
        self._act()

    def forget(self, reason: str) -> None:
        """Releases all handles of values that other workers own, and all values that this worker owns.

        Workers that use one of these values later get `ReferenceRefusedError`. The references are still counted, and
        new ones can be created.

        Args:
            reason: The message of the `UsageError` that later uses of the released handles raise.
        """
        self.give_up_handles(reason)
        with self._lock:
            for reference in self._counts.owned:
                self._released.append(self._values.get(reference))
                self._values[reference] = gone = Value()
                gone.refuse(partial(released, reference, self._name_of(self.me)))
        self.process()

    def clear(self) -> None:
        """Removes all references and releases all values. Sends no messages.

        Handles that still exist are not counted any more, and nothing happens when they are dropped.
        """
        self.is_ended = True
        with self._lock:
            self.dropped.clear()
            self._to_report.clear()
            self._to_end.clear()
            self._arrived.clear()
            values, self._values = self._values, {}
            going, self._released = self._released, []
            self._counts = ReferenceCounts(self.me, self._counts.new_token)
            unacked = self._outboxes.clear()
            self._origins.clear()
            self._handles.clear()
            self._own_handles.clear()
            self.creations.clear()
            self._to_cancel.clear()
        values.clear()
        going.clear()
        del unacked


class RandomTokens:
    """Creates tokens: random bytes that nobody can guess. Not safe for several threads at once.

    Asking the system for random bytes is slow, so the bytes of many tokens are fetched at once.
    """

    __slots__ = ("_drawn",)

    def __init__(self) -> None:
        self._drawn: list[bytes] = []

    def __call__(self) -> bytes:
        """Returns a new token of `TOKEN_SIZE` bytes."""
        if not self._drawn:
            block = os.urandom(TOKEN_SIZE * _TOKENS_AT_ONCE)
            self._drawn = [block[at : at + TOKEN_SIZE] for at in range(0, len(block), TOKEN_SIZE)]
        return self._drawn.pop()

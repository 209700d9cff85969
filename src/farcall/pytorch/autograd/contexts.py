"""The contexts of distributed autograd on one worker: their ids, what each holds, and when they go.

A context is what the workers know of one forward pass and the backward passes over it: which tensors went out (*sent*)
and which came in (*received*), the gradients of this worker's variables, and the backward passes that are under way.
The worker that makes a context names it: its own number in the upper 16 bits, a counter below. The others have one of
the same name from the first call that comes in it.

Rules
- Each thread has at most one current context; a thread that serves a call has that of the caller.
- Who releases a context tells the workers to which it has made calls in it; they do the same. What is told to release a
  context, or to end a backward pass, before it has heard of it remembers that for a while, so that a message that was
  overtaken does not bring it back.
- The contexts of a worker that is gone are released. Of those of others we may have known by it alone: so we join them
  at their makers, who then tell us when they are released, or that they have been. Passes in which gradients should
  come from it fail.
- A call that ended with an error takes no part in backward passes, at neither end.
- Every message carries a stamp, and a worker's clock is always past all stamps that it has seen. So of two sendings of
  one worker, the gradients of the one with the greater stamp never wait for what the other brings (`passes`).
- Nothing is sent and no user code runs under a lock.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.accumulating import GradientTable
from farcall.pytorch.autograd.telling import PassId, Post

if TYPE_CHECKING:
    from farcall.pytorch.autograd.parted import PartedPass
    from farcall.pytorch.autograd.parts import Walks
    from farcall.pytorch.autograd.passes import LocalPass

logger = logging.getLogger("farcall")

COUNTER_BITS: Final = 48
_MOST_AHEAD: Final = 1 << COUNTER_BITS
MAX_WORKER_ID: Final = 65535
_REMEMBERED: Final = 4096
"""How many contexts, or backward passes, that have ended are remembered."""


@dataclass(slots=True)
class Sent:
    """Tensors that went out with one message."""

    message_id: int
    stamp: int
    to: WorkerInfo
    end: torch.Tensor
    """What comes out of the send function. It keeps the function alive."""
    answered: int | None = None
    """The request to which the message was the reply."""
    is_lost: bool = False
    """Whether the worker to which it went is gone."""


class Received(Protocol):
    """Tensors that came with one message."""

    message_id: int
    sender: WorkerInfo

    def function(self) -> Any:
        """The receive function."""


class _Memory:
    """The last names of things that have ended."""

    def __init__(self) -> None:
        self._names: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, name: Hashable) -> None:
        self._names[name] = None
        if len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._names


surveying: Final = threading.RLock()
"""Held by who records what was sent, or looks through the graph behind it. To look is to hold its nodes, and to see who
else does."""


class DistAutogradContext:
    """What this worker knows of one distributed forward pass, and of the backward passes over it."""

    def __init__(self, context_id: int, made_by: tuple[str, int] | None = None) -> None:
        """`made_by`: the line of the program, at its maker."""
        self.context_id = context_id
        self.made_by = made_by
        self.lock = threading.Lock()
        self.sent: dict[int, Sent] = {}
        self.received: dict[int, Received] = {}
        self.known_workers: dict[int, WorkerInfo] = {}
        """To whom calls were made in it."""
        self.gradients = GradientTable()
        self.passes: dict[PassId, LocalPass | PartedPass] = {}
        self.passes_begun = 0
        self.forgotten: set[int] = set()
        """The requests to which no reply is awaited any more."""
        self.is_released = False
        self.walks: Walks | None = None
        """Through what is behind the messages that were sent, once somebody has looked at it."""
        self.unrecorded: deque[Callable[[], Sent | None]] = deque()
        """What records tensors that are on their way: after they have been sent, and before anybody looks for them.

        And before a function runs that was called in this context: it may change them in place.
        """
        self._is_recording = False  # further out in the thread that holds `surveying`

    @property
    def made_at(self) -> str:
        """The line of the program, at its maker; else nothing."""
        return "{}:{}".format(*self.made_by) if self.made_by is not None else ""

    def add_known_worker(self, worker: WorkerInfo) -> None:
        """A call goes there. Raises `RuntimeError` if the context is released."""
        if worker.id in self.known_workers and not self.is_released:
            return
        with self.lock:
            self.check_valid()
            self.known_workers[worker.id] = worker

    def catch_up(self) -> list[Sent]:
        """Records what is on its way and not recorded yet, and gives that. To be done before `sent` is looked at."""
        recorded: list[Sent] = []
        with surveying:
            while self.unrecorded and not self._is_recording:
                self._is_recording = True
                try:
                    sent = self.unrecorded[0]()
                finally:
                    self._is_recording = False
                    self.unrecorded.popleft()  # only now: who finds none relies on it that all is recorded
                if sent is not None:
                    recorded.append(sent)
        return recorded

    def add_sent(self, sent: Sent) -> None:
        """Tensors go out, or have just gone. Raises `RuntimeError` if the context is released."""
        with self.lock:
            self.check_valid()
            if sent.answered not in self.forgotten and sent.message_id not in self.forgotten:
                self.sent[sent.message_id] = sent

    def add_received(self, received: Received) -> None:
        """Tensors have come. Raises `RuntimeError` if the context is released."""
        with self.lock:
            self.check_valid()
            self.received[received.message_id] = received

    def forget(self, request: int) -> None:
        """The call with that request has failed: neither it nor its reply takes part in passes, new or under way."""
        self.catch_up()
        with self.lock:
            self.forgotten.add(request)
            dropped = [sent for sent in self.sent.values() if request in (sent.message_id, sent.answered)]
            for sent in dropped:
                del self.sent[sent.message_id]
            running = list(self.passes.values())
        for each in running:
            for sent in dropped:
                each.dropped(sent)

    def lose(self, worker: WorkerInfo) -> None:
        """That worker is gone: fails the passes in which gradients should come from it."""
        self.catch_up()
        with self.lock:
            for sent in self.sent.values():
                if sent.to.id == worker.id:
                    sent.is_lost = True
            running = list(self.passes.values())
        for each in running:
            each.lost(worker)

    def check_valid(self) -> None:
        """Raises `RuntimeError` if it is released. Its lock is held."""
        if self.is_released:
            raise RuntimeError(
                f"Could not find autograd context with id: {self.context_id}: it was released while a call in it was "
                "under way. Wait for the calls of a context inside of its `with` block"
            )

    def gradients_of(self, variables: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of these; None for one that has none."""
        with self.lock:
            found = self.gradients.by_id
            return [found[id(each)][1] if id(each) in found else None for each in variables]

    def everybody(self) -> list[WorkerInfo]:
        """The workers that have to do with it: whom we called, and who sent us tensors."""
        with self.lock:
            found = {received.sender.id: received.sender for received in self.received.values()}
            found.update(self.known_workers)
        return list(found.values())

    # As torch has it

    def _context_id(self) -> int:
        return self.context_id

    def _send_functions(self) -> dict[int, Any]:
        """The send functions, by the numbers of their messages."""
        self.catch_up()
        with self.lock:
            return {number: sent.end.grad_fn for number, sent in self.sent.items()}

    def _recv_functions(self) -> dict[int, Any]:
        """The receive functions, by the numbers of their messages."""
        with self.lock:
            return {number: received.function() for number, received in self.received.items()}

    def _known_worker_ids(self) -> set[int]:
        """The numbers of the workers to which calls were made in it."""
        with self.lock:
            return set(self.known_workers)


class _Thread(threading.local):
    context_id: int | None = None


class Contexts:
    """Those of one worker. Raises `RuntimeError` for a number that is none of a worker."""

    def __init__(self, worker_id: int, post: Post) -> None:
        if not 0 <= worker_id <= MAX_WORKER_ID:
            raise RuntimeError(f"worker_id needs to be in the range [0, {MAX_WORKER_ID}]")
        self.worker_id = worker_id
        self.post = post
        base = worker_id << COUNTER_BITS
        self.max_id = base | ((1 << COUNTER_BITS) - 1)
        self._lock = threading.Lock()
        self._contexts: dict[int, DistAutogradContext] = {}
        self._ids = itertools.count(base)
        self._message_ids = itertools.count(base)
        self._passes = itertools.count()
        self._released = _Memory()
        self._abandoned = _Memory()
        self._clock = 0
        self.thread = _Thread()
        self._gone: set[int] = set()

    # Numbers

    def new_message(self) -> tuple[int, int]:
        """A number that was never given before, by any worker; and a stamp, greater than any given or heard before."""
        with self._lock:
            self._clock += 1
            return next(self._message_ids), self._clock

    def new_pass_id(self) -> PassId:
        """Never given before, by any worker."""
        return PassId(self.worker_id, next(self._passes))

    def hear(self, stamp: int) -> None:
        """A message has come with that stamp. Raises `TypeError` if it is none."""
        if stamp > self._clock:
            # Stamps count messages. One that is far ahead was made up, and would have ours grow beyond all bounds.
            if stamp - self._clock > _MOST_AHEAD:
                raise TypeError("a message came from another worker with a stamp that cannot be")
            with self._lock:
                self._clock = max(self._clock, stamp)

    # Finding them

    def new(self) -> DistAutogradContext:
        """A new one, the current one of this thread. Raises `RuntimeError` if the thread has one already."""
        if self.thread.context_id is not None:
            raise RuntimeError("Already have an autograd context id for this thread.")
        context = DistAutogradContext(next(self._ids), _caller())
        with self._lock:
            self._contexts[context.context_id] = context
        self.thread.context_id = context.context_id
        return context

    def retrieve(self, context_id: int) -> DistAutogradContext:
        """The one of that name. Raises `RuntimeError` if it is not here."""
        context = self._contexts.get(context_id)
        if context is None:
            raise RuntimeError(
                f"Could not find autograd context with id: {context_id}: its `with` block is over, or no call in it "
                f"has come to worker {self.post.own_name()!r}"
            )
        return context

    def retrieve_or_make(self, context_id: int, caller: WorkerInfo | None = None) -> DistAutogradContext:
        """The one of that name, which another worker has made. Raises `RuntimeError` if it was released."""
        maker = context_id >> COUNTER_BITS
        with self._lock:
            context = self._contexts.get(context_id)
            is_new = context is None
            if context is None:
                if context_id in self._released or maker in self._gone or maker == self.worker_id:
                    raise RuntimeError(
                        f"Could not find autograd context with id: {context_id}: it was released before this call came"
                    )
                context = self._contexts[context_id] = DistAutogradContext(context_id)
            is_orphan = is_new and caller is not None and caller.id in self._gone
        if is_orphan:  # who called us went before the call came: it cannot tell us of the release
            self.post.join(maker, context_id)
        return context

    @property
    def current_id(self) -> int | None:
        """The name of this thread's current context."""
        return self.thread.context_id

    @current_id.setter
    def current_id(self, context_id: int | None) -> None:
        self.thread.context_id = context_id

    def current(self) -> DistAutogradContext:
        """This thread's current context. Raises `RuntimeError` if it has none."""
        context_id = self.thread.context_id
        if context_id is None:
            raise RuntimeError(
                "Current thread doesn't have a valid autograd context. Please wrap your code using: `with "
                "torch.distributed.autograd.context() as context_id` to generate a valid context"
            )
        context = self._contexts.get(context_id)
        if context is None:
            raise RuntimeError(
                f"Couldn't find autograd context data for current autograd context id {context_id}: it was released "
                "while this thread still works in it"
            )
        return context

    def counts(self) -> tuple[int, int]:
        """How many backward passes are under way here, and how many contexts there are."""
        with self._lock:
            contexts = list(self._contexts.values())
        return sum(len(context.passes) for context in contexts), len(contexts)

    # Releasing them

    def release(self, context_id: int) -> None:
        """Releases it here and on the workers that were called in it. Raises `RuntimeError` if it is not here."""
        self.retrieve(context_id)
        self.release_if_present(context_id)
        if self.thread.context_id == context_id:
            self.thread.context_id = None

    def release_if_present(self, context_id: int, is_told: bool = False) -> None:
        """The same if it is here. `is_told`: another worker wants it, who may know more than we do yet."""
        with self._lock:
            context = self._contexts.pop(context_id, None)
            if context is not None or is_told:
                self._released.add(context_id)
        if context is not None:
            self._end(context, "it was released")
            for worker in context.known_workers.values():
                if worker.id != self.worker_id:
                    self.post.release(worker, context_id)

    def lost(self, worker: WorkerInfo) -> None:
        """That worker is gone: so are its contexts, and the passes that need it."""
        with self._lock:
            self._gone.add(worker.id)
            contexts = list(self._contexts.values())
        for context in contexts:
            maker = context.context_id >> COUNTER_BITS
            if maker == worker.id:
                self.release_if_present(context.context_id, is_told=True)
                continue
            context.lose(worker)
            if maker != self.worker_id:
                self.post.join(maker, context.context_id)

    def joined(self, worker: WorkerInfo) -> None:
        """That worker is there, perhaps again."""
        with self._lock:
            self._gone.discard(worker.id)

    def is_gone(self, worker: WorkerInfo) -> bool:
        """Whether that worker is gone, as far as is known here."""
        return worker.id in self._gone

    def take_in(self, context_id: int, worker: WorkerInfo) -> None:
        """That worker has a context of ours: tells it of the release, at once if that has been already."""
        context = self._contexts.get(context_id)
        if context is not None:
            try:
                context.add_known_worker(worker)
                return
            except RuntimeError:
                pass  # released just now
        self.post.release(worker, context_id)

    def forget_call(self, context: DistAutogradContext, to: WorkerInfo, request: int) -> None:
        """A call has failed here: a backward pass waits for nothing of it, here or there."""
        context.forget(request)
        if not context.is_released:
            self.post.forget(to, context.context_id, request)

    def forget(self, context_id: int, request: int) -> None:
        """A caller does not await the reply to that request any more."""
        context = self._contexts.get(context_id)
        if context is not None:
            context.forget(request)

    def close(self) -> None:
        """This worker ends: so does everything. Who has forgotten a context is told."""
        with self._lock:
            left, self._contexts = self._contexts, {}
        for context in left.values():
            self._end(context, "this worker was shut down")
            if context.made_at:
                logger.warning(
                    "the autograd context %d was never released: it was made at %s. Use `with dist_autograd.context()`",
                    context.context_id,
                    context.made_at,
                )

    def _end(self, context: DistAutogradContext, why: str) -> None:
        with context.lock:
            context.is_released = True
            running = list(context.passes.values())
        for each in running:
            each.fail(
                RuntimeError(
                    f"Autograd context no longer valid! The backward pass in autograd context {context.context_id} "
                    f"cannot go on: {why}"
                )
            )

    # Passes that have failed

    def abandon(self, context_id: int, pass_id: PassId, reason: str) -> None:
        """A backward pass has failed somewhere: ends it here, and tells the others, once."""
        with self._lock:
            if pass_id in self._abandoned:
                return
            self._abandoned.add(pass_id)
            context = self._contexts.get(context_id)
        if context is None:
            return
        with context.lock:
            running = context.passes.get(pass_id)
        if running is not None:
            running.abandoned(RuntimeError(reason))
        for worker in context.everybody():
            if worker.id != self.worker_id:
                self.post.abandon(worker, context_id, pass_id, reason)

    def is_abandoned(self, pass_id: PassId) -> bool:
        """Whether that pass has failed, as far as is known and remembered here."""
        return pass_id in self._abandoned


_OWN: Final = __name__.rpartition(".")[0]


def _caller() -> tuple[str, int]:
    """The line of the program that asked us."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno

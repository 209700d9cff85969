"""A backward pass on one worker whose parts are apart: each is run where its gradients come in, and no thread waits.

The worker that begins the pass runs the part behind the roots, and sends the gradients of what it received to where
that came from. Whoever gets some runs the part behind them at once, in the thread that took the call. What comes out
for the caller goes back with the reply, the rest goes out by calls. So of two workers that sent each other tensors many
times, each in one thread, no other thread is woken for their backward pass.

Rules
- The worker whose gradients came first is the *parent*. It has to hear when the pass is through here: when gradients
  have come for all that was sent, all parts have run, and all whose parent we are have said the same.
- A reply says whether its sender is through, and brings gradients. If the sender is not through, and no other call of
  the pass is open there, its parent asks it at once to tell when it is: so the parent hears of every error, and of its
  loss, as of those of any call. Nobody else is owed anything.
- The first call of the parent stays open while there is nothing to say.
- What fails first is the error of the pass. A parent that is not asking just then finds it when it does.
- No part is run, nothing sent and no future settled under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from farcall.errors import RpcError
from farcall.futures import Future
from farcall.gate import FOREVER
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd import trouble
from farcall.pytorch.autograd.contexts import Contexts, DistAutogradContext, Sent
from farcall.pytorch.autograd.flat import read_answer
from farcall.pytorch.autograd.parts import Part, Produced
from farcall.pytorch.autograd.telling import PassId

Answer: TypeAlias = tuple[bool, list[tuple[int, list[torch.Tensor]]]] | None
"""Whether its sender is through, or owes nothing, and gradients by message. None is yes, and none."""

_GLANCE: Final = 0.1
"""Seconds after which whoever waits for one worker looks whether the pass has failed elsewhere."""


class _Call(NamedTuple):
    """A call that is not answered yet, or not dealt with."""

    to: WorkerInfo
    future: Future[Answer]
    gradients: Sequence[torch.Tensor]
    """Kept: they may be sent from where they lie, and nobody must write there."""


class PartedPass:
    """One backward pass on this worker."""

    def __init__(
        self,
        contexts: Contexts,
        context: DistAutogradContext,
        pass_id: PassId,
        retain_graph: bool,
        parts: Mapping[int, tuple[Sent, Part]],
        root_part: Part | None = None,
    ) -> None:
        """Enters it into the context, whose lock is held. Raises `RuntimeError` if that is released.

        `parts` are those behind what was sent, by message.
        """
        context.check_valid()
        self.context = context
        self.retain_graph = retain_graph
        self._contexts = contexts
        self._pass_id = pass_id
        self._root_part = root_part
        self._senders = {message_id: sent.to for message_id, (sent, _) in parts.items()}
        self._missing = {message_id: part for message_id, part in parts.items() if message_id in context.sent}
        self._lock = threading.Lock()
        self._busy = 0  # what is being run or sent, and the calls that are open
        self._open: dict[int, int] = {}  # those calls, by worker
        self._owing: dict[int, WorkerInfo] = {}  # whose parent we are, as far as they are not through
        self._parent: int | None = None
        self._parent_takes = False  # gradients in replies
        self._waiting: list[Future[Answer]] = []  # the open calls of the parent
        self._done: Future[None] = Future()  # at the worker that has begun it
        self._is_failed = False
        self._error: BaseException | None = None  # until those have heard of it who have to
        context.passes[pass_id] = self
        context.passes_begun += 1

    # At the worker that begins it

    def run(self) -> None:
        """Returns when it is through here, and everywhere. Raises what went wrong."""
        part = self._root_part
        assert part is not None
        try:
            self._begin()
            calls = self._run_and_send(part, [_one(root) for root in part.starts])
            self._rest()
            self._wait(calls)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._leave()

    def _wait(self, calls: list[_Call]) -> None:
        while calls:
            if len(calls) == 1:
                self._block(calls[0].future)  # this thread reads the answer itself
                calls = self._answered(calls.pop())
            else:
                self._watch(calls)
                calls = []
        self._block(self._done)
        self._check()

    def _block(self, future: Future[Any]) -> None:
        """Returns when it is settled. Raises what ended the pass meanwhile."""
        with self._lock:
            self._check_missing()
        patience = monotonic() + trouble.PATIENCE
        while not future.block(monotonic() + _GLANCE):
            self._check()
            if monotonic() >= patience:
                patience = FOREVER
                self._complain()

    def _complain(self) -> None:
        with self._lock:
            missing = [self._senders[message_id] for message_id in self._missing]
            names = [worker.name for worker in self._owing.values()]
        if missing:
            trouble.warn_of_missing(missing[0], self.context)
        else:
            trouble.warn_of_others(names, self.context)

    # What comes from other workers

    def serve(self, message_id: int, gradients: list[torch.Tensor], takes_back: bool) -> Answer | Future[Answer]:
        """Gradients have come by a call: runs what is behind them; what to answer, perhaps later.

        `takes_back`: the answer may bring gradients. Raises `RuntimeError` if nothing was sent with that message, and
        what goes wrong.
        """
        caller = self._senders.get(message_id)
        if caller is None:
            raise RuntimeError(f"Could not find send function for autograd message id: {message_id}")
        with self._lock:
            if self._parent is None and self._root_part is None:
                self._parent, self._parent_takes = caller.id, takes_back
            self._busy += 1
        is_parent = caller.id == self._parent
        try:
            back: list[Produced] = []
            part = self._take(message_id)
            if part is not None:
                self._watch(self._run_and_send(part, gradients, caller.id if takes_back else None, back))
            self._rest()
            return self._answer(is_parent, takes_back, [(each.message_id, each.gradients) for each in back])
        except BaseException as error:
            self.fail(error)
            if is_parent:
                self._leave()
            raise

    def _answer(
        self, is_parent: bool, takes_back: bool, back: list[tuple[int, list[torch.Tensor]]]
    ) -> Answer | Future[Answer]:
        if is_parent:
            with self._lock:
                self._check()
                if not self._is_through():
                    if back or (self._waiting and takes_back):
                        return False, back
                    if self._waiting:
                        return None  # it knows no other answer than the end, and hears of that by its first call
                    return self._open_call()
            self._leave()
        return (True, back) if back else None

    def await_end(self) -> Answer | Future[Answer]:
        """The parent asks to be told when it is through here. Raises what went wrong."""
        with self._lock:
            if not self._is_failed and not self._is_through():
                return self._open_call()
        try:
            self._check()
        finally:
            self._leave()
        return None

    def _open_call(self) -> Future[Answer]:
        """One of the parent's, which stays open. Under the lock."""
        self._check_missing()
        waiting: Future[Answer] = Future()
        self._waiting.append(waiting)
        return waiting

    def fail(self, error: BaseException) -> None:
        """The pass cannot go on. Only the first error counts."""
        with self._lock:
            if self._is_failed:
                return
            self._is_failed, self._error = True, error
            self._missing.clear()
            waiting, self._waiting = self._waiting, []
        if waiting:
            self._leave()
        for each in waiting:
            each.set_exception(error)
        _settle(self._done)

    def abandoned(self, error: BaseException) -> None:
        """It has failed elsewhere, and those who have to know of it do."""
        self.fail(error)
        if self._root_part is None:
            self._leave()

    def dropped(self, sent: Sent) -> None:
        """No gradients will come for that message: its call has failed."""
        with self._lock:
            self._missing.pop(sent.message_id, None)
            self._busy += 1
        self._rest()

    def lost(self, worker: WorkerInfo) -> None:
        """That worker is gone: the pass fails if it should send gradients yet."""
        with self._lock:
            is_missing = any(self._senders[message_id].id == worker.id for message_id in self._missing)
        if is_missing:
            self.fail(trouble.loss_of(worker, self.context))

    # Parts

    def _take(self, message_id: int) -> Part | None:
        """What is behind that message, to be run. None if it is too late."""
        with self._lock:
            if self._is_failed:
                self._check()
            taken = self._missing.pop(message_id, None)
        return taken[1] if taken is not None else None

    def _run_and_send(
        self,
        part: Part,
        gradients: list[torch.Tensor],
        caller: int | None = None,
        back: list[Produced] | None = None,
    ) -> list[_Call]:
        """Runs a part and sends what comes out of it; the calls by which it does. What is for `caller` goes to `back`.

        Others go on with what is sent while the gradients of variables are put away here.
        """
        try:
            produced, found = part.run(gradients, self.retain_graph)
            gradients.clear()  # if one of them is that of a variable, it is in nobody else's hands now
        except RpcError:
            raise
        except Exception as error:
            raise trouble.error_here(error, self._contexts) from error
        if back is not None and caller is not None:
            back += [each for each in produced if each.to.id == caller]
        calls = self._send([each for each in produced if each.to.id != caller] if back else produced)
        part.keep(self.context, found)
        return calls

    # Calls

    def _send(self, produced: list[Produced]) -> list[_Call]:
        """Sends gradients to where they belong; the calls by which it does. Raises if that cannot be done."""
        calls = []
        for to, message_id, gradients in produced:
            waiting = None
            if to.id == self._parent and self._parent_takes:
                with self._lock:
                    waiting = self._waiting.pop() if self._waiting else None
            if waiting is not None:
                waiting.set_result((False, [(message_id, gradients)]))
                continue
            future = self._contexts.post.propagate(
                to, self.context.context_id, self._pass_id, message_id, gradients, self.retain_graph, True
            )
            calls.append(self._note(to, future, gradients))
        return calls

    def _note(self, to: WorkerInfo, future: Future[Answer], gradients: Sequence[torch.Tensor] = ()) -> _Call:
        with self._lock:
            self._busy += 1
            self._open[to.id] = self._open.get(to.id, 0) + 1
        return _Call(to, future, gradients)

    def _watch(self, calls: list[_Call]) -> None:
        """Has these dealt with when they are answered, by whoever reads the answer."""
        for call in calls:
            call.future.add_done_callback(partial(self._answered_meanwhile, call))

    def _answered_meanwhile(self, call: _Call, future: Future[Answer]) -> None:
        try:
            self._watch(self._answered(call))
        except BaseException as error:
            del call, future  # see `_answered`
            self.fail(error)

    def _answered(self, call: _Call) -> list[_Call]:
        """Deals with the answer: runs what it brings gradients for. The calls that follow. Raises what went wrong."""
        to = call.to
        try:
            answer: Any = call.future.value()
            if type(answer) is bytes:
                is_through, _, message_id, gradient = read_answer(answer)
                brought: Any = ((message_id, [gradient]),)
                del gradient
            else:
                is_through, brought = answer or (True, ())
        finally:
            del call  # which has the error, whose traceback holds this frame
        with self._lock:
            self._open[to.id] -= 1
            if is_through:
                self._owing.pop(to.id, None)
            else:
                self._owing[to.id] = to
        calls = []
        for message_id, gradients in brought:
            part = self._take(message_id)
            if part is not None:
                calls += self._run_and_send(part, gradients)
        with self._lock:
            must_ask = to.id in self._owing and not self._open[to.id] and not self._is_failed
        if must_ask:
            calls.append(self._note(to, self._contexts.post.await_end(to, self.context.context_id, self._pass_id)))
        self._rest()
        return calls

    # Its state

    def _begin(self) -> None:
        with self._lock:
            self._busy += 1

    def _rest(self) -> None:
        """Something has been done: perhaps it was the last."""
        waiting: list[Future[Answer]] = []
        with self._lock:
            self._busy -= 1
            is_through = self._is_through()
            if is_through:
                waiting, self._waiting = self._waiting, []
        if waiting:
            self._leave()
        for each in waiting:
            each.set_result(None)
        if is_through and self._root_part is not None:
            _settle(self._done)

    def _is_through(self) -> bool:
        """Under the lock."""
        return not (self._missing or self._busy or self._owing or self._is_failed)

    def _check(self) -> None:
        if not self._is_failed:
            return
        error = self._error
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        raise RuntimeError(
            f"the backward pass {self._pass_id} in autograd context {self.context.context_id} has failed already"
        )

    def _check_missing(self) -> None:
        """Raises `WorkerLostError` if gradients should come from a worker that is gone. Under the lock."""
        for sent, _ in self._missing.values():
            if sent.is_lost or self._contexts.is_gone(sent.to):
                raise trouble.loss_of(sent.to, self.context)

    def _leave(self) -> None:
        """All who have to hear of its end have, or will: nothing is known of it any more."""
        with self.context.lock:
            self.context.passes.pop(self._pass_id, None)
        self._error = None  # its traceback holds frames that hold us


def _one(root: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(root, memory_format=torch.contiguous_format)


def _settle(done: Future[None]) -> None:
    try:
        done.set_result(None)
    except RuntimeError:
        pass  # it has failed meanwhile, or was through before

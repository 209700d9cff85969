"""A backward pass on one worker: one run of torch's engine, which waits where gradients come from others.

For graphs that cannot be taken apart (`parts`): there, nothing has to wait.

The algorithm is FAST of PyTorch's note on distributed autograd: all send functions of a context take part in every
backward pass, so each worker can work out alone what its nodes depend on. Where torch steers its engine from inside, we
give it a graph that makes it do the same:

    start ──> the roots (at the worker that begins)
      └────> gate ──> send function of the greatest stamp ──> what was sent ...
               └──> gate ──> send function of the next one ...

A gate waits until the gradients of its send function are there. The engine takes what is ready by sequence number, and
gates have the lowest: it comes to a gate only when nothing else is left to do. So one run of the engine counts the
dependencies of all roots and send functions together, each node runs once with the whole sum, and hooks, retained
graphs, profilers and errors are the engine's own affair.

Why no gate waits for what is behind it: the gradients of a send function S come out of receive functions at its
receiver, which depend on send functions there that were recorded after that receipt, and so on. All of these have
greater stamps than S (`contexts`). Of this worker's they have passed their gates before; at other workers the same
goes for theirs. The outstanding send function with the greatest stamp of all is always the next that gets gradients.

Rules
- Gradients of variables go into the context, by a hook before torch's own accumulation, which then finds none to add.
  All other hooks of the variable run as ever, before and after it.
- The worker whose gradients begin a pass here hears of its end, the others only that their gradients came. So whoever
  began it all hears when all is done, or what went wrong, from one worker to the next.
- What fails first is the error of the pass; it wakes whoever waits at a gate.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any, Final

import torch

from farcall.errors import RpcError
from farcall.futures import Future
from farcall.gate import FOREVER
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd import trouble
from farcall.pytorch.autograd.accumulating import Gradients, accumulate, unshared_holders
from farcall.pytorch.autograd.contexts import Contexts, DistAutogradContext, Sent
from farcall.pytorch.autograd.nodes import EMPTY, function, is_receive_function, running, running_pass
from farcall.pytorch.autograd.reducers import lent_to_reducers
from farcall.pytorch.autograd.telling import PassId

_LEAF: Final = "AccumulateGrad"
_LAST: Final = 0
"""The sequence number of what the engine comes to when nothing else is ready."""


class LocalPass:
    """One backward pass on this worker."""

    def __init__(
        self,
        contexts: Contexts,
        context: DistAutogradContext,
        pass_id: PassId,
        retain_graph: bool,
        roots: Sequence[torch.Tensor] = (),
    ) -> None:
        """Enters it into the context, whose lock is held. Raises `RuntimeError` if that is released."""
        context.check_valid()
        self.context = context
        self.retain_graph = retain_graph
        self._contexts = contexts
        self._pass_id = pass_id
        self._roots = roots
        self._sent = sorted(context.sent.values(), key=lambda sent: sent.stamp)
        self._by_message = {sent.message_id: sent for sent in self._sent}
        self._arrivals: dict[int, Future[list[torch.Tensor | None]]] = {
            sent.message_id: Future() for sent in self._sent
        }
        self._outstanding: list[tuple[Future[None], list[torch.Tensor]]] = []
        self._is_drained = False
        self._answers: Future[Any] = Future()
        self._gathered: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._task = -1
        self._lent: Collection[int] = ()
        context.passes[pass_id] = self
        context.passes_begun += 1

    # What comes from other workers

    def arrived(self, message_id: int, gradients: list[torch.Tensor]) -> None:
        """The gradients of what was sent with that message. Raises `RuntimeError` if nothing was."""
        arrival = self._arrivals.get(message_id)
        if arrival is None:
            raise RuntimeError(f"Could not find send function for autograd message id: {message_id}")
        _settle(arrival, gradients)

    def fail(self, error: BaseException) -> None:
        """The pass cannot go on. Only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        for awaited in (*self._arrivals.values(), self._answers):
            _settle(awaited, [])

    def abandoned(self, error: BaseException) -> None:
        """It has failed elsewhere."""
        self.fail(error)

    def dropped(self, sent: Sent) -> None:
        """No gradients will come for that message: its call has failed."""
        arrival = self._arrivals.get(sent.message_id)
        if arrival is not None:
            _settle(arrival, [None] * len(sent.end.grad_fn.next_functions))

    def lost(self, worker: WorkerInfo) -> None:
        """That worker is gone: the pass fails if it should send gradients yet."""
        if any(sent.to.id == worker.id and not self._arrivals[sent.message_id].done() for sent in self._sent):
            self.fail(trouble.loss_of(worker, self.context))

    # For the nodes

    def wait_for(self, message_id: int) -> None:
        """Returns when the gradients of that message are there. Raises what ended the pass meanwhile."""
        arrival = self._arrivals[message_id]
        sent = self._by_message[message_id]
        if not arrival.done() and (sent.is_lost or self._contexts.is_gone(sent.to)):  # before the pass began
            self.fail(trouble.loss_of(sent.to, self.context))
        elif not arrival.block(monotonic() + trouble.PATIENCE):
            trouble.warn_of_missing(sent.to, self.context)
            arrival.block(FOREVER)
        self._check()

    def take(self, message_id: int) -> list[torch.Tensor | None]:
        """The gradients of that message, or so many times none if its call has failed."""
        return self._arrivals[message_id].value()

    def propagate(self, to: WorkerInfo, message_id: int, gradients: list[torch.Tensor]) -> None:
        """Sends the gradients of what came with that message to where it came from. Raises if that cannot be done."""
        self._check()
        future = self._contexts.post.propagate(
            to, self.context.context_id, self._pass_id, message_id, gradients, self.retain_graph, False
        )
        # The gradients are kept: they may be sent from where they lie, and nobody must write there.
        self._outstanding.append((future, gradients))
        if self._sent:  # somebody may wait at a gate, and is to hear of an error at once
            future.add_done_callback(self._answered)

    def _answered(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)
        else:
            self._note_answers()

    def _note_answers(self) -> None:
        with self._lock:
            is_through = self._is_drained and all(future.done() for future, _ in self._outstanding)
        if is_through:
            _settle(self._answers, [])

    def _check(self) -> None:
        error = self._error
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    # Running it

    def run(self) -> None:
        """Returns when it is through here, and at those whom it reached from here. Raises what went wrong."""
        try:
            try:
                self._run_engine()
            except RpcError:
                raise
            except Exception as error:
                if error is self._error:
                    raise
                raise trouble.error_here(error, self._contexts) from error
            self._wait_for_the_others()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            with self.context.lock:
                self.context.passes.pop(self._pass_id, None)
            with self._lock:
                self._outstanding.clear()
            self._error = None  # its traceback holds this frame, which holds us

    def _wait_for_the_others(self) -> None:
        """Until all have answered, or one with an error, though others then never do."""
        self._check()
        if len(self._outstanding) == 1:
            self._outstanding[0][0].wait()  # this thread reads the answer itself
            return
        if not self._sent:
            for future, _ in self._outstanding:
                future.add_done_callback(self._answered)
        with self._lock:
            self._is_drained = True
        self._note_answers()
        self._answers.block(FOREVER)
        self._check()
        for future, _ in self._outstanding:
            future.wait()  # it is done, but we may not have been told yet how

    def _run_engine(self) -> None:
        with torch.enable_grad():
            gates: tuple[torch.Tensor, ...] = ()
            for sent in self._sent:
                gate = _Gate.apply(self, sent.message_id, sent.end, *gates)
                gate.grad_fn._set_sequence_nr(_LAST)
                gates = (gate,)
            if not gates and not self._roots:
                return
            start = _Start.apply(self, *self._roots, *gates)
        unshared_holders()
        with ExitStack() as around:
            variables = self._watch_variables(start.grad_fn, around)
            self._lent = around.enter_context(lent_to_reducers(self.context, variables))
            around.callback(self._finished)
            torch.autograd.backward((start,), retain_graph=self.retain_graph)

    def started(self) -> Iterator[torch.Tensor]:
        """The engine has begun: the gradients with which it does."""
        self._task = torch._C._current_graph_task_id()
        running[self._task] = self
        for root in self._roots:
            yield torch.ones_like(root, memory_format=torch.contiguous_format)
        if self._sent:
            yield EMPTY

    def _finished(self) -> None:
        running.pop(self._task, None)
        self._gathered.clear()

    def _watch_variables(self, start: Any, around: ExitStack) -> list[torch.Tensor]:
        """Walks through the graph: has us told of the gradients of all variables. The variables."""
        variables = []
        seen, ahead = {start}, [start]
        while ahead:
            node = ahead.pop()
            if type(node).__name__ == _LEAF:
                hook = node.register_prehook(partial(self._gather, node.variable))
                around.callback(hook.remove)
                variables.append(node.variable)
                continue
            if node._sequence_nr() == _LAST and not isinstance(node, _Gate._backward_cls):
                node._set_sequence_nr(_LAST + 1)  # the first node of some thread: it comes before the gates, too
            if is_receive_function(node):
                continue
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    ahead.append(following)
        return variables

    def _gather(self, variable: torch.Tensor, gradients: Gradients) -> Gradients | None:
        """Before torch adds a gradient to `.grad`: nothing is left for it to add, if it is in this pass."""
        if running_pass() is not self or gradients[0] is None or id(variable) in self._lent:
            return None
        with self.context.lock:
            accumulate(self.context.gradients, variable, gradients)
        # Kept to the end: a tensor that is the gradient of two variables is in nobody's hands alone.
        self._gathered.append(gradients[0])
        return (None,)


class _Starting:
    """What the engine begins with: from here on it knows whose run it is."""

    @staticmethod
    def forward(ctx: Any, local_pass: LocalPass, *roots: torch.Tensor) -> torch.Tensor:
        ctx.local_pass = local_pass
        return torch.zeros(())  # a scalar, for which torch makes the gradient: those given it checks by slow means

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        return None, *ctx.local_pass.started()


class _Waiting:
    """Waits for the gradients of one send function; then come that function and the next gate."""

    @staticmethod
    def forward(ctx: Any, local_pass: LocalPass, message_id: int, *ends: torch.Tensor) -> torch.Tensor:
        ctx.local_pass, ctx.message_id, ctx.width = local_pass, message_id, len(ends)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        ctx.local_pass.wait_for(ctx.message_id)
        return None, None, *([EMPTY] * ctx.width)


_Start: Final = function("farcall::Start", _Starting)
_Gate: Final = function("farcall::Gate", _Waiting)


def _settle(awaited: Future[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    try:
        awaited.set_result(gradients)
    except RuntimeError:
        pass  # the pass has failed, or they have come just as it did

"""What rides along with calls in a context: the context's name, and which tensors require gradients.

The tensors of a call or its reply that require gradients are recorded as sent; they travel without their graph, and are
recorded as received at the other end. The words that go along are a `Ticket`.

Outside of a context nothing rides along: tensors arrive as leaves, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import torch

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.allow_list import check_kinds, check_numbers
from farcall.pytorch.autograd.contexts import Contexts, DistAutogradContext
from farcall.pytorch.autograd.engine import prepare
from farcall.pytorch.autograd.nodes import record_later, record_received, record_sent
from farcall.pytorch.envelopes import Departure, Tensors, Trip, Visit
from farcall.runtime.agent import Agent
from farcall.serialization import register_plain


class Ticket(NamedTuple):
    """The words of one message."""

    context_id: int
    stamp: int
    message_id: int
    places: list[int]
    """Which tensors require gradients."""
    is_recorded: bool
    """Whether the sender records what comes and goes with it. If it does not, no gradients will come for a reply."""

    def check(self) -> None:
        """Raises `TypeError` if it is none: it may have come from another worker."""
        check_kinds((self, Ticket))
        if tuple(map(type, self)) != _KINDS or not _INTS.issuperset(map(type, self.places)):
            raise TypeError(f"what came from another worker is no ticket: {tuple(self)!r}")
        check_numbers(self.context_id, self.message_id)


_KINDS: Final = (int, int, int, list, bool)
_INTS: Final = frozenset({int})
register_plain(Ticket, Ticket)


def pack(
    contexts: Contexts,
    context: DistAutogradContext,
    to: WorkerInfo,
    tensors: Tensors,
    is_recorded: bool,
    answered: int | None = None,
    record: Callable[..., object] = record_sent,
) -> tuple[Tensors, Ticket]:
    """Tensors go out: what to send, and the words. `answered` is the message to which this is the reply.

    `record`: `record_later` for who calls `prepare` when they have gone. Raises `RuntimeError` if the context is
    released.
    """
    places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad] if is_recorded else []
    message_id, stamp = contexts.new_message()
    if places:
        record(context, message_id, stamp, to, [tensors[place] for place in places], answered)
        tensors = list(tensors)
        for place in places:
            tensors[place] = tensors[place].detach()
    return tensors, Ticket(context.context_id, stamp, message_id, places, is_recorded)


def unpack(
    contexts: Contexts, context: DistAutogradContext, sender: WorkerInfo, tensors: Tensors, ticket: Ticket
) -> Tensors:
    """Tensors have come: what to hand out. Raises `RuntimeError` if the context is released."""
    contexts.hear(ticket.stamp)
    if not ticket.places:
        return tensors
    received = record_received(context, ticket.message_id, sender, [tensors[place] for place in ticket.places])
    tensors = list(tensors)
    for place, tensor in zip(ticket.places, received, strict=True):
        tensors[place] = tensor
    return tensors


class AutogradTrip(Trip):
    def __init__(self, contexts: Contexts, context: DistAutogradContext, to: WorkerInfo) -> None:
        self._contexts = contexts
        self._context = context
        self._to = to
        self._is_recorded = torch.is_grad_enabled()  # where the call is made: others may pack, and read the reply
        self._message_id: int | None = None

    def pack(self, tensors: Tensors, record: Callable[..., object] = record_sent) -> tuple[Tensors, Ticket]:
        """See `Trip`."""
        self._context.add_known_worker(self._to)
        packed, ticket = pack(self._contexts, self._context, self._to, tensors, self._is_recorded, record=record)
        self._message_id = ticket.message_id
        return packed, ticket

    def unpack(self, tensors: Tensors, words: Ticket | None) -> Tensors:
        """See `Trip`."""
        if words is None or not self._is_recorded:
            return tensors
        Ticket.check(words)
        return unpack(self._contexts, self._context, self._to, tensors, words)

    def received(self, tensor: torch.Tensor, stamp: int, message_id: int | None) -> torch.Tensor:
        """One tensor has come back, with that message if gradients may go there: what to hand out.

        Raises `RuntimeError` if the context is released.
        """
        if not self._is_recorded:
            return tensor
        self._contexts.hear(stamp)
        if message_id is None:
            return tensor
        return record_received(self._context, message_id, self._to, (tensor,))[0]

    def failed(self, error: BaseException) -> None:
        """See `Trip`. No gradients come through this call, nor go: a backward pass must not wait for them."""
        if self._is_recorded and self._message_id is not None:
            self._contexts.forget_call(self._context, self._to, self._message_id)


class AutogradVisit(Visit):
    def __init__(
        self, agent: Agent, contexts: Contexts, context: DistAutogradContext, caller: WorkerInfo, ticket: Ticket
    ) -> None:
        self._agent = agent
        self._contexts = contexts
        self._context = context
        self._caller = caller
        self._ticket = ticket

    @classmethod
    def of(cls, agent: Agent, contexts: Contexts, caller: WorkerInfo, ticket: Ticket) -> AutogradVisit:
        """A call that came with these words. Raises `TypeError` if they are none, `RuntimeError` if it was released."""
        Ticket.check(ticket)
        context = contexts.retrieve_or_make(ticket.context_id, caller)
        if context.unrecorded:
            context.catch_up()
        return cls(agent, contexts, context, caller, ticket)

    def unpack(self, tensors: Tensors) -> Tensors:
        """See `Visit`."""
        return unpack(self._contexts, self._context, self._caller, tensors, self._ticket)

    @contextmanager
    def around(self) -> Iterator[None]:
        """See `Visit`. The function works in the context."""
        before = self.enter()
        try:
            yield
        finally:
            self.leave(before)

    def enter(self) -> int | None:
        """This thread works in the context; what to give to `leave`."""
        before, self._contexts.current_id = self._contexts.current_id, self._context.context_id
        return before

    def leave(self, before: int | None) -> None:
        """It does no more."""
        self._contexts.current_id = before

    def pack(self, tensors: Tensors) -> tuple[Tensors, Ticket]:
        """See `Visit`."""
        ticket = self._ticket
        return pack(self._contexts, self._context, self._caller, tensors, ticket.is_recorded, ticket.message_id)

    def pack_now(self, tensors: Tensors) -> tuple[Tensors, Ticket]:
        """The same for a reply that goes as soon as the function has returned."""
        ticket = self._ticket
        tensors, words = pack(
            self._contexts, self._context, self._caller, tensors, ticket.is_recorded, ticket.message_id, record_later
        )
        if words.places:
            self._agent.after_reply(partial(prepare, self._context))
        return tensors, words

    def sent(self, tensor: torch.Tensor) -> tuple[int, int]:
        """One tensor goes back, as the result: the stamp and the number of the message.

        Raises `RuntimeError` if the context is released.
        """
        message_id, stamp = self._contexts.new_message()
        if tensor.requires_grad:
            record_later(self._context, message_id, stamp, self._caller, (tensor,), self._ticket.message_id)
            self._agent.after_reply(partial(prepare, self._context))
        return stamp, message_id

    def failed(self) -> None:
        """See `Visit`. The caller must not wait for gradients of what it sent."""
        if self._ticket.places:
            self._contexts.post.forget(self._caller, self._ticket.context_id, self._ticket.message_id)


class AutogradRider:
    """Distributed autograd, as calls see it."""

    key = "autograd"

    def __init__(self, contexts_of: Callable[[Agent], Contexts], is_in_context: Callable[[], bool]) -> None:
        """`is_in_context`: whether this thread is."""
        self._contexts_of = contexts_of
        self._is_in_context = is_in_context

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """See `Rider`. In a context every call does: its result may require gradients, though no argument does."""
        return self._is_in_context()

    def board(self, agent: Agent, departure: Departure) -> AutogradTrip:
        """See `Rider`. Raises `RuntimeError` if the context was released."""
        return self.trip(agent, departure.to)

    def trip(self, agent: Agent, to: WorkerInfo) -> AutogradTrip:
        """A call of this thread to that worker. Raises `RuntimeError` if its context was released."""
        contexts = self._contexts_of(agent)
        return AutogradTrip(contexts, contexts.current(), to)

    def visit(self, agent: Agent, caller: WorkerInfo, words: Ticket) -> AutogradVisit:
        """See `Rider`. Raises `RuntimeError` if the context was released."""
        return AutogradVisit.of(agent, self._contexts_of(agent), caller, words)

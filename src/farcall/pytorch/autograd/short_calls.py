"""Calls in a context without an envelope: where it can be seen at a glance which tensors go and come.

An envelope (`envelopes`) is a pickle inside of a message, and so is its reply. Most calls do not need that: if nothing
but autograd rides along, and arguments are tensors, references and plain data, in tuples, lists and dicts, then the
tensors that require gradients are replaced before the call is pickled as any other, and found again by their places.

Rules
- What cannot be seen through, a request as well as a reply, goes in an envelope.
- What is small and flat, as most is, needs not even to be pickled (`flat`).
- A place is a path of indices and keys, from outside to inside. What is on the way there is copied, not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, Final, TypeAlias

import torch
from torch.nn import Parameter

from farcall.api import current_agent
from farcall.backends.interface import run_here
from farcall.functions import async_result, mark_async
from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.allow_list import check_function, check_kinds, check_numbers, find_function, may_be_called
from farcall.pytorch.autograd.contexts import Contexts
from farcall.pytorch.autograd.engine import prepare
from farcall.pytorch.autograd.flat import (
    Row,
    answer_of,
    flatten,
    pack_ids,
    pack_tensor,
    read_answer,
    read_ids,
    unflatten,
)
from farcall.pytorch.autograd.nodes import record_later, record_received
from farcall.pytorch.autograd.post import contexts, contexts_of, is_in_context, take_releases
from farcall.pytorch.autograd.riding import AutogradRider, AutogradTrip, AutogradVisit, Ticket
from farcall.pytorch.envelopes import ReplyEnvelope, Tensors, rides_alone
from farcall.pytorch.internal import runner_of
from farcall.pytorch.worker_info import WorkerInfo as TorchWorkerInfo
from farcall.pytorch.worker_info import as_torch
from farcall.runtime.agent import Agent
from farcall.runtime.calls import PendingCall
from farcall.serialization import encode_function

Place: TypeAlias = tuple[int | str, ...]

_PLAIN: Final = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, WorkerInfo}
    | {TorchWorkerInfo}
)
InPlace: TypeAlias = Callable[[Any, WorkerInfo], Any]
_seen_through: Final[dict[type, InPlace]] = {}

RIDER: Final = AutogradRider(contexts_of, is_in_context)
"""Autograd, of this process."""


def see_through(kind: type, in_place: InPlace) -> None:
    """Objects of that type, too, are known to bring no tensors along.

    `in_place(object, worker)` is what to send in a call to that worker in place of one, if anything: the object itself
    lives until the call is answered.
    """
    _seen_through[kind] = in_place


class Glance:
    """The tensors that require gradients in some values, if these can be seen through."""

    __slots__ = ("_containers", "is_clear", "kept", "places", "tensors", "to", "told", "told_places")

    def __init__(self, values: Any, to: WorkerInfo | None = None) -> None:
        """`to`: to whom they go in a call."""
        self.to = to
        self.places: list[Place] = []
        self.tensors: Tensors = []
        self.told_places: list[Place] = []
        self.told: list[Any] = []
        """What goes in place of other things, and where."""
        self.kept: list[Any] = []
        """Those other things."""
        self._containers: set[int] = set()
        # One tensor that is there twice arrives as one: left to envelopes.
        self.is_clear = self._look(values, ()) and len(set(map(id, self.tensors))) == len(self.tensors)

    def _look(self, value: Any, place: Place) -> bool:
        kind = type(value)
        if kind is torch.Tensor or kind is Parameter:
            if value.requires_grad:
                self.places.append(place)
                self.tensors.append(value)
            return True
        if kind in _PLAIN:
            return True
        if kind in _seen_through:
            if self.to is not None and (told := _seen_through[kind](value, self.to)) is not None:
                self.told_places.append(place)
                self.told.append(told)
                self.kept.append(value)
            return True
        if kind is tuple or kind is list or kind is dict:
            if not value:
                return True
            if id(value) in self._containers:  # one that is there twice, perhaps in itself, has to arrive as one
                return False
            self._containers.add(id(value))
            if kind is dict:
                return all(type(key) is str and self._look(each, (*place, key)) for key, each in value.items())
            for index, each in enumerate(value):
                if type(each) not in _PLAIN and not self._look(each, (*place, index)):
                    return False
            return True
        return False


def replaced(values: Any, places: Sequence[Place], others: Sequence[Any]) -> Any:
    """The values with these others at those places. Raises `TypeError` and others if there are no such places."""
    changed = None  # the positional arguments of a call, which most places are among
    for place, other in zip(places, others, strict=True):
        if len(place) == 2 and place[0] == 0 and type(values) is tuple and type(values[0]) is tuple:
            if changed is None:
                changed = list(values[0])
            changed[place[1]] = other  # type: ignore[index]
            continue
        if changed is not None:
            values, changed = (tuple(changed), *values[1:]), None
        values = _put(values, place, 0, other) if place else other
    return values if changed is None else (tuple(changed), *values[1:])


def _put(value: Any, place: Any, depth: int, other: Any) -> Any:
    if depth == len(place):
        return other
    key = place[depth]
    kind = type(value)
    if kind is tuple:
        value = list(value)
    elif kind is list or kind is dict:
        value = value.copy()
    else:
        raise TypeError(f"a tensor should be inside of a {kind.__name__}")
    value[key] = _put(value[key], place, depth + 1, other)
    return tuple(value) if kind is tuple else value


# At the caller


class _Departure(AutogradTrip):
    """What has to be known of a call until it is answered."""

    released: Sequence[int] = ()
    """The contexts of whose release it tells."""

    def failed(self, error: BaseException) -> None:
        """It may not have come."""
        super().failed(error)
        for context_id in self.released:
            self._contexts.post.release(self._to, context_id)


class _Awaited:
    """A call that is waited for at once."""

    __slots__ = ("_call", "_departure")

    def __init__(self, call: Future[Any], departure: _Departure) -> None:
        self._call = call
        self._departure = departure

    def wait(self) -> Any:
        """What the function returned. Raises what it raised."""
        departure = self._departure
        try:
            answer = self._call.wait()
        except BaseException as error:
            departure.failed(error)
            raise
        finally:
            del self  # it has the call, and that the error, whose traceback holds this frame
        return _opened(answer, departure)


def call_shortly(
    agent: Agent,
    to: WorkerInfo,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: float,
    unattended: bool,
) -> Any:
    """A future of what the function returns on that worker; if not `unattended`, something that has a `wait`.

    None if it has to go in an envelope. Raises what a call raises, and `RuntimeError` if the context was released.
    """
    if not rides_alone(RIDER, agent, to):
        return None
    named = encode_function(function)
    if named is None:
        return None
    run = run_in_context if async_result(function) is None else run_in_context_later
    row = flatten(args, to) if run is run_in_context and not kwargs else None
    if row is not None and (torch.is_grad_enabled() or not row.tensors):
        return _call_flat(agent, to, named, row, timeout, unattended, function)
    values = (tuple(args), dict(kwargs))
    glance = Glance(values, to)
    if not glance.is_clear:
        return None
    here = contexts()
    departure = _Departure(here, here.current(), to)
    departure.released = released = take_releases(to)
    try:
        tensors, ticket = departure.pack(glance.tensors, record_later)
        values = replaced(values, [*glance.places, *glance.told_places], [*tensors, *glance.told])
        request = (agent.info.id, tuple(ticket), glance.places, released, function, *values)
        call: PendingCall = agent.call(to, run, request, None, timeout, unattended)  # type: ignore[assignment]
        call.function = function  # for messages to people
        _keep(call, glance.kept)
        if ticket.places:
            prepare(departure._context)
    except BaseException as error:
        departure.failed(error)
        raise
    return _awaited(call, departure, unattended)


def _call_flat(
    agent: Agent,
    to: WorkerInfo,
    named: bytes,
    row: Row,
    timeout: float,
    unattended: bool,
    function: Callable[..., Any],
) -> Any:
    """The same for arguments that are flat."""
    here = contexts()
    context = here.current()
    departure = _Departure(here, context, to)
    departure.released = released = take_releases(to)
    try:
        context.add_known_worker(to)
        message_id, stamp = here.new_message()
        departure._message_id = message_id
        if row.tensors:
            record_later(context, message_id, stamp, to, row.tensors)
        told = pack_ids(released) if released else None
        words = (agent.info.id, context.context_id, stamp, message_id, row.mask, departure._is_recorded, told, named)
        request = (*words, *row.values)
        call: PendingCall = agent.call(to, run_flat, request, None, timeout, unattended)  # type: ignore[assignment]
        call.function = function  # for messages to people
        _keep(call, row.kept)
        if row.tensors:
            prepare(context)
    except BaseException as error:
        departure.failed(error)
        raise
    return _awaited(call, departure, unattended)


def _keep(call: PendingCall, kept: list[Any]) -> None:
    if kept:
        call.keeps = kept
        if call._state:  # answered already, and perhaps before that was set
            call.keeps = None


def _awaited(call: PendingCall, departure: _Departure, unattended: bool) -> Any:
    if not unattended:
        return _Awaited(call, departure)

    def answered(done: Future[Any]) -> Any:
        try:
            answer = done.value()
        except BaseException as error:
            departure.failed(error)
            raise
        finally:
            del done  # see above
        return _opened(answer, departure)

    return call.then(answered)


def _opened(answer: Any, trip: AutogradTrip) -> Any:
    if type(answer) is bytes:
        is_sent, stamp, message_id, tensor = read_answer(answer)
        return trip.received(tensor, stamp, message_id if is_sent else None)
    if type(answer) is ReplyEnvelope:
        return answer.open({AutogradRider.key: trip})
    if type(answer) is not tuple:
        check_kinds((answer, tuple))
    words, places, result = answer
    tensors = trip.unpack([_at(result, place) for place in places], Ticket(*words))
    return replaced(result, places, tensors) if places else result


def _at(values: Any, place: Any) -> torch.Tensor:
    for key in place:
        if type(values) is not tuple and type(values) is not list:
            check_kinds((values, dict))
        values = values[key]
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"a {type(values).__name__} came from another worker in place of a tensor")
    return values


# At the callee


@may_be_called
def run_in_context(
    caller: int, words: Any, places: Any, released: Any, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What is called on the other worker. Raises what the function raises, and `TypeError` for what is no such call."""
    visit, values = _visited(caller, words, places, released, (args, kwargs))
    check_function(function)
    before = visit.enter()
    try:
        result = runner_of(function)(*values[0], **values[1])
    finally:
        visit.leave(before)
    if type(result) is CoroutineType:
        return _finished(visit, result)
    return _answer(visit, result, visit.pack_now)


_WORDS: Final = (int, int, int, int, int, bool, bytes)


@may_be_called
def run_flat(
    caller: int,
    context_id: int,
    stamp: int,
    message_id: int,
    mask: int,
    is_recorded: bool,
    released: bytes | None,
    named: bytes,
    *row: Any,
) -> Any:
    """The same for arguments that are flat."""
    if tuple(map(type, (caller, context_id, stamp, message_id, mask, is_recorded, named))) != _WORDS:
        raise TypeError("what came from another worker is no call in a context")
    check_numbers(context_id, message_id)
    here = contexts()
    agent: Any = current_agent()
    if released is not None:
        agent.after_reply(partial(_release_all, here, read_ids(released)))
    values = unflatten(row)
    places = [place for place in range(len(values)) if mask >> place & 1] if mask else []
    info = as_torch(agent.get_worker_info(caller))
    context = here.retrieve_or_make(context_id, info)
    visit = AutogradVisit(agent, here, context, info, Ticket(context_id, stamp, message_id, places, is_recorded))
    here.hear(stamp)
    if context.unrecorded:
        context.catch_up()
    if places:
        tensors = [values[place] for place in places]
        for tensor in tensors:
            if type(tensor) is not torch.Tensor:
                raise TypeError(f"a {type(tensor).__name__} came from another worker in place of a tensor")
        for place, tensor in zip(places, record_received(context, message_id, info, tensors), strict=True):
            values[place] = tensor
    function = find_function(named, agent)
    thread = here.thread  # not `visit.around`, with its frames: it is on the path of nearly every call in a context
    before, thread.context_id = thread.context_id, context_id
    try:
        result = runner_of(function)(*values)
    finally:
        thread.context_id = before
    if type(result) is CoroutineType:
        return _finished(visit, result)
    if type(result) is torch.Tensor and (is_recorded or not result.requires_grad):
        packed = pack_tensor(result)
        if packed is not None:
            return answer_of(result.requires_grad, *visit.sent(result), packed)
    return _answer(visit, result, visit.pack_now)


def _release_all(here: Contexts, context_ids: Sequence[int]) -> None:
    for context_id in context_ids:
        here.release_if_present(context_id, is_told=True)


@may_be_called
def run_in_context_later(
    caller: int, words: Any, places: Any, released: Any, function: Callable[..., Any], args: Any, kwargs: Any
) -> Future[Any]:
    """The same for a function that is marked as one that gives a future."""
    visit, values = _visited(caller, words, places, released, (args, kwargs))
    check_function(function)
    before = visit.enter()
    try:
        future = run_here(function, values[0], values[1], runner_of(function))
    finally:
        visit.leave(before)
    return future.then(lambda done: _answer(visit, done.value(), visit.pack))


mark_async(run_in_context_later, run_in_context_later, lambda name, result: result)


def _visited(caller: int, words: Any, places: Any, released: Any, values: Any) -> tuple[AutogradVisit, Any]:
    check_kinds((caller, int), (words, tuple), (places, list), (values[0], tuple), (values[1], dict), (released, list))
    here = contexts()
    for context_id in released:
        check_numbers(context_id)
        here.release_if_present(context_id, is_told=True)
    agent: Any = current_agent()
    visit = AutogradVisit.of(agent, here, as_torch(agent.get_worker_info(caller)), Ticket(*words))
    tensors = visit.unpack([_at(values, place) for place in places])
    return visit, replaced(values, places, tensors) if places else values


async def _finished(visit: AutogradVisit, result: CoroutineType[Any, Any, Any]) -> Any:
    return _answer(visit, await _InContext(visit, result), visit.pack)


class _InContext:
    """A coroutine whose every step is run in the context, in whatever thread that is, and among others."""

    __slots__ = ("_coroutine", "_visit")

    def __init__(self, visit: AutogradVisit, coroutine: CoroutineType[Any, Any, Any]) -> None:
        self._visit = visit
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._coroutine.send
        given: Any = None
        while True:
            before = self._visit.enter()
            try:
                awaited = step(given)
            except StopIteration as end:
                return end.value
            finally:
                self._visit.leave(before)
            try:
                step, given = self._coroutine.send, (yield awaited)
            except BaseException as error:
                step, given = self._coroutine.throw, error


def _answer(visit: AutogradVisit, result: Any, pack: Callable[[Tensors], tuple[Tensors, Ticket]]) -> Any:
    """`pack`: not `pack_now` for who is told a result by something that goes on then, and may change it in place."""
    if type(result) is torch.Tensor:  # as nearly always
        tensors, ticket = pack([result])
        return tuple(ticket), [()] if result.requires_grad else [], tensors[0]
    glance = Glance(result)
    if not glance.is_clear:
        return ReplyEnvelope(result, {AutogradRider.key: visit})
    tensors, ticket = pack(glance.tensors)
    return tuple(ticket), glance.places, replaced(result, glance.places, tensors) if glance.places else result

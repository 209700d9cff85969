"""Calls in envelopes: what more than arguments has to travel with a call and its reply.

Most calls go as farcall's own do. Where something has to see the tensors that cross workers, or has to be around the
function where it runs (distributed autograd, device maps, the profiler), the call is put into an *envelope*: the pickle
of function and arguments, with the tensors in a list beside it, and for each *rider* some words for its counterpart at
the other end. The reply comes in an envelope, too. Nothing below this package knows of it: an envelope is an argument
of a plain call to `run`, and one is its result.

Rules
- What concerns no rider goes without an envelope; and mostly what concerns autograd alone (`autograd.short_calls`).
- Riders see the tensors in the order in which they stand in `RIDERS`, and at the other end in the reverse order.
- An envelope is packed while it is pickled, so that references inside are counted as those of any call. A request is
  opened while it is unpickled; a reply when it is known whose it is, and keeps the references until then.
- An error is no envelope: it travels as that of any call. Trips hear of it by `failed`, as they do of a call that could
  not be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple, Protocol

import torch

from farcall.backends.interface import run_here
from farcall.errors import NotAllowedError
from farcall.functions import mark_async
from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.allow_list import check_function, check_kinds, check_tensors, load, may_be_called
from farcall.pytorch.internal import RPCExecMode, _InternalRPCPickler, runner_of
from farcall.pytorch.tensors import receiving_apart, sending_apart
from farcall.pytorch.worker_info import WorkerInfo as TorchWorkerInfo
from farcall.pytorch.worker_info import as_torch
from farcall.runtime.agent import Agent
from farcall.serialization import dumps_inline, offered, offering, register_plain

Tensors = list[torch.Tensor]


class Trip:
    """One call at its caller, as a rider sees it. Each method may do nothing."""

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """The request is made: the tensors to send in place of these, and words for the other end."""
        return tensors, None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Around the pickling of the request, and around the reading of the reply, in the thread that does it."""
        yield

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        """The reply has come: the tensors to hand out in place of these."""
        return tensors

    def failed(self, error: BaseException) -> None:
        """The call has ended with an error."""

    def awaited(self, future: Any) -> Any:
        """The call is sent: the future to hand out in place of this one, which has a `wait`."""
        return future

    def referenced(self, rref: Any) -> None:
        """The remote call is sent, and this is the reference to its result. It has no reply of its own."""


class Visit:
    """One call at its callee, as a rider sees it. Each method may do nothing."""

    def unpack(self, tensors: Tensors) -> Tensors:
        """The request has come: the tensors to hand to the function in place of these."""
        return tensors

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around the function, in the thread that runs it."""
        yield

    def finished(self) -> None:
        """The function has ended, or the future that it returned is settled: before the reply is made."""

    def failed(self) -> None:
        """The function of a remote call has raised. It has no reply that says so to the caller's trip."""

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """The reply is made: the tensors to send in place of these, and words for the caller."""
        return tensors, None


class Departure(NamedTuple):
    """A call that this thread makes."""

    to: WorkerInfo
    function: Callable[..., Any]
    mode: RPCExecMode


class Rider(Protocol):
    """What rides along with calls."""

    @property
    def key(self) -> str:
        """By which its words are found at the other end."""

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """Whether it has to do with a call of this thread to that worker. On the path of every call."""

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """This thread makes a call that concerns it."""

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """A call has come with these words."""


RIDERS: Final[list[Rider]] = []
"""All of them, in order; each module of a rider adds its own when it is imported."""

RESTRICTED: Final[set[str]] = {"autograd"}
"""The keys of those that may ride to a worker with the option `allow`: they look at the words that come."""


def rides_along(agent: Agent, to: WorkerInfo) -> bool:
    """Whether a call of this thread to that worker needs an envelope; mostly not."""
    for rider in RIDERS:  # noqa: SIM110 (any() makes a generator)
        if rider.concerns(agent, to):
            return True
    return False


def rides_alone(rider: Rider, agent: Agent, to: WorkerInfo) -> bool:
    """Whether no other rider has to do with a call of this thread to that worker."""
    for other in RIDERS:  # noqa: SIM110 (any() makes a generator)
        if other is not rider and other.concerns(agent, to):
            return False
    return True


def board(agent: Agent, departure: Departure) -> dict[str, Trip]:
    """The trips of a call of this thread."""
    return {rider.key: rider.board(agent, departure) for rider in RIDERS if rider.concerns(agent, departure.to)}


# At the caller


class Request:
    """A call that is put into an envelope when it is pickled."""

    def __init__(
        self,
        agent: Agent,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        trips: Mapping[str, Trip],
    ) -> None:
        self._agent = agent
        self._call = (function, tuple(args), dict(kwargs))
        self._trips = trips
        self._packed: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._packed is None:  # pickle may come twice: what it cannot name, cloudpickle sends by value
            self._packed = _pack(self._call, [(key, trip.pack) for key, trip in self._trips.items()])
        body, tensors, words = self._packed
        return _Opened, (as_torch(self._agent.info), body, tensors, words)


@contextmanager
def handling(trips: Mapping[str, Trip]) -> Iterator[None]:
    """Around what becomes of a request before it is sent, and of a reply that has come; see `Trip`."""
    with ExitStack() as around:
        for trip in trips.values():
            around.enter_context(trip.handling())
        yield


@contextmanager
def sending(trips: Mapping[str, Trip]) -> Iterator[None]:
    """Around the sending of a request: the trips hear of what it raises."""
    try:
        with handling(trips):
            yield
    except BaseException as error:
        for trip in trips.values():
            trip.failed(error)
        raise


def reply_of(future: Future[Any], trips: Mapping[str, Trip]) -> Future[Any]:
    """A future of what the function gave, for one of the envelope that comes back."""

    def unpack(done: Future[Any]) -> Any:
        try:
            with handling(trips):
                envelope = done.value()
        except BaseException as error:
            for trip in trips.values():
                trip.failed(error)
            raise
        if not isinstance(envelope, ReplyEnvelope):  # it was called on this very worker, and not pickled
            raise TypeError(f"no envelope came back but a {type(envelope).__name__}")
        return envelope.open(trips)

    return future.then(unpack)


# At the callee


class _Opened:
    """A request that has come: opened while it is unpickled, as the references inside are there only then."""

    def __init__(self, caller: WorkerInfo, body: bytes, tensors: Tensors, words: dict[str, Any]) -> None:
        from farcall.api import current_agent  # where it arrives

        agent = current_agent()
        self.visits = {
            rider.key: rider.visit(agent, caller, words[rider.key])  # type: ignore[arg-type]  # it is one of ours
            for rider in RIDERS
            if rider.key in words
        }
        for visit in reversed(self.visits.values()):
            tensors = visit.unpack(tensors)
        self.function, self.args, self.kwargs = loads_apart(body, tensors)
        check_function(self.function)
        if type(self.args) not in (tuple, list) or type(self.kwargs) is not dict:
            raise TypeError("what came from another worker are no arguments of a function")

    def run(self) -> Future[Any]:
        with ExitStack() as around:
            for visit in self.visits.values():
                around.enter_context(visit.around())
            return run_here(self.function, self.args, self.kwargs, runner_of(self.function))


class ReplyEnvelope:
    """A result that is put into an envelope when it is pickled; or one that has come."""

    def __init__(self, result: Any, visits: Mapping[str, Visit]) -> None:
        self._result = result
        self._visits = visits
        self._packed: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._packed is None:
            self._packed = _pack(self._result, [(key, visit.pack) for key, visit in self._visits.items()])
        return _received, self._packed

    def open(self, trips: Mapping[str, Trip]) -> Any:
        """What the function gave."""
        body, tensors, words, handles = self._result
        for key in reversed(list(trips)):
            tensors = trips[key].unpack(tensors, words.get(key))
        with offering(handles):
            return loads_apart(body, tensors)


def _received(body: bytes, tensors: Tensors, words: dict[str, Any]) -> ReplyEnvelope:
    return ReplyEnvelope((body, tensors, words, offered()), {})


@may_be_called
def run(request: _Opened) -> Future[Any]:
    """What is called on the other worker: runs what is in the envelope, and answers with one.

    Raises `TypeError` for what is no envelope.
    """
    check_kinds((request, _Opened))
    visits = request.visits

    def finished(done: Future[Any]) -> ReplyEnvelope:
        for visit in visits.values():
            visit.finished()
        return ReplyEnvelope(done.value(), visits)

    return request.run().then(finished)


@may_be_called
def run_remotely(request: _Opened) -> Future[Any]:
    """The same for a remote call: the result stays here, in no envelope."""
    check_kinds((request, _Opened))
    visits = request.visits

    def finished(done: Future[Any]) -> Any:
        for visit in visits.values():
            visit.finished()
        if done.exception() is not None:
            for visit in visits.values():
                visit.failed()
        return done.value()

    return request.run().then(finished)


for _function in (run, run_remotely):
    mark_async(_function, _function, lambda name, result: result)


# At workers that restrict what others may do: what is inside is loaded by their list, and the function judged by it


def _open_checked(caller: Any, body: Any, tensors: Any, words: Any) -> _Opened:
    from farcall.api import current_agent

    check_kinds((caller, TorchWorkerInfo), (body, bytes), (words, dict))
    check_tensors(tensors)
    for key in words:
        if key not in RESTRICTED:
            raise NotAllowedError(
                f"a call with {key!r} along is not allowed on this worker, as it has the option allow; make it without"
            )
    return _Opened(as_torch(current_agent().get_worker_info(caller.name)), body, tensors, words)


def _receive_checked(body: Any, tensors: Any, words: Any) -> ReplyEnvelope:
    check_kinds((body, bytes), (words, dict))
    check_tensors(tensors)
    return _received(body, tensors, words)


def _take_checked(place: Any) -> torch.Tensor:
    check_kinds((place, int))
    return _InternalRPCPickler._tensor_receiver(place)


register_plain(_Opened, _open_checked)
register_plain(_received, _receive_checked)
register_plain(_InternalRPCPickler._tensor_receiver, _take_checked)
register_plain(TorchWorkerInfo, TorchWorkerInfo)


# Pickles with the tensors beside them


def _pack(value: Any, pack: Sequence[tuple[str, Callable[[Tensors], tuple[Tensors, Any]]]]) -> tuple[Any, ...]:
    body, tensors = dumps_apart(value)
    words = {}
    for key, pack_for in pack:
        tensors, words[key] = pack_for(tensors)
    return body, tensors, words


def dumps_apart(value: Any) -> tuple[bytes, Tensors]:
    """The pickle of a value, and the tensors in it, which are not in the pickle. Raises what pickle raises."""
    with sending_apart() as tensors:
        body = dumps_inline(value)
    return body, tensors


def loads_apart(body: bytes, tensors: Tensors) -> Any:
    """The value again, with these tensors. Raises `SerializationError` if it cannot be rebuilt here.

    `NotAllowedError` for what this worker does not allow.
    """
    with receiving_apart(tensors):
        return load(body)

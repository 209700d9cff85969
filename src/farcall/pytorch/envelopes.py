"""Calls in envelopes: data that travels with a call and its reply, besides the arguments and the result.

Most calls are sent as farcall's own. Distributed autograd, device maps and the profiler must see the tensors of a call,
or must run code around the function. For them the call is put into an *envelope*: the pickle of the function and its
arguments, the tensors in a list beside it, and some data of each interceptor (`Rider`) for its counterpart at the other
end. The reply comes in an envelope as well. No layer below this package knows about envelopes: one is the argument of a
plain call of `run`, and another is the result of that call.

Rules
- A call that no interceptor handles is sent without an envelope. So are most calls that only autograd handles
  (`autograd.short_calls`).
- Interceptors see the tensors in the order of `RIDERS`, and at the other end in the reverse order.
- An envelope is packed while it is pickled, so that the references in it are counted as in any call. A request is
  opened while it is unpickled. A reply is opened when the thread that waits for it takes it, and keeps its references
  until then.
- An error is not put into an envelope. It travels as in any call. Interceptors get it in `failed`, as they do when
  the call could not be sent.
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
    """What an interceptor does for one call at the caller: one method for each step of the call.

    A subclass overrides the methods that it needs. The methods of this class change nothing: they return what they are
    given, and run no code around the call. The constructor takes no arguments.
    """

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Called when the request is pickled. Returns the tensors to send, and data for the interceptor at the callee.

        The default returns `tensors` and None. If it raises, the program that makes the call gets the error.

        Args:
            tensors: The tensors of the request; may be empty.
        """
        return tensors, None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Context manager around pickling the request and around reading the reply, in the thread that does either.

        The default has no effect.
        """
        yield

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        """Called when the reply has arrived. Returns the tensors to use in place of those of the reply.

        The default returns `tensors`. If it raises, the call fails with that error.

        Args:
            tensors: The tensors of the reply; may be empty.
            words: The data that the same interceptor's `pack` returned at the callee; None if there is none.
        """
        return tensors

    def failed(self, error: BaseException) -> None:
        """Called when the call could not be sent, or has ended with an error. The default does nothing.

        Args:
            error: Why the call failed.
        """

    def awaited(self, future: Any) -> Any:
        """Called when a call with a reply was sent. Returns the future for the program; by default `future` itself.

        Args:
            future: The future of the result, as the interceptors before this one returned it.
        """
        return future

    def referenced(self, rref: Any) -> None:
        """Called when a call by `remote` was sent. The default does nothing.

        Such a call has no reply, so `unpack` and `awaited` are not called.

        Args:
            rref: The reference to the result of the call.
        """


class Visit:
    """What an interceptor does for one call at the callee: one method for each step of the call.

    A subclass overrides the methods that it needs. The methods of this class change nothing: they return what they are
    given, and run no code around the function. The constructor takes no arguments.
    """

    def unpack(self, tensors: Tensors) -> Tensors:
        """Called when the request has arrived. Returns the tensors for the function in place of those of the request.

        The default returns `tensors`, which may be empty. If it raises, the call fails with that error.
        """
        return tensors

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context manager around the function, in the thread that runs it. The default has no effect."""
        yield

    def finished(self) -> None:
        """Called before the reply is made: the function has returned or raised, or its future is done.

        The default does nothing.
        """

    def failed(self) -> None:
        """Called after `finished` if the function of a call by `remote` has raised. The caller gets no reply.

        The default does nothing.
        """

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Called when the reply is pickled. Returns the tensors to send, and data for the interceptor at the caller.

        The default returns `tensors` and None. If it raises, the caller gets that error.

        Args:
            tensors: The tensors of the reply; may be empty.
        """
        return tensors, None


class Departure(NamedTuple):
    """A call that the current thread makes, as interceptors see it. The fields are not checked.

    Attributes:
        to: The callee.
        function: The function that the program calls.
        mode: How the program calls it: by `rpc_sync`, `rpc_async` or `remote`.
    """

    to: WorkerInfo
    function: Callable[..., Any]
    mode: RPCExecMode


class Rider(Protocol):
    """Protocol of an interceptor that must see the tensors of calls. All such interceptors are in the list `RIDERS`.

    At the caller, `concerns` says whether the interceptor takes part in a call. If it does, `board` returns an object
    that does its work for this call. At the callee, another method returns such an object for a call that has come.
    """

    @property
    def key(self) -> str:
        """A text that is unique among `RIDERS`. The data of the interceptor are sent under this key."""

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """Returns True if the interceptor takes part in a call that the current thread makes. Every call asks this.

        Args:
            agent: The agent of this worker.
            to: The callee.
        """

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """Returns the object that does the interceptor's work for one call that the current thread makes.

        `agent` is the agent of this worker. The other argument is the call: the callee, the function, and how it is
        called. Call this only if `concerns` is True for the call; otherwise the result is undefined.
        """

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """Returns the object that does the interceptor's work for one call that has come from another worker.

        Args:
            agent: The agent of this worker.
            caller: The worker that calls.
            words: The data that the same interceptor's `pack` returned at the caller. Data that are not valid may raise
                any exception, and the call fails with it.
        """


RIDERS: Final[list[Rider]] = []
"""All interceptors, in order. The module of an interceptor adds it when it is imported."""

RESTRICTED: Final[set[str]] = {"autograd"}
"""The keys of the interceptors that check the data that come, so that workers with an allow-list accept them."""


def rides_along(agent: Agent, to: WorkerInfo) -> bool:
    """Returns True if any interceptor takes part in a call that the current thread makes.

    Such a call is sent in an envelope: with the tensors beside the pickle, and with data of the interceptors. Returns
    False for most calls, and if there are no interceptors.

    Args:
        agent: The agent of this worker.
        to: The callee.
    """
    for rider in RIDERS:  # noqa: SIM110 (any() makes a generator)
        if rider.concerns(agent, to):
            return True
    return False


def rides_alone(rider: Rider, agent: Agent, to: WorkerInfo) -> bool:
    """Returns True if no interceptor other than `rider` takes part in a call that the current thread makes.

    Args:
        rider: The interceptor that is not asked. So the result does not say whether it takes part.
        agent: The agent of this worker.
        to: The callee.
    """
    for other in RIDERS:  # noqa: SIM110 (any() makes a generator)
        if other is not rider and other.concerns(agent, to):
            return False
    return True


def board(agent: Agent, departure: Departure) -> dict[str, Trip]:
    """Returns, by key, the objects that do the work of all interceptors that take part in a call of this thread.

    `agent` is the agent of this worker. The other argument is the call: the callee, the function, and how it is called.
    Returns an empty dict if no interceptor takes part.
    """
    return {rider.key: rider.board(agent, departure) for rider in RIDERS if rider.concerns(agent, departure.to)}


# At the caller


class Request:
    """A call that is put into an envelope when it is pickled: its pickle, its tensors, and data of the interceptors.

    Use it as the only argument of a call of `run` or `run_remotely`, which runs the function in it. The arguments are
    not checked.

    Args:
        agent: The agent of this worker.
        function: The function to call.
        args: Its positional arguments; may be empty.
        kwargs: Its keyword arguments; may be empty.
        trips: The objects that do the work of the interceptors for this call, by key. `board` returns them. May be
            empty.
    """

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
        """Returns what pickle needs to rebuild the call at the callee: a function and its arguments.

        The first call packs the envelope, and later ones return the same. Raises what pickle raises if an argument
        cannot be pickled, for example `PicklingError` or `TypeError`, and what an interceptor raises.
        """
        if self._packed is None:  # pickle may come twice: what it cannot name, cloudpickle sends by value
            self._packed = _pack(self._call, [(key, trip.pack) for key, trip in self._trips.items()])
        body, tensors, words = self._packed
        return _Opened, (as_torch(self._agent.info), body, tensors, words)


@contextmanager
def handling(trips: Mapping[str, Trip]) -> Iterator[None]:
    """Context manager: enters the context manager `handling` of all interceptors that take part in a call.

    The argument has, by key, the objects that do the work of these interceptors for the call. If it is empty, the
    context manager has no effect.
    """
    with ExitStack() as around:
        for trip in trips.values():
            around.enter_context(trip.handling())
        yield


@contextmanager
def sending(trips: Mapping[str, Trip]) -> Iterator[None]:
    """Context manager around sending a request: if sending raises, calls `failed` of all interceptors of the call.

    The error is raised again. The block runs inside the context manager `handling` of these interceptors. The argument
    has, by key, the objects that do their work for the call. If it is empty, the context manager has no effect.
    """
    try:
        with handling(trips):
            yield
    except BaseException as error:
        for trip in trips.values():
            trip.failed(error)
        raise


def reply_of(future: Future[Any], trips: Mapping[str, Trip]) -> Future[Any]:
    """Returns a future of the result of a call, whose reply comes back in an envelope.

    `future` is the future of that envelope: the pickle of the result, a list of its tensors, and data of the
    interceptors. The returned future fails with the error of the call, or with `TypeError` if no envelope came back.

    The second argument has, by key, the objects that do the work of the interceptors for this call. It may be empty.
    They see the tensors in the envelope. If the call fails, the method `failed` of each object is called.
    """

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
    """A request that came in an envelope: a pickle, its tensors in a list beside it, and data of the interceptors.

    The unpickler creates it, because the references of the message exist only while it reads. It has the function to
    run, its arguments, and the objects that do the work of the interceptors for the call.

    Args:
        caller: The worker that calls.
        body: The pickle of three items, without tensors: the function, its positional and its keyword arguments.
        tensors: The tensors that belong to the pickle; may be empty.
        words: The data of the caller's interceptors, by key. Keys of unknown interceptors are ignored.

    Raises:
        TypeError: The arguments in the pickle are not a tuple or list and a dict.
        ValueError: The pickle does not have three items.
        NotAllowedError: The allow-list of this worker forbids the function or something in the arguments.
        SerializationError: The pickle cannot be read here.
    """

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
        """Runs the function of the request inside the context manager `around` of each interceptor.

        Returns a future of its result, which fails with what the function raises. What an interceptor raises is raised
        here.
        """
        with ExitStack() as around:
            for visit in self.visits.values():
                around.enter_context(visit.around())
            return run_here(self.function, self.args, self.kwargs, runner_of(self.function))


class ReplyEnvelope:
    """The reply to a call, in an envelope: a pickle, its tensors in a list beside it, and data of the interceptors.

    The callee creates it from a result. The envelope is packed when it is pickled. At the caller, the unpickler creates
    it from what has come, and `open` returns the result. The arguments are not checked.

    At the callee, `result` is the result of the function. The second argument has, by key, the objects that do the work
    of the interceptors for the call. It may be empty.

    At the caller, `result` is a tuple of four items: the pickle of the result, its tensors, the data of the
    interceptors by key, and the references that came with it. The second argument is an empty dict.
    """

    def __init__(self, result: Any, visits: Mapping[str, Visit]) -> None:
        self._result = result
        self._visits = visits
        self._packed: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what pickle needs to rebuild the envelope at the caller: a function and its arguments.

        The first call packs the envelope, and later ones return the same. Raises what pickle raises if the result
        cannot be pickled, for example `PicklingError` or `TypeError`, and what an interceptor raises.
        """
        if self._packed is None:
            self._packed = _pack(self._result, [(key, visit.pack) for key, visit in self._visits.items()])
        return _received, self._packed

    def open(self, trips: Mapping[str, Trip]) -> Any:
        """Returns the result in a reply that has arrived. Call it at the caller only.

        Args:
            trips: The objects that do the work of the caller's interceptors for the call, by key. They see the tensors
                of the result, and may replace them. May be empty.

        Raises:
            SerializationError: The result cannot be rebuilt here.
            NotAllowedError: The allow-list of this worker forbids something in it.
            Exception: What the method `unpack` of an interceptor raises.
        """
        body, tensors, words, handles = self._result
        for key in reversed(list(trips)):
            tensors = trips[key].unpack(tensors, words.get(key))
        with offering(handles):
            return loads_apart(body, tensors)


def _received(body: bytes, tensors: Tensors, words: dict[str, Any]) -> ReplyEnvelope:
    """Called by the unpickler: returns a reply, with the references of the message that this thread is reading.

    The arguments are not checked.

    Args:
        body: The pickle of the result, without tensors.
        tensors: The tensors that belong to the pickle; may be empty.
        words: The data of the callee's interceptors, by key.
    """
    return ReplyEnvelope((body, tensors, words, offered()), {})


@may_be_called
def run(request: _Opened) -> Future[Any]:
    """Called remotely for `rpc_sync` and `rpc_async` if interceptors take part in the call: runs its function.

    Args:
        request: The request with the function, as the unpickler made it. Anything else raises `TypeError`.

    Returns:
        A future of a `ReplyEnvelope`: the result, and data of the interceptors. It fails with what the function raises.
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
    """Called remotely for `remote` if interceptors take part in the call: runs its function. The result stays here.

    Args:
        request: The request with the function, as the unpickler made it. Anything else raises `TypeError`.

    Returns:
        A future of the result. It fails with what the function raises.
    """
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
    """Called by the unpickler of a worker with an allow-list: checks the parts of a request, and returns the request.

    Args:
        caller: The `WorkerInfo` of the worker that calls. An unknown one raises `UnknownWorkerError`.
        body: The pickle of the function and its arguments, without tensors; bytes.
        tensors: The tensors that belong to the pickle, a list; may be empty.
        words: The data of the caller's interceptors by key, a dict.

    Raises:
        TypeError: A part has the wrong type.
        NotAllowedError: A key in `words` is not in `RESTRICTED`, the keys of interceptors that check their data. Or
            the allow-list forbids something in the call.
        SerializationError: The pickle cannot be read here.
    """
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
    """Called by the unpickler of a worker with an allow-list: checks the types of the parts of a reply, and returns it.

    Raises `TypeError` if a part has another type than said below.

    Args:
        body: The pickle of the result, without tensors; bytes.
        tensors: The tensors that belong to the pickle, a list; may be empty.
        words: The data of the callee's interceptors by key, a dict.
    """
    check_kinds((body, bytes), (words, dict))
    check_tensors(tensors)
    return _received(body, tensors, words)


def _take_checked(place: Any) -> torch.Tensor:
    """Returns the tensor at index `place` of the list of tensors that belongs to the pickle being read.

    It is for workers with an allow-list. Raises `TypeError` if `place` is not an int, and `IndexError` if the list is
    too short.
    """
    check_kinds((place, int))
    return _InternalRPCPickler._tensor_receiver(place)


register_plain(_Opened, _open_checked)
register_plain(_received, _receive_checked)
register_plain(_InternalRPCPickler._tensor_receiver, _take_checked)
register_plain(TorchWorkerInfo, TorchWorkerInfo)


# Pickles with the tensors beside them


def _pack(value: Any, pack: Sequence[tuple[str, Callable[[Tensors], tuple[Tensors, Any]]]]) -> tuple[Any, ...]:
    """Returns the pickle of a value, its tensors as the interceptors changed them, and their data by key.

    Raises what pickle raises if the value cannot be pickled, for example `PicklingError` or `TypeError`, and what an
    interceptor raises.

    Args:
        value: The value.
        pack: The key and the method `pack` of each interceptor, in order; may be empty.
    """
    body, tensors = dumps_apart(value)
    words = {}
    for key, pack_for in pack:
        tensors, words[key] = pack_for(tensors)
    return body, tensors, words


def dumps_apart(value: Any) -> tuple[bytes, Tensors]:
    """Returns the pickle of a value without its tensors, and the list of its tensors; an empty list if it has none.

    Raises what pickle raises if the value cannot be pickled, for example `PicklingError` or `TypeError`.
    """
    with sending_apart() as tensors:
        body = dumps_inline(value)
    return body, tensors


def loads_apart(body: bytes, tensors: Tensors) -> Any:
    """Rebuilds a value from its pickle and its tensors, the two results of `dumps_apart`.

    Args:
        body: The pickle.
        tensors: The tensors of the value, in the order of `dumps_apart`; may be empty.

    Raises:
        SerializationError: The value cannot be rebuilt here, for example because a tensor is missing.
        NotAllowedError: The allow-list of this worker forbids something in it.
    """
    with receiving_apart(tensors):
        return load(body)

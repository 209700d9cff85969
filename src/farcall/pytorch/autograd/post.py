"""The contexts of this process's worker, and how it talks with others about them: by plain calls of functions of here.

Nothing rides along with these calls. They have no time limit of their own: a worker that is lost ends them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from farcall.api import current_agent, is_initialized
from farcall.backends.interface import MembershipChange
from farcall.errors import RpcError, RpcTimeoutError, WorkerLostError
from farcall.functions import mark_async
from farcall.futures import DONE, Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.allow_list import check_kinds, check_numbers, check_tensors, may_be_called
from farcall.pytorch.autograd import engine
from farcall.pytorch.autograd.contexts import Contexts
from farcall.pytorch.autograd.flat import answer_of, pack_gradient, tensor_of
from farcall.pytorch.autograd.telling import PassId
from farcall.runtime.agent import Agent

logger = logging.getLogger("farcall")

_NO_LIMIT: Final = 0.0
_ATTEMPTS: Final = 20


class AgentPost:
    """Calls by the agent of this process.

    That contexts are released is not urgent: it is told along with the next call in a context (`take_releases`), or
    some milliseconds later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: dict[int, tuple[WorkerInfo, list[int]]] = {}
        self._agent: weakref.ref[Any] | None = None
        self._rouse: Callable[[], None] = lambda: None

    def own_name(self) -> str:
        """See `Post`."""
        return current_agent().get_worker_info().name if is_initialized() else "(that was shut down)"

    def propagate(
        self,
        to: WorkerInfo,
        context_id: int,
        pass_id: PassId,
        message_id: int,
        gradients: list[torch.Tensor],
        retain_graph: bool,
        takes_back: bool,
    ) -> Future[Any]:
        """See `Post`."""
        packed = [pack_gradient(gradient) for gradient in gradients]
        if None not in packed:
            return call(to, _propagate_flat, (context_id, *pass_id, message_id, retain_graph, takes_back, *packed))
        args = (context_id, tuple(pass_id), message_id, gradients, retain_graph, takes_back)
        return call(to, _propagate, args)

    def await_end(self, to: WorkerInfo, context_id: int, pass_id: PassId) -> Future[Any]:
        """See `Post`."""
        return call(to, _await_end, (context_id, tuple(pass_id)))

    def release(self, to: WorkerInfo, context_id: int) -> None:
        """See `Post`."""
        agent: Any = current_agent() if is_initialized() else None
        if not isinstance(agent, Agent):
            _tell(to, _release, (context_id,), _ATTEMPTS)
            return
        with self._lock:
            if self._agent is None or self._agent() is not agent:
                self._agent = weakref.ref(agent)
                self._rouse = agent.process_soon(self._has_untold, self._tell_releases)
            self._untold.setdefault(to.id, (to, []))[1].append(context_id)
        self._rouse()

    def take_releases(self, to: WorkerInfo) -> list[int]:
        """The contexts of whose release a call to that worker is to tell it. If it fails, tell `release` again."""
        if to.id not in self._untold:
            return []
        with self._lock:
            return self._untold.pop(to.id, (to, []))[1]

    def _has_untold(self) -> bool:
        return bool(self._untold)

    def _tell_releases(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, {}
        for to, context_ids in untold.values():
            for context_id in context_ids:
                _tell(to, _release, (context_id,), _ATTEMPTS)

    def forget(self, to: WorkerInfo, context_id: int, request: int) -> None:
        """See `Post`."""
        _tell(to, _forget, (context_id, request), _ATTEMPTS)

    def join(self, maker: int, context_id: int) -> None:
        """See `Post`."""
        if not is_initialized():  # we are being shut down, and our contexts go with us
            return
        agent: Any = current_agent()
        to = next((info for info in agent.get_worker_infos() if info.id == maker), None)
        if to is not None:  # else we hear of its loss
            _tell(to, _join, (context_id, agent.get_worker_info()), _ATTEMPTS)

    def abandon(self, to: WorkerInfo, context_id: int, pass_id: PassId, reason: str) -> None:
        """See `Post`."""
        _tell(to, _abandon, (context_id, tuple(pass_id), reason), _ATTEMPTS)


def call(to: WorkerInfo, function: Any, args: tuple[Any, ...], unattended: bool = False) -> Future[Any]:
    """A call without a time limit. `unattended`: nobody is going to wait for it, nor has it call back at once."""
    agent: Any = current_agent()
    return agent.call(to, function, args, None, _NO_LIMIT, unattended)  # type: ignore[no-any-return]


def _tell(to: WorkerInfo, function: Any, args: tuple[Any, ...], attempts: int) -> None:
    """Has it done there, though connections break. If it cannot be, the other is gone, or we are."""
    try:
        future = call(to, function, args, unattended=True)
    except RpcError as error:
        logger.debug("worker %r was not told %s: %s", to.name, function.__name__, error)
        return

    def answered(done: Future[None]) -> None:
        error = done.exception()
        if error is None or not _is_there(to):
            return
        if attempts > 1 and isinstance(error, (WorkerLostError, RpcTimeoutError)):  # the connection broke
            _tell(to, function, args, attempts - 1)
        else:
            logger.error("worker %r could not be told %s%r: %s", to.name, function.__name__, args, error)

    # Nobody waits for the answer, so it is read when somebody comes by: to have it read at once takes another thread.
    future.watch(answered, waker=False, attended=True)


def _is_there(worker: WorkerInfo) -> bool:
    """Whether it still has to be told: neither it nor this worker is gone, or about to be."""
    agent: Any = current_agent() if is_initialized() else None
    if agent is None or agent.closed is not None:
        return False
    return worker.name in {info.name for info in agent.get_worker_infos()}


@may_be_called
def _propagate(
    context_id: int,
    pass_id: tuple[int, int],
    message_id: int,
    gradients: list[torch.Tensor],
    retain_graph: bool,
    takes_back: bool,
) -> Future[Any]:
    check_numbers(context_id, message_id)
    check_kinds((retain_graph, bool), (takes_back, bool))
    check_tensors(gradients)
    found = contexts()
    return _settled(
        engine.take_part(found, context_id, _pass_id(pass_id), message_id, gradients, retain_graph, takes_back)
    )


@may_be_called
def _propagate_flat(
    context_id: int, worker: int, number: int, message_id: int, retain_graph: bool, takes_back: bool, *packed: Any
) -> Any:
    """The same where all gradients are small."""
    check_numbers(context_id, message_id)
    check_kinds((worker, int), (number, int), (retain_graph, bool), (takes_back, bool))
    gradients = [tensor_of(each) for each in packed]
    pass_id = PassId(worker, number)
    answer = engine.take_part(contexts(), context_id, pass_id, message_id, gradients, retain_graph, takes_back)
    if type(answer) is tuple and len(answer[1]) == 1:
        back, brought = answer[1][0]
        flat = pack_gradient(brought[0]) if len(brought) == 1 else None
        if flat is not None:
            return _Settled(answer_of(answer[0], 0, back, flat))
    return answer if isinstance(answer, Future) else _Settled(answer)


class _Settled:
    """As good as a future, for who runs functions and only looks whether it is done: costs less to make."""

    __slots__ = ("_value",)

    _state = DONE

    def __init__(self, value: Any) -> None:
        self._value = value


@may_be_called
def _await_end(context_id: int, pass_id: tuple[int, int]) -> Future[Any]:
    check_numbers(context_id)
    return _settled(engine.await_end(contexts(), context_id, _pass_id(pass_id)))


def _settled(answer: Any) -> Future[Any]:
    if isinstance(answer, Future):
        return answer
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


for _function in (_propagate, _propagate_flat, _await_end):
    mark_async(_function, _function, lambda name, result: result)


@may_be_called
def _release(context_id: int) -> None:
    check_numbers(context_id)
    contexts().release_if_present(context_id, is_told=True)


@may_be_called
def _forget(context_id: int, request: int) -> None:
    check_numbers(context_id, request)
    contexts().forget(context_id, request)


@may_be_called
def _join(context_id: int, worker: WorkerInfo) -> None:
    check_numbers(context_id)
    if not isinstance(worker, WorkerInfo):
        raise TypeError(f"a {type(worker).__name__} came from another worker in place of who it is")
    contexts().take_in(context_id, worker)


@may_be_called
def _abandon(context_id: int, pass_id: tuple[int, int], reason: str) -> None:
    check_numbers(context_id)
    check_kinds((reason, str))
    contexts().abandon(context_id, _pass_id(pass_id), reason)


def _pass_id(numbers: tuple[int, int]) -> PassId:
    worker, number = numbers
    check_kinds((worker, int), (number, int))
    return PassId(worker, number)


class _Process:
    """What this process has: the contexts of its worker, and the agent at which we watch who is lost."""

    contexts: Contexts | None = None
    watched: weakref.ref[Agent] | None = None


_process: Final = _Process()


def take_releases(to: WorkerInfo) -> list[int]:
    """See `AgentPost`: of this process's worker."""
    found = _process.contexts
    return found.post.take_releases(to) if found is not None and isinstance(found.post, AgentPost) else []


def begin(worker_id: int) -> None:
    """This process is that worker. Raises `RuntimeError` for a number that is none."""
    end()
    _process.contexts = Contexts(worker_id, AgentPost())


def end() -> None:
    """The worker ends, and its contexts do."""
    ended, _process.contexts, _process.watched = _process.contexts, None, None
    if ended is not None:
        ended.close()


def contexts() -> Contexts:
    """Those of this process's worker. Raises `RuntimeError` if it is none."""
    found, watched = _process.contexts, _process.watched
    if found is not None and watched is not None and watched() is not None:
        return found
    if found is None and is_initialized():  # by farcall's own init_rpc, which knows nothing of this
        begin(current_agent().get_worker_info().id)
        found = _process.contexts
    if found is None:
        raise RuntimeError("Need to initialize distributed autograd using torch.distributed.autograd._init()")
    if is_initialized():
        _watch(found, current_agent())
    return found


def is_in_context() -> bool:
    """Whether this thread is in a context."""
    found = _process.contexts
    return found is not None and found.thread.context_id is not None


def contexts_of(agent: Agent) -> Contexts:
    """Those of that agent, which is the one of this process."""
    return contexts()


def _watch(found: Contexts, agent: Any) -> None:
    def changed(change: MembershipChange) -> None:
        if change.kind == "joined":
            found.joined(change.worker)
        else:
            found.lost(change.worker)

    _process.watched = weakref.ref(agent)
    agent.watch_members(changed)

"""A backend written outside the package: one worker that runs its own calls, over a queue in memory.

It shows how little an agent needs. Arguments are not copied, and references are plain objects. What an agent need not
do is not here: who it is, what a call is given, and its timeout are seen to by `RpcAgent`.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farcall.backends import BackendValue, NoReferences, RpcAgent, run_here
from farcall.errors import NotInitializedError, UnknownWorkerError
from farcall.futures import Future
from farcall.options import UNSET_RPC_TIMEOUT, BackendOptions
from farcall.protocol.frames import METHOD, PRESENCE, TYPE, VALUE
from farcall.protocol.ids import RRefId, WorkerInfo
from farcall.runtime.leaks import Inventory


@dataclass(kw_only=True)
class InProcessOptions(BackendOptions):
    """Its options."""

    with_references: bool = True


class InProcessAgent(RpcAgent):
    """One worker, and one thread that runs what it calls."""

    def __init__(self, name: str, options: InProcessOptions) -> None:
        self.options = options.frozen_copy()
        self._me = WorkerInfo(name, 0)
        self.asked_to_leave: list[tuple[bool, float]] = []
        self.calls = 0
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="in-process", daemon=True)
        self._closed = False
        if options.with_references:
            self.reference_store = InProcessReferences(self)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def run_on(
        self,
        worker: WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> Future[Any]:
        if self._closed:
            raise NotInitializedError("this worker has shut down")
        self.calls += 1
        future: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.value())

        self._jobs.put(lambda: run_here(function, args, kwargs).then(settle))
        return future

    def remote(self, to: Any, function: Any, args: Any, kwargs: Any, timeout: float = -1.0) -> Any:
        if isinstance(self.reference_store, NoReferences):
            return super().remote(to, function, args, kwargs)
        assert isinstance(self.reference_store, InProcessReferences)
        return InProcessHandle(self.reference_store, self.call(to, function, args, kwargs, 0))

    def get_worker_info(self, to: Any = None) -> WorkerInfo:
        if to not in (None, self._me, self._me.name, self._me.id):
            raise UnknownWorkerError(f"there is no worker {to!r}: this one is alone")
        return self._me

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [self._me]

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        self.call(self._me, int, None, None, 0).wait()  # what came before it has been run

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        self.asked_to_leave.append((graceful, timeout))
        if graceful and not self._closed:
            self.join(timeout=timeout)
        self._closed = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def get_metrics(self) -> Mapping[str, Any]:
        return {"calls_made": self.calls, "peers": {}}


class InProcessHandle:
    """A handle of a value that is here, as all are."""

    fork = None
    confirmed = True

    def __init__(self, store: InProcessReferences, value: Future[Any]) -> None:
        self.reference_store = store
        self.value = value
        self.reference = RRefId(0, 0, next(store.numbers))

    def check(self) -> None:
        """They always lead somewhere."""


class InProcessReferences:
    """Store and calls of references in one."""

    def __init__(self, agent: InProcessAgent) -> None:
        self.calling = self
        self.agent = agent
        self.info = agent.info
        self.numbered = {0: agent}
        self.me = 0
        self.numbers = itertools.count(1)

    def own(self, value: Any) -> InProcessHandle:
        there: Future[Any] = Future()
        there.set_result(value)
        return InProcessHandle(self, there)

    def call_on(
        self, handle: Any, what: bytes, method: str, args: Any, kwargs: Any, timeout: float, unattended: bool = False
    ) -> Future[Any]:
        def ask() -> Any:
            value = handle.value.value()
            if what == METHOD:
                return getattr(value, method)(*args, **(kwargs or {}))
            return {PRESENCE: None, TYPE: type(value)}.get(what, value)

        return self.agent.call(0, ask, None, None, timeout)

    def call_on_many(self, handles: Any, method: str, args: Any, kwargs: Any, timeout: float) -> list[Future[Any]]:
        return [self.call_on(handle, METHOD, method, args, kwargs, timeout) for handle in handles]

    def fetch(self, handle: Any, timeout: float) -> Any:
        return self.call_on(handle, VALUE, "", (), None, timeout).wait()

    def remote_on(self, handle: Any, method: str, args: Any, kwargs: Any) -> InProcessHandle:
        return InProcessHandle(self, self.call_on(handle, METHOD, method, args, kwargs, 0))

    def resolve_timeout(self, timeout: float) -> float:
        return self.agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout

    def inventory(self) -> Inventory:
        return Inventory((), ())

    def debug_info(self) -> dict[str, str]:
        return {"num_owner_rrefs": "0"}

    def give_up_handles(self, reason: str) -> None:
        """There are none of others'."""

    def forget(self, reason: str) -> None:
        """Nothing is kept."""


def construct_options(rpc_timeout: float, init_method: str, **more: Any) -> InProcessOptions:
    return InProcessOptions(rpc_timeout=rpc_timeout, init_method=init_method, **more)


def init_agent(
    store: None, name: str, rank: int, world_size: int | None, rpc_backend_options: InProcessOptions
) -> InProcessAgent:
    assert store is None
    return InProcessAgent(name, rpc_backend_options)


BACKEND = BackendValue(construct_options, init_agent)

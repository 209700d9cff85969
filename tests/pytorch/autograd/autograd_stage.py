"""Workers with contexts and no agents: what one tells another is done by a thread of this process.

with Workers(2) as workers:
    context_id = workers.new_context()
    (there,) = workers.move(context_id, 0, 1, [x])        # as an argument of a call, or a result
    (back,) = workers.move(context_id, 1, 0, [there * 2])
    workers.backward(context_id, 0, [back.sum()])
    workers.gradients(context_id, 0)[x]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from farcall.errors import WorkerLostError
from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.contexts import Contexts, DistAutogradContext
from farcall.pytorch.autograd.engine import await_end, run_backward, take_part
from farcall.pytorch.autograd.riding import pack, unpack
from farcall.pytorch.autograd.telling import PassId


class StagePost:
    """Hands messages over in threads of its own, which `Workers` waits for."""

    def __init__(self, workers: Workers, number: int) -> None:
        self.workers = workers
        self.number = number

    def own_name(self) -> str:
        return info(self.number).name

    def propagate(
        self,
        to: WorkerInfo,
        context_id: int,
        pass_id: PassId,
        message_id: int,
        gradients: list[torch.Tensor],
        retain_graph: bool,
        takes_back: bool = False,
    ) -> Future[Any]:
        if to.id in self.workers.lost:
            raise WorkerLostError(f"worker {to.name!r} is gone", to.name)
        copies = [gradient.clone() for gradient in gradients]
        self.workers.propagated.append((to.id, message_id, copies))
        return self.workers.in_thread(
            lambda: take_part(self.workers[to.id], context_id, pass_id, message_id, copies, retain_graph, takes_back)
        )

    def await_end(self, to: WorkerInfo, context_id: int, pass_id: PassId) -> Future[Any]:
        self.workers.told.append(("await_end", to.id))
        return self.workers.in_thread(lambda: await_end(self.workers[to.id], context_id, pass_id))

    def release(self, to: WorkerInfo, context_id: int) -> None:
        if to.id in self.workers.lost:
            return
        self.workers.told.append(("release", to.id))
        self.workers[to.id].release_if_present(context_id, is_told=True)

    def forget(self, to: WorkerInfo, context_id: int, request: int) -> None:
        self.workers.told.append(("forget", to.id))
        self.workers[to.id].forget(context_id, request)

    def join(self, maker: int, context_id: int) -> None:
        self.workers.told.append(("join", maker))
        self.workers[maker].take_in(context_id, info(self.number))

    def abandon(self, to: WorkerInfo, context_id: int, pass_id: PassId, reason: str) -> None:
        self.workers.told.append(("abandon", to.id))
        self.workers[to.id].abandon(context_id, pass_id, reason)


class Workers:
    """So many of them. At the end nothing may be left running."""

    def __init__(self, size: int) -> None:
        self.lost: set[int] = set()
        self.propagated: list[tuple[int, int, list[torch.Tensor]]] = []
        self.told: list[tuple[str, int]] = []
        self._threads: list[threading.Thread] = []
        self._contexts = [Contexts(number, StagePost(self, number)) for number in range(size)]

    def __getitem__(self, number: int) -> Contexts:
        return self._contexts[number]

    def in_thread(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = work()
                if isinstance(result, Future):
                    result = result.wait()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = threading.Thread(target=run, daemon=True)  # so that a test that fails can end
        self._threads.append(thread)
        thread.start()
        return future

    def join(self) -> None:
        """Waits until all threads have ended."""
        for thread in self._threads:
            thread.join(10)

    def new_context(self, number: int = 0) -> int:
        """Made by that worker; no thread has it as its current one."""
        context_id = self[number].new().context_id
        self[number].current_id = None
        return context_id

    def context(self, context_id: int, number: int) -> DistAutogradContext:
        return self[number].retrieve(context_id)

    def move(
        self, context_id: int, source: int, target: int, tensors: list[torch.Tensor], is_recorded: bool = True
    ) -> list[torch.Tensor]:
        """What arrives at the target."""
        return self.send(context_id, source, target, tensors, is_recorded)()

    def send(
        self, context_id: int, source: int, target: int, tensors: list[torch.Tensor], is_recorded: bool = True
    ) -> Callable[[], list[torch.Tensor]]:
        """The half of it; the function that is returned is the other half, and gives what arrives."""
        sender = self[source].retrieve_or_make(context_id)
        sender.add_known_worker(info(target))
        sent, ticket = pack(self[source], sender, info(target), tensors, is_recorded)

        def receive() -> list[torch.Tensor]:
            receiver = self[target].retrieve_or_make(context_id)
            return unpack(self[target], receiver, info(source), [tensor.clone() for tensor in sent], ticket)

        return receive

    def backward(self, context_id: int, number: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None:
        run_backward(self[number], context_id, roots, retain_graph)

    def gradients(self, context_id: int, number: int) -> Mapping[torch.Tensor, torch.Tensor]:
        return self.context(context_id, number).gradients

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for contexts in self._contexts:
                contexts.close()
        self.join()
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads)
            assert [contexts.counts()[0] for contexts in self._contexts] == [0] * len(self._contexts)


def info(number: int) -> WorkerInfo:
    return WorkerInfo(f"worker{number}", number)

"""What workers tell each other about contexts and backward passes, as `contexts` and the passes see it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo


class PassId(NamedTuple):
    """A backward pass: the worker that began it, and its how-manieth it is."""

    worker: int
    number: int


class Post(Protocol):
    """How a worker tells others about contexts. The futures are done when the other has done it."""

    def own_name(self) -> str:
        """The name of the worker that tells. Raises nothing."""

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
        """The gradients of the tensors that came with that message. Raises if it cannot be sent.

        `takes_back`: the answer may bring gradients, and come before the other is through (`parted.Answer`). Else it
        is None, when the other is through if those gradients were the first.
        """

    def await_end(self, to: WorkerInfo, context_id: int, pass_id: PassId) -> Future[Any]:
        """Has it tell when it is through with a backward pass (`parted.Answer`). Raises if it cannot be asked."""

    def release(self, to: WorkerInfo, context_id: int) -> None:
        """The context is released. Raises nothing."""

    def abandon(self, to: WorkerInfo, context_id: int, pass_id: PassId, reason: str) -> None:
        """The backward pass has failed. Raises nothing."""

    def forget(self, to: WorkerInfo, context_id: int, request: int) -> None:
        """No reply to that request is awaited any more. Raises nothing."""

    def join(self, maker: int, context_id: int) -> None:
        """We have a context of that worker: it has to tell us of its release. Raises nothing."""

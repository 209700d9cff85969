"""Distributed autograd: the API of `torch.distributed.autograd`.

    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", model, args=(batch,)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)

Calls inside of a context record where the graph of their tensors goes from one worker to another (`riding`, `nodes`); a
backward pass follows it across all of them (`engine`, `passes`), and each worker gathers the gradients of its variables
in its part of the context (`contexts`, `accumulating`), not in `.grad`.
"""

from __future__ import annotations

import warnings
from types import TracebackType

from farcall.pytorch.autograd import post
from farcall.pytorch.autograd.contexts import DistAutogradContext
from farcall.pytorch.autograd.scripting import backward, get_gradients
from farcall.pytorch.autograd.short_calls import RIDER
from farcall.pytorch.envelopes import RIDERS

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """True: it works wherever torch does."""
    return True


def _init(worker_id: int) -> None:
    """This process is that worker. Raises `RuntimeError` for a number that is none."""
    post.begin(worker_id)


def close() -> None:
    """This process is a worker no more: its contexts end. Those that were forgotten are reported."""
    post.end()


def _new_context() -> DistAutogradContext:
    """A context, the current one of this thread. Raises `RuntimeError` if it has one."""
    return post.contexts().new()


def _release_context(context_id: int) -> None:
    """Releases it on all workers. Raises `RuntimeError` if it is not here."""
    post.contexts().release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """The context of that id. Raises `RuntimeError` if it is not here."""
    return post.contexts().retrieve(context_id)


def _current_context() -> DistAutogradContext:
    """This thread's context. Raises `RuntimeError` if it has none."""
    return post.contexts().current()


def _is_valid_context(context_id: int) -> None:
    """Raises `RuntimeError` if the context is not here."""
    post.contexts().retrieve(context_id)


def _get_max_id() -> int:
    """The greatest id that a context of this worker can have."""
    return post.contexts().max_id


def _get_debug_info() -> dict[str, str]:
    """How many backward passes and contexts are here."""
    passes, contexts = post.contexts().counts()
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(contexts)}


class context:  # noqa: N801  # torch's name
    """`with context() as context_id:` is a context for a forward pass and the backward passes over it."""

    _made: DistAutogradContext | None = None

    def __enter__(self) -> int:
        """Raises `RuntimeError` if this thread is in a context already."""
        self._made = _new_context()
        return self._made._context_id()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        made, self._made = self._made, None
        assert made is not None
        _release_context(made._context_id())

    def __del__(self) -> None:
        made = self._made
        if made is not None and not made.is_released:
            warnings.warn(
                f"the autograd context {made.context_id}, made at {made.made_at}, was dropped and never left: use it "
                "in a `with` statement",
                ResourceWarning,
                stacklevel=2,
            )


RIDERS.append(RIDER)

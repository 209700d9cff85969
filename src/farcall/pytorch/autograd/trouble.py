"""What is said of a backward pass that cannot go on, or waits for long: by both kinds of passes in the same words."""

from __future__ import annotations

import logging
from typing import Final

from farcall.errors import WorkerLostError
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.contexts import Contexts, DistAutogradContext

logger = logging.getLogger("farcall")

PATIENCE: Final = 10.0
"""Seconds after which whoever waits for gradients says so."""


def loss_of(worker: WorkerInfo, context: DistAutogradContext) -> WorkerLostError:
    """The error of a pass in which that worker should have sent gradients."""
    return WorkerLostError(
        f"the backward pass in autograd context {context.context_id} cannot go on: worker {worker.name!r}, to "
        "which tensors were sent in it, is gone, and so are their gradients. Begin again, in a new context",
        worker.name,
    )


def error_here(error: BaseException, contexts: Contexts) -> RuntimeError:
    """What other workers are to hear of an error in the pass here, which is to be its cause."""
    text = str(error) or repr(error)
    return RuntimeError(f"Error on Node {contexts.worker_id}: {text} (worker {contexts.post.own_name()!r})")


def warn_of_missing(worker: WorkerInfo, context: DistAutogradContext) -> None:
    """Gradients of what was sent to that worker have been awaited for long."""
    logger.warning(
        "the backward pass in autograd context %d waits for gradients from worker %r, to which tensors were "
        "sent: is the result of that call used? All calls of a context take part in its backward passes%s",
        context.context_id,
        worker.name,
        _earlier(context),
    )


def warn_of_others(names: list[str], context: DistAutogradContext) -> None:
    """Those workers have not been through for long."""
    logger.warning(
        "the backward pass in autograd context %d waits for %s to be through: are the results of all calls of the "
        "context used? All of them take part in its backward passes%s",
        context.context_id,
        " and ".join(f"worker {name!r}" for name in names) or "other workers",
        _earlier(context),
    )


def _earlier(context: DistAutogradContext) -> str:
    """The most common reason, if it may be that."""
    if context.passes_begun < 2:
        return ""
    return (
        f", those of earlier passes too, and this is pass number {context.passes_begun} of the context: give all "
        "losses to one backward, or use a context for each"
    )

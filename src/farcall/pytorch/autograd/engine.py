"""Distributed backward passes: beginning one, and taking part in one that another worker has begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from farcall.futures import Future
from farcall.pytorch.autograd.contexts import Contexts, DistAutogradContext, surveying
from farcall.pytorch.autograd.parted import Answer, PartedPass
from farcall.pytorch.autograd.parts import Walks
from farcall.pytorch.autograd.passes import LocalPass
from farcall.pytorch.autograd.reducers import has_reducers
from farcall.pytorch.autograd.telling import PassId


def run_backward(contexts: Contexts, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
    """Runs a backward pass from these roots, here and wherever their graph goes; returns when it is through everywhere.

    Raises `RuntimeError` if there is no such context or the roots are none, and the first error of any worker; then
    the pass has ended everywhere.
    """
    if _profiler_enabled():
        with record_function("torch::distributed::autograd::backward"):
            _run_backward(contexts, context_id, roots, retain_graph)
    else:
        _run_backward(contexts, context_id, roots, retain_graph)


def _run_backward(contexts: Contexts, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
    context = contexts.retrieve(context_id)
    _check_roots(roots)
    pass_id = contexts.new_pass_id()
    new_pass = _new_pass(contexts, context, pass_id, retain_graph, roots)
    with context.lock:
        local_pass = new_pass()
    try:
        local_pass.run()
    except BaseException as error:
        contexts.abandon(context_id, pass_id, str(error))
        raise


def prepare(context: DistAutogradContext) -> None:
    """Records what has just gone out in that context, and looks at the graph behind it: while others work.

    A backward pass then has less to do. It does the same if nobody has.
    """
    with surveying:
        recorded = context.catch_up()
        walks = _walks_of(context)
        for sent in recorded:
            walks.through(sent.end.grad_fn)


def _walks_of(context: DistAutogradContext) -> Walks:
    """Under `surveying`."""
    if context.walks is None:
        context.walks = Walks()
    return context.walks


def take_part(
    contexts: Contexts,
    context_id: int,
    pass_id: PassId,
    message_id: int,
    gradients: list[torch.Tensor],
    retain_graph: bool,
    takes_back: bool = False,
) -> Answer | Future[Answer]:
    """Gradients have come. What to answer: see `Post.propagate`. May wait for other gradients meanwhile.

    Raises `RuntimeError` if there is no such context or message, and what goes wrong in the pass.
    """
    context = contexts.retrieve(context_id)
    local_pass = context.passes.get(pass_id)
    is_first = False
    if local_pass is None:
        new_pass = _new_pass(contexts, context, pass_id, retain_graph)
        with context.lock:
            local_pass = context.passes.get(pass_id)  # another thread may have been quicker
            if local_pass is None:
                if contexts.is_abandoned(pass_id):
                    raise RuntimeError(
                        f"the backward pass {pass_id} in autograd context {context_id} has failed already"
                    )
                local_pass, is_first = new_pass(), True
    try:
        if isinstance(local_pass, PartedPass):
            return local_pass.serve(message_id, gradients, takes_back)
        local_pass.arrived(message_id, gradients)
    except BaseException:
        if is_first:
            with context.lock:
                context.passes.pop(pass_id, None)
        raise
    del gradients  # the pass has them, and whoever counts holders should not find this frame
    if is_first:
        local_pass.run()
    return None


def await_end(contexts: Contexts, context_id: int, pass_id: PassId) -> Answer | Future[Answer]:
    """Who has our gradients of that pass asks to be told when it is through here. What to answer.

    Raises `RuntimeError` if there is no such context, and what went wrong in the pass.
    """
    local_pass = contexts.retrieve(context_id).passes.get(pass_id)
    if isinstance(local_pass, PartedPass):
        return local_pass.await_end()
    if contexts.is_abandoned(pass_id):
        raise RuntimeError(f"the backward pass {pass_id} in autograd context {context_id} has failed already")
    return None  # it was told just now


def _new_pass(
    contexts: Contexts,
    context: DistAutogradContext,
    pass_id: PassId,
    retain_graph: bool,
    roots: Sequence[torch.Tensor] = (),
) -> Callable[[], LocalPass | PartedPass]:
    """What enters a pass into the context, whose lock is to be held then; the graph is looked at before that."""
    context.catch_up()
    with context.lock:
        sent = list(context.sent.values())
    # Who profiles is to see send and receive functions run; and a reducer sees to all its variables in one run.
    is_whole = has_reducers() or _profiler_enabled()
    surveyed = None
    if not is_whole:
        with surveying:
            surveyed = _walks_of(context).survey(roots, [each.end.grad_fn for each in sent])
    if surveyed is None:
        return partial(LocalPass, contexts, context, pass_id, retain_graph, roots)
    root_part, parts = surveyed
    by_message = {each.message_id: (each, part) for each, part in zip(sent, parts, strict=True)}
    return partial(PartedPass, contexts, context, pass_id, retain_graph, by_message, root_part)


def _check_roots(roots: Sequence[Any]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        name = root.name or "a root"
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            shape = "x".join(map(str, root.shape))
            raise RuntimeError(
                f"{name} is not a scalar, all roots need to be scalar: its shape is {shape}; give its .sum() or .mean()"
            )
        if root.grad_fn is None:
            raise RuntimeError(f"{name} does not have a valid gradient function.")

"""Distributed backward passes: beginning one, and taking part in one that another worker has begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from farcall.pytorch.autograd.contexts import Contexts, PassId
from farcall.pytorch.autograd.passes import LocalPass


def run_backward(contexts: Contexts, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
    """Runs a backward pass from these roots, here and wherever their graph goes; returns when it is through everywhere.

    Raises `RuntimeError` if there is no such context or the roots are none, and the first error of any worker; then
    the pass has ended everywhere.
    """
    with record_function("torch::distributed::autograd::backward"):
        context = contexts.retrieve(context_id)
        _check_roots(roots)
        pass_id = contexts.new_pass_id()
        with context.lock:
            local_pass = LocalPass(contexts, context, pass_id, retain_graph, roots)
        try:
            local_pass.run()
        except BaseException as error:
            contexts.abandon(context_id, pass_id, str(error))
            raise


def take_part(
    contexts: Contexts,
    context_id: int,
    pass_id: PassId,
    message_id: int,
    gradients: list[torch.Tensor],
    retain_graph: bool,
) -> None:
    """Gradients have come. The first that come in a pass have it run here, and this returns when it is through.

    Raises `RuntimeError` if there is no such context or message, and what goes wrong in the pass.
    """
    context = contexts.retrieve(context_id)
    with context.lock:
        local_pass = context.passes.get(pass_id)
        is_first = local_pass is None
        if local_pass is None:
            if contexts.is_abandoned(pass_id):
                raise RuntimeError(f"the backward pass {pass_id} in autograd context {context_id} has failed already")
            local_pass = LocalPass(contexts, context, pass_id, retain_graph)
    if not is_first:
        local_pass.arrived(message_id, gradients)
        return
    try:
        local_pass.arrived(message_id, gradients)
    except BaseException:
        with context.lock:
            context.passes.pop(pass_id, None)
        raise
    del gradients  # the pass has them, and whoever counts holders should not find this frame
    local_pass.run()


def _check_roots(roots: Sequence[Any]) -> None:
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        name = root.name or ""
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{name} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(f"{name} does not have a valid gradient function.")

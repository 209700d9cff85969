"""`RRef.backward`: a backward pass from the value of a reference, run where that lives."""

from __future__ import annotations

from typing import Any, Final

import torch

from farcall.pytorch.autograd import engine, post

_NO_CONTEXT: Final = -1


def backward(rref: Any, context_id: int = _NO_CONTEXT, retain_graph: bool = False) -> None:
    """Runs it in that context; without one, if the value is here, as `torch.autograd.backward` does.

    Raises `RuntimeError` if the value is no tensor that can be a root, or is elsewhere and no context is given.
    """
    if not rref.is_owner():
        if context_id == _NO_CONTEXT:
            raise RuntimeError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: the value lives on worker "
                f"{rref.owner_name()!r}"
            )
        post.call(rref.owner(), _backward_at_owner, (rref, context_id, retain_graph)).wait()
        return
    _backward_at_owner(rref, context_id, retain_graph)


def _backward_at_owner(rref: Any, context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef should contain a tensor for .backward(), not a {type(value).__name__}")
    if context_id == _NO_CONTEXT:
        torch.autograd.backward((value,), retain_graph=retain_graph)
    else:
        engine.run_backward(post.contexts(), context_id, (value,), retain_graph)

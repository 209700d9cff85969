"""`backward` and `get_gradients` as functions that torch can compile.

Compiled, each is a call of the function below it, which runs in Python. So their annotations are such that the compiler
reads, and their bodies are one line; the checks of arguments are below.
"""

from typing import Any, Dict, List  # noqa: UP035  # the compiler reads these

import torch

from farcall.pytorch.autograd import engine, post


def _get_gradients(context_id: int) -> Dict[torch.Tensor, torch.Tensor]:  # noqa: UP006
    context = post.contexts().retrieve(context_id)
    with context.lock:
        return dict(context.gradients.by_id.values())


def _dist_backward(context_id: int, roots: List[torch.Tensor], retain_graph: bool) -> None:  # noqa: UP006
    if not isinstance(context_id, int) or not _are_tensors(roots):
        raise TypeError(
            "backward(): incompatible function arguments. The following argument types are supported:\n"
            "    1. (arg0: int, arg1: list[torch.Tensor], retain_graph: bool = False) -> None\n\n"
            f"Invoked with: {context_id!r}, {roots!r}"
        )
    engine.run_backward(post.contexts(), context_id, roots, bool(retain_graph))


_left_to_python: Any = torch.jit.ignore
_left_to_python(_get_gradients)
_left_to_python(_dist_backward)


def get_gradients(context_id: int) -> Dict[torch.Tensor, torch.Tensor]:  # noqa: UP006
    """The gradients of this worker's variables in that context. Raises `RuntimeError` if there is no such context."""
    return _get_gradients(context_id)


def dist_backward(context_id: int, roots: List[torch.Tensor], retain_graph: bool = False) -> None:  # noqa: UP006
    """Runs the backward pass from these roots, each a scalar, on all workers that their graph reaches.

    Returns when it is through everywhere; the gradients are in the context. All calls made in the context take part: if
    the result of one that was given tensors which require gradients is not used, it never ends, as torch's. Raises
    `TypeError`, `RuntimeError` for roots that cannot be or an unknown context, and the first error of any worker.
    """
    _dist_backward(context_id, roots, retain_graph)


backward = dist_backward


def _are_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, torch.Tensor) for each in value)

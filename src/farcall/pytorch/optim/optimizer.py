"""`DistributedOptimizer`: what `torch.distributed.optim.optimizer` has, on farcall.

Each worker that owns some of the parameters gets an optimizer of its own for them, which stays there; the one who made
them all holds references to them. A step asks each of them, all at the same time, to apply the gradients that a
distributed autograd context holds on its worker.

There are two kinds of them:
- *functional* ones, for the classes that torch has compiled versions of: they are handed the gradients and never touch
  `.grad`, so steps of several contexts may run at the same time, and their arithmetic without the interpreter's lock;
- any other class of `torch.optim`: gradients are put into `.grad` for it, one step after the other on each worker.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from farcall.api import current_agent
from farcall.protocol.wire import METHOD
from farcall.pytorch import api, autograd
from farcall.pytorch.autograd.short_calls import RIDER
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import rides_alone
from farcall.pytorch.rref import PyRRef, RRef
from farcall.pytorch.workers import WorkerInfo

logger = logging.getLogger("farcall")

_compiler: Final = threading.Lock()
"""TorchScript compiles for one thread at a time."""
_STRIDED: Final = frozenset({torch.strided})
_SGD: Final = ("torch.distributed.optim.functional_sgd", "_FunctionalSGD")
_stepping: Final = threading.Lock()
"""All plain optimizers of a worker may be for the same parameters: one step at a time."""


@contextmanager
def _compiling() -> Iterator[None]:
    """Around what has TorchScript compile: nobody asked for TorchScript, so nobody is told that it is deprecated."""
    with _compiler:
        with warnings.catch_warnings(record=True) as caught:  # some of torch's come through any filter
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
        for warning in caught:
            if not issubclass(warning.category, DeprecationWarning):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class _CompiledStep(nn.Module):  # type: ignore[misc]  # torch may not be there when types are checked
    """A functional optimizer in TorchScript: an object of its class is compiled only as an attribute of a module."""

    def __init__(self, optim: Any) -> None:
        super().__init__()
        self.optim = optim

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        self.optim.step(gradients)

    step = torch.jit.export(step)  # not above it: mypy wants a comment there that TorchScript takes for a type


class _FunctionalOptimizer:
    """Of one worker's parameters, with gradients handed in."""

    def __init__(self, optimizer_class: Callable[..., Any], parameters: list[torch.Tensor], *args: Any, **kwargs: Any):
        self._parameters = parameters
        made = _functional_class(optimizer_class) or optimizer_class
        with _compiling():
            self._compiled = torch.jit.script(_CompiledStep(made(parameters, *args, **kwargs)))
        self._rate = _plain_rate(made, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Applies the gradients of that context."""
        gradients = autograd._retrieve_context(context_id).gradients_of(self._parameters)
        if self._rate is not None and {None if each is None else each.layout for each in gradients} == _STRIDED:
            with torch.no_grad():
                torch._foreach_add_(self._parameters, gradients, alpha=-self._rate)
        else:
            self._compiled.step(gradients)


def _plain_rate(functional: Any, lr: Any = None, *args: Any, **kwargs: Any) -> float | None:
    """The rate of torch's SGD without anything else to it: one operation on all parameters is what it compiles to.

    None for any other: it has a state, or does more than to add.
    """
    is_plain = functional.__module__ == _SGD[0] and functional.__qualname__ == _SGD[1] and not args and not kwargs
    return float(lr) if is_plain and lr is not None else None


class _PlainOptimizer:
    """Of one worker's parameters, with gradients in their `.grad`."""

    def __init__(self, optimizer_class: Callable[..., Any], parameters: list[torch.Tensor], *args: Any, **kwargs: Any):
        self._optimizer = optimizer_class(parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Applies the gradients of that context."""
        gradients = autograd.get_gradients(context_id)
        with _stepping:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self._optimizer.step()


def _make(
    kind: type[_FunctionalOptimizer | _PlainOptimizer],
    optimizer_class: Callable[..., Any],
    parameters: Sequence[PyRRef[torch.Tensor]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> RRef[Any]:
    """At the owner of the parameters."""
    return RRef(kind(optimizer_class, [rref.local_value() for rref in parameters], *args, **kwargs))


def _step(optimizer: PyRRef[Any], context_id: int) -> None:
    """At its owner."""
    optimizer.local_value().step(context_id)


def _begin_step(optimizer: RRef[Any], owner: WorkerInfo, context: autograd.DistAutogradContext) -> Any:
    """A step at the owner, which is another worker; a future of its end.

    Of a worker that knows the context only a method is called, by the reference itself; to others it has to be brought.
    """
    agent: Any = current_agent()
    if owner.id in context.known_workers and rides_alone(RIDER, agent, owner):
        calling = optimizer._calling
        args = (context.context_id,)
        return calling.call_on(optimizer._handle, METHOD, "step", args, None, UNSET_RPC_TIMEOUT)
    return api.rpc_async(owner, _step, (optimizer, context.context_id))


class _StepHere:
    """A step of this worker's own, taken when it is waited for."""

    def __init__(self, optimizer: RRef[Any], context_id: int) -> None:
        self._optimizer = optimizer
        self._context_id = context_id

    def wait(self) -> None:
        self._optimizer.local_value().step(self._context_id)


class DistributedOptimizer:
    """An optimizer of parameters that live on several workers.

    `optimizer_class` is one of `torch.optim`, or any other with such a constructor; `params_rref` are references to the
    parameters, from whatever workers. Everything else is for the constructor of the optimizer on each worker.

    Raises `TypeError` for parameters themselves, and what a constructor raised on its worker. If several
    did, the others' errors are notes of the first.
    """

    def __init__(
        self, optimizer_class: Callable[..., Any], params_rref: Iterable[PyRRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        by_owner: dict[WorkerInfo, list[PyRRef[Any]]] = {}
        for rref in params_rref:
            if isinstance(rref, torch.Tensor):
                raise TypeError(
                    f"DistributedOptimizer takes references to parameters, not a {type(rref).__name__}: give it "
                    "rpc.RRef(parameter), or what RemoteModule.remote_parameters() gives"
                )
            by_owner.setdefault(rref.owner(), []).append(rref)
        functional = _functional_class(optimizer_class)
        self.is_functional_optim = functional is not None
        """Whether steps run compiled, without the interpreter's lock."""
        # Torch's own are looked up at the owners: to load one by its name is to compile all of them.
        made = optimizer_class if functional is None or functional.__module__.startswith("torch.") else functional
        if functional is None:
            logger.warning(
                "Creating the optimizer %s without TorchScript support: its steps hold the interpreter's lock, which "
                "slows down workers that serve several trainers at the same time",
                optimizer_class,
            )
        kind = _FunctionalOptimizer if self.is_functional_optim else _PlainOptimizer
        self.remote_optimizers: list[RRef[Any]] = _all_of(
            [
                (owner, api.rpc_async(owner, _make, (kind, made, rrefs, args, kwargs)))
                for owner, rrefs in by_owner.items()
            ]
        )
        """One for each worker that owns some of the parameters."""
        self._owners = list(by_owner)

    def step(self, context_id: int) -> None:
        """Applies the gradients of that context, on all workers at the same time; returns when all have.

        Parameters without a gradient in it are left alone. Raises `RuntimeError` if there is no such context here, and
        what a step raised on its worker; if several did, the others' errors are notes of the first. The steps of other
        workers may have been taken then.
        """
        context = autograd._retrieve_context(context_id)
        here: list[tuple[WorkerInfo, Any]] = []
        there: list[tuple[WorkerInfo, Any]] = []
        for optimizer, owner in zip(self.remote_optimizers, self._owners, strict=True):
            if optimizer.is_owner():
                here.append((owner, _StepHere(optimizer, context_id)))
            else:
                there.append((owner, _begin_step(optimizer, owner, context)))
        _all_of(here + there)  # this worker's own, while the others are at theirs


def _functional_class(optimizer_class: Any) -> Any:
    """Torch's compiled version of that class; None if there is none, or nothing is to be compiled."""
    with _compiling():
        from torch.distributed.optim.utils import functional_optim_map  # imports what may be importing this module
    return functional_optim_map.get(optimizer_class) if torch.jit._state._enabled else None


def _all_of(calls: Sequence[tuple[WorkerInfo, Any]]) -> list[Any]:
    """The results of all these calls, when all have ended. Raises the first error, with the others as its notes."""
    results, failed = [], None
    try:
        for owner, future in calls:
            try:
                results.append(future.wait())
            except Exception as error:
                if failed is None:
                    failed = error
                else:
                    failed.add_note(f"worker {owner.name!r} failed as well: {type(error).__name__}: {error}")
        if failed is not None:
            raise failed
        return results
    finally:
        del failed

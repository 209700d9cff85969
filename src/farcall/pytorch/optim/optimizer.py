"""`DistributedOptimizer`: the contents of `torch.distributed.optim.optimizer`, on farcall.

Each worker that owns some of the parameters gets an optimizer for them, which stays there. The `DistributedOptimizer`
holds references to these optimizers. A step asks all of them at the same time to apply the gradients that a distributed
autograd context has on their workers.

There are two kinds of these optimizers:

- *Functional* ones, for the classes of which torch has a compiled version. They are given the gradients and never use
  `.grad`. So steps of several contexts may run at the same time, and their arithmetic runs without the GIL.
- All other classes of `torch.optim`. Gradients are put into `.grad`, and steps run one after the other on each worker.
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
from farcall.protocol.frames import METHOD
from farcall.pytorch import api, autograd
from farcall.pytorch.autograd.short_calls import RIDER
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import rides_alone
from farcall.pytorch.rref import PyRRef, RRef
from farcall.pytorch.worker_info import WorkerInfo

logger = logging.getLogger("farcall")

_STRIDED: Final = frozenset({torch.strided})
_FUNCTIONAL_SGD: Final = ("torch.distributed.optim.functional_sgd", "_FunctionalSGD")
_compile_lock: Final = threading.Lock()
"""TorchScript cannot compile in several threads at once."""


@contextmanager
def _compiling() -> Iterator[None]:
    """Context manager for code that compiles TorchScript: admits one thread at a time, and hides deprecation warnings.

    The user did not ask for TorchScript, so its deprecation warnings would be of no use. Other warnings are shown at
    the end, unless the block raises.
    """
    with _compile_lock:
        with warnings.catch_warnings(record=True) as caught:  # recorded, because some of torch's bypass the filters
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
        for warning in caught:
            if not issubclass(warning.category, DeprecationWarning):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class _CompiledStep(nn.Module):  # type: ignore[misc]  # torch may not be there when types are checked
    """Wraps a functional optimizer in a module, because TorchScript compiles objects only as attributes of a module.

    A functional optimizer is torch's version of an optimizer that is given its gradients and ignores `.grad`.

    Args:
        optim: The functional optimizer. Its `step` takes a list with one gradient, or None, for each parameter.
    """

    def __init__(self, optim: Any) -> None:
        super().__init__()
        self.optim = optim

    def step(self, gradients: list[torch.Tensor | None]) -> None:
        self.optim.step(gradients)

    step = torch.jit.export(step)  # no decorator: it would need a `type:` comment, which TorchScript would parse


with _compiling():

    @torch.jit.interface
    class _ScriptLocalOptimizerInterface:
        """The TorchScript interface of an optimizer for the parameters of one worker.

        Its `step` takes the id of the distributed autograd context with the gradients.
        """

        def step(self, autograd_ctx_id: int) -> None:
            pass


class _ScriptLocalOptimizer(nn.Module):  # type: ignore[misc]  # torch may not be there when types are checked
    """An optimizer for the parameters of one worker, with a compiled step that ignores `.grad`.

    It takes the gradients from a distributed autograd context instead.

    Attributes:
        optim: The functional optimizer: torch's version of an optimizer that is given its gradients.
    """

    compile_lock = _compile_lock

    def __init__(
        self, optim_cls: Callable[..., Any], local_params_rref: Iterable[PyRRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        """Creates and compiles the optimizer.

        A functional version is torch's variant of an optimizer class that is given its gradients, and can be compiled.

        Args:
            optim_cls: A class of `torch.optim` of which torch has a functional version, or a functional version itself.
                Another class raises what TorchScript raises.
            local_params_rref: References to parameters that this worker owns; others raise `RuntimeError`. For none,
                the class itself raises `ValueError`.
            *args: Further positional arguments of the optimizer.
            **kwargs: Its keyword arguments. The class raises `TypeError` for an unknown one.
        """
        super().__init__()
        self._local_params = [rref.local_value() for rref in local_params_rref]
        made = _functional_class(optim_cls) or optim_cls
        with _compiling():
            self.optim = made(self._local_params, *args, **kwargs)
            self._compiled = torch.jit.script(_CompiledStep(self.optim))
        self._rate = _plain_sgd_rate(made, *args, **kwargs)

    def step(self, autograd_ctx_id: int) -> None:
        """Applies the gradients of a distributed autograd context. Parameters without a gradient stay unchanged.

        Args:
            autograd_ctx_id: The id of the context. Raises `RuntimeError` if this worker does not know the context.
        """
        gradients = autograd._retrieve_context(autograd_ctx_id).gradients_of(self._local_params)
        if self._rate is not None and {None if each is None else each.layout for each in gradients} == _STRIDED:
            with torch.no_grad():
                torch._foreach_add_(self._local_params, gradients, alpha=-self._rate)
        else:
            self._compiled.step(gradients)


def _plain_sgd_rate(functional: Any, lr: Any = None, *args: Any, **kwargs: Any) -> float | None:
    """Returns the learning rate if the optimizer is torch's SGD with nothing but a learning rate; None for any other.

    A step of such an optimizer is one addition for all parameters, which needs no compiled code.

    Args:
        functional: The class of the functional optimizer, torch's version of an optimizer that is given its gradients.
        lr: Its learning rate; None if it was not given, which returns None.
        *args: Its further positional arguments.
        **kwargs: Its further keyword arguments.
    """
    is_plain = (
        functional.__module__ == _FUNCTIONAL_SGD[0]
        and functional.__qualname__ == _FUNCTIONAL_SGD[1]
        and not args
        and not kwargs
    )
    return float(lr) if is_plain and lr is not None else None


class _LocalOptimizer:
    """An optimizer of `torch.optim` for the parameters of one worker. A step puts the gradients into `.grad` first.

    The gradients come from a distributed autograd context.

    Attributes:
        optim: The optimizer of `torch.optim`.
    """

    global_lock = threading.Lock()
    """Held during a step of any `_LocalOptimizer`, because several of them may have the same parameters."""

    def __init__(
        self, optim_cls: Callable[..., Any], local_params_rref: Iterable[PyRRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        """Creates the optimizer.

        Args:
            optim_cls: A class of `torch.optim`, or any other with such a constructor and a `step`.
            local_params_rref: References to parameters that this worker owns; others raise `RuntimeError`. For none, a
                class of `torch.optim` raises `ValueError`.
            *args: Further positional arguments of the optimizer.
            **kwargs: Its keyword arguments. The class raises `TypeError` for an unknown one.
        """
        self._local_params = [rref.local_value() for rref in local_params_rref]
        self.optim = optim_cls(self._local_params, *args, **kwargs)

    def step(self, autograd_ctx_id: int) -> None:
        """Puts this worker's gradients of a distributed autograd context into `.grad`, and makes a step.

        A parameter without a gradient in the context keeps its `.grad`. Steps of all such optimizers run one after the
        other.

        Args:
            autograd_ctx_id: The id of the context. Raises `RuntimeError` if this worker does not know the context.
        """
        gradients = autograd.get_gradients(autograd_ctx_id)
        with _LocalOptimizer.global_lock:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self.optim.step()


# -- called on the owner of the parameters


def _new_local_optimizer(
    optim_cls: Callable[..., Any], local_params_rref: Sequence[PyRRef[Any]], *args: Any, **kwargs: Any
) -> RRef[Any]:
    """Called remotely: creates an optimizer that uses `.grad` on this worker, and returns a reference to it.

    Args:
        optim_cls: A class of `torch.optim`, or any other with such a constructor and a `step`.
        local_params_rref: References to parameters that this worker owns. Others raise `RuntimeError`.
        *args: Further positional arguments of the optimizer.
        **kwargs: Its keyword arguments. The class raises `TypeError` for an unknown one.
    """
    return RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _new_script_local_optimizer(
    optim_cls: Callable[..., Any], local_params_rref: Sequence[PyRRef[Any]], *args: Any, **kwargs: Any
) -> RRef[Any]:
    """Called remotely: creates an optimizer with a compiled step on this worker, and returns a reference to it.

    Args:
        optim_cls: A class of `torch.optim` of which torch has a functional version, which is given its gradients and
            can be compiled; or a functional version itself.
        local_params_rref: References to parameters that this worker owns. Others raise `RuntimeError`.
        *args: Further positional arguments of the optimizer.
        **kwargs: Its keyword arguments. The class raises `TypeError` for an unknown one.
    """
    return RRef(_ScriptLocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: PyRRef[Any], autograd_ctx_id: int) -> None:
    """Called remotely: makes a step of an optimizer of this worker that uses `.grad`.

    Args:
        local_optim_rref: A reference to the optimizer. Raises `RuntimeError` if this worker does not own it.
        autograd_ctx_id: The id of the distributed autograd context with the gradients. Raises `RuntimeError` if this
            worker does not know it.
    """
    local_optim_rref.local_value().step(autograd_ctx_id)


def _script_local_optimizer_step(local_optim_rref: PyRRef[Any], autograd_ctx_id: int) -> None:
    """Called remotely: makes a step of an optimizer of this worker whose step is compiled.

    This function is not compiled, as in torch, because compiled code does not accept references. The step itself is.

    Args:
        local_optim_rref: A reference to the optimizer. Raises `RuntimeError` if this worker does not own it.
        autograd_ctx_id: The id of the distributed autograd context with the gradients. Raises `RuntimeError` if this
            worker does not know it.
    """
    local_optim_rref.local_value().step(autograd_ctx_id)


def _begin_step(
    optimizer: RRef[Any],
    owner: WorkerInfo,
    context: autograd.DistAutogradContext,
    step: Callable[[PyRRef[Any], int], None],
) -> Any:
    """Starts a step of an optimizer on another worker, and returns a future that is done when the step is.

    If that worker knows the context already, a method is called through the reference, which is faster. Otherwise an
    ordinary call takes the context there. The future fails with what the step raises. Raises `RuntimeError` if the
    reference cannot be used any more or the worker is not known.

    Args:
        optimizer: A reference to the optimizer.
        owner: The worker that has it.
        context: The distributed autograd context with the gradients.
        step: The function for the ordinary call: `_local_optimizer_step` or `_script_local_optimizer_step`.
    """
    agent: Any = current_agent()
    if owner.id in context.known_workers and rides_alone(RIDER, agent, owner):
        calling = optimizer._calling
        args = (context.context_id,)
        return calling.call_on(optimizer._handle, METHOD, "step", args, None, UNSET_RPC_TIMEOUT)
    return api.rpc_async(owner, step, (optimizer, context.context_id))


class _LocalStep:
    """A step of an optimizer of this worker, with the interface of a future. The step is made by `wait`, not before.

    Args:
        optimizer: A reference to the optimizer.
        context_id: The id of the distributed autograd context with the gradients.
    """

    def __init__(self, optimizer: RRef[Any], context_id: int) -> None:
        self._optimizer = optimizer
        self._context_id = context_id

    def wait(self) -> None:
        """Makes the step, and returns None. Call it once.

        Raises `RuntimeError` if this worker does not know the context, and what the optimizer raises.
        """
        self._optimizer.local_value().step(self._context_id)


class DistributedOptimizer:
    """An optimizer for parameters that live on several workers. It creates an optimizer on each of them.

    Example:
        optimizer = DistributedOptimizer(torch.optim.SGD, [rref1, rref2], lr=0.05)
        with rpc.autograd.context() as context_id:
            rpc.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Attributes:
        is_functional_optim: True if steps run compiled, without the GIL.
        remote_optimizers: References to the optimizers, one for each worker that owns some of the parameters.
    """

    def __init__(
        self, optimizer_class: Callable[..., Any], params_rref: Iterable[PyRRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        """Creates an optimizer on each worker that owns some of the parameters, and waits for all of them.

        Args:
            optimizer_class: A class of `torch.optim`, or any other with such a constructor and a `step`.
            params_rref: References to parameters, on any workers. Without references, steps do nothing.
            *args: Further positional arguments of the optimizers.
            **kwargs: Keyword arguments of the optimizers, for example `lr`.

        Raises:
            TypeError: One of `params_rref` is a parameter and not a reference.
            Exception: What a constructor raised on its worker. If several raised, the last one, with notes about the
                others.
        """
        by_owner: dict[WorkerInfo, list[PyRRef[Any]]] = {}
        for rref in params_rref:
            if isinstance(rref, torch.Tensor):
                raise TypeError(
                    f"DistributedOptimizer takes references to parameters, not a {type(rref).__name__}: give it "
                    "rpc.RRef(parameter), or the result of RemoteModule.remote_parameters()"
                )
            by_owner.setdefault(rref.owner(), []).append(rref)
        functional = _functional_class(optimizer_class)
        self.is_functional_optim = functional is not None
        # For torch's own, the class of torch.optim is sent, and each worker looks the functional one up. Unpickling a
        # functional class by name would import, and so compile, all of them.
        made = optimizer_class if functional is None or functional.__module__.startswith("torch.") else functional
        if functional is None:
            logger.warning(
                "Creating the optimizer %s without TorchScript support: its steps hold the GIL, which slows down "
                "workers that serve several trainers at the same time",
                optimizer_class,
            )
        new = _new_script_local_optimizer if self.is_functional_optim else _new_local_optimizer
        self._owners = list(by_owner)
        self.remote_optimizers: list[RRef[Any]] = _wait_for_all(
            [api.rpc_async(owner, new, (made, rrefs, *args), kwargs) for owner, rrefs in by_owner.items()],
            self._owners,
        )

    def step(self, context_id: int) -> None:
        """Applies the gradients of a distributed autograd context on all workers at the same time, and waits for all.

        With a class that has a compiled version, parameters without a gradient in the context stay unchanged. Other
        classes also use gradients that are in `.grad` already. Without parameters it does nothing.

        Args:
            context_id: The id of the context.

        Raises:
            RuntimeError: This worker does not know the context. Nothing has changed.
            Exception: What a step raised on its worker. If several raised, the last one, with notes about the others.
                The steps of other workers may have been made.
        """
        context = autograd._retrieve_context(context_id)
        step = _script_local_optimizer_step if self.is_functional_optim else _local_optimizer_step
        here: dict[WorkerInfo, Any] = {}
        there: dict[WorkerInfo, Any] = {}
        for optimizer, owner in zip(self.remote_optimizers, self._owners, strict=True):
            if optimizer.is_owner():
                here[owner] = _LocalStep(optimizer, context_id)
            else:
                there[owner] = _begin_step(optimizer, owner, context, step)
        steps = here | there  # this worker's own first: it is made while the others make theirs
        _wait_for_all(list(steps.values()), list(steps))


def _functional_class(optimizer_class: Any) -> Any:
    """Returns torch's functional version of an optimizer class, which is given its gradients and can be compiled.

    Returns None if there is none, or if TorchScript is disabled.
    """
    return functional_optim_map.get(optimizer_class) if torch.jit._state._enabled else None


def _wait_for_all(rpc_futs: Iterable[Any], owners: Sequence[WorkerInfo] = ()) -> list[Any]:
    """Waits until all calls have ended, and returns their results in order; an empty list for no calls.

    Args:
        rpc_futs: The futures of the calls; each has a `wait`.
        owners: The worker of each call, for the notes. If empty, the notes name no workers.

    Raises:
        Exception: The error of the last call that failed, with notes about the other failures.
    """
    results: list[Any] = []
    failures: list[tuple[str, Exception]] = []
    for place, future in enumerate(rpc_futs):
        try:
            results.append(future.wait())
        except Exception as error:
            failures.append((f"worker {owners[place].name!r}" if owners else "another call", error))
    if not failures:
        return results
    notes = [f"{who} failed as well: {type(each).__name__}: {each}" for who, each in failures[:-1]]
    _, last = failures.pop()
    failures.clear()  # avoids a reference cycle: their tracebacks refer to this frame
    for note in notes:
        last.add_note(note)
    try:
        raise last
    finally:
        del last


with _compiling():
    # At the end, because it imports torch's package, which needs `DistributedOptimizer` from this module.
    from torch.distributed.optim.utils import functional_optim_map

"""Send and receive functions: the nodes of the autograd graph where it goes on at another worker.

The tensors that require gradients and go out in one message are the inputs of one send function; those that come in one
are the outputs of one receive function. Backwards, the receive function sends the gradients of what came to the worker
from which it came, and the send function there hands them on to what was sent.

Both know the backward pass by the engine's task in which they run (`running`): a graph may be used in several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.autograd import Function

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.contexts import DistAutogradContext, Sent

if TYPE_CHECKING:
    from farcall.pytorch.autograd.passes import LocalPass

running: Final[dict[int, LocalPass]] = {}
"""The passes that the engine runs in this process, by the numbers of its tasks."""

EMPTY: Final = torch.empty(0)
"""What flows along edges that only order nodes."""


def running_pass() -> LocalPass | None:
    """The pass that this thread runs nodes for."""
    return running.get(torch._C._current_graph_task_id())


class Origin(NamedTuple):
    """Where received tensors came from."""

    context_id: int
    message_id: int
    sender: WorkerInfo
    likes: list[tuple[torch.Size, dict[str, Any]]]
    """What they are like: the shape, and what torch has to be told to make another one."""


class _Send:
    @staticmethod
    def forward(ctx: Any, message_id: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.message_id = message_id
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        local_pass = running_pass()
        if local_pass is None:
            raise RuntimeError("SendRpcBackward runs in a distributed backward pass only: use dist_autograd.backward")
        return None, *local_pass.take(ctx.message_id)


class _Receive:
    @staticmethod
    def forward(ctx: Any, lure: torch.Tensor, origin: Origin, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        ctx.origin = origin
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        local_pass = running_pass()
        origin = ctx.origin
        if local_pass is None or local_pass.context.context_id != origin.context_id:
            raise RuntimeError(
                f"a tensor came from worker {origin.sender.name!r} in autograd context {origin.context_id}: its graph "
                "goes on there. Use torch.distributed.autograd.backward with that context"
            )
        local_pass.propagate(origin.sender, origin.message_id, list(gradients))
        return None, None, None


def function(name: str, methods: type) -> Any:
    """An autograd function of these methods, whose node has that name with `Backward` after it."""
    make: Any = type(Function)  # names with colons are torch's, and no names of classes in Python
    return make(name, (methods, Function), {})


_SendRpc: Final = function("torch::distributed::autograd::SendRpc", _Send)
_RecvRpc: Final = function("torch::distributed::autograd::RecvRpc", _Receive)


_RecvRpcBackward: Final[Any] = _RecvRpc._backward_cls
RECEIVE_FUNCTION: Final[Any] = _RecvRpcBackward
"""The type of receive functions, for who asks that of many nodes."""
# Past what `Function.apply` does in Python for functions of programs: defaults of arguments, and functorch.
_send: Final[Any] = super(Function, _SendRpc).apply
_receive: Final[Any] = super(Function, _RecvRpc).apply


def is_receive_function(node: Any) -> bool:
    """Whether the graph goes on at another worker there."""
    return isinstance(node, _RecvRpcBackward)


def is_hooked(node: Any) -> bool:
    """Whether the program has hooks at that receive function."""
    return getattr(node, "hooked", False)


def _noting(register: Any) -> Any:
    """torch does not tell whether a node has hooks; so it is noted when one is registered."""

    def note(self: Any, hook: Any) -> Any:
        self.hooked = True
        return register(self, hook)

    return note


_RecvRpcBackward.register_hook = _noting(_RecvRpcBackward.register_hook)
_RecvRpcBackward.register_prehook = _noting(_RecvRpcBackward.register_prehook)


_LURE: Final = torch.empty(0, requires_grad=True)
"""An input that requires gradients, so that the outputs do."""


def record_sent(
    context: DistAutogradContext,
    message_id: int,
    stamp: int,
    to: WorkerInfo,
    tensors: Sequence[torch.Tensor],
    answered: int | None = None,
) -> Sent:
    """These tensors, which require gradients, go to that worker. Raises `RuntimeError` if the context is released."""
    if torch.is_grad_enabled():  # to ask costs less than to set
        end = _send(message_id, *tensors)
    else:
        with torch.enable_grad():
            end = _send(message_id, *tensors)
    sent = Sent(message_id, stamp, to, end, answered)
    context.add_sent(sent)
    return sent


def record_later(context: DistAutogradContext, *sent: Any) -> None:
    """As `record_sent`, to be done when they have gone: `DistAutogradContext.catch_up` has to be called then."""

    def record() -> Sent | None:
        try:
            return record_sent(context, *sent)
        except RuntimeError:
            if not context.is_released:
                raise
        return None

    context.unrecorded.append(record)


class _Reception:
    """Tensors that came with one message."""

    __slots__ = ("_holder", "_node", "_origin", "message_id", "sender")

    def __init__(self, origin: Origin, node: Any) -> None:
        self.message_id = origin.message_id
        self.sender = origin.sender
        self._origin = origin
        self._node = node
        self._holder: Any = None

    def function(self) -> Any:
        """See `Received`. Another one of the same kind if nobody had the tensors any more, nor what was made of them.

        Python's object of a function of ours does not keep it alive; that of one of torch's does, and what follows it.
        """
        if self._holder is None:
            try:
                self._node.next_functions  # noqa: B018 (says whether it lives)
            except RuntimeError:
                likes = [torch.zeros(shape, **kind) for shape, kind in self._origin.likes]
                with torch.enable_grad():
                    first = _receive(_LURE, self._origin, likes)[0]
                    self._holder = (first.view_as(first) if first.layout is torch.strided else first.clone()).grad_fn
                self._node = first.grad_fn
        return self._node


def record_received(
    context: DistAutogradContext, message_id: int, sender: WorkerInfo, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """These came from that worker; the tensors to use in their place. Raises `RuntimeError` as `record_sent`."""
    likes, fresh = [], []
    for tensor in tensors:
        likes.append((tensor.shape, {"dtype": tensor.dtype, "device": tensor.device, "layout": tensor.layout}))
        fresh.append(tensor.data)  # no views: autograd does not let those be changed in place
    origin = Origin(context.context_id, message_id, sender, likes)
    outputs: tuple[torch.Tensor, ...]
    if torch.is_grad_enabled():
        outputs = _receive(_LURE, origin, fresh)
    else:
        with torch.enable_grad():
            outputs = _receive(_LURE, origin, fresh)
    context.add_received(_Reception(origin, outputs[0].grad_fn))
    return outputs

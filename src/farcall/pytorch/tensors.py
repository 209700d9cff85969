"""How tensors travel: as what they show, beside the pickle where they are large.

`reduce_tensor` is the reducer of `torch.Tensor` in farcall's messages, and in nobody else's pickles.

Around it, `sending_apart` and `receiving_apart` let the tensors of a value travel in a list of their own, for those who
have to see them (`envelopes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pickle import PickleBuffer
from typing import Any, ParamSpec, TypeVar

import torch

from farcall.serialization import register_reducer

P = ParamSpec("P")
R = TypeVar("R")

_profiler_enabled = torch.autograd._profiler_enabled


class _Apart(dict[int, torch.Tensor]):
    """The tensors of one value, by their ids, each once though pickle may come twice; in order."""


class _Thread(threading.local):
    sent: _Apart | None = None
    received: list[torch.Tensor] | None = None


_thread = _Thread()


@contextmanager
def sending_apart() -> Iterator[Mapping[int, torch.Tensor]]:
    """What is pickled inside has its tensors in there, in order, and only their places in the pickle."""
    before, tensors = _thread.sent, _Apart()
    _thread.sent = tensors
    try:
        yield tensors
    finally:
        _thread.sent = before


@contextmanager
def receiving_apart(tensors: list[torch.Tensor]) -> Iterator[None]:
    """What is unpickled inside finds its tensors in this list."""
    before, _thread.received = _thread.received, tensors
    try:
        yield
    finally:
        _thread.received = before


def take_apart(place: int) -> torch.Tensor:
    """For the unpickler: the tensor at that place. Raises `RuntimeError` outside of `receiving_apart`."""
    if _thread.received is None:
        raise RuntimeError("a tensor that travelled apart from its pickle was read without it")
    return _thread.received[place]


def _unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """What it does is not shown in profiles: how a tensor travels is none of the program's operators."""

    @wraps(function)
    def unrecorded(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _profiler_enabled():
            return function(*args, **kwargs)
        torch.autograd._enable_record_function(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.autograd._enable_record_function(True)

    return unrecorded


@_unrecorded
def reduce_tensor(tensor: torch.Tensor) -> Any:
    """What pickle makes of a tensor."""
    sent = _thread.sent
    if sent is not None:
        if id(tensor) not in sent:
            sent[id(tensor)] = tensor
            return take_apart, (len(sent) - 1,)
        return take_apart, (list(sent).index(id(tensor)),)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return tensor.__reduce_ex__(2)
    dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
    memory = dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else b""
    return rebuild_tensor, (PickleBuffer(memory), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


@_unrecorded
def rebuild_tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A tensor again, in the memory that came."""
    view = memoryview(memory)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    tensor = torch.frombuffer(view if not view.readonly else bytearray(view), dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


register_reducer(torch.Tensor, reduce_tensor)

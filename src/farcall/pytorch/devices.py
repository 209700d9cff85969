"""Tensors on other devices than the processor: moved between workers by their device maps.

A rider of `envelopes`, for calls to a worker for which the caller has a map. A tensor leaves its device for the
processor's memory, travels as any other, and goes to the device that the map names for it; those of the reply go the
way back, by the same map turned round, which travels with the call. A device that no map names is refused with torch's
words; tensors in the processor's memory need no map.

It stands before all other riders: these see only tensors in the processor's memory, so that the gradients of
distributed autograd need no map of their own. The moves are part of the autograd graph at both ends.

A tensor on the device `meta` has a shape and no contents, and nothing else of it travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Parameter

from farcall.agent import Agent
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.envelopes import RIDERS, Departure, Tensors, Trip, Visit
from farcall.pytorch.layouts import no_map
from farcall.pytorch.options import DeviceMap

_CPU: Final = torch.device("cpu")


class Move(NamedTuple):
    """What becomes of one tensor where it arrives."""

    device: str
    is_parameter: bool = False
    shape: tuple[int, ...] | None = None
    """And the strides: of one without contents."""
    strides: tuple[int, ...] = ()


Moves = list[Move | None]
"""For each tensor of a message; None for those that stay in the processor's memory."""


def depart(
    tensors: Tensors, device_map: Mapping[torch.device, torch.device], side: str, to: str
) -> tuple[Tensors, Moves]:
    """The tensors to send in place of these, and what becomes of each.

    Raises `RuntimeError` for one whose device the map does not have. `side`, `Request` or `Response`, is for that.
    """
    sent: Tensors = []
    moves: Moves = []
    for tensor in tensors:
        here = tensor.device
        there = device_map.get(here, _CPU if here == _CPU else None)
        if there is None:
            raise no_map(side, here, to)
        is_parameter = isinstance(tensor, Parameter)
        if here == there == _CPU:
            moves.append(None)
        elif here.type == "meta":
            if there != here:
                raise RuntimeError(f"a tensor on the device meta has no contents that could go to {there} of {to}")
            moves.append(Move(str(there), is_parameter, tuple(tensor.shape), tensor.stride()))
            tensor = torch.empty(0, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        else:
            moves.append(Move(str(there), is_parameter))
            with torch.enable_grad():
                tensor = tensor.to(_CPU)
        sent.append(tensor)
    return sent, moves


def arrive(tensors: Tensors, moves: Moves) -> Tensors:
    """The tensors on their devices."""
    return [tensor if move is None else _arrived(tensor, move) for tensor, move in zip(tensors, moves, strict=True)]


def _arrived(tensor: torch.Tensor, move: Move) -> torch.Tensor:
    if tensor.grad_fn is not None:  # of distributed autograd
        with torch.enable_grad():
            return tensor.to(move.device)
    requires_grad, tensor = tensor.requires_grad, tensor.detach()
    if move.shape is not None:
        tensor = torch.empty_strided(move.shape, move.strides, dtype=tensor.dtype, device=move.device)
    else:
        tensor = tensor.to(move.device)
    return Parameter(tensor, requires_grad) if move.is_parameter else tensor.requires_grad_(requires_grad)


class _Trip(Trip):
    """A call at its caller."""

    def __init__(self, device_map: DeviceMap, to: str) -> None:
        self._map = device_map
        self._to = to

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """See `Trip`. Raises `RuntimeError`."""
        sent, moves = depart(tensors, self._map, "Request", self._to)
        return sent, (moves, [(str(theirs), str(ours)) for ours, theirs in self._map.items()])

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        """See `Trip`."""
        return arrive(tensors, words)


class _Visit(Visit):
    """A call at its callee."""

    def __init__(self, words: Any, caller: str) -> None:
        self._moves, back = words
        self._map = {torch.device(ours): torch.device(theirs) for ours, theirs in back}
        self._caller = caller

    def unpack(self, tensors: Tensors) -> Tensors:
        """See `Visit`."""
        return arrive(tensors, self._moves)

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """See `Visit`. Raises `RuntimeError`."""
        return depart(tensors, self._map, "Response", self._caller)


class Devices:
    """The rider."""

    key = "devices"

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """See `Rider`."""
        maps = getattr(agent, "device_maps", None)
        return maps is not None and bool(maps.get(to.name))

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """See `Rider`."""
        name = departure.to.name
        return _Trip(agent.device_maps[name], name)

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """See `Rider`."""
        return _Visit(words, caller.name)


def ride() -> None:
    """From now on, tensors are moved by the device maps; once is enough."""
    if not any(isinstance(rider, Devices) for rider in RIDERS):
        RIDERS.insert(0, Devices())

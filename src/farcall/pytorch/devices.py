"""An interceptor that moves tensors between devices of different workers, by the device maps of the options.

It is active for calls to a worker for which the caller has a device map. A tensor is copied from its device to CPU
memory, sent like any other, and moved to the device that the map names. The tensors of the reply go back by the reverse
of the map, which is sent with the call. A tensor on a device that the map does not have is rejected with torch's
message. Tensors in CPU memory need no map.

It runs before all other interceptors at the caller. So these see only tensors in CPU memory, and the gradients of
distributed autograd need no map of their own. The moves are part of the autograd graph on both workers.

A tensor on the device `meta` has a shape and no contents; only its shape and strides are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Parameter

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.envelopes import RIDERS, Departure, Tensors, Trip, Visit
from farcall.pytorch.options import DeviceMap
from farcall.pytorch.tensors import missing_device_map_error
from farcall.runtime.agent import Agent

_CPU: Final = torch.device("cpu")


class Move(NamedTuple):
    """What the receiver of a message does with one of its tensors. The values are not checked.

    Attributes:
        device: The device to which the tensor is moved.
        is_parameter: Whether the tensor becomes a `Parameter`.
        shape: The shape of a tensor on the device `meta`, which has no contents; None for any other tensor.
        strides: The strides of such a tensor; empty for any other tensor.
    """

    device: str
    is_parameter: bool = False
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()


Moves = list[Move | None]
"""One entry per tensor of a message; None for a tensor that stays in CPU memory."""


def prepare_to_send(
    tensors: Tensors, device_map: Mapping[torch.device, torch.device], side: str, to: str
) -> tuple[Tensors, Moves]:
    """Returns the tensors to send in place of these, all in CPU memory, and what the receiver does with each.

    The second result has a `Move` for each tensor; None for one that stays in CPU memory. Without tensors both lists
    are empty.

    Args:
        tensors: The tensors of a message; may be empty.
        device_map: A map from devices of this worker to devices of the other one.
        side: `Request` or `Response`, for the error.
        to: The name of the other worker, for the error.

    Raises:
        RuntimeError: A tensor is on a device that the map does not have, or a tensor on `meta`, which has no contents,
            would go to another device.
    """
    sent: Tensors = []
    moves: Moves = []
    for tensor in tensors:
        here = tensor.device
        there = device_map.get(here, _CPU if here == _CPU else None)
        if there is None:
            raise missing_device_map_error(side, here, to)
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


def place_received(tensors: Tensors, moves: Moves) -> Tensors:
    """Returns the received tensors on the devices that `moves` names, in the same order; an empty list for none.

    Args:
        tensors: The tensors as they came, in CPU memory.
        moves: What to do with each tensor; None for one that stays in CPU memory.

    Raises:
        ValueError: There are not as many moves as tensors.
        RuntimeError: A device does not exist.
    """
    return [tensor if move is None else _place_one(tensor, move) for tensor, move in zip(tensors, moves, strict=True)]


def _place_one(tensor: torch.Tensor, move: Move) -> torch.Tensor:
    """Returns one received tensor on the device that `move` names.

    It becomes a parameter if `move` says so. A tensor of the device `meta`, which has no contents, is created anew.
    Raises `RuntimeError` if the device does not exist.
    """
    if tensor.grad_fn is not None:  # part of a graph of distributed autograd, so the move must be, too
        with torch.enable_grad():
            return tensor.to(move.device)
    requires_grad, tensor = tensor.requires_grad, tensor.detach()
    if move.shape is not None:
        tensor = torch.empty_strided(move.shape, move.strides, dtype=tensor.dtype, device=move.device)
    else:
        tensor = tensor.to(move.device)
    return Parameter(tensor, requires_grad) if move.is_parameter else tensor.requires_grad_(requires_grad)


class _ClientCall(Trip):
    """Moves the tensors of one call between devices, at the caller, by its device map for the callee.

    Args:
        device_map: The map from devices of this worker to devices of the callee. It is not checked.
        to: The name of the callee.
    """

    def __init__(self, device_map: DeviceMap, to: str) -> None:
        self._map = device_map
        self._to = to

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Returns the tensors of the request in CPU memory, and the data from which the callee moves them.

        The data are a pair: what to do with each tensor, and the reverse of the device map for the reply. Raises
        `RuntimeError` if a tensor is on a device that the map does not have.
        """
        sent, moves = prepare_to_send(tensors, self._map, "Request", self._to)
        return sent, (moves, [(str(theirs), str(ours)) for ours, theirs in self._map.items()])

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        """Returns the tensors of the reply on their devices; an empty list for none.

        Args:
            tensors: The tensors as they came, in CPU memory.
            words: What to do with each tensor, a list of `Move` or None. It came from the callee.

        Raises:
            ValueError: `words` does not have one entry for each tensor.
            RuntimeError: A device does not exist here.
        """
        return place_received(tensors, words)


class _ServerCall(Visit):
    """Moves the tensors of one call between devices, at the callee.

    Args:
        words: The data that came from the caller: what to do with each tensor, and the reverse of the caller's device
            map. Anything else raises `TypeError`, `ValueError` or `RuntimeError`.
        caller: The name of the caller.
    """

    def __init__(self, words: Any, caller: str) -> None:
        self._moves, back = words
        self._map = {torch.device(ours): torch.device(theirs) for ours, theirs in back}
        self._caller = caller

    def unpack(self, tensors: Tensors) -> Tensors:
        """Returns the tensors of the request on their devices; an empty list for none.

        Raises `ValueError` if the caller did not send one entry per tensor, and `RuntimeError` if a device does not
        exist.
        """
        return place_received(tensors, self._moves)

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Returns the tensors of the reply in CPU memory, and what the caller does with each: a `Move`, or None.

        They go back by the reverse of the caller's device map. Raises `RuntimeError` if a tensor is on a device that
        this map does not have.
        """
        return prepare_to_send(tensors, self._map, "Response", self._caller)


class Devices:
    """The interceptor that moves tensors between devices of two workers, by the device map that the caller has.

    It takes part in a call if the caller has a device map for the callee. The constructor takes no arguments.
    `enable_device_maps` adds an instance to this process. The class implements `envelopes.Rider`, the protocol of
    interceptors that see the tensors of calls.
    """

    key = "devices"

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """Returns True if the agent of this worker has a device map for worker `to` that is not empty, else False."""
        maps = getattr(agent, "device_maps", None)
        return maps is not None and bool(maps.get(to.name))

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """Returns the object that moves the tensors of one call that this worker makes.

        The arguments are the agent of this worker, and the call, of which only the callee is used. Raises `KeyError` if
        the agent has no device map for the callee.
        """
        name = departure.to.name
        return _ClientCall(agent.device_maps[name], name)

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """Returns the object that moves the tensors of one call that came from another worker.

        Args:
            agent: The agent of this worker; ignored.
            caller: The worker that calls.
            words: The data that came from the caller: what to do with each tensor, and the reverse of its device map.
                Raises `TypeError`, `ValueError` or `RuntimeError` if they are anything else.
        """
        return _ServerCall(words, caller.name)


def enable_device_maps() -> None:
    """Makes calls move tensors between devices by the device maps of the options from now on.

    It adds an interceptor, which runs before all others at the caller. Does nothing the second time.
    """
    if not any(isinstance(rider, Devices) for rider in RIDERS):
        RIDERS.insert(0, Devices())

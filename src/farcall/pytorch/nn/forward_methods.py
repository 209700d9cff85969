"""`forward` and `forward_async` of remote modules: they call the module on its owner.

The functions here become methods of remote modules. Modules with a TorchScript interface have generated methods
(`instantiator`), which call these. If the module is on another device than the CPU, its owner moves the arguments
there. The result is moved back to the CPU, unless the caller has a device map for the owner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from farcall.pytorch import api
from farcall.pytorch.rref import PyRRef


def forward_async(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the module on its owner, and returns a torch future of its result.

    The future fails with what the module or its constructor raised, and if the call timed out or the owner was lost.
    Raises `RuntimeError` if this process is not a worker.

    Args:
        self: The remote module, which stands for a module on another worker.
        *args: The positional arguments of the module.
        **kwargs: Its keyword arguments.
    """
    rref = self.module_rref
    return api.rpc_async(rref.owner(), _remote_forward, (rref, self.device, self.is_device_map_set, *args), kwargs)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the module on its owner, and returns its result.

    Raises what the module or its constructor raised. Raises `RuntimeError` if the call timed out, the owner was lost,
    or this process is not a worker.

    Args:
        self: The remote module, which stands for a module on another worker.
        *args: The positional arguments of the module.
        **kwargs: Its keyword arguments.
    """
    rref = self.module_rref
    return api.rpc_sync(rref.owner(), _remote_forward, (rref, self.device, self.is_device_map_set, *args), kwargs)


_generated_methods = [forward_async, forward]
module_interface_cls = None


def _remote_forward(
    module_rref: PyRRef[Any], device: str, is_device_map_set: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Called remotely on the owner of the module: calls `forward` of the module, and returns its result.

    Raises what `forward` and the constructor of the module raise.

    Args:
        module_rref: A reference to the module. Raises `RuntimeError` if this worker is not the owner.
        device: The device of the module. Tensors in the arguments are moved there, unless it is "cpu".
        is_device_map_set: If False and the device is not "cpu", the tensors of the result are moved to the CPU.
        *args: The positional arguments of `forward`.
        **kwargs: Its keyword arguments.
    """
    module = module_rref.local_value()
    if device == "cpu":
        return module.forward(*args, **kwargs)
    args, kwargs = move_tensors((args, kwargs), torch.device(device))
    result = module.forward(*args, **kwargs)
    return result if is_device_map_set else move_tensors(result, torch.device("cpu"))


def move_tensors(value: Any, device: torch.device) -> Any:
    """Returns a copy of the value with its tensors on `device`, also those in nested lists, tuples and dicts.

    Tensors in a set, or in an attribute of an object, stay where they are. Raises `RuntimeError` if the device does not
    exist.
    """
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)

"""How `forward` and `forward_async` of a remote module get to the module itself.

The functions here become methods of remote modules; those of modules with an interface are generated (`instantiator`)
and call these. A module on another device than the processor's gets its arguments moved there; what it returns comes
back to the processor first unless the caller's agent maps devices to each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from farcall.pytorch import api
from farcall.pytorch.rref import PyRRef


def forward_async(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A future of what the module returns for these arguments."""
    rref = self.module_rref
    return api.rpc_async(rref.owner(), _remote_forward, (rref, self.device, self.is_device_map_set, *args), kwargs)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the module returns for these arguments. Raises what it raises, and what its constructor raised."""
    rref = self.module_rref
    return api.rpc_sync(rref.owner(), _remote_forward, (rref, self.device, self.is_device_map_set, *args), kwargs)


_generated_methods = [forward_async, forward]


def _remote_forward(
    module_rref: PyRRef[Any], device: str, is_device_map_set: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """At the owner of the module."""
    module = module_rref.local_value()
    if device == "cpu":
        return module.forward(*args, **kwargs)
    args, kwargs = moved((args, kwargs), torch.device(device))
    result = module.forward(*args, **kwargs)
    return result if is_device_map_set else moved(result, torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """The same value, with all tensors that are in it, in lists, tuples and dicts too, on that device."""
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)

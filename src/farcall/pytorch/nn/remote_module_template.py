"""The source code of the methods of remote modules, as a template that `instantiator` fills in.

The fields are those of torch's template, and `given`: the arguments of a function as it passes them on. The second part
is for TorchScript interfaces only: the class that TorchScript sees in place of a remote module.
"""

from __future__ import annotations

from typing import Final

NO_PICKLE: Final = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
NO_UNPICKLE: Final = "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"

_TEMPLATE_PREFIX: Final = '''"""The methods of remote modules with an interface: generated."""
from typing import *

import torch
from torch import Tensor, nn
from torch._jit_internal import Future

from farcall.pytorch.nn import forward_methods as _forward_methods
from farcall.pytorch.nn import instantiator as _instantiator


{assign_module_interface_cls}


def forward_async(self, {arg_types}){arrow_and_future_return_type}:
    return _forward_methods.forward_async(self, {given})


def forward(self, {arg_types}){arrow_and_return_type}:
    return _forward_methods.forward(self, {given})


_generated_methods = [forward_async, forward]
'''

_REMOTE_FORWARD_TEMPLATE: Final = """

class Scriptable(nn.Module):
    module_rref: Future[Any]

    def __init__(self, remote_module):
        super().__init__()
        self.module_rref = torch.futures.Future()
        self.module_rref.set_result(_instantiator.Calls(remote_module))

    @torch.jit.export
    def forward(self, {arg_types}){arrow_and_return_type}:
        return self._result(self._begin({given}))

    @torch.jit.export
    def forward_async(self, {arg_types}){arrow_and_future_return_type}:
        return torch.jit.fork(self._await, self._begin({given}))

    @torch.jit.export
    def _await(self, call: int){arrow_and_return_type}:
        return self._result(call)

    @torch.jit.ignore
    def _begin(self, {arg_types}) -> int:
        return self.module_rref.value().begin({given})

    @torch.jit.ignore
    def _result(self, call: int){arrow_and_return_type}:
        return self.module_rref.value().result(call)

    @torch.jit.export
    def __getstate__(self):
        raise RuntimeError("{no_pickle}")

    @torch.jit.export
    def __setstate__(self, state):
        raise RuntimeError("{no_unpickle}")
"""

_REMOTE_FORWARD_TEMPLATE_ENABLE_MOVING_CPU_TENSORS_TO_CUDA: Final = _REMOTE_FORWARD_TEMPLATE
"""The same, because the owner of the module moves tensors."""


def get_remote_module_template(enable_moving_cpu_tensors_to_cuda: bool) -> str:
    """Returns the source code of the methods of remote modules with a TorchScript interface, with fields to fill in.

    The fields are in braces, for `str.format`. The argument has no effect: the result is the same for True and False.
    """
    if enable_moving_cpu_tensors_to_cuda:
        return _TEMPLATE_PREFIX + _REMOTE_FORWARD_TEMPLATE_ENABLE_MOVING_CPU_TENSORS_TO_CUDA
    return _TEMPLATE_PREFIX + _REMOTE_FORWARD_TEMPLATE

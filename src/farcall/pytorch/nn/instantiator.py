"""Methods for remote modules that have an interface of TorchScript's, generated from the signature of its `forward`.

A generated module has `forward_async` and `forward` for plain Python (`_generated_methods`), and `Scriptable`, the
class of the module that TorchScript gets to see in the place of a remote module. It compiles only what it has the
source of, and its code cannot call ours: it calls methods that it is told to ignore, which Python runs. They find the
remote module in an attribute, since they are bound anew at each call; TorchScript keeps no Python object in one, but a
future whose value is such an object. A call is begun in the thread that asks for it, so that whatever rides along sees
it; TorchScript waits for it in a task of its own, as a future of ours would give it a value that has no type there.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from types import ModuleType
from typing import Any, Final

import torch

from farcall.pytorch.nn import forwarding

_FILE_PREFIX: Final = "_remote_module_"

_SOURCE: Final = '''"""The methods of remote modules with the interface {interface}: generated."""
from typing import *

import torch
from torch import Tensor, nn
from torch._jit_internal import Future

from farcall.pytorch.nn import forwarding as _forwarding
from farcall.pytorch.nn import instantiator as _instantiator


def forward_async(self, {parameters}) -> Future[{result}]:
    return _forwarding.forward_async(self, {names})


def forward(self, {parameters}) -> {result}:
    return _forwarding.forward(self, {names})


_generated_methods = [forward_async, forward]


class Scriptable(nn.Module):
    module_rref: Future[Any]

    def __init__(self, remote_module):
        super().__init__()
        self.module_rref = torch.futures.Future()
        self.module_rref.set_result(_instantiator.Calls(remote_module))

    @torch.jit.export
    def forward(self, {parameters}) -> {result}:
        return self._result(self._begin({names}))

    @torch.jit.export
    def forward_async(self, {parameters}) -> Future[{result}]:
        return torch.jit.fork(self._await, self._begin({names}))

    @torch.jit.export
    def _await(self, call: int) -> {result}:
        return self._result(call)

    @torch.jit.ignore
    def _begin(self, {parameters}) -> int:
        return self.module_rref.value().begin({names})

    @torch.jit.ignore
    def _result(self, call: int) -> {result}:
        return self.module_rref.value().result(call)

    @torch.jit.export
    def __getstate__(self):
        raise RuntimeError("{no_pickle}")

    @torch.jit.export
    def __setstate__(self, state):
        raise RuntimeError("{no_unpickle}")
'''

NO_PICKLE: Final = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
NO_UNPICKLE: Final = "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"

_generating: Final = threading.RLock()


class Calls:
    """Those that compiled code has begun on a remote module, by their numbers."""

    def __init__(self, remote_module: Any) -> None:
        self._remote_module = remote_module
        self._numbers = itertools.count(1)
        self._futures: dict[int, Any] = {}

    def begin(self, *args: Any) -> int:
        """Calls the module; the number is for `result`."""
        number = next(self._numbers)
        self._futures[number] = self._remote_module.forward_async(*args)
        return number

    def result(self, number: int) -> Any:
        """What the module returned. Raises what it raised."""
        return self._futures.pop(number).wait()


def get_arg_return_types_from_interface(module_interface: Any) -> tuple[str, str, str]:
    """Of its `forward`: the names of the parameters, the same with their types, and the type of the result.

    Raises `AssertionError` for what is no interface, or has no `forward`.
    """
    if not getattr(module_interface, "__torch_script_interface__", False):
        raise AssertionError("Expect a TorchScript class interface decorated by @torch.jit.interface.")
    compiled = torch.jit._state._python_cu.get_interface(torch._jit_internal._qualified_name(module_interface))
    methods = compiled.getMethodNames()
    if "forward" not in methods:
        raise AssertionError(f"Expect forward in interface methods, while it has {methods}")
    schema = compiled.getMethod("forward")
    parameters = schema.arguments[1:]  # without self
    typed = [
        f"{each.name}: {each.type}" + (f" = {each.default_value!r}" if each.has_default_value() else "")
        for each in parameters
    ]
    return ", ".join(each.name for each in parameters), ", ".join(typed), str(schema.returns[0].type)


def instantiate_scriptable_remote_module_template(
    module_interface_cls: Any, enable_moving_cpu_tensors_to_cuda: bool = True
) -> ModuleType:
    """The generated module for that interface; the same one each time. Raises `ValueError` for what is no interface.

    Tensors are moved to the module's device by its owner in any case.
    """
    if not getattr(module_interface_cls, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {module_interface_cls} must be a type object decorated by @torch.jit.interface"
        )
    qualified = torch._jit_internal._qualified_name(module_interface_cls)
    name = _FILE_PREFIX + qualified.replace(".", "_")
    with _generating:
        if name in sys.modules:
            return sys.modules[name]
        names, parameters, result = get_arg_return_types_from_interface(module_interface_cls)
        source = _SOURCE.format(
            interface=qualified,
            names=names,
            parameters=parameters,
            result=result,
            no_pickle=NO_PICKLE,
            no_unpickle=NO_UNPICKLE,
        )
        module = _loaded(name, source)
        module.__dict__["module_interface_cls"] = module_interface_cls
        sys.modules[name] = module
        return module


def instantiate_non_scriptable_remote_module_template() -> ModuleType:
    """The module with the methods of remote modules that have no interface: they take whatever they are given."""
    return forwarding


def _loaded(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    file = f"<{name}>.py"
    module.__file__ = file
    # TorchScript reads the source as `inspect` does, which finds it here.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module

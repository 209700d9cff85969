"""Generates methods for remote modules that have a TorchScript interface, from the signature of its `forward`.

A generated module contains `forward_async` and `forward` for plain Python (`_generated_methods`), and `Scriptable`, the
class that TorchScript sees in place of a remote module.

Theory of operation. TorchScript compiles only code whose source it has, and compiled code cannot call ours. It can call
methods that it was told to ignore (`torch.jit.ignore`), which Python runs. These must find the remote module in an
attribute of the compiled object. An attribute of a compiled object cannot be a Python object, but can be a future whose
value is one; so it is a future of a `Calls`. A call is started in the thread that asks for it, so that interceptors see
it. TorchScript waits for the result in a task of its own, because the value of a future of ours would have no type
there.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import itertools
import linecache
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import torch

from farcall.pytorch.nn import forward_methods
from farcall.pytorch.nn.remote_module_template import (
    _TEMPLATE_PREFIX,
    NO_PICKLE,
    NO_UNPICKLE,
    get_remote_module_template,
)

_FILE_PREFIX: Final = "_remote_module_"

_generating: Final = threading.RLock()


class Calls:
    """The calls that compiled TorchScript code has started on a remote module, by number.

    The code starts a call with `begin`, and gets its result with `result`.

    Args:
        remote_module: The remote module, an object with `forward_async`.
    """

    def __init__(self, remote_module: Any) -> None:
        self._remote_module = remote_module
        self._numbers = itertools.count(1)
        self._futures: dict[int, Any] = {}

    def begin(self, *args: Any) -> int:
        """Calls the module on its owner without waiting, and returns the number of the call, for `result`.

        `args` are the arguments of the module. Raises `RuntimeError` if this process is not a worker.
        """
        number = next(self._numbers)
        self._futures[number] = self._remote_module.forward_async(*args)
        return number

    def result(self, number: int) -> Any:
        """Waits for the call with this number, and returns what the module returned. Raises what the module raised.

        Each number can be used once. Raises `KeyError` for a number that was used or never returned.
        """
        return self._futures.pop(number).wait()


def get_arg_return_types_from_interface(module_interface: Any) -> tuple[str, str, str]:
    """Returns the parameter names, the parameters with their types, and the result type of an interface's `forward`.

    All three are source code, for example `x, y`, `x: Tensor, y: int` and `Tensor`.

    Raises:
        AssertionError: `module_interface` is not a TorchScript interface, or has no `forward`.
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


class _StringLoader(importlib.abc.SourceLoader):
    """An import loader whose source code is a text in memory.

    Args:
        data: The source code.
    """

    def __init__(self, data: str) -> None:
        self.data = data

    def get_source(self, fullname: str) -> str:
        """Returns the source code, whatever the name."""
        return self.data

    def get_data(self, path: Any) -> bytes:
        """Returns the source code as UTF-8 bytes, whatever the path."""
        return self.data.encode("utf-8")

    def get_filename(self, fullname: str) -> str:
        """Returns a file name for tracebacks, for example `<m>.py` for the module `m`. There is no such file."""
        return f"<{fullname}>.py"

    def path_stats(self, path: Any) -> Any:
        """Always raises `OSError`, because the source code is not in a file."""
        raise OSError("dynamically generated module has no filesystem stats")

    def exec_module(self, module: ModuleType) -> None:
        """Runs the text, and adds it to `linecache`, where TorchScript looks for it. Raises what the text raises."""
        file = self.get_filename(module.__name__)
        linecache.cache[file] = (len(self.data), None, self.data.splitlines(keepends=True), file)
        exec(compile(self.data, file, "exec", dont_inherit=True), module.__dict__)


def _do_instantiate_remote_module_template(
    generated_module_name: str, str_dict: Mapping[str, str], enable_moving_cpu_tensors_to_cuda: bool
) -> ModuleType:
    """Returns the generated module of this name, with `forward_async` and `forward`; generates it the first time.

    Raises what the generated code raises, for example `SyntaxError`.

    Args:
        generated_module_name: The name, under which the module is also put into `sys.modules`.
        str_dict: The texts for the fields of the source-code template, by the names of the fields. Raises `KeyError` if
            one is missing. If `jit_script_decorator` is empty, the class for TorchScript is left out.
        enable_moving_cpu_tensors_to_cuda: Has no effect: the template is the same for True and False.
    """
    with _generating:
        if generated_module_name in sys.modules:
            return sys.modules[generated_module_name]
        given = ", ".join(text for text in (str_dict["args"], str_dict["kwargs"]) if text)
        template = get_remote_module_template(enable_moving_cpu_tensors_to_cuda)
        if not str_dict["jit_script_decorator"]:  # not for TorchScript, so without `Scriptable`
            template = _TEMPLATE_PREFIX
        source = template.format(given=given, no_pickle=NO_PICKLE, no_unpickle=NO_UNPICKLE, **str_dict)
        loader = _StringLoader(source)
        spec = importlib.util.spec_from_loader(generated_module_name, loader, origin="generated")
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[generated_module_name] = module
        return module


def instantiate_scriptable_remote_module_template(
    module_interface_cls: Any, enable_moving_cpu_tensors_to_cuda: bool = True
) -> ModuleType:
    """Returns a Python module with the methods of those remote modules that have a certain TorchScript interface.

    Its list `_generated_methods` has the functions `forward_async` and `forward`, with the parameters of the
    interface's `forward`. The Python module is generated once; later calls with the same interface return it again.

    Args:
        module_interface_cls: A class decorated with `torch.jit.interface`.
        enable_moving_cpu_tensors_to_cuda: Has no effect, as the owner of a module always moves tensors to its device.

    Raises:
        ValueError: `module_interface_cls` is not an interface.
        AssertionError: The interface has no `forward`.
    """
    if not getattr(module_interface_cls, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {module_interface_cls} must be a type object decorated by @torch.jit.interface"
        )
    name = _FILE_PREFIX + torch._jit_internal._qualified_name(module_interface_cls).replace(".", "_")
    if name in sys.modules:
        return sys.modules[name]
    args, arg_types, result = get_arg_return_types_from_interface(module_interface_cls)
    str_dict = {
        "assign_module_interface_cls": "module_interface_cls = None",
        "arg_types": arg_types,
        "arrow_and_return_type": f" -> {result}",
        "arrow_and_future_return_type": f" -> Future[{result}]",
        "args": args,
        "kwargs": "",
        "jit_script_decorator": "@torch.jit.script",
    }
    module = _do_instantiate_remote_module_template(name, str_dict, enable_moving_cpu_tensors_to_cuda)
    module.__dict__["module_interface_cls"] = module_interface_cls  # set here, as a local class has no importable name
    return module


def instantiate_non_scriptable_remote_module_template() -> ModuleType:
    """Returns the Python module with the methods of remote modules without a TorchScript interface.

    Its list `_generated_methods` has the functions `forward_async` and `forward`, which accept any arguments.
    """
    return forward_methods

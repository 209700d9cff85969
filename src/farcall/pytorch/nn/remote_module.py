"""`RemoteModule`: what `torch.distributed.nn.api.remote_module` has, on farcall.

A remote module has a reference to a module that was made on another worker, and methods `forward` and `forward_async`
that call it there. It stands for that module where one is called; its parameters, buffers and submodules are not here,
and all of `torch.nn.Module`'s methods that would need them are refused.

It travels in calls, as a reference does, and in no other pickle. What it consists of then is in
`_REMOTE_MODULE_PICKLED_ATTRIBUTES`.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import _remote_device

from farcall.pytorch import api
from farcall.pytorch.nn import forwarding, instantiator
from farcall.pytorch.rref import PyRRef, RRef
from farcall.pytorch.script_modules import reduce_script_module
from farcall.serialization import register_reducer

logger = logging.getLogger("farcall")

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""What travels, in this order."""

_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING: Final = (*vars(nn.Module()), "forward_async", "forward")
"""What does not: everything of `torch.nn.Module`, and the methods, which are installed anew."""

_KNOWN_ATTRIBUTES: Final = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING}

_REFUSED: Final = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float"),
    *("double", "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook"),
    *("register_forward_hook", "state_dict", "load_state_dict", "named_parameters", "buffers", "named_buffers"),
    *("children", "named_children", "modules", "named_modules", "requires_grad_", "zero_grad", "share_memory"),
    "extra_repr",
)
"""The methods of `torch.nn.Module` that a remote module does not have."""


class _RemoteModule(nn.Module):  # type: ignore[misc]  # torch may not be there when types are checked
    """A module on another worker."""

    on: str | int
    """The worker that it is on: its name or its rank."""
    device: str
    """Its device there."""
    is_device_map_set: bool
    """Whether results may come from a device to a device; else they come through the processor's memory."""
    is_scriptable: bool
    """Whether it has an interface, so that `torch.jit.script` takes it."""
    generated_methods: Sequence[Callable[..., Any]]
    """`forward_async` and `forward`."""
    module_rref: PyRRef[Any]
    """The module itself."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        """Has `module_cls(*args, **kwargs)` made on a worker and moved to a device there.

        `remote_device` is `"name/device"`, `"rank:1/device"`, or the first half of it, for `cpu`.

        Without an interface this does not wait: what `module_cls` raises, and `ValueError` if it makes no module, is
        raised by `forward`. With one (a class decorated by `torch.jit.interface`) the module is compiled there, and its
        errors are raised here. Raises `ValueError` for what is no device, `RuntimeError` if this is no worker.
        """
        super().__init__()
        self._place(remote_device)
        arguments = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        self._equip(_module_interface_cls)
        if _module_interface_cls is None:
            self.module_rref = api.remote(self.on, _create_module, arguments)
        else:
            self.module_rref = api.rpc_sync(self.on, _create_script_module, (*arguments, _module_interface_cls))
        self._install_methods()

    def _place(self, remote_device: str) -> None:
        """Sets where it is."""
        if not api._is_current_rpc_agent_set():
            raise AssertionError("RemoteModule only works in RPC.")
        place = _remote_device(remote_device)
        agent = api._get_current_rpc_agent()
        where = place.worker_name() if place.worker_name() is not None else place.rank()
        info = agent.get_worker_info(where)
        self.on = where if where is not None else info.name
        self.device = str(place.device())
        device_map_for = getattr(agent, "_get_device_map", None)  # agents of other backends may know no devices
        self.is_device_map_set = device_map_for is not None and bool(device_map_for(info))

    def _equip(self, interface: Any) -> None:
        """Sets its methods: those for that interface, or those that take anything."""
        self.is_scriptable = interface is not None
        source = instantiator.instantiate_scriptable_remote_module_template(interface) if interface else forwarding
        self.generated_methods = source._generated_methods

    def _install_methods(self) -> None:
        for method in self.generated_methods:
            setattr(self, method.__name__, types.MethodType(method, self))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: PyRRef[Any], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """A remote module for a module that is there already, and maybe shared: the way for those with an interface,
        which do not travel themselves. `remote_device` says where it is. Raises as the constructor does.
        """
        remote_module: RemoteModule = object.__new__(RemoteModule)
        remote_module._place(remote_device)
        remote_module._equip(_module_interface_cls)
        remote_module.module_rref = module_rref
        remote_module._install_methods()
        return remote_module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`. One that has travelled has nothing of `torch.nn.Module` that could be around it."""
        return super().__call__(*args, **kwargs) if "_forward_hooks" in self.__dict__ else self.forward(*args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Any]]:
        """References to its parameters, for an optimizer; `recurse`: those of its submodules, too."""
        parameters: list[RRef[Any]] = api.rpc_sync(self.on, _parameters_of, (self.module_rref, recurse))
        return parameters

    def get_module_rref(self) -> PyRRef[Any]:
        """The reference to the module itself."""
        return self.module_rref

    def train(self, mode: bool = True) -> _RemoteModule:
        """Sets whether the module trains. Returns this one."""
        api.rpc_sync(self.on, _train, (self.module_rref, mode))
        return self

    def eval(self) -> _RemoteModule:
        """Sets that the module does not train. Returns this one."""
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Any:
        """Refused: raises `ValueError`."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.on) + '/' + self.device!r})"

    def __getstate__(self) -> Any:
        raise RuntimeError(instantiator.NO_PICKLE)

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError(instantiator.NO_UNPICKLE)

    def __prepare_scriptable__(self) -> nn.Module:
        """For `torch.jit.script`: what is compiled in its place. Raises `RuntimeError` if it has no interface."""
        if not self.is_scriptable:
            raise RuntimeError(
                "this RemoteModule cannot be compiled, since the types of its forward are not known: make it by "
                "RemoteModule.init_from_module_rref with a _module_interface_cls"
            )
        return self.generated_methods[0].__globals__["Scriptable"](self)


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: _RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refused.__name__ = name
    refused.__qualname__ = f"_RemoteModule.{name}"
    refused.__doc__ = "Refused: raises `ValueError`."
    return refused


for _name in _REFUSED:
    setattr(_RemoteModule, _name, _refuse(_name))


class RemoteModule(_RemoteModule):
    """A module on another worker, used as if it were here: `forward` calls it there.

    Under distributed autograd, gradients find their way to its parameters.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Has `module_cls(*args, **kwargs)` made on a worker and moved to a device there; does not wait for it.

        `remote_device` is `"name/device"`, `"rank:1/device"`, or the first half of it, for `cpu`. What `module_cls`
        raises, and `ValueError` if it makes no module, is raised by `forward`. Raises `ValueError` for what is no
        device, `RuntimeError` if this is no worker.
        """
        super().__init__(remote_device, module_cls, args, kwargs)


# At the owner of the module


def _create_module(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    module.to(device)
    return module


def _create_script_module(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str, interface: Any
) -> RRef[Any]:
    return RRef(torch.jit.script(_create_module(module_cls, args, kwargs, device)), interface)


def _parameters_of(module_rref: PyRRef[Any], recurse: bool) -> list[RRef[Any]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _train(module_rref: PyRRef[Any], mode: bool) -> None:
    module_rref.local_value().train(mode)


# Travelling


def _reduce_remote_module(remote_module: RemoteModule) -> Any:
    for name in remote_module.__dict__:
        if name not in _KNOWN_ATTRIBUTES:
            logger.warning("the attribute %r of a RemoteModule stays here: it is none of those that travel", name)
    state = {name: getattr(remote_module, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES}
    # Not the methods: a worker that has not generated them could not find them by their names.
    state["generated_methods"] = state["generated_methods"][0].__globals__.get("module_interface_cls")
    return _receive_remote_module, (state,)


def _receive_remote_module(state: dict[str, Any]) -> RemoteModule:
    remote_module: RemoteModule = object.__new__(RemoteModule)
    remote_module.__dict__.update(state)
    remote_module._equip(state["generated_methods"])
    remote_module._install_methods()
    return remote_module


def _reduce_script_module(module: Any) -> Any:
    if hasattr(module._c, "module_rref"):
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Send its module_rref, and make another one from "
            "that by RemoteModule.init_from_module_rref where it arrives."
        )
    return reduce_script_module(module)


register_reducer(RemoteModule, _reduce_remote_module)
register_reducer(torch.jit.RecursiveScriptModule, _reduce_script_module)

"""`RemoteModule`: the contents of `torch.distributed.nn.api.remote_module`, on farcall.

A remote module holds a reference to a module that was created on another worker. Its methods `forward` and
`forward_async` call that module there. Its parameters, buffers and submodules are not in this process, so methods of
`torch.nn.Module` that would need them raise `ValueError`.

A remote module can be sent in calls, like a reference, and in no other pickle. `_REMOTE_MODULE_PICKLED_ATTRIBUTES`
lists what is sent.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed import _remote_device

from farcall.pytorch import api
from farcall.pytorch.internal import _internal_rpc_pickler
from farcall.pytorch.nn import instantiator
from farcall.pytorch.nn.remote_module_template import NO_PICKLE, NO_UNPICKLE
from farcall.pytorch.rref import PyRRef, RRef

T = TypeVar("T", bound=nn.Module)
_grad_t: TypeAlias = tuple[torch.Tensor, ...] | torch.Tensor

_NON_SCRIPTABLE_REMOTE_MODULE_MODULE: Final = instantiator.instantiate_non_scriptable_remote_module_template()
"""Its `_generated_methods` are the methods of remote modules without an interface."""

_REMOTE_MODULE_PICKLED_ATTRIBUTES: tuple[str, ...] = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""The attributes that are sent, in this order."""

_SerializedRemoteModule = namedtuple(  # type: ignore[misc]  # mypy wants the names written here
    "_SerializedRemoteModule", _REMOTE_MODULE_PICKLED_ATTRIBUTES
)
"""The sent attributes with their values.

For the reference, what stands for it in a message; for the methods, the interface.
"""

_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING: tuple[str, ...] = (*vars(nn.Module()), "forward_async", "forward")
"""The attributes that are not sent: those of `torch.nn.Module`, and the methods, which are installed on arrival."""


def _is_known(name: str) -> bool:
    """Returns True if the attribute `name` of remote modules is declared as sent or as not sent in calls; else False.

    The attributes that are sent are in `_REMOTE_MODULE_PICKLED_ATTRIBUTES`. Those that are not sent are in
    `_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING`.
    """
    # Both are looked up each time, because programs with subclasses add their own attributes there.
    return name in _REMOTE_MODULE_PICKLED_ATTRIBUTES or name in _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING


_REFUSED_METHODS: Final = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float"),
    *("double", "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook"),
    *("register_forward_hook", "state_dict", "load_state_dict", "named_parameters", "buffers", "named_buffers"),
    *("children", "named_children", "modules", "named_modules", "requires_grad_", "zero_grad", "share_memory"),
    "extra_repr",
)
"""The methods of `torch.nn.Module` that a remote module does not have."""


class _RemoteModule(nn.Module):  # type: ignore[misc]  # torch may not be there when types are checked
    """Stands for a module on another worker. Calling this object calls the module there.

    The module may have a TorchScript interface: a class that declares the methods of the module with their types.
    Programs use the subclass `RemoteModule`.

    Attributes:
        on: The name or the rank of the worker that has the module.
        device: The device of the module on that worker.
        is_device_map_set: True if results may stay on their device; otherwise they are moved to CPU memory before they
            are sent.
        is_scriptable: True if it has an interface, so that `torch.jit.script` accepts it.
        generated_methods: The functions `forward_async` and `forward`.
        module_rref: A reference to the module itself.
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: Sequence[Callable[..., Any]]
    module_rref: PyRRef[Any]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        """Creates `module_cls(*args, **kwargs)` on a worker, and moves it to a device there.

        Args:
            remote_device: Where: `"name/device"` or `"rank:1/device"`, for example `"worker1/cuda:0"`. Without the
                device, `cpu`.
            module_cls: A subclass of `torch.nn.Module`, or a function that returns a module.
            args: Its positional arguments; None for none.
            kwargs: Its keyword arguments; None for none.
            _module_interface_cls: A class decorated with `torch.jit.interface`, or None. If given, the module is
                compiled. The constructor waits for that, and raises what `module_cls` raises. If None, the constructor
                does not wait, and `forward` raises what `module_cls` raises.

        Raises:
            ValueError: `remote_device` is malformed, or `_module_interface_cls` is not an interface.
            AssertionError: This process is not a worker.
            RuntimeError: The worker does not exist.
        """
        super().__init__()
        enable_moving_cpu_tensors_to_cuda = self._prepare_init(remote_device)
        arguments = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        self._init_template(_module_interface_cls, enable_moving_cpu_tensors_to_cuda)
        if _module_interface_cls is None:
            self.module_rref = api.remote(self.on, _create_module, arguments)
        else:
            self.module_rref = api.rpc_sync(self.on, _create_module_with_interface, (*arguments, _module_interface_cls))
        self._install_generated_methods()
        self._check_attribute_picklability()

    def _prepare_init(self, remote_device_str: str) -> bool:
        """Sets `on`, `device` and `is_device_map_set`, and returns True if the device is a GPU.

        `is_device_map_set` becomes True if this worker has a device map for the other one.

        Args:
            remote_device_str: Where the module is: `"name/device"` or `"rank:1/device"`. Without the device, `cpu`.

        Raises:
            ValueError: `remote_device_str` is malformed.
            AssertionError: This process is not a worker.
            RuntimeError: The worker does not exist.
        """
        if not api._is_current_rpc_agent_set():
            raise AssertionError("RemoteModule only works in RPC.")
        place = _remote_device(remote_device_str)
        agent = api._get_current_rpc_agent()
        where = place.worker_name() if place.worker_name() is not None else place.rank()
        info = agent.get_worker_info(where)
        self.on = where if where is not None else info.name
        self.device = str(place.device())
        device_map_for = getattr(agent, "_get_device_map", None)  # agents of other backends may not have device maps
        self.is_device_map_set = device_map_for is not None and bool(device_map_for(info))
        return bool(torch.device(self.device).type == "cuda")

    def _init_template(self, module_interface_cls: Any, enable_moving_cpu_tensors_to_cuda: bool) -> None:
        """Sets `is_scriptable` and `generated_methods`, the functions `forward_async` and `forward` of this object.

        Args:
            module_interface_cls: The TorchScript interface for which methods are generated; None for methods that
                accept any arguments.
            enable_moving_cpu_tensors_to_cuda: Has no effect.

        Raises:
            ValueError: `module_interface_cls` is not an interface.
            AssertionError: The interface has no `forward`.
        """
        self.is_scriptable = module_interface_cls is not None
        generated = _NON_SCRIPTABLE_REMOTE_MODULE_MODULE
        if self.is_scriptable:
            generated = instantiator.instantiate_scriptable_remote_module_template(
                module_interface_cls, enable_moving_cpu_tensors_to_cuda
            )
        self.generated_methods = generated._generated_methods

    def _install_generated_methods(self) -> None:
        """Makes the functions in `generated_methods`, `forward_async` and `forward`, methods of this object."""
        for method in self.generated_methods:
            setattr(self, method.__name__, types.MethodType(method, self))

    def _check_attribute_picklability(self) -> None:
        """Returns None if each attribute of this object is declared as sent or as not sent in calls.

        Raises `AttributeError` for an attribute that is neither in `_REMOTE_MODULE_PICKLED_ATTRIBUTES` (sent) nor in
        `_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING` (not sent).
        """
        for name in self.__dict__:
            if not _is_known(name):
                raise AttributeError(
                    f"Attribute {name} must be either in ``_REMOTE_MODULE_PICKLED_ATTRIBUTES`` or "
                    "``_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING``."
                )

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: PyRRef[Any], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Returns a remote module for a module that exists already on another worker.

        This is how remote modules with an interface are shared, because they cannot be sent themselves.

        Args:
            remote_device: Where the module is, `"name/device"` or `"rank:1/device"`. Without the device, `cpu`.
            module_rref: A reference to the module. It is not checked.
            _module_interface_cls: Its TorchScript interface; None for none.

        Raises:
            ValueError: `remote_device` is malformed, or `_module_interface_cls` is not an interface.
            AssertionError: This process is not a worker.
            RuntimeError: The worker does not exist.
        """
        remote_module: RemoteModule = object.__new__(RemoteModule)
        enable_moving_cpu_tensors_to_cuda = remote_module._prepare_init(remote_device)
        remote_module._init_template(_module_interface_cls, enable_moving_cpu_tensors_to_cuda)
        remote_module.module_rref = module_rref
        remote_module._install_generated_methods()
        remote_module._check_attribute_picklability()
        return remote_module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module on its worker with these arguments, and returns its result. Runs hooks of `torch.nn.Module`.

        A remote module that was received in a call has no hooks. Raises what the module or its constructor raised, and
        `RuntimeError` if the call timed out or the worker was lost.
        """
        return super().__call__(*args, **kwargs) if "_forward_hooks" in self.__dict__ else self.forward(*args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Any]]:
        """Returns references to the parameters of the module, for a `DistributedOptimizer`; empty if it has none.

        Args:
            recurse: Whether to include the parameters of submodules.

        Raises:
            RuntimeError: The call timed out, or the owner was lost.
            Exception: What the constructor of the module raised.
        """
        parameters: list[RRef[Any]] = api.rpc_sync(self.on, _param_rrefs, (self.module_rref, recurse))
        return parameters

    def get_module_rref(self) -> PyRRef[Any]:
        """Returns the reference to the module itself."""
        return self.module_rref

    def train(self, mode: bool = True) -> _RemoteModule:
        """Sets the module to training mode, or to evaluation mode if `mode` is False. Returns this remote module.

        Raises `RuntimeError` if the owner does not answer, and what the constructor of the module raised.
        """
        api.rpc_sync(self.on, _train, (self.module_rref, mode))
        return self

    def eval(self) -> _RemoteModule:
        """Sets the module to evaluation mode. Returns this remote module.

        Raises `RuntimeError` if the owner does not answer, and what the constructor of the module raised.
        """
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Any:
        """Always raises `ValueError`, which says to use `remote_parameters`. `recurse` is ignored."""
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.on) + '/' + self.device!r})"

    def __getstate__(self) -> Any:
        raise RuntimeError(NO_PICKLE)

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError(NO_UNPICKLE)

    def __prepare_scriptable__(self) -> nn.Module:
        """Returns what `torch.jit.script` compiles in place of this object: a module with the same `forward`.

        Raises `RuntimeError` if this object has no TorchScript interface.
        """
        if not self.is_scriptable:
            raise RuntimeError(
                "this RemoteModule cannot be compiled, since the types of its forward are not known: create it with "
                "RemoteModule.init_from_module_rref and a _module_interface_cls"
            )
        return self.generated_methods[0].__globals__["Scriptable"](self)


def _raise_not_supported(name: str) -> None:
    """Always raises `ValueError`, which says that a remote module has no method `name`."""
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule")


def _make_refusing_method(name: str) -> Callable[..., Any]:
    """Returns a method that always raises `ValueError`: remote modules do not have the method `name`.

    For `inspect`, it has the signature that `torch.nn.Module` has for this name. Raises `AttributeError` if
    `torch.nn.Module` has no such method.
    """

    def refused(self: _RemoteModule, *args: Any, **kwargs: Any) -> Any:
        _raise_not_supported(name)

    # For `inspect`. torch's remote modules also accept by position what `nn.Module` accepts by name only.
    signature = inspect.signature(getattr(nn.Module, name))
    parameters = list(signature.parameters.values())
    if all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in parameters):
        parameters = [each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in parameters]
    refused.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    refused.__name__ = name
    refused.__qualname__ = f"_RemoteModule.{name}"
    refused.__doc__ = "Raises `ValueError`: a remote module does not have this method."
    return refused


for _name in _REFUSED_METHODS:
    setattr(_RemoteModule, _name, _make_refusing_method(_name))


class RemoteModule(_RemoteModule):
    """A module on another worker, used as if it were in this process: `forward` calls it there.

    The constructor creates `module_cls(*args, **kwargs)` at `remote_device`: the name of a worker, `/`, and a device.
    Under distributed autograd, gradients reach the parameters of the module. A `RemoteModule` can be sent in a call,
    but cannot be pickled otherwise. Methods of `torch.nn.Module` that would need the parameters in this process, such
    as `to`, raise `ValueError`.

    Example:
        linear = RemoteModule("worker1/cpu", torch.nn.Linear, args=(20, 30))
        output = linear(torch.randn(128, 20))
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates `module_cls(*args, **kwargs)` on a worker, and moves it to a device there. Does not wait for that.

        Errors of `module_cls`, and a `ValueError` if its result is not a module, are raised by `forward`.

        Args:
            remote_device: Where: `"name/device"` or `"rank:1/device"`, for example `"worker1/cuda:0"`. Without the
                device, `cpu`.
            module_cls: A subclass of `torch.nn.Module`, or a function that returns a module.
            args: Its positional arguments; None for none.
            kwargs: Its keyword arguments; None for none.

        Raises:
            ValueError: `remote_device` is malformed.
            AssertionError: This process is not a worker.
            RuntimeError: The worker does not exist.
        """
        super().__init__(remote_device, module_cls, args, kwargs)


# -- called on the owner of the module


def _create_module(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """Called remotely: creates `module_cls(*args, **kwargs)`, moves it to a device of this worker, and returns it.

    Raises `ValueError` if the result is not a module, `RuntimeError` if the device does not exist, and what
    `module_cls` raises.
    """
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    module.to(device)
    return module


def _create_module_with_interface(
    module_cls: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    module_interface_cls: Any,
) -> RRef[Any]:
    """Called remotely: creates `module_cls(*args, **kwargs)` here, compiles it, and returns a reference to it.

    Args:
        module_cls: A subclass of `torch.nn.Module`, or a function that returns a module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        device: The device to which the module is moved.
        module_interface_cls: The TorchScript interface of the module. If None, the module is not compiled.

    Raises:
        ValueError: `module_cls` does not return a module.
        RuntimeError: The module cannot be compiled, does not have the interface, or the device does not exist.
        Exception: What `module_cls` raises.
    """
    module = _create_module(module_cls, args, kwargs, device)
    return RRef(module if module_interface_cls is None else torch.jit.script(module), module_interface_cls)


def _instantiate_template(module_interface_cls: Any, enable_moving_cpu_tensors_to_cuda: bool) -> None:
    """Generates the methods of remote modules with a TorchScript interface on this worker, for later use.

    Does nothing if they were generated before. Raises `ValueError` if `module_interface_cls` is None or anything else
    that is not an interface, and `AssertionError` if the interface has no `forward`. The other argument has no effect.
    """
    instantiator.instantiate_scriptable_remote_module_template(module_interface_cls, enable_moving_cpu_tensors_to_cuda)


def _param_rrefs(module_rref: PyRRef[Any], recurse: bool) -> list[RRef[Any]]:
    """Called remotely: returns references to the parameters of a module of this worker; an empty list if it has none.

    Args:
        module_rref: A reference to the module. Raises `RuntimeError` if another worker owns it, and what the
            constructor of the module raised.
        recurse: Whether to include the parameters of submodules.
    """
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _train(module_rref: PyRRef[Any], mode: bool) -> None:
    """Called remotely: sets a module of this worker to training mode, or to evaluation mode if `mode` is False.

    Raises `RuntimeError` if another worker owns the module, and what the constructor of the module raised.
    """
    module_rref.local_value().train(mode)


# -- serialization


def _remote_module_reducer(remote_module: RemoteModule) -> Any:
    """Returns what is pickled in place of a remote module: a function and the values of the attributes that are sent.

    Prints a warning to standard error for each attribute that is neither in `_REMOTE_MODULE_PICKLED_ATTRIBUTES` nor in
    `_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING`, and does not send it. Raises `SerializationError` if this thread is
    not writing a message of a call.
    """
    for name in remote_module.__dict__:
        if not _is_known(name):
            print(
                f"The new attribute ``{name}`` of RemoteModule is ignored during RPC pickling. "
                "To pickle this attribute, please add it to ``_REMOTE_MODULE_PICKLED_ATTRIBUTES``. "
                "Otherwise, please explicitly add it to ``_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING``.",
                file=sys.stderr,
            )
    fields: Sequence[str] = _SerializedRemoteModule._fields
    attributes = {name: getattr(remote_module, name) for name in fields}
    # The interface is sent in place of the methods, which another worker may not have generated yet.
    attributes["generated_methods"] = attributes["generated_methods"][0].__globals__.get("module_interface_cls")
    attributes["module_rref"] = remote_module.module_rref._serialize()
    return _remote_module_receiver, tuple(attributes.values())


def _remote_module_receiver(*remote_module_pickled_attrs: Any) -> RemoteModule:
    """Returns the remote module that was sent.

    Raises `SerializationError` if this thread is not reading a message.

    Args:
        *remote_module_pickled_attrs: The values of `_REMOTE_MODULE_PICKLED_ATTRIBUTES`, in that order. A wrong number
            of them raises `TypeError`.
    """
    attributes = _SerializedRemoteModule._make(remote_module_pickled_attrs)._asdict()
    remote_module: RemoteModule = object.__new__(RemoteModule)
    remote_module.__dict__.update(attributes)
    remote_module.module_rref = PyRRef._deserialize(attributes["module_rref"])
    remote_module._init_template(attributes["generated_methods"], torch.device(remote_module.device).type == "cuda")
    remote_module._install_generated_methods()
    return remote_module


def _recursive_script_module_reducer(recursive_script_module: Any) -> Any:
    """Returns what is pickled in place of a script module: the bytes that `torch.jit.save` writes.

    Raises `RuntimeError` if the module is a compiled remote module, or torch cannot save it.
    """
    if hasattr(recursive_script_module._c, "module_rref"):
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Please create a RemoteModule in the sender, "
            "send the `module_rref` to the receiver, and create a new instance on the receiver end by passing this "
            "`module_rref`."
        )
    _, saved = _internal_rpc_pickler._script_module_reducer(recursive_script_module)
    return _recursive_script_module_receiver, saved


def _recursive_script_module_receiver(recursive_script_module_serialized: bytes) -> Any:
    """Returns the script module in bytes that `torch.jit.save` has written.

    Raises `RuntimeError` if the bytes are damaged.
    """
    return _internal_rpc_pickler._script_module_receiver(recursive_script_module_serialized)


_internal_rpc_pickler._register_reducer(RemoteModule, _remote_module_reducer)
_internal_rpc_pickler._register_reducer(torch.jit.RecursiveScriptModule, _recursive_script_module_reducer)

"""`nn`: modules on another worker, as they are used, refused, sent and compiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farcall.pytorch import api, autograd
from farcall.pytorch.nn import RemoteModule, forward_methods, instantiator
from farcall.pytorch.nn.remote_module import _REFUSED_METHODS, _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule
from farcall.testing.local import LocalGroup


class Shift(nn.Module):  # type: ignore[misc]
    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))
        self.inner = nn.Linear(2, 2)

    def forward(self, tensor: Tensor, device: str = "") -> tuple[str, Tensor]:
        if not self.training:
            device += " at rest"
        return device, tensor + self.by


@torch.jit.interface
class ShiftInterface:
    def forward(self, tensor: Tensor, device: str) -> tuple[str, Tensor]:  # type: ignore[empty-body]
        pass


@torch.jit.interface
class Both:
    def forward(self, tensor: Tensor, device: str) -> tuple[str, Tensor]:  # type: ignore[empty-body]
        pass

    def forward_async(self, tensor: Tensor, device: str) -> torch.futures.Future[tuple[str, Tensor]]:
        pass


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with LocalGroup(2) as group:
        autograd._init(0)
        yield group
        autograd.close()


@pytest.mark.usefixtures("group")
class TestUsing:
    def test_it_is_called_where_it_is(self) -> None:
        module = RemoteModule("worker1/cpu", Shift, (2.0,))
        assert module(torch.zeros(2), device="by name")[0] == "by name"
        assert torch.equal(module.forward(torch.zeros(2))[1], torch.full((2,), 2.0))
        assert torch.equal(module.forward_async(torch.ones(2)).wait()[1], torch.full((2,), 3.0))
        assert module.get_module_rref().owner().name == "worker1"

    def test_it_trains_or_not(self) -> None:
        module = RemoteModule("worker1", Shift)
        assert module.eval() is module
        assert module(torch.zeros(1))[0] == " at rest"
        assert module.train() is module
        assert module(torch.zeros(1))[0] == ""
        assert module.train(False)(torch.zeros(1))[0] == " at rest"

    @pytest.mark.parametrize(
        ("place", "on", "device"),
        [
            ("worker1/cpu", "worker1", "cpu"),
            ("worker1", "worker1", "cpu"),
            ("rank:1/cpu", 1, "cpu"),
            ("rank:1", 1, "cpu"),
            ("worker1/meta", "worker1", "meta"),
            ("cpu", "worker0", "cpu"),
        ],
    )
    def test_a_place_is_a_worker_and_a_device(self, place: str, on: str | int, device: str) -> None:
        module = RemoteModule(place, nn.Linear, (2, 2))
        assert (module.on, module.device, module.is_device_map_set) == (on, device, False)
        assert repr(module) == f"RemoteModule('{on}/{device}')"
        assert api.rpc_sync(on, device_of, (module.get_module_rref(),)) == device

    @pytest.mark.parametrize(
        ("place", "kind", "said"),
        [
            ("worker1/cpu/cpu", ValueError, "Could not parse remote_device: worker1/cpu/cpu. The valid format is"),
            ("/", ValueError, "Could not parse remote_device: /. The valid format is"),
            ("/cpu", ValueError, "Could not parse remote_device: /cpu. The valid format is"),
            ("worker1/", RuntimeError, "Device string must not be empty"),
            ("worker1/cpu2", RuntimeError, "Invalid device string: 'cpu2'"),
            ("worker1/foo", RuntimeError, "Expected one of .+ device type at start of device string"),
            ("rank:x/cpu", ValueError, "Could not parse remote_device"),
            ("worker9/cpu", RuntimeError, "there is no worker 'worker9'"),
            (1, TypeError, "Invalid type for remote_device"),
        ],
    )
    def test_no_place_is_refused(self, place: Any, kind: type[Exception], said: str) -> None:
        with pytest.raises(kind, match=said):
            RemoteModule(place, Shift)

    def test_what_its_constructor_raises_is_raised_by_forward(self) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'no'"):
            RemoteModule("worker1", Shift, kwargs={"no": "such"}).forward(torch.ones(1))

    def test_what_is_no_module_is_refused(self) -> None:
        module = RemoteModule("worker1", dict)
        with pytest.raises(ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an inst.*'dict'>"):
            module.forward()

    def test_parameters_with_and_without_those_of_submodules(self) -> None:
        module = RemoteModule("worker0", Shift)  # whoever makes references in this process is worker0
        assert len(module.remote_parameters()) == 3
        (only,) = module.remote_parameters(recurse=False)
        assert only.to_here().item() == 1.0

    @pytest.mark.parametrize("name", _REFUSED_METHODS)
    def test_whatever_needs_the_module_here_is_refused(self, name: str) -> None:
        assert hasattr(nn.Module, name)
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(RemoteModule("worker1", Shift), name)()

    def test_parameters_are_refused_with_advice(self) -> None:
        with pytest.raises(ValueError, match=r"``parameters`` not supported.*use ``remote_parameters`` instead"):
            RemoteModule("worker1", Shift).parameters()


def test_only_a_worker_has_remote_modules() -> None:
    with pytest.raises(AssertionError, match=r"RemoteModule only works in RPC\."):
        RemoteModule("worker1", Shift)


def test_values_are_moved_between_devices_wherever_their_tensors_are() -> None:
    value = {"a": (torch.ones(1), [torch.ones(2), "word"]), "b": 3}
    there = forward_methods.move_tensors(value, torch.device("meta"))
    assert there["a"][0].device.type == there["a"][1][0].device.type == "meta"
    assert (there["a"][1][1], there["b"]) == ("word", 3)


def device_of(module: Any) -> str:
    return str(module.local_value().weight.device)


def attributes_of(module: RemoteModule) -> tuple[list[str], Any, str]:
    # All workers of this group are one process, so it cannot call on from here: look at the module that it has.
    return list(vars(module)), module.module_rref.local_value()(torch.ones(1))[1].item(), module.forward.__module__


@pytest.mark.usefixtures("group")
class TestTravelling:
    def test_in_a_call_with_what_makes_it_up_and_nothing_else(self, capsys: pytest.CaptureFixture[str]) -> None:
        module = RemoteModule("worker1", Shift)
        module.hobby = "none"
        names, value, methods = api.rpc_sync("worker1", attributes_of, (module,))
        assert names == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
        assert (value, methods) == (2.0, "farcall.pytorch.nn.forward_methods")
        assert "The new attribute ``hobby`` of RemoteModule is ignored" in capsys.readouterr().err

    def test_not_in_any_other_pickle(self) -> None:
        module = RemoteModule("worker1", Shift)
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
            pickle.dumps(module)
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
            copy.deepcopy(module)

    def test_by_its_reference(self) -> None:
        module = RemoteModule("worker1", Shift, (5.0,))
        other = RemoteModule.init_from_module_rref("worker1", module.get_module_rref())
        assert other(torch.zeros(1))[1].item() == 5.0
        assert not other.is_scriptable

    def test_with_the_methods_of_an_interface(self) -> None:
        rref = RemoteModule("worker1", Shift).get_module_rref()
        module = RemoteModule.init_from_module_rref("worker1", rref, ShiftInterface)
        names, value, methods = api.rpc_sync("worker1", attributes_of, (module,))
        assert names == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
        assert (value, methods) == (2.0, module.forward.__module__)
        assert methods.endswith("_ShiftInterface")


def scripted(by: float) -> Any:
    return torch.jit.script(Shift(by))


@pytest.mark.usefixtures("group")
class TestCompiling:
    def compiled(self) -> Any:
        return torch.jit.script(_RemoteModule("cpu", scripted, (2.0,), _module_interface_cls=ShiftInterface))

    def test_compiled_code_calls_it_and_knows_the_types_of_what_comes(self) -> None:
        @torch.jit.script
        def use(module: Both) -> tuple[str, Tensor]:
            word, tensor = module.forward(torch.ones(1), "a")
            later_word, later = module.forward_async(tensor * 10, "b").wait()
            return word + later_word, later * 2

        word, tensor = use(self.compiled())
        assert (word, tensor.item()) == ("ab", 64.0)

    def test_its_errors_reach_compiled_code(self) -> None:
        with pytest.raises(RuntimeError, match="must match the size"):
            self.compiled_sum().forward(torch.ones(3), torch.ones(2))

    def compiled_sum(self) -> Any:
        return torch.jit.script(_RemoteModule("cpu", Sum, _module_interface_cls=SumInterface))

    def test_it_lives_as_long_as_compiled_code_has_it(self) -> None:
        class Outer(nn.Module):  # type: ignore[misc]
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, tensor: Tensor) -> Tensor:
                return self.inner(tensor, "x")[1]

        outer = torch.jit.script(Outer(_RemoteModule("cpu", scripted, (3.0,), _module_interface_cls=ShiftInterface)))
        assert outer(torch.zeros(1)).item() == 3.0

    def test_it_does_not_travel(self) -> None:
        with pytest.raises(RuntimeError, match=r"Passing a script RemoteModule over RPC is not supported\."):
            api.rpc_sync("worker1", attributes_of, (self.compiled(),))

    def test_it_is_not_saved(self) -> None:
        with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
            pickle.dumps(self.compiled())

    def test_one_without_an_interface_is_not_compiled(self) -> None:
        with pytest.raises(RuntimeError, match="cannot be compiled, since the types of its forward are not known"):
            torch.jit.script(RemoteModule("worker1", Shift))


class Sum(nn.Module):  # type: ignore[misc]
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@torch.jit.interface
class SumInterface:
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        pass


class TestGenerating:
    def test_the_signature_is_that_of_the_interface(self) -> None:
        names, typed, result = instantiator.get_arg_return_types_from_interface(ShiftInterface)
        assert (names, typed, result) == ("tensor, device", "tensor: Tensor, device: str", "Tuple[str, Tensor]")

    def test_once_for_each_interface(self) -> None:
        first = instantiator.instantiate_scriptable_remote_module_template(SumInterface)
        assert instantiator.instantiate_scriptable_remote_module_template(SumInterface, False) is first
        assert [method.__name__ for method in first._generated_methods] == ["forward_async", "forward"]

    def test_what_is_no_interface_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"must be a type object decorated by @torch\.jit\.interface"):
            instantiator.instantiate_scriptable_remote_module_template(Shift)
        with pytest.raises(AssertionError, match=r"Expect a TorchScript class interface"):
            instantiator.get_arg_return_types_from_interface(Shift)

    def test_an_interface_without_forward_is_refused(self) -> None:
        @torch.jit.interface
        class Backward:
            def backward(self, tensor: Tensor) -> Tensor:
                pass

        with pytest.raises(AssertionError, match="Expect forward in interface methods, while it has"):
            instantiator.get_arg_return_types_from_interface(Backward)

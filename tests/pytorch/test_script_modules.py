"""`script_modules`: script modules as arguments and results, and the hints of references to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from script_stage import quietly, script

from farcall.pytorch import api
from farcall.pytorch.rref import RRef
from farcall.pytorch.script_modules import check_type_hint
from farcall.serialization import dumps, loads
from farcall.testing.local import LocalGroup

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Scaling(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((1,), factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


with quietly():

    class OldScaling(torch.jit.ScriptModule):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = torch.full((1,), factor)

        @torch.jit.script_method
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    @torch.jit.interface
    class Forward(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pass

    @torch.jit.interface
    class ForwardOfNumbers(torch.nn.Module):
        def forward(self, x: int) -> int:  # type: ignore[empty-body]
            pass


@script
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start


def applied(modules: list[torch.nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    return [module(x).detach() for module in modules]


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with LocalGroup(2) as group:
        yield group


@pytest.mark.usefixtures("group")
def test_they_are_arguments_and_results() -> None:
    modules = [torch.jit.script(Scaling(2.0)), OldScaling(3.0)]
    assert api.rpc_sync("worker1", applied, (modules, torch.ones(1))) == [torch.tensor([2.0]), torch.tensor([3.0])]
    made = api.rpc_sync("worker1", OldScaling, (4.0,))
    assert isinstance(made, torch.jit.ScriptModule)
    assert made(torch.ones(1)) == 4.0


@pytest.mark.usefixtures("group")
def test_proxies_call_their_methods() -> None:
    rref = api.remote("worker1", OldScaling, (4.0,))
    assert rref.rpc_sync().forward(torch.ones(1)) == 4.0
    assert rref.to_here()(torch.ones(1)) == 4.0


def test_parameters_are_parameters_again() -> None:
    module = loads(*dumps({"module": torch.jit.script(Scaling(2.0))}))["module"]
    assert [parameter.requires_grad for parameter in module.parameters()] == [True]


def test_objects_of_script_classes_travel_as_any() -> None:
    assert loads(*dumps(Counter(5))).count == 5


def test_methods_cannot_travel() -> None:
    with pytest.raises(TypeError, match="pickle"):
        dumps(OldScaling(1.0).forward)


@pytest.mark.usefixtures("group")
def test_a_reference_to_a_script_module_wants_a_hint() -> None:
    with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"):
        RRef(OldScaling(1.0))
    assert RRef(OldScaling(2.0), Forward).to_here()(torch.ones(1)) == 2.0


def test_the_hint_must_be_an_interface_of_it() -> None:
    module = torch.jit.script(Scaling(1.0))
    check_type_hint(module, Forward)
    for hint in (ForwardOfNumbers, Scaling, int):
        with pytest.raises(RuntimeError, match=r"Scaling is not a subtype of the type hint: .*valid interface type"):
            check_type_hint(module, hint)


def test_nothing_else_takes_a_hint() -> None:
    check_type_hint(3, None)
    with pytest.raises(RuntimeError, match="only be specified when the RRef being created contains a ScriptModule"):
        check_type_hint(Scaling(1.0), Forward)

"""Private names of torch's modules of RPC that programs use, beside torch's own: same results, same errors."""

from __future__ import annotations

import inspect
import linecache
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

import torch
import torch.distributed.nn.api.remote_module as their_remote_module
import torch.distributed.nn.jit.instantiator as their_instantiator
import torch.distributed.nn.jit.templates.remote_module_template as their_template
import torch.distributed.optim.optimizer as their_optimizer
import torch.distributed.rpc as their_rpc
import torch.distributed.rpc.api as their_api
from torch.autograd import profiler_legacy

import farcall.pytorch as rpc
from farcall.pytorch import api, autograd
from farcall.pytorch import internal as our_internal
from farcall.pytorch.nn import instantiator as our_instantiator
from farcall.pytorch.nn import remote_module as our_remote_module
from farcall.pytorch.nn import remote_module_template as our_template
from farcall.pytorch.optim import optimizer as our_optimizer
from torch_stage import one_worker, run_group

LIMIT = 120.0
"""Seconds for a process that imports torch, on a busy machine."""


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the type and the text of what it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def run(code: str) -> list[str]:
    """What a program prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# The agent


def test_the_group_of_an_agent(tmp_path: Path) -> None:
    for name in ("is_static_group", "store"):
        assert isinstance(getattr(their_rpc.TensorPipeAgent, name), property)
        assert isinstance(getattr(rpc.TensorPipeAgent, name), property)
    with one_worker(tmp_path, device_maps={"alone": {"cpu": "meta"}}):
        agent = api._get_current_rpc_agent()
        assert agent.is_static_group is True
        agent.store.set("key", "value")
        assert agent.store.get("key") == b"value"
        with pytest.raises(AttributeError):
            agent.store = None
        assert agent._get_device_map(agent.get_worker_info()) == {torch.device("cpu"): torch.device("meta")}
        assert rpc.RpcAgent._get_device_map(agent, agent.get_worker_info()) == {}


# The profiler


@pytest.mark.parametrize("package", [their_rpc, rpc], ids=["torch", "farcall"])
def test_the_number_of_a_worker_is_in_what_it_records(package: Any) -> None:
    package._set_profiler_node_id(7)
    try:
        with profiler_legacy.profile() as recorded:
            torch.ones(2) + 1
        assert {event.node_id for event in recorded.function_events} == {7}
        with pytest.raises(TypeError):
            package._set_profiler_node_id("7")
        with pytest.raises(RuntimeError, match="expects an id >= 0"):
            package._set_profiler_node_id(-1)
    finally:
        package._set_profiler_node_id(0)


@pytest.mark.parametrize("module", [their_api, api], ids=["torch", "farcall"])
def test_whether_calls_are_profiled(module: Any) -> None:
    assert not module._get_should_profile()
    with profiler_legacy.profile():
        assert module._get_should_profile()
    with torch.profiler.profile():
        assert not module._get_should_profile()
    assert not module._get_should_profile()


def test_a_program_records_its_own_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    class Noting:
        """torch's own needs torch's agent."""

        @staticmethod
        def set_current_profiling_key(key: str) -> None:
            keys.append(key)

    called = (inspect.getsource, our_internal.RPCExecMode.ASYNC)
    names = []
    with one_worker(tmp_path):
        me = rpc.get_worker_info()
        monkeypatch.setattr(their_api, "get_worker_info", rpc.get_worker_info)
        monkeypatch.setattr(their_api, "RemoteProfilerManager", Noting)
        monkeypatch.setattr(api, "RemoteProfilerManager", Noting)
        for module in (their_api, api):
            with module._enable_rpc_profiler(False, None, *called, me) as record:
                assert record is None
            with profiler_legacy.profile() as recorded, module._enable_rpc_profiler(True, None, *called, me):
                pass
            with module._enable_rpc_profiler(True, "aten::add", *called, me) as record:
                names.append(({event.name for event in recorded.function_events}, record.name))
    assert names[0] == names[1]
    assert names[0] == ({"rpc_async#getsource(alone -> alone)"}, "rpc_async#aten::add(alone -> alone)")
    assert keys == ["rpc_async#getsource(alone -> alone)", "rpc_async#aten::add(alone -> alone)"] * 2


def test_the_next_call_has_the_name_of_the_record(tmp_path: Path) -> None:
    with one_worker(tmp_path), profiler_legacy.profile() as recorded:
        mode = our_internal.RPCExecMode.SYNC
        with api._enable_rpc_profiler(api._get_should_profile(), "my::operator", abs, mode, rpc.get_worker_info()):
            rpc.rpc_sync("alone", len, ("text",))
    names = [event.name for event in recorded.function_events]
    assert names.count("rpc_sync#my::operator(alone -> alone)") == 2  # the record and the call
    assert not any("len" in name for name in names)


# TorchScript's pickles

_SAVE = """
import os, sys, tempfile, torch
import torch.distributed.rpc as rpc
import farcall.pytorch
from torch.distributed.rpc import RRef

@torch.jit.script
def save(rref: RRef[torch.Tensor], path: str) -> None:
    torch.save(rref, path)

def try_to_save():
    try:
        save(rref, path)
        print("saved")
    except RuntimeError as error:
        print("only allowed inside RPC calls" in str(error))

with tempfile.TemporaryDirectory() as directory:
    path = directory + "/saved"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/meeting")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    rref = rpc.remote("alone", torch.add, args=(torch.ones(1), 1))
    rref.to_here()
    try_to_save()
    farcall.pytorch._enable_jit_rref_pickle()
    try_to_save()
    farcall.pytorch._disable_jit_rref_pickle()
    try_to_save()
sys.stdout.flush()
os._exit(0)  # torch's shutdown would wait for the fork that was saved, for more than a minute
"""


@pytest.mark.timeout(LIMIT + 20)
def test_the_switch_for_torchs_own_references(tmp_path: Path) -> None:
    """farcall's references are in no script module: the switch is for the references of torch's own agent."""
    program = tmp_path / "program.py"  # a file, as TorchScript reads the source
    program.write_text(_SAVE)
    command = [sys.executable, "-W", "ignore", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "saved", "True"]
    assert rpc._enable_jit_rref_pickle is not their_rpc._enable_jit_rref_pickle
    assert rpc._disable_jit_rref_pickle is not their_rpc._disable_jit_rref_pickle


# All names

ALL_NAMES = """
import importlib, sys, types
import torch.distributed.autograd, torch.distributed.nn.jit.templates.remote_module_template, torch.distributed.optim
import torch.distributed.rpc._testing.faulty_agent_backend_registry
import torch.distributed.rpc.server_process_global_profiler

PACKAGES = ("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim.optimizer",
            "torch.distributed.nn", "torch._C._distributed_rpc", "torch._C._distributed_autograd")


def is_own(name, value):
    if name.startswith("__") or name == "TYPE_CHECKING" or isinstance(value, types.ModuleType):
        return False
    home = getattr(value, "__module__", None) or type(value).__module__
    # A value of a type from elsewhere, a logger for example, is the module's own; what it imported from there is not.
    return home.startswith(PACKAGES) or not (isinstance(value, type) or callable(value))


names = {
    module: [name for name, value in vars(sys.modules[module]).items() if is_own(name, value)]
    for module in sorted(sys.modules)
    if module.startswith(PACKAGES)
}
import farcall.pytorch
farcall.pytorch.install()
print(sum(map(len, names.values())) > 300, "logger" in names["torch.distributed.rpc"])
for module, expected in names.items():
    ours = importlib.import_module(module)
    print(*[f"{module}.{name} is not there" for name in expected if not hasattr(ours, name)], sep="\\n", end="")
"""


def test_every_name_is_there_after_install() -> None:
    assert run(ALL_NAMES) == ["True True"]


# What is left over in `rpc.api`


def test_names_that_are_left_over() -> None:
    assert api.method_name == their_api.method_name == "to_here"
    assert set(api.__all__) == set(their_api.__all__)
    assert callable(api.new_method)
    assert api.docstring


def test_a_method_that_calls_that_of_the_base(tmp_path: Path) -> None:
    with one_worker(tmp_path):
        rref = rpc.RRef(5)
        assert api.new_method(rref) == 5
        assert api.method_factory("owner_name", "doc")(rref) == "alone"
        assert api.method_factory("owner_name", "doc").__doc__ == "doc"
        assert outcome(api.method_factory("nothing", ""), rref)[0] is AttributeError


def test_groups_are_counted(tmp_path: Path) -> None:
    before = rpc._init_counter
    with one_worker(tmp_path), rpc._init_counter_lock:
        assert rpc._init_counter == before + 1


def test_methods_of_a_value_may_have_arguments_of_any_names(tmp_path: Path) -> None:
    with one_worker(tmp_path):
        rref = rpc.RRef({"a": 1})
        rref.rpc_sync().update(rref=2, timeout=3)
        assert rref.local_value() == {"a": 1, "rref": 2, "timeout": 3}
        from farcall.pytorch import rref_proxy

        assert rref_proxy._invoke_rpc(rref=rref, rpc_api=rpc.rpc_sync, func_name="__len__", timeout=-1.0) == 3


# Remote modules


@torch.jit.interface
class Shifting:
    def forward(self, x: torch.Tensor, by: int) -> torch.Tensor:
        pass


class Shift(torch.nn.Module):
    def forward(self, x: torch.Tensor, by: int) -> torch.Tensor:
        return x + by


class Marked(our_remote_module.RemoteModule):
    def __init__(self, device: str) -> None:
        self.__dict__["mark"] = 1
        super().__init__(device, Shift)


BOTH_REMOTE_MODULES = pytest.mark.parametrize(
    "module", [their_remote_module, our_remote_module], ids=["torch", "farcall"]
)


@BOTH_REMOTE_MODULES
def test_a_module_is_created(module: Any) -> None:
    made = module._create_module(torch.nn.Linear, (2,), {"out_features": 3}, "meta")
    assert isinstance(made, torch.nn.Linear)
    assert made.weight.device.type == "meta"


def test_what_makes_no_module() -> None:
    calls: list[tuple[str, Any]] = [("_create_module", (dict, (), {}, "cpu")), ("_raise_not_supported", ("cuda",))]
    for name, args in calls:
        expected, got = (outcome(getattr(each, name), *args) for each in (their_remote_module, our_remote_module))
        assert got == expected
        assert got[0] is ValueError


def test_modules_and_parameters_at_their_owner(tmp_path: Path) -> None:
    with one_worker(tmp_path):
        rref = our_remote_module._create_module_with_interface(torch.nn.Linear, (2, 1), {}, "cpu", None)
        assert isinstance(rref.local_value(), torch.nn.Linear)
        parameters = our_remote_module._param_rrefs(rref, True)
        assert [each.local_value() for each in parameters] == list(rref.local_value().parameters())
        scripted = our_remote_module._create_module_with_interface(Shift, (), {}, "cpu", Shifting)
        assert isinstance(scripted.local_value(), torch.jit.ScriptModule)


def test_which_attributes_travel() -> None:
    ignored = "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING"
    assert our_remote_module._SerializedRemoteModule._fields == their_remote_module._SerializedRemoteModule._fields
    assert set(getattr(our_remote_module, ignored)) == set(getattr(their_remote_module, ignored))


def values_of(module: Any) -> tuple[Any, ...]:
    return module.on, module.device, module.is_scriptable, module.forward(torch.ones(1), 1).item()


def test_remote_modules_travel_by_their_reducer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        remote = our_remote_module.RemoteModule("worker1/cpu", Shift)
        seen = []
        reducer = our_internal._internal_rpc_pickler._class_reducer_dict[our_remote_module.RemoteModule]
        assert reducer is our_remote_module._remote_module_reducer
        remote.note = "new"
        seen.append(rpc.rpc_sync("worker1", values_of, (remote,)))
        shared = our_remote_module.RemoteModule.init_from_module_rref("worker1", remote.get_module_rref(), Shifting)
        seen.append(rpc.rpc_sync("worker1", values_of, (shared,)))
        return seen, outcome(Marked, "worker1"), outcome(our_remote_module._remote_module_reducer, remote)[0]

    (seen, marked, alone), _ = run_group(tmp_path, body)
    assert seen == [("worker1", "cpu", False, 2.0), ("worker1", "cpu", True, 2.0)]
    assert marked == (
        AttributeError,
        "Attribute mark must be either in ``_REMOTE_MODULE_PICKLED_ATTRIBUTES`` or "
        "``_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING``.",
    )
    assert issubclass(alone, RuntimeError)
    assert "The new attribute ``note`` of RemoteModule is ignored during RPC pickling. " in capfd.readouterr().err


def test_script_modules_travel_by_their_reducer() -> None:
    class Calling:
        class _c:  # noqa: N801 (torch's name)
            module_rref = None

    scripted = torch.jit.script(torch.nn.Linear(2, 1))
    for module in (their_remote_module, our_remote_module):
        receiver, (saved,) = module._recursive_script_module_reducer(scripted)
        assert receiver is module._recursive_script_module_receiver
        assert torch.equal(receiver(saved)(torch.ones(2)), scripted(torch.ones(2)))
    expected, got = (
        outcome(module._recursive_script_module_reducer, Calling())
        for module in (their_remote_module, our_remote_module)
    )
    assert got == expected


@BOTH_REMOTE_MODULES
def test_generated_methods(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    module._instantiate_template(Shifting, False)
    name = "_remote_module___torch___" + Shifting.__module__.replace(".", "_") + "_Shifting"
    methods = sys.modules[name]._generated_methods
    assert [method.__name__ for method in methods] == ["forward_async", "forward"]
    assert list(inspect.signature(methods[1]).parameters) == ["self", "x", "by"]
    plain = module._NON_SCRIPTABLE_REMOTE_MODULE_MODULE._generated_methods
    assert [method.__name__ for method in plain] == ["forward_async", "forward"]
    with pytest.raises(ValueError, match=r"must be a type object decorated by @torch\.jit\.interface"):
        module._instantiate_template(Shift, False)


@pytest.mark.parametrize("module", [their_instantiator, our_instantiator], ids=["torch", "farcall"])
def test_a_template_is_filled_in(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    texts = {
        "assign_module_interface_cls": "module_interface_cls = None",
        "args": "*args",
        "kwargs": "**kwargs",
        "arg_types": "*args, **kwargs",
        "arrow_and_return_type": "",
        "arrow_and_future_return_type": "",
        "jit_script_decorator": "",
    }
    made = module._do_instantiate_remote_module_template("_remote_module_of_a_test", texts, True)
    assert sys.modules["_remote_module_of_a_test"] is made
    assert module._do_instantiate_remote_module_template("_remote_module_of_a_test", texts, True) is made
    assert made.module_interface_cls is None
    assert [method.__name__ for method in made._generated_methods] == ["forward_async", "forward"]


@pytest.mark.parametrize("module", [their_instantiator, our_instantiator], ids=["torch", "farcall"])
def test_a_loader_of_texts(module: Any) -> None:
    loader = module._StringLoader("number = 6 * 7")
    assert loader.get_source("made") == "number = 6 * 7"
    assert loader.get_data("anywhere") == b"number = 6 * 7"
    assert loader.get_filename("made") == "<made>.py"
    with pytest.raises(OSError, match="dynamically generated module has no filesystem stats"):
        loader.path_stats("anywhere")
    made = type(sys)("made")
    loader.exec_module(made)
    assert made.number == 42
    linecache.cache.pop("<made>.py", None)


@pytest.mark.parametrize("enabled", [True, False])
def test_templates(enabled: bool) -> None:
    for module in (their_template, our_template):
        last = module._REMOTE_FORWARD_TEMPLATE
        if enabled:
            last = module._REMOTE_FORWARD_TEMPLATE_ENABLE_MOVING_CPU_TENSORS_TO_CUDA
        assert module.get_remote_module_template(enabled) == module._TEMPLATE_PREFIX + last


# The optimizer


class Settled:
    """A call that has ended."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("results", [[], [1, 2], [1, ValueError("a"), 3], [ValueError("a"), 2, KeyError("b"), 4]])
def test_calls_are_waited_for_as_torch_waits(results: list[Any]) -> None:
    expected, got = (
        outcome(module._wait_for_all, map(Settled, results)) for module in (their_optimizer, our_optimizer)
    )
    assert got == expected


def test_the_functional_optimizers_are_torchs() -> None:
    ours: Any = our_optimizer
    assert ours.functional_optim_map is their_optimizer.functional_optim_map
    assert ours._ScriptLocalOptimizerInterface.__torch_script_interface__


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize("options", [{"lr": 0.5}, {"lr": 0.5, "momentum": 0.9}])
def test_an_optimizer_of_one_worker(tmp_path: Path, is_script: bool, options: dict[str, float]) -> None:
    names = ("_new_script_local_optimizer", "_script_local_optimizer_step")
    if not is_script:
        names = ("_new_local_optimizer", "_local_optimizer_step")
    new, step = (getattr(our_optimizer, name) for name in names)
    weight, expected = (torch.ones(2, requires_grad=True) for _ in range(2))
    plain = torch.optim.SGD([expected], **options)
    with one_worker(tmp_path):
        rref = new(torch.optim.SGD, [rpc.RRef(weight)], **options)
        kind = our_optimizer._ScriptLocalOptimizer if is_script else our_optimizer._LocalOptimizer
        assert type(rref.local_value()) is kind
        for _ in range(3):
            with autograd.context() as context_id:
                autograd.backward(context_id, [(weight * torch.tensor([1.0, 2.0])).sum()])
                step(rref, context_id)
            plain.zero_grad()
            (expected * torch.tensor([1.0, 2.0])).sum().backward()
            plain.step()
    assert torch.allclose(weight, expected)
    assert (weight.grad is None) is is_script


@pytest.mark.parametrize("module", [their_optimizer, our_optimizer], ids=["torch", "farcall"])
def test_local_optimizers(module: Any) -> None:
    class Here:
        def __init__(self, value: Any) -> None:
            self.value = value

        def local_value(self) -> Any:
            return self.value

    weight = torch.ones(2, requires_grad=True)
    made = module._LocalOptimizer(torch.optim.SGD, [Here(weight)], lr=0.25)
    assert made._local_params == [weight]
    assert made.optim.param_groups[0]["lr"] == 0.25
    assert module._LocalOptimizer.global_lock.acquire(blocking=False)
    module._LocalOptimizer.global_lock.release()
    functional = module.functional_optim_map[torch.optim.SGD]
    made = module._ScriptLocalOptimizer(functional, [Here(weight)], lr=0.25)
    assert isinstance(made, torch.nn.Module)
    assert isinstance(made.optim, functional)
    assert module._ScriptLocalOptimizer.compile_lock.acquire(blocking=False)
    module._ScriptLocalOptimizer.compile_lock.release()


# In the place of torch's


@pytest.mark.timeout(LIMIT + 20)
def test_modules_that_are_found_after_install() -> None:
    found = run(
        """
import farcall.pytorch
farcall.pytorch.install()
import torch
from torch._C._distributed_autograd import DistAutogradContext, _new_context
print(DistAutogradContext.__module__, _new_context.__module__)
import torch.distributed.nn
jit = torch.distributed.nn.jit
print(jit.instantiator.__name__, jit.templates.remote_module_template.__name__)
print(hasattr(torch._C, "_distributed_rpc_testing"))
import torch.distributed.rpc._testing
from torch._C._distributed_rpc_testing import FaultyTensorPipeAgent
print(FaultyTensorPipeAgent.__module__, torch._C._distributed_rpc_testing.__name__)
from torch.distributed.rpc import *
print(AllGatherStates.__module__)
from torch.distributed.rpc.api import method_name, Future
print(method_name, Future is torch.futures.Future)
"""
    )
    assert found == [
        "farcall.pytorch.autograd.contexts farcall.pytorch.autograd",
        "farcall.pytorch.nn.instantiator farcall.pytorch.nn.remote_module_template",
        "False",
        "farcall.pytorch._testing.faulty_agent farcall.pytorch._testing.faulty_agent",
        "farcall.pytorch.api",
        "to_here True",
    ]

"""The options: their defaults, what is refused, and that an agent never sees them change."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from farcall import options
from farcall.errors import BackendError, DeviceError, UsageError
from farcall.options import BackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions


def test_the_defaults_are_those_of_torch_where_it_has_the_option() -> None:
    chosen = RpcBackendOptions()
    assert chosen.num_worker_threads == options.DEFAULT_NUM_WORKER_THREADS == 16
    assert chosen.rpc_timeout == options.DEFAULT_RPC_TIMEOUT == 60.0
    assert chosen.init_method == options.DEFAULT_INIT_METHOD == "env://"
    assert options.UNSET_RPC_TIMEOUT == -1.0
    assert options.DEFAULT_SHUTDOWN_TIMEOUT == 0.0


def test_the_defaults_of_our_own() -> None:
    chosen = RpcBackendOptions()
    assert chosen.init_timeout == options.DEFAULT_INIT_TIMEOUT == 60.0
    assert chosen.interface is None
    assert chosen.transports == ("unix", "tcp")
    assert 0 < chosen.spin < 1e-3


@pytest.mark.parametrize(
    "chosen",
    [
        {"num_worker_threads": 1},
        {"rpc_timeout": 0},
        {"init_timeout": 0.001},
        {"spin": 0},
        {"transports": ("tcp",)},
        {"transports": ["tcp"]},
        {"interface": "eth0", "init_method": "tcp://h:1"},
    ],
)
def test_the_least_that_is_allowed(chosen: dict[str, Any]) -> None:
    made = RpcBackendOptions(**chosen)
    assert {name: getattr(made, name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_worker_threads": 0}, "num_worker_threads must be at least 1, not 0"),
        ({"num_worker_threads": -3}, "num_worker_threads must be at least 1, not -3"),
        ({"num_worker_threads": "4"}, "num_worker_threads must be a number, not '4'"),
        ({"rpc_timeout": None}, "rpc_timeout must be a number, not None"),
        ({"init_timeout": "60"}, "init_timeout must be a number, not '60'"),
        ({"spin": None}, "spin must be a number, not None"),
        ({"rpc_timeout": -1}, r"rpc_timeout must be 0 \(no timeout\) or more, not -1"),
        ({"rpc_timeout": math.nan}, r"rpc_timeout must be 0 \(no timeout\) or more, not nan"),
        ({"init_timeout": math.nan}, "init_timeout must be more than 0, not nan"),
        ({"spin": math.nan}, "spin must be 0"),
        ({"init_timeout": 0}, "init_timeout must be more than 0, not 0"),
        ({"init_timeout": -0.5}, "init_timeout must be more than 0, not -0.5"),
        ({"spin": -1e-6}, r"spin must be 0 \(never spin\) or more, not -1e-06"),
        ({"num_worker_threads": 1.5}, "num_worker_threads must be a whole number, not 1.5"),
        ({"num_worker_threads": True}, "num_worker_threads must be a number, not True"),
        ({"max_strangers": 1.5}, "max_strangers must be a whole number, not 1.5"),
        ({"max_greeting_size": 1024.5}, "max_greeting_size must be a whole number, not 1024.5"),
        ({"max_head_size": 5000.25}, "max_head_size must be a whole number"),
        ({"max_message_size": math.inf}, "max_message_size must be a whole number, not inf"),
        ({"max_message_size": 65535}, "max_message_size must be at least 65536, not 65535"),
        ({"rpc_timeout": True}, "rpc_timeout must be a number, not True"),
        ({"transports": ()}, "transports must be a tuple of names such as"),
        ({"transports": 5}, "transports must be a tuple of names such as .* not 5"),
        ({"transports": None}, "transports must be a tuple of names such as .* not None"),
        ({"transports": ["tcp", 5]}, "transports must be a tuple of names such as"),
        ({"transports": "tcp"}, "transports must be a tuple of names such as .* not 'tcp'"),
    ],
)
def test_what_cannot_work_is_refused_and_the_refusal_says_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RpcBackendOptions(**wrong)


@pytest.mark.parametrize(("name", "wrong"), [("num_worker_threads", 0), ("rpc_timeout", -1), ("transports", "tcp")])
def test_what_is_set_later_is_checked_as_well(name: str, wrong: object) -> None:
    chosen = RpcBackendOptions()
    before = getattr(chosen, name)
    with pytest.raises(UsageError, match=f"{name} must be"):
        setattr(chosen, name, wrong)
    assert getattr(chosen, name) == before
    chosen.init_method += "?again"
    assert chosen.init_method == "env://?again"


def test_options_never_change_once_an_agent_has_taken_them() -> None:
    chosen = RpcBackendOptions(spin=0, device_maps={"b": {0: 1}})
    taken = chosen.frozen_copy()
    assert taken == chosen
    chosen.spin = 1e-3
    chosen.set_device_map("b", {1: 0})
    assert (taken.spin, taken.device_maps) == (0, {"b": {"cuda:0": "cuda:1"}})
    for field in dataclasses.fields(taken):
        with pytest.raises(UsageError, match=f"{field.name} cannot be set: these options are in use by an agent"):
            setattr(taken, field.name, getattr(taken, field.name))
    with pytest.raises(UsageError, match="set_device_map was called too late"):
        taken.set_device_map("b", {1: 0})
    with pytest.raises(UsageError, match="devices cannot be set"):
        taken.set_devices(["cuda:0"])
    again = taken.frozen_copy()
    assert again == taken
    assert again is not taken


def test_the_options_of_another_backend() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Chosen(BackendOptions):
        colour: str = "red"
        shades: list[str] = dataclasses.field(default_factory=list)

    chosen = Chosen(rpc_timeout=3)
    assert (chosen.rpc_timeout, chosen.init_method, chosen.colour) == (3, "env://", "red")
    with pytest.raises(UsageError, match="rpc_timeout must be 0"):
        Chosen(rpc_timeout=-2)
    taken = chosen.frozen_copy()
    assert taken == chosen
    chosen.shades.append("dark")
    assert taken.shades == []

    class InTorchsManner(BackendOptions):
        def __init__(self, init_method: str) -> None:
            super().__init__()
            self.init_method = init_method

    assert InTorchsManner("tcp://h:1").frozen_copy().init_method == "tcp://h:1"


def test_a_whole_number_may_be_written_as_one_likes() -> None:
    size = RpcBackendOptions(max_message_size=1e6).max_message_size  # type: ignore[arg-type]
    assert (size, type(size)) == (1_000_000, int)


def test_an_option_that_is_none_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(
        BackendError, match=r"^RpcBackendOptions has no option num_threads; did you mean num_worker_threa"
    ):
        RpcBackendOptions(num_threads=3)  # type: ignore[call-arg]
    with pytest.raises(BackendError, match=r"no option colour; its options are rpc_timeout, init_method$"):
        BackendOptions(colour="red")  # type: ignore[call-arg]

    class TakesAny(BackendOptions):
        def __init__(self, **chosen: Any) -> None:
            super().__init__()
            self.chosen = chosen

    assert TakesAny(colour="red").chosen == {"colour": "red"}


def test_options_are_given_by_name_and_compared_by_value() -> None:
    with pytest.raises(TypeError):
        RpcBackendOptions(4)  # type: ignore[misc]
    assert RpcBackendOptions(spin=0) == RpcBackendOptions(spin=0.0)
    assert RpcBackendOptions(spin=0) != RpcBackendOptions()
    assert dataclasses.replace(RpcBackendOptions(), rpc_timeout=1).rpc_timeout == 1
    with pytest.raises(UsageError):
        dataclasses.replace(RpcBackendOptions(), rpc_timeout=-1)


# -- devices


class TorchDevice:
    """As a `torch.device` looks from here."""

    def __init__(self, kind: str, index: int | None = None) -> None:
        self.type = kind
        self.index = index


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (0, "cuda:0"),
        ("cuda:3", "cuda:3"),
        ("cpu", "cpu"),
        ("meta", "meta"),
        (TorchDevice("cuda", 1), "cuda:1"),
        (TorchDevice("cuda"), "cuda"),
    ],
)
def test_devices_may_be_written_in_any_way(given: object, kept: str) -> None:
    chosen = RpcBackendOptions(device_maps={"b": {given: given}})
    assert chosen.device_maps == {"b": {kept: kept}}


@pytest.mark.parametrize("given", ["", "gpu 0", "cuda:", "cuda:x", None, 1.5, True, object()])
def test_what_is_no_device(given: object) -> None:
    for chosen in ({"device_maps": {"b": {given: 0}}}, {"device_maps": {"b": {0: given}}}, {"devices": [given]}):
        with pytest.raises(DeviceError, match="is not a device: write 'cpu'"):
            RpcBackendOptions(**chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [-1, "cuda:-1"])
def test_a_negative_device_is_a_runtime_error_as_in_torch(given: object) -> None:
    with pytest.raises(RuntimeError, match="Device index must not be negative, got -1"):
        RpcBackendOptions().set_device_map("b", {given: 0})


def test_device_maps_grow() -> None:
    chosen = TensorPipeRpcBackendOptions(num_worker_threads=8, device_maps={"b": {0: 1}})
    chosen.set_device_map("b", {1: 2})
    chosen.set_device_map("b", {0: 1})
    chosen.set_device_map("c", {0: "cpu"})
    assert chosen.device_maps == {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:2"}, "c": {"cuda:0": "cpu"}}
    assert RpcBackendOptions().device_maps == {}
    assert RpcBackendOptions(device_maps=None, devices=None).devices == []  # type: ignore[arg-type]  # torch's defaults


def test_device_maps_can_be_turned_round() -> None:
    chosen = RpcBackendOptions(device_maps={"b": {0: 1}})
    with pytest.raises(
        ValueError, match="`set_device_map` only supports 1-to-1 mapping, trying to map cuda:0 to cuda:"
    ):
        chosen.set_device_map("b", {2: 2, 0: 0})
    assert chosen.device_maps == {"b": {"cuda:0": "cuda:1"}}
    with pytest.raises(ValueError, match=r"`device_map` only supports 1-to-1 mapping, .* cuda:1 and cuda:0 to cuda:5"):
        chosen.set_device_map("c", {0: 5, 1: 5})
    chosen.set_device_map("b", {2: 1})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        chosen.frozen_copy()


def test_devices_of_calls_are_cuda_devices() -> None:
    chosen = RpcBackendOptions(devices=[1])
    chosen.set_devices(["cuda:0", 2])
    assert chosen.devices == ["cuda:0", "cuda:2"]
    with pytest.raises(ValueError, match="`set_devices` expect a list of CUDA devices, but got device type cpu"):
        chosen.set_devices([0, "cpu"])
    for wrong in (None, "cuda:0", 5):
        with pytest.raises(ValueError, match=r"devices must be a list such as \['cuda:0'\], not"):
            chosen.set_devices(wrong)  # type: ignore[arg-type]
    assert chosen.devices == ["cuda:0", "cuda:2"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device_maps": [0]}, "device_maps must be a dict"),
        ({"device_maps": {3: {0: 0}}}, "device_maps must be a dict"),
        ({"device_maps": {"b": [0]}}, "a device map must be a dict"),
        ({"devices": "cuda:0"}, "devices must be a list"),
        ({"devices": 3}, "devices must be a list"),
    ],
)
def test_what_is_no_map_or_list_of_devices(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        RpcBackendOptions(**wrong)

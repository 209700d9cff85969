"""The options: their defaults, what is refused, and that they never change."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from farcall import options
from farcall.errors import UsageError
from farcall.options import RpcBackendOptions


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
        ({"transports": ()}, "transports must be a tuple of names such as"),
        ({"transports": "tcp"}, "transports must be a tuple of names such as .* not 'tcp'"),
    ],
)
def test_what_cannot_work_is_refused_and_the_refusal_says_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RpcBackendOptions(**wrong)


def test_options_never_change() -> None:
    chosen = RpcBackendOptions()
    for field in dataclasses.fields(chosen):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(chosen, field.name, getattr(chosen, field.name))


def test_options_are_given_by_name_and_compared_by_value() -> None:
    with pytest.raises(TypeError):
        RpcBackendOptions(4)  # type: ignore[misc]
    assert RpcBackendOptions(spin=0) == RpcBackendOptions(spin=0.0)
    assert RpcBackendOptions(spin=0) != RpcBackendOptions()
    assert dataclasses.replace(RpcBackendOptions(), rpc_timeout=1).rpc_timeout == 1
    with pytest.raises(UsageError):
        dataclasses.replace(RpcBackendOptions(), rpc_timeout=-1)

"""What can be chosen about an agent, and checked when it is chosen.

Options may be changed until an agent takes them: it keeps a copy that nobody can change (`taken`), so an agent never
sees its options change.

Defaults are those of `torch.distributed.rpc` where it has the option. Device maps say on which device of the callee a
tensor arrives. Devices are written as torch writes them, but torch is not needed for it: "cpu", "cuda:1", "meta"; a
number n is "cuda:n"; whatever has a `type` and an `index` (a `torch.device`) is taken for those. They are checked for
their form only: which devices there are is not known here.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import ModuleType
from typing import Any, Final, Self, TypeAlias

from farcall.errors import BackendError, DeviceError, UsageError

DEFAULT_RPC_TIMEOUT: Final = 60.0
UNSET_RPC_TIMEOUT: Final = -1.0
"""The default of a `timeout` parameter: take the agent's."""
DEFAULT_NUM_WORKER_THREADS: Final = 16
DEFAULT_INIT_METHOD: Final = "env://"
DEFAULT_INIT_TIMEOUT: Final = 60.0
DEFAULT_SHUTDOWN_TIMEOUT: Final = 0.0

Device: TypeAlias = Any
"""A text, a number, or something with a `type` and an `index`. Kept as a text."""

_ONE_OF: Final = re.compile(r"\[!?[^\[\].]+\]")
"""In a pattern of names: one of these characters."""
_DEVICE: Final = re.compile(r"([a-z]+)(?::(-?\d+))?")


@dataclass(kw_only=True)
class BackendOptions:
    """What the options of every backend have. Another backend's options are a subclass of it.

    Every value is checked when it is set: raises `UsageError`, and nothing has changed. An option that is none raises
    `BackendError`, a `TypeError`.
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    """Seconds that a call may take unless it says otherwise; 0 is without end."""

    init_method: str = DEFAULT_INIT_METHOD
    """Where workers find each other: `env://`, `tcp://host:port` or `file://path`."""

    def __new__(cls, *_: Any, **chosen: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [] if takes_any else [name for name in chosen if name not in known]
        if unknown:
            raise _no_such_option(cls, unknown[0], list(known)[1:])
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_taken"):
            raise UsageError(f"{name} cannot be set: an agent has taken these options; set it before init_rpc")
        check = _CHECKS.get(name)
        super().__setattr__(name, check(name, value) if check is not None else value)

    def taken(self) -> Self:
        """A copy for an agent to keep, checked once more. Nobody can change it."""
        mine = copy.deepcopy(self)
        mine.__dict__.pop("_taken", None)
        for each in dataclasses.fields(mine):
            setattr(mine, each.name, getattr(mine, each.name))
        mine.__dict__["_taken"] = True
        return mine


@dataclass(kw_only=True)
class RpcBackendOptions(BackendOptions):
    """The options of the default backend."""

    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    """How many functions run here at once for others. Those that wait for a farcall reply do not count."""

    init_timeout: float = DEFAULT_INIT_TIMEOUT
    """Seconds to wait for all workers at the start."""

    interface: str | None = None
    """The network interface (`eth0`) or its address to listen on; by default the one that leads to the store."""

    transports: tuple[str, ...] = ("unix", "tcp")
    """Which transports may be used, best first. What cannot be used here or for a peer is passed over."""

    spin: float = 100e-6
    """Seconds that a thread polls for what it waits for before it sleeps; 0 turns spinning off.
    Spinning stops by itself where it does not pay."""

    heartbeat_interval: float = 1.0
    """Seconds between the pings by which workers watch each other."""

    heartbeat_patience: float = 8.0
    """Seconds of silence after which a worker is taken for dead. It should be longer than any call into C that keeps
    the interpreter to itself; a worker whose process has ended is noticed at once all the same."""

    secret: str | None = field(default=None, repr=False)
    """What the workers of the group know each other by, the same at all; by default FARCALL_SECRET of the environment,
    which `farcall run` sets, else what the file of this user holds, which is made on first use."""

    allow: tuple[str, ...] | None = None
    """What others may call on this worker, and what may be loaded from what they send: modules, functions and classes,
    or their names, or patterns of names ("service.*"). Besides, what is marked by `farcall.exposed`, and plain data.
    None allows everything; an empty list only what is marked."""

    encrypt_between_hosts: bool = True
    """Whether what goes to other hosts is encrypted (TLS 1.3). It must be the same at all workers. On one host, by unix
    sockets and loopback, everything goes in the clear; the secret is asked for everywhere."""

    tls_certificate: str | None = None
    """The PEM file with this worker's certificate, if it is not to make one for itself; `tls_key` has its key, and
    `tls_authority` the certificate of who has signed those of all workers. All three or none."""

    tls_key: str | None = None
    tls_authority: str | None = None

    max_strangers: int = 256
    """How many connections may be there at once whose other end has not proved yet that it knows the secret."""

    proof_timeout: float = 10.0
    """Seconds that the other end of a connection has to prove it."""

    max_greeting_size: int = 64 * 1024
    """Bytes that one message may have before that is proved."""

    max_head_size: int = 4 * 1024**2
    """Bytes that the head of a message between workers may have: the function's name, and references."""

    max_message_size: int = 1024**4
    """Bytes that a message between workers may have. Memory is taken as they come, not as they are announced."""

    shared_memory: int | None = None
    """Bytes of shared memory at most in which this worker hands large data to others on its host; 0 turns that off,
    and everything goes through sockets. By default a quarter of the machine's memory, 4 GiB at most."""

    record_stacks: bool = False
    """Whether references remember the whole stack where they were made, for `references()`; else the line only."""

    device_maps: dict[str, dict[Device, Device]] = field(default_factory=dict)
    """For a callee's name: which of its devices stands for which device of this worker."""

    devices: list[Device] = field(default_factory=list)
    """The CUDA devices of this worker that calls may use; by default those of the device maps."""

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Adds to the device map for worker `to`: our devices are the keys, its devices the values.

        Raises `DeviceError`, a `ValueError`, for what is no device, for two of ours on one of its, and for one of ours
        that has another place already. Two of ours on one of its by several calls: `init_rpc` raises it.
        """
        if self.__dict__.get("_taken"):
            raise UsageError("set_device_map came too late: an agent has taken these options; set it before init_rpc")
        added = _device_map(device_map)
        known = self.device_maps.get(to, {})
        for ours, its in added.items():
            if known.get(ours, its) != its:
                raise DeviceError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {ours} to {its} and {known[ours]}"
                )
        self.device_maps[to] = {**known, **added}

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Says which CUDA devices of this worker calls may use. Raises `DeviceError`, a `ValueError`, for any other."""
        self.devices = list(devices)


TensorPipeRpcBackendOptions = RpcBackendOptions
"""The name that torch gives to the options of its default backend."""


# What each option is checked by, and made of: a function of its name and the value.


def _no_such_option(cls: type, name: str, known: Sequence[str]) -> BackendError:
    import difflib  # late: only for this message

    near = difflib.get_close_matches(name, known, n=3)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return BackendError(f"{cls.__name__} has no option {name}; {advice}")


def _number(name: str, value: Any, least: Callable[[Any], bool], rule: str) -> Any:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if not least(value):  # nan too
        raise UsageError(f"{name} must be {rule}, not {value}")
    return value


def _whole(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        number = _number(name, value, lambda number: number >= least, f"at least {least}")
        if number // 1 != number:  # infinity, too
            raise UsageError(f"{name} must be a whole number, not {value}")
        return int(number)  # 1e6 is one

    return check


def _transports(name: str, value: Any) -> Any:
    if isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a tuple of names such as ('unix', 'tcp'), not {value!r}")
    return value


def _secret(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, str):  # it is not shown
        raise UsageError(f"{name} must be a text, the same at all workers, not a {type(value).__name__}")
    return value


def _allow(name: str, value: Any) -> Any:
    """As names, which can be copied and compared before anything is loaded."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list of names, functions, classes or modules, not {value!r}")
    return tuple(_name_of(name, each) for each in value)


def _name_of(option: str, target: Any) -> str:
    if isinstance(target, ModuleType):
        return target.__name__
    if isinstance(target, str):
        text = target
    else:
        module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname:
            raise UsageError(f"{option} cannot name {target!r}: give a module, or a function or class of a module")
        text = f"{module}.{qualname}"
    plain = _ONE_OF.sub("x", text)
    if not all(plain.split(".")) or set(plain) & set("[]") or any(each.isspace() for each in text):
        # It would match nothing, and nobody would know why.
        raise UsageError(
            f"{option} has {target!r}, which is no name: write 'module', 'module.function', or a pattern such as "
            "'module.*', 'module.get_?' or 'module.step[0-9]'"
        )
    return text


def _truth(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return value


def _device(device: Device) -> str:
    """The device as torch writes it. Raises `DeviceError`."""
    if isinstance(device, int) and not isinstance(device, bool):
        text = f"cuda:{device}"
    elif isinstance(device, str):
        text = device
    else:
        kind, index = getattr(device, "type", None), getattr(device, "index", None)
        text = f"{kind}:{index}" if index is not None else str(kind)
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise DeviceError(f"{device!r} is no device: write it as 'cpu', 'cuda:1', or 1 for the latter")
    if match[2] and match[2].startswith("-"):
        raise DeviceError(f"Device index must not be negative, got {match[2]}")
    return text


def _device_map(device_map: Mapping[Device, Device]) -> dict[Device, Device]:
    if not isinstance(device_map, Mapping):
        raise DeviceError(f"a device map must be a dict from our devices to the callee's, not {device_map!r}")
    checked: dict[Device, Device] = {}
    of: dict[str, str] = {}  # theirs to ours
    for ours, its in ((_device(key), _device(value)) for key, value in device_map.items()):
        if of.setdefault(its, ours) != ours:
            raise DeviceError(f"`device_map` only supports 1-to-1 mapping, trying to map {ours} and {of[its]} to {its}")
        checked[ours] = its
    return checked


def _device_maps(name: str, value: Any) -> dict[str, dict[Device, Device]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(worker, str) for worker in value):
        raise DeviceError(f"{name} must be a dict with a device map for each worker's name, not {value!r}")
    return {worker: _device_map(device_map) for worker, device_map in value.items()}


def _devices(name: str, value: Any) -> list[Device]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable | None):
        raise DeviceError(f"{name} must be a list such as ['cuda:0'], not {value!r}")
    checked = [_device(device) for device in value or ()]
    for device in checked:
        kind = device.partition(":")[0]
        if kind != "cuda":
            raise DeviceError(f"`set_devices` expect a list of CUDA devices, but got device type {kind}.")
    return list(checked)


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "num_worker_threads": _whole(1),
    "rpc_timeout": lambda name, value: _number(name, value, lambda number: number >= 0, "0 (no timeout) or more"),
    "init_timeout": lambda name, value: _number(name, value, lambda number: number > 0, "more than 0"),
    "spin": lambda name, value: _number(name, value, lambda number: number >= 0, "0 (never spin) or more"),
    "heartbeat_interval": lambda name, value: _number(name, value, lambda number: number > 0, "more than 0"),
    "heartbeat_patience": lambda name, value: _number(name, value, lambda number: number > 0, "more than 0"),
    "secret": _secret,
    "encrypt_between_hosts": _truth,
    "allow": _allow,
    "max_strangers": _whole(1),
    "proof_timeout": lambda name, value: _number(name, value, lambda number: number > 0, "more than 0"),
    "max_greeting_size": _whole(1024),
    "max_head_size": _whole(1024),
    "max_message_size": _whole(65536),
    "shared_memory": lambda name, value: None if value is None else _whole(0)(name, value),
    "transports": _transports,
    "device_maps": _device_maps,
    "devices": _devices,
}

"""The options of an agent: `RpcBackendOptions` for farcall's own, `BackendOptions` for the agents of other backends.

Rules
- A value is checked when it is set, in the constructor or later. A wrong value raises an error and changes nothing.
- Options can be changed until an agent is made from them. The agent keeps a frozen copy (`frozen_copy`), so its
  options never change while it runs.
- The defaults are those of `torch.distributed.rpc` for the options that torch has.

Devices are written as torch writes them, but torch is not needed: "cpu", "cuda:1" or "meta". A number n means "cuda:n".
An object with the attributes `type` and `index`, such as a `torch.device`, is accepted as well. Only the form of a
device is checked here, not whether the device exists.
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
from typing import Any, Final, Self, TypeAlias, TypedDict

from farcall.errors import BackendError, DeviceError, RpcTimeoutError, UsageError

DEFAULT_RPC_TIMEOUT: Final = 60.0
"""The default timeout of calls, in seconds."""
UNSET_RPC_TIMEOUT: Final = -1.0
"""The default of `timeout` parameters. It means: use the timeout of the agent, `RpcAgent.rpc_timeout`."""
DEFAULT_NUM_WORKER_THREADS: Final = 16
"""The default of `num_worker_threads`: how many functions a worker runs at once for other workers."""
DEFAULT_INIT_METHOD: Final = "env://"
"""The default rendezvous: MASTER_ADDR and MASTER_PORT of the environment."""
DEFAULT_INIT_TIMEOUT: Final = 60.0
"""The default time that `init_rpc` waits for the other workers, in seconds."""
DEFAULT_SHUTDOWN_TIMEOUT: Final = 0.0
"""The default timeout of `shutdown`, in seconds; 0 means no limit."""

Device: TypeAlias = Any
"""A str such as "cuda:1", an int, or an object with `type` and `index`. Options keep devices as str."""

_CHARACTER_SET: Final = re.compile(r"\[!?[^\[\].]+\]")
"""A set of characters in a pattern of names, such as the `[0-9]` of "service.step[0-9]"."""
_DEVICE: Final = re.compile(r"([a-z]+)(?::(-?\d+))?")
"""A device: its type and, after a colon, its index."""


@dataclass(kw_only=True)
class BackendOptions:
    """The options that all backends have. The options of another backend are a subclass of this class.

    All options are keyword arguments and attributes; those left out have their defaults. Each is checked when it is
    set.

    Args:
        rpc_timeout: The timeout, in seconds, of calls that do not give their own. 0 means no timeout.
        init_method: The URL at which the workers find each other. Not checked here.

    Raises:
        UsageError: `rpc_timeout` is negative or not a number. The attribute is not changed.
        BackendError: A keyword argument names no option. The message suggests similar names.

    Example:
        >>> options = BackendOptions(rpc_timeout=30)
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    """The timeout, in seconds, of calls that do not give their own. 0 means no timeout."""

    init_method: str = DEFAULT_INIT_METHOD
    """The rendezvous URL, where the workers find each other: `env://`, `tcp://host:port` or `file:///path`. `env://`
    means MASTER_ADDR and MASTER_PORT of the environment. The URL is not checked here but by `init_rpc`.
    """

    def __new__(cls, *_: Any, **chosen: Any) -> Self:
        """Returns a new object, whose options `__init__` sets. `chosen` are the keyword arguments; there may be none.

        Raises `BackendError`, with similar names, if one of them is not a parameter of `__init__`. Values and
        positional arguments are left to `__init__`.
        """
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [] if takes_any else [name for name in chosen if name not in known]
        if unknown:
            raise _unknown_option_error(cls, unknown[0], list(known)[1:])
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks and sets one option. A name that is no option is set without a check.

        Raises:
            UsageError: The value is not valid, or these options are a frozen copy. Nothing has changed.
            DeviceError: The value of `devices` or `device_maps` is not valid. Nothing has changed.
        """
        if self.__dict__.get("_frozen"):
            raise UsageError(f"{name} cannot be set: these options are in use by an agent; set it before init_rpc")
        check = _CHECKS.get(name)
        super().__setattr__(name, check(name, value) if check is not None else value)

    def frozen_copy(self) -> Self:
        """Returns a deep copy for an agent to keep. Setting an option of the copy raises `UsageError`.

        All values are checked again, because a list or dict may have been changed in place since it was set. The
        original is not changed and not frozen. The copy of a frozen copy is frozen, too.

        Raises:
            UsageError: An option has a value that it cannot have.
            DeviceError: `devices` or `device_maps` is not valid.
        """
        mine = copy.deepcopy(self)
        mine.__dict__.pop("_frozen", None)
        for each in dataclasses.fields(mine):
            setattr(mine, each.name, getattr(mine, each.name))
        mine.__dict__["_frozen"] = True
        return mine


@dataclass(kw_only=True)
class RpcBackendOptions(BackendOptions):
    """The options of the default backend, farcall's own agent.

    All options are keyword arguments and attributes, and have defaults. Each is checked when it is set. Each attribute
    has a description of its own. In short:

    - Calls: `rpc_timeout` (seconds), `num_worker_threads` (how many functions run at once), `device_maps` and `devices`
      (for tensors), `record_stacks` (for `farcall.references`).
    - Rendezvous: `init_method` (a URL), `init_timeout` (seconds), `interface` (to listen on; None chooses one).
    - Connections: `transports` (names, the preferred one first), `spin` (seconds of polling before a thread sleeps),
      `heartbeat_interval` and `heartbeat_patience` (seconds until a silent worker is declared lost), `shared_memory`
      (bytes; 0 for none, None for a quarter of the machine's memory, at most 4 GiB).
    - Security: `secret` (None for that of the environment or of this user), `allow` (None allows everything),
      `encrypt_between_hosts`, `tls_certificate`, `tls_key` and `tls_authority` (paths of files; all None
      means that each worker creates a certificate for itself).
    - Limits: `max_strangers` (connections without a proof of the secret), `proof_timeout` (seconds until the proof).
      The other limits are sizes in bytes: of a message of the handshake, of a header and of a message.

    Raises:
        UsageError: An option is set to a value that it cannot have; the option keeps its value.
        DeviceError: `devices` or `device_maps` is not valid.
        BackendError: A keyword argument names no option. The message suggests similar names.

    Example:
        >>> options = farcall.RpcBackendOptions(num_worker_threads=4, rpc_timeout=30)
        >>> farcall.init_rpc("trainer", rank=0, world_size=2, rpc_backend_options=options)
    """

    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    """How many functions this worker runs at once for other workers, at least 1. Functions that are waiting for the
    reply of a farcall call do not count."""

    init_timeout: float = DEFAULT_INIT_TIMEOUT
    """How many seconds `init_rpc` waits for the other workers, more than 0."""

    interface: str | None = None
    """The network interface (`eth0`) or its address to listen on. None means the one over which this worker reaches the
    store, the small server behind the rendezvous. `init_rpc` raises `UsageError` if this machine does not have it.
    """

    transports: tuple[str, ...] = ("unix", "tcp")
    """The names of the transports that may be used, the preferred one first; not empty. A transport that this host does
    not have, or that does not lead to the other worker, is skipped. `init_rpc` raises `UsageError` for an unknown name.
    """

    spin: float = 100e-6
    """How many seconds a waiting thread polls before it sleeps. 0 means it never polls. Polling is also switched off
    automatically while it does not make calls faster."""

    heartbeat_interval: float = 1.0
    """Seconds between two heartbeats, more than 0."""

    heartbeat_patience: float = 8.0
    """How many seconds a worker may be silent, towards all other workers, before it can be declared lost. It is
    declared lost at the latest two heartbeat intervals after that. Must be at least three heartbeat intervals, which
    `init_rpc` checks, and longer than any call into C code that holds the GIL. A worker whose process has ended is
    declared lost at once.
    """

    secret: str | None = field(default=None, repr=False)
    """The secret of the group, at least 16 characters, the same for all workers. None means FARCALL_SECRET of the
    environment, which `farcall run` sets, or else the content of a file of this user, which is created on first use.
    `init_rpc` raises `UsageError` if the secret is too short.
    """

    allow: Sequence[Any] | None = None
    """The functions that other workers may call on this worker, and the types that they may send: modules, functions
    and classes, or their names, or patterns of names ("service.*"). Functions and classes marked by `farcall.exposed`
    and plain data are always allowed. None allows everything; an empty list allows only those."""

    encrypt_between_hosts: bool = True
    """Whether connections to other hosts, and to other network namespaces of this host, use TLS 1.3. Must be the same
    for all workers. Connections within one host (Unix sockets, loopback) are not encrypted. All connections are
    authenticated with the secret, encrypted or not."""

    tls_certificate: str | None = None
    """The path of a PEM file with this worker's certificate. None means that the worker creates a certificate for
    itself. Set `tls_certificate`, `tls_key` and `tls_authority` together or not at all; `init_rpc` raises `UsageError`
    if only some are set, or a file cannot be used.
    """

    tls_key: str | None = None
    """The path of a PEM file with the private key of `tls_certificate`, without a passphrase; None without a
    certificate.
    """

    tls_authority: str | None = None
    """The path of a PEM file with the certificate of the authority that signed the certificates of all workers; None
    without certificates.
    """

    max_strangers: int = 256
    """How many connections may be open at once whose other end has not proved yet that it knows the secret, at least
    1. When one more arrives, the oldest of them is closed."""

    proof_timeout: float = 10.0
    """How many seconds the other end of a new connection has to prove that it knows the secret, more than 0."""

    max_greeting_size: int = 64 * 1024
    """The largest size, in bytes, of one message of a handshake, at least 1024."""

    max_head_size: int = 4 * 1024**2
    """The largest size, in bytes, of the header of a message between workers, which holds the name of the function and
    the references. At least 1024."""

    max_message_size: int = 1024**4
    """The largest size, in bytes, of a message between workers, at least 65536. Memory is allocated as the bytes
    arrive, not for the size that the message announces."""

    shared_memory: int | None = None
    """How many bytes of shared memory this worker may use to pass large data to workers of the same host. 0 means none:
    large data goes through sockets. None means a quarter of the memory of the machine, at most 4 GiB."""

    record_stacks: bool = False
    """Whether a reference remembers the whole call stack at its creation, for `farcall.references()`. False means only
    the line that created it. The type is not checked.
    """

    device_maps: dict[str, dict[Device, Device]] = field(default_factory=dict)
    """For the name of each callee, a map from devices of this worker to devices of the callee. A tensor on a device of
    this worker arrives on the mapped device. No two devices may be mapped to the same one. None means no maps."""

    devices: list[Device] = field(default_factory=list)
    """The CUDA devices of this worker that calls may use. An empty list or None means the devices named in
    `device_maps`.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Returns the options as a dict, for pickling. Raises `UsageError` if `secret` is set."""
        if self.secret is not None:
            raise UsageError(
                "options with a secret cannot be pickled, because the pickle would contain the secret; for a child "
                "process, set FARCALL_SECRET in the environment, which it inherits, or set the option secret there"
            )
        return dict(self.__dict__)

    def __copy__(self) -> Self:
        """Returns a shallow copy with the secret, for `copy.copy`. The copy of frozen options is frozen, too."""
        mine = object.__new__(type(self))
        mine.__dict__.update(self.__dict__)
        return mine

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns a deep copy with the secret, for `copy.deepcopy`; `memo` is its table of the objects copied so far.

        The copy of frozen options is frozen, too.
        """
        mine = object.__new__(type(self))
        memo[id(self)] = mine
        mine.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return mine

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Adds entries to the device map for one callee. Tensors on a device of the map arrive on the mapped device.

        Args:
            to: The name of the callee. Whether there is such a worker is not checked.
            device_map: A dict from devices of this worker to devices of the callee. An empty one adds no entries.

        Raises:
            DeviceError: `device_map` is not a mapping, a key or value is not a device, two devices are mapped to the
                same one, or a device is mapped already to another one. Nothing has changed. Two separate calls that map
                two devices to the same one are found only by `init_rpc`.
            UsageError: An agent uses these options already.

        Example:
            >>> options.set_device_map("worker1", {"cuda:0": "cuda:1", 1: "cpu"})
        """
        if self.__dict__.get("_frozen"):
            raise UsageError(
                "set_device_map was called too late: these options are in use by an agent; call it before init_rpc"
            )
        added = _check_device_map(device_map)
        known = self.device_maps.get(to, {})
        for source, target in added.items():
            if known.get(source, target) != target:
                raise DeviceError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{known[source]}"
                )
        self.device_maps[to] = {**known, **added}

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Sets the CUDA devices of this worker that calls may use, in place of earlier ones.

        Args:
            devices: The devices, such as `["cuda:0", 1]`. An empty list means the devices in the device maps.

        Raises:
            DeviceError: One of them is not a CUDA device, or `devices` is a single str. Nothing has changed.
            TypeError: `devices` cannot be iterated over; also for None.
            UsageError: An agent uses these options already.
        """
        self.devices = list(devices)


TensorPipeRpcBackendOptions = RpcBackendOptions
"""torch's name for the options of the default backend."""


# The checks. Each is a function of the option's name and the value, and returns the value to store.


def _unknown_option_error(cls: type, name: str, known: Sequence[str]) -> BackendError:
    """Returns the error for the unknown option `name` of the class `cls`, with up to three similar names of `known`.

    If none is similar, the message lists all of `known`.
    """
    import difflib  # late: only for this message

    near = difflib.get_close_matches(name, known, n=3)
    advice = f"did you mean {' or '.join(near)}?" if near else f"its options are {', '.join(known)}"
    return BackendError(f"{cls.__name__} has no option {name}; {advice}")


def _check_number(name: str, value: Any, is_valid: Callable[[Any], bool], rule: str) -> Any:
    """Returns `value`, the new value of the option `name`, if it is a real number for which `is_valid` returns True.

    Raises `UsageError` if it is not a number, is a bool, or is not valid. `rule` says in the message what is valid.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} must be a number, not {value!r}")
    if not is_valid(value):  # every comparison with nan is false, so nan is refused here
        raise UsageError(f"{name} must be {rule}, not {value}")
    return value


def _check_int(least: int) -> Callable[[str, Any], int]:
    """Returns a function of an option's name and value that returns the value as an int of at least `least`.

    The function accepts 1e6, as 1000000. It raises `UsageError` for a smaller number, 1.5, inf, a bool, or no number.
    """

    def check(name: str, value: Any) -> int:
        number = _check_number(name, value, lambda number: number >= least, f"at least {least}")
        if number // 1 != number:  # also refuses infinity: inf // 1 is nan
            raise UsageError(f"{name} must be a whole number, not {value}")
        return int(number)

    return check


def _check_transports(name: str, value: Any) -> Any:
    """Returns `value`. Raises `UsageError`, which names the option `name`, if it is empty, None or a single str.

    Nothing else is checked here; `init_rpc` refuses names of transports that do not exist.
    """
    if isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a tuple of names such as ('unix', 'tcp'), not {value!r}")
    return value


def _check_secret(name: str, value: Any) -> Any:
    """Returns `value`. Raises `UsageError`, which names the option `name`, if it is neither None nor a str.

    Empty and short secrets pass; `init_rpc` refuses them.
    """
    if value is not None and not isinstance(value, str):
        # The message has the type only: the value may be the secret, as bytes.
        raise UsageError(f"{name} must be a str, the same for all workers, not a {type(value).__name__}")
    return value


def _check_allow(name: str, value: Any) -> Any:
    """Returns the entries of the option `allow` as a tuple of names; None for None, which allows everything.

    An empty list gives an empty tuple. `name` is the name of the option, for messages. Raises `UsageError` for a single
    str, for what is not iterable, and for an entry without a usable name.
    """
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list of names, functions, classes or modules, not {value!r}")
    return tuple(_name_of_entry(name, each) for each in value)


def _name_of_entry(option: str, target: Any) -> str:
    """Returns the name of one entry of the option `option`, an allow-list.

    If `target` is a module, returns its name. If it is a function or class, returns "module.function". If it is a str
    (a name or a pattern of names), returns it unchanged. Raises `UsageError` for an object without a module and a name
    (a lambda, an instance), and for a text that can match no name, because it is empty or has empty parts, spaces or
    unpaired brackets.
    """
    if isinstance(target, ModuleType):
        return target.__name__
    if isinstance(target, str):
        text = target
    else:
        module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname:
            raise UsageError(
                f"{option} cannot have {target!r}, because it has no name that can be looked up: give a module, or a "
                "function or class of a module"
            )
        text = f"{module}.{qualname}"
    plain = _CHARACTER_SET.sub("x", text)
    if not all(plain.split(".")) or set(plain) & set("[]") or any(each.isspace() for each in text):
        # Refused here, because it would match nothing later, without any message.
        raise UsageError(
            f"{option} has {target!r}, which is not a name: write 'module', 'module.function', or a pattern such as "
            "'module.*', 'module.get_?' or 'module.step[0-9]'"
        )
    return text


def _check_bool(name: str, value: Any) -> Any:
    """Returns `value`. Raises `UsageError`, which names the option `name`, if it is not True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return value


def _check_device(device: Device) -> str:
    """Returns a device as torch writes it, such as "cuda:1" for 1. Whether the device exists is not checked.

    `device` is an int, a text such as "cpu" or "cuda:1", or an object with the attributes `type` and `index`. Raises
    `DeviceError` for anything else, such as None or "", and for a negative index.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        text = f"cuda:{device}"
    elif isinstance(device, str):
        text = device
    else:
        kind, index = getattr(device, "type", None), getattr(device, "index", None)
        text = f"{kind}:{index}" if index is not None else str(kind)
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise DeviceError(f"{device!r} is not a device: write 'cpu', or 'cuda:1', or 1 for 'cuda:1'")
    if match[2] and match[2].startswith("-"):
        raise DeviceError(f"Device index must not be negative, got {match[2]}")
    return text


def _check_device_map(device_map: Mapping[Device, Device]) -> dict[Device, Device]:
    """Returns the map, from devices of this worker to devices of a callee, with its devices as str such as "cuda:1".

    An empty map gives an empty dict. Raises `DeviceError` if two devices are mapped to the same one, `device_map` is
    not a mapping, or a key or value is not a device.
    """
    if not isinstance(device_map, Mapping):
        raise DeviceError(
            f"a device map must be a dict from devices of this worker to devices of the callee, not {device_map!r}"
        )
    checked: dict[Device, Device] = {}
    sources: dict[str, str] = {}
    for source, target in ((_check_device(key), _check_device(value)) for key, value in device_map.items()):
        if sources.setdefault(target, source) != source:
            raise DeviceError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {sources[target]} to {target}"
            )
        checked[source] = target
    return checked


def _check_device_maps(name: str, value: Any) -> dict[str, dict[Device, Device]]:
    """Returns the device maps by the callees' names, with all devices as str such as "cuda:1"; an empty dict for None.

    Raises `DeviceError`, which names the option `name`, if `value` is not a dict from names to valid device maps.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(worker, str) for worker in value):
        raise DeviceError(f"{name} must be a dict from names of workers to device maps, not {value!r}")
    return {worker: _check_device_map(device_map) for worker, device_map in value.items()}


def _check_devices(name: str, value: Any) -> list[Device]:
    """Returns a list of CUDA devices as str, such as "cuda:1"; an empty list for None.

    Raises `DeviceError`, which names the option `name`, for other devices, a single str, a mapping, and what is not
    iterable.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable | None):
        raise DeviceError(f"{name} must be a list such as ['cuda:0'], not {value!r}")
    checked = [_check_device(device) for device in value or ()]
    for device in checked:
        kind = device.partition(":")[0]
        if kind != "cuda":
            raise DeviceError(f"`set_devices` expect a list of CUDA devices, but got device type {kind}.")
    return list(checked)


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "num_worker_threads": _check_int(1),
    "rpc_timeout": lambda name, value: _check_number(name, value, lambda number: number >= 0, "0 (no timeout) or more"),
    "init_timeout": lambda name, value: _check_number(name, value, lambda number: number > 0, "more than 0"),
    "spin": lambda name, value: _check_number(name, value, lambda number: number >= 0, "0 (never spin) or more"),
    "heartbeat_interval": lambda name, value: _check_number(name, value, lambda number: number > 0, "more than 0"),
    "heartbeat_patience": lambda name, value: _check_number(name, value, lambda number: number > 0, "more than 0"),
    "secret": _check_secret,
    "encrypt_between_hosts": _check_bool,
    "allow": _check_allow,
    "max_strangers": _check_int(1),
    "proof_timeout": lambda name, value: _check_number(name, value, lambda number: number > 0, "more than 0"),
    "max_greeting_size": _check_int(1024),
    "max_head_size": _check_int(1024),
    "max_message_size": _check_int(65536),
    "shared_memory": lambda name, value: None if value is None else _check_int(0)(name, value),
    "transports": _check_transports,
    "device_maps": _check_device_maps,
    "devices": _check_devices,
}
"""The check of each option that has one, by the option's name; applied by `BackendOptions.__setattr__`."""


# The options of a call


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `.options(...)` of a worker or a reference, which returns a copy with these options.

    `timeout` is how many seconds to wait for the reply, more than 0; None means no limit. 0 raises `RpcTimeoutError`,
    and a negative number `UsageError`. An option that is left out stays as it was. An unknown option raises
    `UsageError`.
    """

    timeout: float | None
    """Seconds to wait for the reply, more than 0; None for no limit. By default the caller's `rpc_timeout`. 0 raises
    `RpcTimeoutError`, and a negative number `UsageError`.
    """


class SelectionOptions(CallOptions, total=False):
    """The keyword arguments of `.options(...)` of a selection of workers, and of references by worker name."""

    idempotent: bool
    """Whether `map` gives the items of a lost worker to another one, so that they may run more than once. By default
    only if the function is marked `idempotent`."""


def idempotent_option(options: SelectionOptions, before: bool) -> tuple[bool, CallOptions]:
    """Returns the option `idempotent`, and the other options.

    Args:
        options: The keyword arguments of `.options(...)` of a selection.
        before: What to return if `options` does not have it.

    Raises:
        UsageError: It is not a bool.
    """
    others = {name: value for name, value in options.items() if name != "idempotent"}
    return _check_bool("idempotent", options.get("idempotent", before)), others  # type: ignore[return-value]


def call_timeout(options: CallOptions, before: float) -> float:
    """Returns the timeout of calls with these options, in the form that agents use: 0 for no limit.

    Args:
        options: The keyword arguments of `.options(...)`. Its `timeout` of None gives 0, no limit.
        before: The timeout to return if `options` has none.

    Raises:
        UsageError: There is no such option, or the timeout is negative or not a number.
        RpcTimeoutError: The timeout is 0, so it is over before a call is made.
    """
    for name in options:
        if name not in CallOptions.__annotations__:
            raise UsageError(f"calls have no option {name!r}; there is {', '.join(CallOptions.__annotations__)}")
    if "timeout" not in options:
        return before
    seconds = options["timeout"]
    if seconds is None:
        return 0.0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise UsageError(f"the timeout of a call must be more than 0 seconds, or None for no limit, not {seconds!r}")
    if seconds == 0:
        raise RpcTimeoutError("a timeout of 0 s is over before the call is made; for no limit, give timeout=None")
    return float(seconds)

"""Backends by name, as in torch: `TENSORPIPE` is farcall's own agent, `FAULTY_TENSORPIPE` the one for tests.

As in torch, `BackendType` is an enumeration that is replaced whenever a backend is registered, so code that has
imported it earlier does not see the new backend.

The second half is about device maps between all workers. They are exchanged and checked when an agent starts, by
functions with torch's names. A map says, for one callee, on which of its devices a tensor arrives that is on one of
ours. Replies use the reverse of the caller's map. `devices` moves the tensors.

Rules
- These functions return and raise what torch's return and raise, because backends of other projects may call them.
- The workers of a fixed group exchange their maps through the store, as plain text, because workers have not proved who
  they are to a store. `_tensorpipe_exchange_and_check_all_device_maps` also accepts a process group, as torch's does.
- In an open group a worker that joins asks the others for their maps, and sends them its own. A map may name workers
  that have not joined yet.
- torch rejects the device `meta`. Here it is allowed in maps, and counts as the CPU where maps are checked.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from farcall.errors import UnknownWorkerError, WorkerLostError
from farcall.pytorch import api, devices, restricted_tensors
from farcall.pytorch import constants as rpc_constants
from farcall.pytorch._utils import _group_membership_management, _update_group_membership
from farcall.pytorch.agent import TensorPipeAgent
from farcall.pytorch.allow_list import check_kinds, may_be_called
from farcall.pytorch.options import DeviceMap, TensorPipeRpcBackendOptions
from farcall.pytorch.worker_info import WorkerInfo
from farcall.serialization import register_plain

__all__ = [
    "BackendType",
    "BackendValue",
    "_group_membership_management",
    "_update_group_membership",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

DeviceMaps: TypeAlias = Mapping[str, DeviceMap]
"""The device maps of one worker, by the name of the callee."""
DeviceInfos: TypeAlias = tuple[int, DeviceMaps, Sequence[torch.device]]
"""What a worker tells the others: the number of its GPUs, its device maps, and the devices that calls may use on it."""

_CPU: Final = torch.device("cpu")


class BackendValue(NamedTuple):
    """The two functions of a backend, which `register_backend` stores as the value of a member of `BackendType`.

    Attributes:
        construct_rpc_backend_options_handler: Returns options, given `rpc_timeout`, `init_method` and further keywords.
        init_backend_handler: Returns a started agent, given `store`, `name`, `rank`, `world_size` and
            `rpc_backend_options`.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _backend_types(backends: dict[str, BackendValue]) -> Any:
    """Returns a new enumeration `BackendType` with one member for each backend; no members for no backends.

    `backends` has the two functions of each backend, by its name.
    """
    made = enum.Enum("BackendType", backends)  # type: ignore[misc]  # its members are known at run time only
    setattr(made, "__repr__", _backend_type_repr)  # noqa: B010 (mypy does not allow an assignment)
    made.__doc__ = _backend_type_doc
    return made


def _backend_type_repr(self: enum.Enum) -> str:
    """Returns the `repr` of a member, for example `BackendType.TENSORPIPE`."""
    return f"BackendType.{self.name}"


_backend_type_doc = "The backends that are registered, by name."


BackendType: Any = _backend_types({})
"""The registered backends, as an enumeration."""


def backend_registered(backend_name: str) -> bool:
    """Returns True if a backend is registered as `backend_name`, for example `"TENSORPIPE"`; else False."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Registers a backend, and returns its member of the enumeration `BackendType`.

    `BackendType` is replaced by a new enumeration, so code that imported it earlier does not see the new backend.

    Args:
        backend_name: The name.
        construct_rpc_backend_options_handler: Returns options, given `rpc_timeout`, `init_method` and further keywords.
            It is not checked.
        init_backend_handler: Returns a started agent, given `store`, `name`, `rank`, `world_size` and
            `rpc_backend_options`. It is not checked.

    Raises:
        RuntimeError: The name is taken.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    known = {member.name: member.value for member in BackendType}
    BackendType = _backend_types(
        {backend_name: BackendValue(construct_rpc_backend_options_handler, init_backend_handler), **known}
    )
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = rpc_constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Returns options for a backend.

    Args:
        backend: A member of `BackendType`. Anything else raises `AttributeError`.
        rpc_timeout: The default timeout of calls in seconds; 0 for no timeout.
        init_method: The rendezvous URL.
        **kwargs: Further options of the backend. Its handler raises if it does not know one.
    """
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts an agent of a backend, and returns the agent.

    Args:
        backend: A member of `BackendType`. Anything else raises `AttributeError`.
        *args: Passed to the `init_backend_handler` of the backend.
        **kwargs: Passed to the handler as well. The handler raises if the agent cannot be started.
    """
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = rpc_constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: Sequence[str] | None = None,
    _channels: Sequence[str] | None = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    """Returns the options of the default backend, `TENSORPIPE`.

    Args:
        rpc_timeout: The default timeout of calls in seconds; 0 for no timeout.
        init_method: The rendezvous URL.
        num_worker_threads: The number of threads that run requests.
        _transports: Ignored.
        _channels: Ignored.
        **kwargs: Further options of `TensorPipeRpcBackendOptions`, which raises `TypeError` if an option is unknown,
            and `TypeError`, `ValueError` or `UsageError` if a value is wrong.
    """
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
        **kwargs,
    )


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    """Starts an agent of the default backend, exchanges its device maps with the other workers, and returns the agent.

    The agent becomes the agent of this process. If the exchange fails, the agent is shut down.

    Args:
        store: A `torch.distributed.Store`, at which the workers find each other.
        name: The name of this worker.
        rank: Its rank.
        world_size: The number of workers; None or 0 for an open group.
        rpc_backend_options: The options, a `TensorPipeRpcBackendOptions`.

    Raises:
        TypeError: `store` or `rpc_backend_options` has the wrong type.
        ValueError: A device map of a worker is invalid.
        RuntimeError: The group could not be joined, torch does not accept the name, or this process is a worker
            already.
    """
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = TensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
    api._init_rpc_states(agent)
    try:
        if agent.is_static_group:
            agent.reverse_device_maps, agent.used_devices = _tensorpipe_exchange_and_check_all_device_maps(
                name, *_device_infos_of(agent), agent
            )
        else:
            _set_devices_and_reverse_device_map(agent)
        if torch.cuda.is_available() and agent.used_devices:
            torch.cuda.init()
    except BaseException:
        agent.shutdown()
        api._reset_current_rpc_agent()
        raise
    return agent


# -- device maps


def _tensorpipe_exchange_and_check_all_device_maps(
    my_name: str,
    my_device_count: int,
    my_device_maps: DeviceMaps,
    my_devices: Sequence[torch.device],
    group: Any,
) -> tuple[dict[str, DeviceMap], list[torch.device]]:
    """Exchanges device maps with all workers of a fixed group, and checks the maps of all workers.

    A device map is for one callee. It maps devices of the caller to devices of the callee: a tensor on the first
    arrives on the second.

    Args:
        my_name: The name of this worker.
        my_device_count: The number of its GPUs.
        my_device_maps: Its device maps, by the name of the callee; may be empty.
        my_devices: The devices that calls may use on it. If empty, calls may use the devices that any map names.
        group: How the maps are exchanged: this worker's `TensorPipeAgent`, or a process group of torch's.

    Returns:
        For the name of each caller with a map for this worker, a map from devices of this worker to devices of the
        caller; and the devices that calls may use here. Both may be empty.

    Raises:
        ValueError: A worker has invalid maps. All workers raise it.
        RendezvousError: The store is gone, or not all workers came in time (`RendezvousTimeoutError`).
    """
    mine: DeviceInfos = my_device_count, my_device_maps, my_devices
    if isinstance(group, TensorPipeAgent):
        everybody = {name: _decode(told) for name, told in group.exchange(_encode(mine)).items()}
    else:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, (my_name, *mine), group)
        everybody = {name: infos for name, *infos in gathered}
    return _check_all(my_name, everybody, is_static_group=True)


def _set_devices_and_reverse_device_map(agent: Any) -> None:
    """Exchanges device maps with all workers of the open group that this worker is joining, and stores the result.

    A device map is for one callee. It maps devices of the caller to devices of the callee. If there are no other
    workers, only the maps of this worker are checked.

    Args:
        agent: The agent of this worker. Its attributes `used_devices` and `reverse_device_maps` are set.

    Raises:
        ValueError: A worker has invalid maps. This worker has not sent its maps to the others in that case.
        RpcTimeoutError: A worker did not answer in time.
    """
    me = agent.get_worker_info()
    mine = _device_infos_of(agent)
    others = [info for info in agent.get_worker_infos() if info != me]
    everybody = {me.name: mine, **_ask(others, _get_device_infos, ())}
    reverse, used = _check_all(me.name, everybody, is_static_group=False)
    agent._update_group_membership(me, used, reverse, True)
    _ask(others, _worker_has_joined, (me, mine))


def _check_all(
    my_name: str, everybody: Mapping[str, DeviceInfos], is_static_group: bool
) -> tuple[dict[str, DeviceMap], list[torch.device]]:
    """Checks the device maps of all workers.

    Args:
        my_name: The name of this worker. Raises `KeyError` if it is not in `everybody`.
        everybody: For the name of each worker, the number of its GPUs, its device maps by the name of the callee, and
            the devices that calls may use on it.
        is_static_group: Whether maps may name only the workers in `everybody`.

    Returns:
        For the name of each caller with a map for this worker, a map from devices of this worker to devices of the
        caller; and the devices that calls may use on this worker. Both may be empty.

    Raises:
        ValueError: A worker has invalid maps.
    """
    names = list(everybody)
    checked = {name: _with_meta_as_cpu(maps) for name, (_, maps, _) in everybody.items()}
    named = {name: devices for name, (_, _, devices) in everybody.items()}
    counts = {name: count for name, (count, _, _) in everybody.items()}
    _validate_device_maps(names, counts, checked, named, is_static_group)
    reverse = _create_reverse_mapping(my_name, names, {name: maps for name, (_, maps, _) in everybody.items()})
    return reverse, _create_device_list(named[my_name], checked[my_name], _with_meta_as_cpu(reverse))


def _with_meta_as_cpu(maps: DeviceMaps) -> DeviceMaps:
    """Returns the device maps of a worker with the device `cpu` in place of `meta`, which torch's checks do not know.

    Returns `maps` itself if `meta` is not in it.
    """
    if not any(device.type == "meta" for each in maps.values() for pair in each.items() for device in pair):
        return maps

    def known(device: torch.device) -> torch.device:
        return _CPU if device.type == "meta" else device

    return {name: {known(ours): known(theirs) for ours, theirs in each.items()} for name, each in maps.items()}


def _ask(workers: Iterable[WorkerInfo], function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Calls `function(*args)` on these workers at the same time, and returns the results by the names of the workers.

    Workers that have left are not in the result, which is empty for no workers. Raises what the function raises on a
    worker, and `RpcTimeoutError` if a worker does not answer within the default timeout of calls.
    """
    answers = {}
    for worker, future in [(worker, api.rpc_async(worker, function, args)) for worker in workers]:
        with suppress(WorkerLostError, UnknownWorkerError):
            answers[worker.name] = future.wait()
    return answers


@may_be_called
def _get_device_infos() -> DeviceInfos:
    """Called remotely by a worker that joins: returns this worker's GPU count, device maps, and devices.

    The maps and devices are those in the options; each may be empty. Raises `RuntimeError` if this process is not a
    worker.
    """
    infos = _device_infos_of(api._get_current_rpc_agent())
    if torch.cuda.is_available() and infos[2]:
        torch.cuda.init()  # the worker that joins may send tensors to these devices at once
    return infos


def _device_infos_of(agent: Any) -> DeviceInfos:
    """Returns the number of GPUs of this machine, and the device maps and the devices in the options of `agent`.

    Each is 0 or empty if there are none.
    """
    options = agent._get_backend_options()
    return torch.cuda.device_count(), options.device_maps, options.devices


@may_be_called
def _worker_has_joined(worker: WorkerInfo, infos: DeviceInfos) -> None:
    """Called remotely on the workers of an open group: stores the device maps of a worker that has joined.

    Any worker may call this function, so everything is checked. Raises `TypeError` if an argument has the wrong type,
    and `ValueError` if `infos` does not have three items.

    Args:
        worker: The worker that has joined. Maps of an earlier worker with its name are replaced.
        infos: The number of its GPUs, its device maps, and the devices that calls may use on it.
    """
    check_kinds((worker, WorkerInfo), (infos, tuple))
    count, maps, devices = infos
    check_kinds((count, int), (maps, dict), (devices, list), *((device, torch.device) for device in devices))
    for name, device_map in maps.items():
        check_kinds((name, str), (device_map, dict))
        check_kinds(*((device, torch.device) for pair in device_map.items() for device in pair))
    agent = api._get_current_rpc_agent()
    mine = agent.get_worker_info().name
    reverse = _create_reverse_mapping(mine, [worker.name], {worker.name: maps})
    agent.reverse_device_maps.pop(worker.name, None)  # that of an earlier worker with this name
    _, my_maps, my_devices = _device_infos_of(agent)
    all_reverse = _with_meta_as_cpu({**agent.reverse_device_maps, **reverse})
    used = _create_device_list(my_devices, _with_meta_as_cpu(my_maps), all_reverse)
    agent._update_group_membership(worker, used, reverse, True)


def _device_checked(kind: Any, index: Any = None) -> torch.device:
    """Checks a device type and an index that came from another worker, and returns the device.

    An `index` of None gives a device without an index. Raises `TypeError` if `kind` is not a str, or if `index` is
    neither None nor an int. Raises `RuntimeError` if torch knows no such device.
    """
    check_kinds((kind, str), *([] if index is None else [(index, int)]))
    return torch.device(kind) if index is None else torch.device(kind, index)


def _encode(infos: DeviceInfos) -> bytes:
    """Returns what a worker tells the others about its devices as JSON, for the store of the rendezvous.

    `infos` is the number of its GPUs, its device maps, and the devices that calls may use on it. `_decode` reads the
    result.
    """
    count, maps, devices = infos
    as_text = {name: {str(ours): str(theirs) for ours, theirs in each.items()} for name, each in maps.items()}
    return json.dumps([count, as_text, [str(device) for device in devices]]).encode()


def _decode(told: bytes) -> DeviceInfos:
    """Returns what a worker told about its devices: the number of its GPUs, its device maps, and the devices for calls.

    `told` is a result of `_encode`. Raises `ValueError`, `TypeError`, `AttributeError` or `RuntimeError` if the text is
    anything else.
    """
    count, maps, devices = json.loads(told)
    device = torch.device
    return (
        int(count),
        {name: {device(ours): device(theirs) for ours, theirs in each.items()} for name, each in maps.items()},
        [device(each) for each in devices],
    )


def _tensorpipe_validate_devices(devices: Iterable[torch.device], device_count: int) -> bool:
    """Returns True if all devices are the CPU or GPUs of a worker with `device_count` GPUs; also for no devices.

    GPUs are counted from 0. Returns False for any other device. A GPU without an index raises `TypeError`.
    """
    return all(
        device.type == "cpu" or (device.type == "cuda" and 0 <= device.index < device_count) for device in devices
    )


def _validate_device_maps(
    all_names: Collection[str],
    all_device_counts: Mapping[str, int],
    all_device_maps: Mapping[str, DeviceMaps],
    all_devices: Mapping[str, Sequence[torch.device]],
    is_static_group: bool = True,
) -> None:
    """Checks the device maps and the devices of all workers. Returns None if they are valid.

    Args:
        all_names: The names of the workers. One that a mapping below does not have raises `KeyError`.
        all_device_counts: The number of GPUs of each worker, by name.
        all_device_maps: The device maps of each worker, by name, then by the name of the callee.
        all_devices: The devices that calls may use on each worker, by name. An empty list means any device that it has.
        is_static_group: If True, a map may only be for workers in `all_names`.

    Raises:
        ValueError: The devices of a worker contain one twice, or one that does not exist. Or a device map is for an
            unknown worker, maps two devices to the same one, or has a device that the caller or the callee does not
            have or does not allow.
    """
    for node in all_names:
        named, count = all_devices[node], all_device_counts[node]
        if len(set(named)) < len(named):
            raise ValueError(f"Node {node} has duplicated devices\ndevices = {named}")
        if not _tensorpipe_validate_devices(named, count):
            raise ValueError(f"Node {node} has devices with invalid indices\ndevices = {named}\ndevice count = {count}")
    for node in all_names:
        maps = all_device_maps[node]
        if is_static_group and not maps.keys() <= set(all_names):
            raise ValueError(
                f"Node {node} has invalid target node names in its device maps\ndevice maps = {maps.keys()}\n"
                f"node names = {all_names}"
            )
        for target, device_map in maps.items():
            told = f"device map for {target}\ndevice map = {device_map}"
            if len(set(device_map.values())) < len(device_map):
                raise ValueError(f"Node {node} has duplicated target devices in its {told}")
            ends: list[tuple[str, Iterable[torch.device], str]] = [
                ("source", device_map.keys(), node),
                ("target", device_map.values(), target),
            ]
            for end, used, owner in ends:
                if named := all_devices.get(owner, ()):
                    if not set(used) <= set(named):
                        raise ValueError(f"Node {node} has unexpected {end} devices in its {told}\ndevices = {named}")
                elif owner in all_device_counts and not _tensorpipe_validate_devices(used, all_device_counts[owner]):
                    raise ValueError(
                        f"Node {node} has {end} devices with invalid indices in its {told}\n"
                        f"device count = {all_device_counts[owner]}"
                    )


def _create_reverse_mapping(
    my_name: str, all_names: Iterable[str], all_device_maps: Mapping[str, DeviceMaps]
) -> dict[str, DeviceMap]:
    """Returns the reverse device maps of a worker, by the name of the caller. Replies use them.

    A reverse map leads from devices of the worker `my_name` to devices of the caller. A caller without a map for
    `my_name` is not in the result, which may be empty.

    Args:
        my_name: The name of the worker.
        all_names: The names of the callers. One that is not in `all_device_maps` raises `KeyError`.
        all_device_maps: The device maps of each of them, by name, then by the name of the callee.
    """
    return {
        node: {theirs: ours for ours, theirs in all_device_maps[node][my_name].items()}
        for node in all_names
        if my_name in all_device_maps[node]
    }


def _create_device_list(
    my_devices: Sequence[torch.device], my_device_maps: DeviceMaps, reverse_device_maps: DeviceMaps
) -> list[torch.device]:
    """Returns the devices that calls may use on a worker, sorted by index; an empty list if there are none.

    Args:
        my_devices: The devices that the options name. If not empty, these are returned, and the maps are ignored. If
            empty, the keys of all maps are returned, which are devices of the worker; the CPU is left out.
        my_device_maps: The device maps of the worker, by the name of the callee.
        reverse_device_maps: For the name of each caller, a map from devices of the worker to devices of the caller.
    """
    every_map = [*my_device_maps.values(), *reverse_device_maps.values()]
    used = my_devices or {device for each in every_map for device in each} - {_CPU}
    return sorted(used, key=lambda device: device.index)


def _init_process_group(store: Any, rank: int, world_size: int) -> Any:
    """Returns a new process group of torch's (Gloo), for programs that call this function; farcall does not.

    Args:
        store: A `torch.distributed.Store`, at which the workers find each other.
        rank: The rank of this worker, from 0 to `world_size` - 1.
        world_size: The number of workers.

    Raises:
        RuntimeError: `rank` or `world_size` is not valid, or the process group could not be created.
    """
    group = dist.ProcessGroupGloo(store, rank, world_size, rpc_constants.DEFAULT_PROCESS_GROUP_TIMEOUT)
    if rank not in (-1, group.rank()):
        raise RuntimeError(f"rank argument {rank} doesn't match pg rank {group.rank()}")
    if world_size not in (-1, group.size()):
        raise RuntimeError(f"world_size argument {world_size} doesn't match pg size {group.size()}")
    return group


# Workers with an allow-list accept devices, too.
register_plain(torch.device, _device_checked)
devices.enable_device_maps()
restricted_tensors.allow_tensors()
register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)

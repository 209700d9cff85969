"""Backends by name: `BackendType.FARCALL` is the default, others are registered, or installed with other packages.

A package offers a backend by an entry point of the group `farcall.backends`, whose name is the backend's and which
names a `BackendValue`:

    [project.entry-points."farcall.backends"]
    PIGEON = "pigeons.backend:BACKEND"

Rules
- Names are looked up where they are used: a backend that is registered later is there for whoever has imported
  `BackendType` before.
- Packages are looked for, and imported, only when a name is asked for that is not known; never by `import farcall`.
- The table is the only thing the layer holds for the whole process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from farcall.backends import default
from farcall.backends.interface import RpcAgent
from farcall.errors import BackendError, UsageError
from farcall.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT, BackendOptions
from farcall.protocol.ids import WorkerInfo

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("farcall")

ENTRY_POINTS: Final = "farcall.backends"


class BackendValue(NamedTuple):
    """What a backend does."""

    construct_rpc_backend_options_handler: Callable[..., BackendOptions]
    """`(rpc_timeout, init_method, **more)`, the first two by position as in torch: options of its own, a subclass of
    `BackendOptions`. With all defaults it is also asked which type they are."""
    init_backend_handler: Callable[..., RpcAgent]
    """`(store, name, rank, world_size, rpc_backend_options)`, by keyword: a new agent. The store is None; rank is -1
    and world_size None if `init_rpc` was not told."""


class _Backends(type):
    """The face of `BackendType` as a namespace."""

    def __getattr__(cls, name: str) -> BackendType:
        found = None if name.startswith("_") else _find(name)
        if found is None:
            raise AttributeError(f"there is no backend {name!r}; there are {_names()}")
        return found

    def __getitem__(cls, name: str) -> BackendType:
        found = _find(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(cls, backend: object) -> bool:
        return backend in _known.values() if isinstance(backend, BackendType) else _is_known(backend)

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(dict.fromkeys(_known.values())))

    def __len__(cls) -> int:
        return len(set(_known.values()))

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *_known]

    def __repr__(cls) -> str:
        return f"<BackendType: {_names()}>"

    @property
    def __members__(cls) -> Mapping[str, BackendType]:
        """All that are known so far, by all their names."""
        return MappingProxyType(dict(_known))


@final
class BackendType(metaclass=_Backends):
    """A backend, and all of them: `BackendType.NAME`, `BackendType["NAME"]`, `"NAME" in BackendType`, iteration.

    Made by `register_backend`. `AttributeError` or `KeyError` for a name that nobody has registered or installed.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (BackendType, self.name)


_DEFAULT: Final = BackendType(default.NAME, BackendValue(default.construct_options, default.init_agent))
_known: Final[dict[str, BackendType]] = {default.NAME: _DEFAULT, default.ALIAS: _DEFAULT}
_lock: Final = threading.Lock()


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name, registered or installed."""
    return _is_known(backend_name)


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., BackendOptions],
    init_backend_handler: Callable[..., RpcAgent],
) -> BackendType:
    """Makes a backend known; `BackendValue` says what the handlers are called with.

    Raises `UsageError` if the name is taken or cannot be an attribute of `BackendType`, or if a handler cannot be
    called.
    """
    if not isinstance(backend_name, str) or not backend_name.isidentifier() or backend_name.startswith("_"):
        raise UsageError(f"{backend_name!r} cannot be a backend's name: use letters, digits and underscores")
    if backend_name in BackendType.__slots__:
        raise UsageError(f"{backend_name!r} cannot be a backend's name: every backend has an attribute of that name")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    for role, handler in value._asdict().items():
        if not callable(handler):
            raise UsageError(f"the {role} of backend {backend_name} must be a function, not {handler!r}")
    backend = BackendType(backend_name, value)
    with _lock:
        if backend_name in _known:
            raise UsageError(f"RPC backend {backend_name}: already registered; choose another name or unregister it")
        _known[backend_name] = backend
    return backend


def unregister_backend(backend_name: str) -> None:
    """Takes a backend out again; its agents live on. Raises `UsageError` if there is none, or for the default."""
    with _lock:
        if _known.get(backend_name) is _DEFAULT:
            raise UsageError(f"the default backend, {backend_name}, cannot be unregistered")
        if _known.pop(backend_name, None) is None:
            raise UsageError(f"there is no backend {backend_name!r}; there are {_names()}")


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> BackendOptions:
    """Options for that backend. Raises what its handler raises: `UsageError` for values that cannot be.

    `BackendError` if that makes no options.
    """
    options = backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)
    if not isinstance(options, BackendOptions):
        raise BackendError(
            f"{backend!r} made no farcall.BackendOptions but {options!r}; its construct_rpc_backend_options_handler is "
            "wrong"
        )
    return options


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> RpcAgent:
    """A new agent of that backend, with the `rpc_timeout` of its options.

    Raises what its handler raises, and `BackendError` for options that are not of it, or if it makes no agent that
    knows who it is; then nothing is left running.
    """
    options = kwargs.get("rpc_backend_options", args[4] if len(args) > 4 else None)
    if options is not None:
        _check_options(backend, options)
    agent = backend.value.init_backend_handler(*args, **kwargs)
    if not isinstance(agent, RpcAgent):
        raise BackendError(f"{backend!r} made no farcall.RpcAgent but {agent!r}; its init_backend_handler is wrong")
    try:
        if not isinstance(agent.info, WorkerInfo):
            raise BackendError(
                f"an agent of {backend!r} does not know who it is: its get_worker_info() must give a "
                f"farcall.WorkerInfo, not {agent.info!r}"
            )
        if options is not None:
            agent.rpc_timeout = options.rpc_timeout
    except BaseException:
        agent.shutdown(graceful=False, timeout=0.0)
        raise
    return agent


def _check_options(backend: BackendType, options: object) -> None:
    """What a backend's own handler makes of nothing shows which type its options have; if it cannot, it must look."""
    wanted = _type_of_options(backend)
    if wanted is not _NoOptions and not isinstance(options, wanted):
        raise BackendError(
            f"`rpc_backend_options` must be a `{wanted.__name__}` ({wanted.__module__}) for {backend!r}, not a "
            f"`{type(options).__name__}`; give init_rpc the backend that these options are of, or leave it out"
        )


def choose_backend(backend: BackendType | None, options: BackendOptions | None) -> tuple[BackendType, BackendOptions]:
    """What `init_rpc` is to use: the backend that is given, the one that the options are of, or the default.

    Raises `BackendError`, a `TypeError`.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise BackendError(
            f"Argument backend must be a member of BackendType, not {backend!r}; write BackendType.{default.NAME}, or "
            "leave it out"
        )
    if options is None:
        chosen = backend if backend is not None else _DEFAULT
        return chosen, construct_rpc_backend_options(chosen)
    if not isinstance(options, BackendOptions):
        raise BackendError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, or of the options of another "
            f"backend, not {type(options).__name__}"
        )
    if backend is not None:
        return backend, options
    found = _backend_of(options)
    if found is not _DEFAULT:
        logger.warning(
            "init_rpc was given options of %r and no backend, so it uses that one and not the default; "
            "say backend=%r to have no warning",
            found, found,
        )  # fmt: skip
    return found, options


def _backend_of(options: BackendOptions) -> BackendType:
    """The backend with the most special type of options that these are of; packages are asked only in need."""
    for all_of_them in (False, True):
        if all_of_them:
            _load_all()
        fitting = [(kind, backend) for backend in BackendType if isinstance(options, kind := _type_of_options(backend))]
        if fitting:
            return max(fitting, key=lambda each: len(each[0].__mro__))[1]
    raise BackendError(
        f"Could not infer backend for options {options!r}: no backend has options of this type; say `backend`, too"
    )


def _type_of_options(backend: BackendType) -> type:
    try:
        return type(construct_rpc_backend_options(backend))
    except Exception:  # it has options that must be given: none of them were made by default then
        return _NoOptions


class _NoOptions:
    """Nothing is an instance of it."""


# Names


def _find(name: str) -> BackendType | None:
    found = _known.get(name)
    if found is not None:
        return found
    for entry in _entry_points():
        if entry.name == name:
            return _load(entry)
    return None


def _is_known(name: object) -> bool:
    return name in _known or any(entry.name == name for entry in _entry_points())


def _names() -> str:
    return ", ".join(dict.fromkeys([*_known, *(entry.name for entry in _entry_points())]))


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # not at the head: it takes longer to import than all of farcall

    return list(entry_points(group=ENTRY_POINTS))


def _load_all() -> None:
    for entry in _entry_points():
        if entry.name not in _known:
            try:
                _load(entry)
            except BackendError as error:  # whoever asks for it by its name hears of it
                logger.warning("%s", error)


def _load(entry: EntryPoint) -> BackendType:
    """Raises `BackendError` if the package cannot be imported, or names something else."""
    try:
        value = entry.load()
    except Exception as error:
        raise BackendError(
            f"backend {entry.name!r} ({entry.value}) is installed but cannot be loaded: {error}"
        ) from error
    if entry.name not in _known:  # unless the package has registered it itself
        if not isinstance(value, BackendValue):
            raise BackendError(
                f"backend {entry.name!r} ({entry.value}) is {value!r}; its entry point must name a "
                "farcall.backends.BackendValue"
            )
        try:
            return register_backend(entry.name, *value)
        except UsageError:
            if entry.name not in _known:  # another thread has loaded it just now
                raise
    return _known[entry.name]

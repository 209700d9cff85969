"""The registry of backends: `BackendType.FARCALL` is the default, others are registered by programs and packages.

A backend is a kind of agent with a name and options of its own. The default backend creates farcall's own agent and is
also known by torch's name, `TENSORPIPE`. The modules of the agent are imported when an agent is created, so a process
that only looks at names does not load them.

A package provides a backend by an entry point of the group `farcall.backends`. The name of the entry point is the name
of the backend, and its value is a `BackendValue`:

    [project.entry-points."farcall.backends"]
    PIGEON = "pigeons.backend:BACKEND"

Rules
- Names are looked up when they are used, so a program that has imported `BackendType` also sees backends that are
  registered later.
- Entry points are read only when an unknown name or unknown options are used, never by `import farcall`.
- The table of backends is the only process-wide state of this package.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from farcall.backends.interface import RpcAgent
from farcall.errors import BackendError, RendezvousTimeoutError, UsageError
from farcall.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT, BackendOptions, RpcBackendOptions
from farcall.protocol.ids import WorkerInfo

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from farcall.rendezvous import Rendezvous
    from farcall.runtime.agent import Agent
    from farcall.security import Credentials


# The default backend

DEFAULT_NAME: Final = "FARCALL"
"""The name of the default backend."""
TORCH_ALIAS: Final = "TENSORPIPE"
"""torch's name for its default backend, by which farcall's is known as well."""


def construct_default_options(
    rpc_timeout: float, init_method: str, _transports: object = None, _channels: object = None, **chosen: Any
) -> RpcBackendOptions:
    """Returns options of the default backend.

    Args:
        rpc_timeout: The timeout, in seconds, of calls that do not give their own; 0 means no timeout.
        init_method: The URL at which the workers find each other. Not checked here.
        _transports: Ignored; torch's programs pass it.
        _channels: Ignored; torch's programs pass it.
        **chosen: Other options of `RpcBackendOptions`; those left out have their defaults.

    Raises:
        UsageError: An option has a value that it cannot have; `DeviceError` for a device or a device map.
        BackendError: There is no option of that name.
    """
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **chosen)


def init_default_agent(
    store: None, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> RpcAgent:
    """Returns a new agent of the default backend, after it has joined its group.

    For a fixed group, waits until all workers have joined.

    Args:
        store: Ignored.
        name: The name of this worker.
        rank: The rank of this worker; -1 takes it from the URL or the environment, if they have one.
        world_size: The number of workers; None takes it from the URL or the environment. If those have none either, the
            group is open.
        rpc_backend_options: The options of the agent.

    Raises:
        UsageError: An option, the name, the rank or the world size is not valid.
        RendezvousError: The workers did not find each other; `RendezvousTimeoutError` if some did not come in time.
            Nothing is left running after an error.
    """
    from farcall.runtime.agent import Agent

    return join_group(Agent, name, rank, world_size, rpc_backend_options)


def join_group(
    make_agent: Callable[..., Agent], name: str, rank: int, world_size: int | None, options: RpcBackendOptions
) -> Agent:
    """Finds the other workers at `options.init_method`, and returns a new agent in their group.

    Args:
        make_agent: `Agent`, or a subclass or function with the same parameters: the name, the rendezvous, the options,
            the transports by name and the credentials.
        name: The name of this worker.
        rank: The rank of this worker; -1 takes it from the URL or the environment, if they have one.
        world_size: The number of workers; None takes it from the URL or the environment. If those have none either, the
            group is open.
        options: The options of the agent.

    Raises:
        UsageError: An option, the name, the rank or the world size is not valid.
        RendezvousError: The workers did not find each other; `RendezvousTimeoutError` if some did not come in time.
            Nothing is left running after an error.
    """
    from farcall.rendezvous import rendezvous

    return join_at(
        make_agent,
        name,
        options,
        lambda credentials: rendezvous(
            options.init_method, name, rank, world_size, options.init_timeout, options.interface, credentials
        ),
    )


def join_at(
    make_agent: Callable[..., Agent],
    name: str,
    options: RpcBackendOptions,
    find_rendezvous: Callable[[Credentials], Rendezvous],
) -> Agent:
    """Finds the other workers with `find_rendezvous`, and returns a new agent in their group.

    Args:
        make_agent: `Agent`, or a subclass or function with the same parameters: the name, the rendezvous, the options,
            the transports by name and the credentials.
        name: The name of this worker.
        options: The options of the agent.
        find_rendezvous: Returns the rendezvous (the connection to the group's store), given this worker's credentials
            (its secret and certificate). Called after the options are checked.

    Raises:
        UsageError: An option, the name, the rank or the world size is not valid.
        RendezvousError: The workers did not find each other; `RendezvousTimeoutError` if some did not come in time.
            Nothing is left running after an error.
    """
    from farcall.protocol.watching import check_heartbeat
    from farcall.rendezvous import CLOSE_TIMEOUT_S
    from farcall.security import credentials_from_options
    from farcall.transports.registry import new_transport

    check_heartbeat(options.heartbeat_interval, options.heartbeat_patience)  # before other workers know this one
    credentials = credentials_from_options(options)
    transports = {scheme: new_transport(scheme, credentials.encryption) for scheme in options.transports}
    found = find_rendezvous(credentials)
    try:
        return make_agent(name, found, options, transports, credentials)
    except BaseException as error:
        # After a timeout the store stays a little longer, because other workers are waiting as well: they shall be told
        # which workers came and which did not.
        waited = isinstance(error, RendezvousTimeoutError)
        found.store.close(early=not waited, timeout=CLOSE_TIMEOUT_S if waited else 0.0)
        raise


# The registry

logger = logging.getLogger("farcall")

ENTRY_POINTS: Final = "farcall.backends"
"""The group of the entry points by which packages provide backends."""


class BackendValue(NamedTuple):
    """The two functions that make up a backend.

    `construct_rpc_backend_options_handler` returns options, given an `rpc_timeout`, an `init_method` and the keyword
    arguments of other options. `init_backend_handler` returns a new agent, given the keyword arguments `store`, `name`,
    `rank`, `world_size` and `rpc_backend_options`.

    A package offers a `BackendValue` as an entry point of the group `farcall.backends`. The functions are not checked
    here, but when the backend is registered.
    """

    construct_rpc_backend_options_handler: Callable[..., BackendOptions]
    """Returns options of the backend, an instance of a subclass of `BackendOptions`.

    Called as `handler(rpc_timeout, init_method, **more)`, the first two by position as in torch. Also called with the
    defaults, to find out the type of the options."""
    init_backend_handler: Callable[..., RpcAgent]
    """Returns a new agent.

    Called with the keyword arguments `store`, `name`, `rank`, `world_size` and `rpc_backend_options`. `store` is None.
    `rank` is -1 and `world_size` is None if `init_rpc` was not given them."""


class _Backends(type):
    """The metaclass of `BackendType`, which makes the class a namespace of all backends: `BackendType.NAME` is one."""

    def __getattr__(cls, name: str) -> BackendType:
        """Returns the backend of that name, loading its package if necessary.

        Raises `AttributeError` if there is none or the name begins with an underscore, and `BackendError` if its
        package cannot be loaded.
        """
        found = None if name.startswith("_") else _find(name)
        if found is None:
            raise AttributeError(f"there is no backend {name!r}; the backends are {_names()}")
        return found

    def __getitem__(cls, name: str) -> BackendType:
        """Returns the backend of that name, loading its package if necessary.

        Raises `KeyError` if there is none, and `BackendError` if its package cannot be loaded.
        """
        found = _find(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(cls, backend: object) -> bool:
        """Returns whether a backend is registered, or whether a name belongs to a registered or installed one.

        `backend` is a `BackendType` or a name. Returns False for any other object, but raises `TypeError` for one that
        cannot be hashed.
        """
        return backend in _known.values() if isinstance(backend, BackendType) else _is_known(backend)

    def __iter__(cls) -> Iterator[BackendType]:
        """Iterates over the backends that are registered or loaded so far, each once; at least the default one."""
        return iter(list(dict.fromkeys(_known.values())))

    def __len__(cls) -> int:
        """Returns the number of backends registered or loaded so far, at least 1.

        A backend with two names counts once.
        """
        return len(set(_known.values()))

    def __dir__(cls) -> list[str]:
        """Returns the attributes of the class and the names of the backends known so far, for completion."""
        return [*super().__dir__(), *_known]

    def __repr__(cls) -> str:
        return f"<BackendType: {_names()}>"

    @property
    def __members__(cls) -> Mapping[str, BackendType]:
        """The backends that are registered or loaded so far, by name; read-only.

        A backend with two names is there under both of them.
        """
        return MappingProxyType(dict(_known))


@final
class BackendType(metaclass=_Backends):
    """A backend. The class itself is the namespace of all backends, as in torch.

    Backends are found by `BackendType.NAME` (`AttributeError` if there is none of that name), `BackendType["NAME"]`
    (`KeyError`), `"NAME" in BackendType`, and iteration. New ones are created by `register_backend`, not by calling
    this class, which checks nothing and registers nothing.

    Attributes:
        name: The name of the backend.
        value: The two functions that create its options and its agents, a `BackendValue`.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles the backend by its name; unpickling raises `AttributeError` where there is none of that name."""
        return getattr, (BackendType, self.name)


_DEFAULT: Final = BackendType(DEFAULT_NAME, BackendValue(construct_default_options, init_default_agent))
_known: Final[dict[str, BackendType]] = {DEFAULT_NAME: _DEFAULT, TORCH_ALIAS: _DEFAULT}
"""The backends that are registered or loaded so far, by name."""
_lock: Final = threading.Lock()


def backend_registered(backend_name: str) -> bool:
    """Returns whether there is a backend of that name, registered or provided by an installed package.

    Loads nothing.
    """
    return _is_known(backend_name)


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., BackendOptions],
    init_backend_handler: Callable[..., RpcAgent],
) -> BackendType:
    """Registers a backend, so that `init_rpc` can use it.

    Args:
        backend_name: Its name, which becomes an attribute of `BackendType`.
        construct_rpc_backend_options_handler: Creates its options. Called as `handler(rpc_timeout, init_method,
            **more)`; returns an instance of a subclass of `BackendOptions`.
        init_backend_handler: Creates its agents. Called with the keyword arguments `store`, `name`, `rank`,
            `world_size` and `rpc_backend_options`; returns an `RpcAgent`.

    Returns:
        The new backend, also available as `BackendType.<backend_name>`.

    Raises:
        UsageError: The name is registered already, is not an identifier or begins with an underscore, or is "name" or
            "value"; or a handler cannot be called.
    """
    if not isinstance(backend_name, str) or not backend_name.isidentifier() or backend_name.startswith("_"):
        raise UsageError(f"{backend_name!r} cannot be a backend's name: use letters, digits and underscores")
    if backend_name in BackendType.__slots__:
        raise UsageError(f"{backend_name!r} cannot be a backend's name: backends have an attribute of that name")
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
    """Removes a backend from the registry. Agents that it has created keep running.

    A backend of an installed package is loaded again when its name is used.

    Args:
        backend_name: The name of the backend.

    Raises:
        UsageError: No backend of that name is registered or loaded, or it is the default backend.
    """
    with _lock:
        if _known.get(backend_name) is _DEFAULT:
            raise UsageError(f"the default backend, {backend_name}, cannot be unregistered")
        if _known.pop(backend_name, None) is None:
            raise UsageError(f"there is no backend {backend_name!r}; the backends are {_names()}")


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> BackendOptions:
    """Returns options for a backend.

    Args:
        backend: The backend. Its type is not checked.
        rpc_timeout: The timeout, in seconds, of calls that do not give their own; 0 means no timeout.
        init_method: The rendezvous, as a URL. Not checked here.
        **kwargs: Other options of the backend; those left out have their defaults.

    Raises:
        UsageError: An option has a value that it cannot have. Other exceptions of the backend's handler, the function
            that creates the options, are raised as they are.
        BackendError: The handler returned something else than a `BackendOptions`, or the default backend has no option
            of that name.
    """
    options = backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)
    if not isinstance(options, BackendOptions):
        raise BackendError(
            f"{backend!r} returned {options!r} instead of a farcall.BackendOptions; correct its "
            "construct_rpc_backend_options_handler"
        )
    return options


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> RpcAgent:
    """Returns a new agent of a backend, with its `rpc_timeout` set from the options. `init_rpc` calls it.

    Args:
        backend: The backend. Its type is not checked.
        *args: Positional arguments for `init_backend_handler`, the function of the backend that creates agents.
        **kwargs: Keyword arguments for it, usually `store`, `name`, `rank`, `world_size` and `rpc_backend_options`.
            Without options, the agent keeps its own `rpc_timeout`.

    Raises:
        BackendError: The options are not of this backend, or the handler did not return an `RpcAgent` whose
            `get_worker_info()` returns a `WorkerInfo`. An agent that was created has been shut down.
        Exception: What the backend's handler raises.
    """
    options = kwargs.get("rpc_backend_options", args[4] if len(args) > 4 else None)
    if options is not None:
        _check_options(backend, options)
    agent = backend.value.init_backend_handler(*args, **kwargs)
    if not isinstance(agent, RpcAgent):
        raise BackendError(
            f"{backend!r} returned {agent!r} instead of a farcall.RpcAgent; correct its init_backend_handler"
        )
    try:
        if not isinstance(agent.info, WorkerInfo):
            raise BackendError(
                f"get_worker_info() of an agent of {backend!r} must return a farcall.WorkerInfo, not {agent.info!r}"
            )
        if options is not None:
            agent.rpc_timeout = options.rpc_timeout
    except BaseException:
        agent.shutdown(graceful=False, timeout=0.0)
        raise
    return agent


def _check_options(backend: BackendType, options: object) -> None:
    """Raises `BackendError` if `options` are not of the type of the backend's default options. Returns if they are.

    Does nothing if the type is unknown, because the backend cannot create default options; the backend must check the
    options itself then.
    """
    wanted = _type_of_options(backend)
    if wanted is not _NoOptions and not isinstance(options, wanted):
        raise BackendError(
            f"`rpc_backend_options` must be a `{wanted.__name__}` ({wanted.__module__}) for {backend!r}, not a "
            f"`{type(options).__name__}`; pass init_rpc the backend of these options, or no backend"
        )


def choose_backend(backend: BackendType | None, options: BackendOptions | None) -> tuple[BackendType, BackendOptions]:
    """Returns the backend and the options that `init_rpc` uses.

    Logs a warning if `backend` is None and the options belong to another backend than the default.

    Args:
        backend: The backend that the program gave. None means the backend to which the options belong, or the default
            one without options.
        options: The options that the program gave; None for the backend's defaults. Whether given options belong to a
            given backend is not checked here, but by `init_backend`.

    Raises:
        BackendError: `backend` is not a `BackendType`, `options` are not `BackendOptions`, or no backend has options of
            that type.
        Exception: What the backend raises if it cannot create default options.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise BackendError(
            f"Argument backend must be a member of BackendType, not {backend!r}; write BackendType.{DEFAULT_NAME}, or "
            "omit the argument"
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
            "init_rpc was given options of %r and no backend, so it uses that backend instead of the default; "
            "pass backend=%r as well to silence this warning",
            found, found,
        )  # fmt: skip
    return found, options


def _backend_of(options: BackendOptions) -> BackendType:
    """Returns the backend to which `options` belong: they are of the type of its default options.

    If several backends fit, returns the one with the most derived type. The backends of installed packages are loaded
    only if no known backend fits. Raises `BackendError` if none fits at all.
    """
    for with_entry_points in (False, True):
        if with_entry_points:
            _load_all()
        fitting = [(kind, backend) for backend in BackendType if isinstance(options, kind := _type_of_options(backend))]
        if fitting:
            return max(fitting, key=lambda each: len(each[0].__mro__))[1]
    raise BackendError(
        f"Could not infer backend for options {options!r}: no backend has options of this type; pass `backend` as well"
    )


def _type_of_options(backend: BackendType) -> type:
    """Returns the type of a backend's default options; `_NoOptions` if the backend cannot create default options."""
    try:
        return type(construct_rpc_backend_options(backend))
    except Exception:  # the backend has options without defaults
        return _NoOptions


class _NoOptions:
    """A class without instances. It stands for the type of a backend's options if that type is not known."""


# Names


def _find(name: str) -> BackendType | None:
    """Returns the backend of that name, loading it from an installed package if necessary; None if there is none.

    Raises `BackendError` if the package cannot be loaded.
    """
    found = _known.get(name)
    if found is not None:
        return found
    for entry in _entry_points():
        if entry.name == name:
            return _load(entry)
    return None


def _is_known(name: object) -> bool:
    """Returns whether a backend of that name is registered or provided by an installed package, without loading it."""
    return name in _known or any(entry.name == name for entry in _entry_points())


def _names() -> str:
    """Returns the names of all backends, registered or installed, separated by commas, for error messages."""
    return ", ".join(dict.fromkeys([*_known, *(entry.name for entry in _entry_points())]))


def _entry_points() -> list[EntryPoint]:
    """Returns the entry points of installed packages that provide backends; an empty list if there are none."""
    from importlib.metadata import entry_points  # imported here: it takes longer than `import farcall` itself

    return list(entry_points(group=ENTRY_POINTS))


def _load_all() -> None:
    """Loads the backends of all installed packages that provide some; there may be none.

    A backend that cannot be loaded is logged as a warning and skipped. Raises `UsageError` for a name that no backend
    can have: no identifier, an underscore at its start, "name" or "value".
    """
    for entry in _entry_points():
        if entry.name not in _known:
            try:
                _load(entry)
            except BackendError as error:  # a use of its name raises the error
                logger.warning("%s", error)


def _load(entry: EntryPoint) -> BackendType:
    """Loads and registers the backend of an entry point (of an installed package), and returns it.

    Returns the registered backend if there is one of that name already. Raises `BackendError` if the package cannot be
    imported, or the entry point does not name a `BackendValue`. Raises `UsageError` for a name that no backend can
    have: no identifier, an underscore at its start, "name" or "value".
    """
    try:
        value = entry.load()
    except Exception as error:
        raise BackendError(
            f"backend {entry.name!r} ({entry.value}) is installed but cannot be loaded: {error}"
        ) from error
    if entry.name not in _known:  # unless the package has registered it itself
        if not isinstance(value, BackendValue):
            raise BackendError(
                f"the entry point of backend {entry.name!r} ({entry.value}) names {value!r}; it must name a "
                "farcall.backends.BackendValue"
            )
        try:
            return register_backend(entry.name, *value)
        except UsageError:
            if entry.name not in _known:  # otherwise another thread has just loaded it
                raise
    return _known[entry.name]

"""The registry of transports by name. Options name transports, as in `("unix", "tcp")`, and programs can add their own.

The transport `memory`, for tests, is not registered, because it needs a network that the test creates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from farcall.errors import UsageError
from farcall.transports.base import Transport
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport

if TYPE_CHECKING:
    from farcall.transports.tls import Encryption

Factory: TypeAlias = Callable[["Encryption | None"], Transport]
"""Creates a transport for one worker, given the worker's certificates; None if the worker does not encrypt."""

_factories: Final[dict[str, Factory]] = {"unix": lambda encryption: UnixTransport(), "tcp": TcpTransport}
_lock: Final = threading.Lock()


def register(name: str, factory: Factory) -> None:
    """Registers a transport under a name. From then on, options such as `transports=("unix", name)` can contain it.

    Args:
        name: The name, a Python identifier in ASCII such as `tcp`. It must be the scheme of the transport's addresses.
        factory: Creates the transport for one worker. It is called with the worker's certificates, or None if the
            worker does not encrypt.

    Raises:
        UsageError: The name is registered already, or is not a valid name. Nothing is changed.
    """
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"{name!r} cannot be a transport's name: use letters, digits and underscores, as in 'tcp'")
    with _lock:
        if name in _factories:
            raise UsageError(f"a transport named {name!r} is registered already: choose another name or unregister it")
        _factories[name] = factory


def unregister(name: str) -> None:
    """Removes a transport from the registry. Transports that were created before stay usable.

    Raises:
        UsageError: No transport has that name.
    """
    with _lock:
        if _factories.pop(name, None) is None:
            raise _unknown(name)


def new_transport(name: str, encryption: Encryption | None) -> Transport:
    """Returns a new transport for one worker.

    Args:
        name: The name of a registered transport, such as `tcp`.
        encryption: The certificates of the worker; None if the worker does not encrypt.

    Raises:
        UsageError: No transport has that name. The error lists the names that exist.
        Exception: The error that the registered factory has raised.
    """
    with _lock:
        factory = _factories.get(name)
        if factory is None:
            raise _unknown(name)
    return factory(encryption)


def _unknown(name: str) -> UsageError:
    """Returns the error for a name that is not registered. Its message lists all registered names."""
    return UsageError(f"there is no transport named {name!r}; there are {', '.join(sorted(_factories))}")

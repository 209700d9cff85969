"""Transports by name, so that options can say `("unix", "tcp")` and others can add theirs.

A transport for tests (`memory`) is not in here: it takes a network that the test makes.

Rules
- A name is the scheme of the transport's addresses.
- The table is the only thing the layer holds for the whole process, and it holds factories: every agent has transports
  of its own.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from farcall.errors import UsageError
from farcall.transports.base import Channel, Transport
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport

_factories: Final[dict[str, Callable[[], Transport]]] = {"unix": UnixTransport, "tcp": TcpTransport}
_lock: Final = threading.Lock()


def register(name: str, factory: Callable[[], Transport]) -> None:
    """Makes a transport known under that name, which must be its scheme.

    Raises `UsageError` if the name is taken already, or could not be the first part of an address.
    """
    if not (name.isascii() and name.isidentifier()):
        raise UsageError(f"{name!r} cannot be a transport's name: use letters, digits and underscores, as in 'tcp'")
    with _lock:
        if name in _factories:
            raise UsageError(f"a transport named {name!r} is registered already: choose another name or unregister it")
        _factories[name] = factory


def unregister(name: str) -> None:
    """Takes a transport out again; those made already live on. Raises `UsageError` if there is none."""
    with _lock:
        if _factories.pop(name, None) is None:
            raise UsageError(_unknown(name))


def transport(name: str) -> Transport:
    """A new transport of that name. Raises `UsageError`, with the names there are, if there is none."""
    with _lock:
        factory = _factories.get(name)
        if factory is None:
            raise UsageError(_unknown(name))
    return factory()


def connect(addresses: Iterable[str], timeout: float, transports: Iterable[Transport]) -> Channel:
    """A channel to the first of a peer's addresses that works, with whichever of our transports knows its scheme.

    Addresses of another scheme are passed over, and each of the others gets its share of the time.
    Raises `OSError` with the reasons of all, a `TimeoutError` if the last was one.
    """
    addresses = tuple(addresses)
    by_scheme = {transport.scheme: transport for transport in transports}
    usable = [address for address in addresses if address.partition(":")[0] in by_scheme]
    if not usable:
        raise OSError(
            errno.EAFNOSUPPORT,
            f"none of the addresses {', '.join(addresses) or '(none)'} can be reached by {', '.join(by_scheme)}",
        )
    deadline = time.monotonic() + timeout
    reasons: list[str] = []
    for tried, address in enumerate(usable):
        share = (deadline - time.monotonic()) / (len(usable) - tried)
        try:
            return by_scheme[address.partition(":")[0]].connect(address, max(share, 0.0))
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
            last = error
    raise OSError(last.errno or errno.EHOSTUNREACH, "no address could be reached: " + "; ".join(reasons)) from last


def _unknown(name: str) -> str:
    return f"there is no transport named {name!r}; there are {', '.join(sorted(_factories))}"

"""Where others connect to a worker: a listener of each transport that can be used here.

Rule: a worker that is out of descriptors stops accepting, and goes on when a connection was closed, or at its next
heartbeat. Who waits in a listener's queue goes on waiting until then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from farcall.agent.poller import READABLE, Poller
from farcall.errors import UsageError
from farcall.transports.base import Channel, Listener, Transport

logger = logging.getLogger("farcall")


def listen_on(name: str, transports: Iterable[Transport], host: str) -> list[Listener]:
    """A listener of each of these that worker `name` can use. Raises `UsageError` if that is none."""
    listeners: list[Listener] = []
    reasons = []
    for transport in transports:
        try:
            listener = transport.listen(host)
        except OSError as error:
            reasons.append(f"{transport.scheme}: {error}")
            logger.info("worker %r goes without transport %s here: %s", name, transport.scheme, error)
        else:
            listeners.append(listener)
    if not listeners:
        raise UsageError(f"worker {name!r} can listen on no transport ({'; '.join(reasons)})")
    return listeners


class Listening:
    """Accepts those who connect. `come` is told of each, and at which address it came in."""

    def __init__(
        self, name: str, listeners: Sequence[Listener], poller: Poller, come: Callable[[Channel, str], None]
    ) -> None:
        self._name = name
        self._listeners = listeners
        self._poller = poller
        self._come = come

    def start(self) -> None:
        """Accepts from now on."""
        for listener in self._listeners:
            self._poller.add(listener.fileno(), lambda _, listener=listener: self._accept(listener), READABLE)  # type: ignore[misc]

    def _accept(self, listener: Listener) -> None:
        try:
            channel = listener.accept()
        except OSError as error:
            logger.warning("worker %r cannot accept connections at %s: %s", self._name, listener.address, error)
            self._poller.want(listener.fileno(), READABLE, False)
            return
        if channel is not None:
            self._come(channel, listener.address)

    def go_on(self) -> None:
        """Accepts again, should that have been stopped for want of descriptors."""
        with suppress(OSError):  # they have just been closed
            for listener in self._listeners:
                self._poller.want(listener.fileno(), READABLE, True)

    def close(self) -> None:
        """Accepts no more, and gives the addresses up. May be called twice."""
        for listener in self._listeners:
            with suppress(OSError):  # it was closed before
                self._poller.remove(listener.fileno())
            listener.close()

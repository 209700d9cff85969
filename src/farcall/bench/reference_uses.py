"""How references are used in the benchmark. farcall and torch have the same functions, so one class drives both.

The functions that run remotely are here as well: both systems import them by name.
"""

from __future__ import annotations

from typing import Any, Final

from farcall.bench.system import OWNER, THIRD, keep_in_flight

MAX_SHARED_IN_FLIGHT: Final = 12
"""How many references are being shared at the same time.

For each of them the third worker waits for the value inside a call. torch answers with the same 16 threads in which its
functions wait, so with more calls than threads it would stand still until its calls time out.
"""
NUMBER: Final = 7
"""The value of every reference."""


def number() -> int:
    """Called remotely by `remote`: returns the value."""
    return NUMBER


def fetch(reference: Any) -> int:
    """Called remotely, on the third worker or on the owner: fetches the value of a reference, and returns it."""
    value: int = reference.to_here()
    return value


class Thing:
    """A class without data, whose instance the benchmark calls through a proxy."""

    def f(self) -> None:
        """Called through the proxy: does nothing."""


def check(fetched: object) -> None:
    """Raises `RuntimeError` if `fetched` is not the value that `number` returns."""
    if fetched != NUMBER:
        raise RuntimeError(f"{fetched!r} was fetched, not {NUMBER}")


class ReferenceUses:
    """Implements the methods of `ReferenceCaller` for a module with torch's functions."""

    def __init__(self, rpc: Any) -> None:
        """Takes the functions to use from a module.

        Args:
            rpc: A module with `remote`, `rpc_sync` and `rpc_async`: farcall, or torch.distributed.rpc.
        """
        self._remote = rpc.remote
        self._rpc_sync = rpc.rpc_sync
        self._rpc_async = rpc.rpc_async
        self._thing: Any = None

    def remote_to_here(self) -> None:
        """Creates a small value on the server by `remote`, and fetches it by `to_here`.

        Raises what the system raises if the server is lost or does not answer in time.
        """
        self._remote(OWNER, number).to_here()

    def proxy_call(self) -> None:
        """Calls a no-op method of an object on the server through a reference, which is created in the first call."""
        if self._thing is None:
            self._thing = self._remote(OWNER, Thing)
        self._thing.rpc_sync().f()

    def pass_back(self) -> None:
        """Creates a reference on the server and passes it back to the server, which fetches the value.

        Raises `RuntimeError` if the server got a wrong value.
        """
        check(self._rpc_sync(OWNER, fetch, args=(self._remote(OWNER, number),)))

    def share(self, references: int) -> None:
        """Creates references on the server and passes each to the third end, which fetches its value. Waits for all.

        Args:
            references: How many; 0 does nothing.

        Raises:
            RuntimeError: The third end got a wrong value.
        """
        keep_in_flight(references, MAX_SHARED_IN_FLIGHT, self._share_one, lambda future: check(future.wait()))

    def _share_one(self) -> Any:
        """Creates a reference on the server and passes it to the third end. Returns the future of that call."""
        # The caller's own reference is dropped when this function returns, while the call is still in flight.
        return self._rpc_async(THIRD, fetch, args=(self._remote(OWNER, number),))

    def drop(self) -> None:
        """Drops the reference that `proxy_call` holds. A system may report references that are left at shutdown."""
        self._thing = None

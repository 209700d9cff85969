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
    """Called remotely by `remote`: returns `NUMBER`, the value of every reference."""
    return NUMBER


def fetch(reference: Any) -> int:
    """Called remotely, on the third worker or on the owner: fetches the value of a reference, and returns it.

    Raises what `to_here` of the system's references raises, if the owner is lost or does not answer in time.
    """
    value: int = reference.to_here()
    return value


class Thing:
    """A class without data, whose instance the benchmark calls through a proxy."""

    def f(self) -> None:
        """Called through the proxy: does nothing."""


def check(fetched: object) -> None:
    """Returns if `fetched` is `NUMBER`, the value of every reference. Raises `RuntimeError` if not."""
    if fetched != NUMBER:
        raise RuntimeError(f"{fetched!r} was fetched, not {NUMBER}")


class ReferenceUses:
    """Uses references in the ways that the benchmark measures, with the functions of farcall or of torch.

    The server, whose worker name is `OWNER`, owns all values. References are shared with the worker named `THIRD`.

    Args:
        rpc: A module with `remote`, `rpc_sync` and `rpc_async`: farcall, or torch.distributed.rpc.
    """

    def __init__(self, rpc: Any) -> None:
        """Takes the functions to use from a module. Makes no calls.

        Args:
            rpc: A module with `remote`, `rpc_sync` and `rpc_async`: farcall, or torch.distributed.rpc. A module without
                them raises `AttributeError`.
        """
        self._remote = rpc.remote
        self._rpc_sync = rpc.rpc_sync
        self._rpc_async = rpc.rpc_async
        self._thing: Any = None

    def remote_to_here(self) -> None:
        """Creates a small value on the server by `remote`, fetches it by `to_here`, and drops the reference.

        Raises what the measured library raises if the server is lost or does not answer in time; `RpcError` in farcall.
        """
        self._remote(OWNER, number).to_here()

    def proxy_call(self) -> None:
        """Calls a no-op method of an object on the server through a reference, which is created in the first call.

        Raises what the measured library raises if the server is lost or does not answer in time; `RpcError` in farcall.
        """
        if self._thing is None:
            self._thing = self._remote(OWNER, Thing)
        self._thing.rpc_sync().f()

    def pass_back(self) -> None:
        """Creates a reference on the server and passes it back to the server, which fetches the value. Waits for that.

        Raises `RuntimeError` if the server got a wrong value, and what the measured library raises if a call fails.
        """
        check(self._rpc_sync(OWNER, fetch, args=(self._remote(OWNER, number),)))

    def share(self, references: int) -> None:
        """Creates references on the server and passes each to a third worker, which fetches its value. Waits for all.

        At most `MAX_SHARED_IN_FLIGHT` are shared at a time.

        Args:
            references: How many; 0 does nothing.

        Raises:
            RuntimeError: The third worker got a wrong value.
            Exception: What the measured library raises if a call fails, for example because there is no third worker.
        """
        keep_in_flight(references, MAX_SHARED_IN_FLIGHT, self._share_one, lambda future: check(future.wait()))

    def _share_one(self) -> Any:
        """Creates a reference on the server and passes it to the third worker, which fetches its value.

        Returns the future of that call. Raises what the measured library raises if it cannot be sent.
        """
        # The caller's own reference is dropped when this function returns, while the call is still in flight.
        return self._rpc_async(THIRD, fetch, args=(self._remote(OWNER, number),))

    def drop(self) -> None:
        """Drops the reference that `proxy_call` holds; does nothing if there is none.

        To be called before the shutdown: a system may report references that are left.
        """
        self._thing = None

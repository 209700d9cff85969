"""The measured uses of references. farcall and torch have the same names for them, so one piece of code drives both.

A callee is run by both systems alike, and both import it from here by its name.
"""

from __future__ import annotations

from typing import Any, Final

from farcall.bench.systems.base import OWNER, THIRD, keep_under_way

UNDER_WAY: Final = 12
"""References being shared at once. The third worker waits in each callee for the value, and torch's replies need one of
the 16 threads that its callees wait in: with more callees than threads it stands still until its calls time out."""
NUMBER: Final = 7
"""What references are to."""


def number() -> int:
    """The callee of `remote`."""
    return NUMBER


def fetch(reference: Any) -> int:
    """What the third worker does with a reference: one use."""
    value: int = reference.to_here()
    return value


class Thing:
    """What a proxy stands for."""

    def f(self) -> None:
        """The callee of the proxy."""


def check(fetched: object) -> None:
    """Raises RuntimeError if that is not what `number` gave."""
    if fetched != NUMBER:
        raise RuntimeError(f"{fetched!r} was fetched, not {NUMBER}")


class ReferenceUses:
    """A caller's uses of references. `rpc` is the module of the system."""

    def __init__(self, rpc: Any) -> None:
        self._remote = rpc.remote
        self._rpc_async = rpc.rpc_async
        self._thing: Any = None

    def remote_to_here(self) -> None:
        self._remote(OWNER, number).to_here()

    def proxy_call(self) -> None:
        if self._thing is None:
            self._thing = self._remote(OWNER, Thing)
        self._thing.rpc_sync().f()

    def share(self, references: int) -> None:
        keep_under_way(references, UNDER_WAY, self._share_one, lambda future: check(future.wait()))

    def _share_one(self) -> Any:
        # The caller's own hold on the reference ends with this function, while the call is under way.
        return self._rpc_async(THIRD, fetch, args=(self._remote(OWNER, number),))

    def drop(self) -> None:
        """Let go of what is still held: a system may complain of references that are left at its end."""
        self._thing = None

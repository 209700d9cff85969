"""`Store`, the interface of the key-value store that the workers of a group share while they find each other.

The interface is small, so that it can be implemented on Redis or etcd. Keys are text, values are bytes, and neither is
ever unpickled. No call uses the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

CLOSE_TIMEOUT_S: Final = 5.0
"""How many seconds the worker that hosts a store waits in `Store.close` for the other workers to disconnect."""


class Store(ABC):
    """Keys and values that all workers of a group can read and write. All methods may be called from any thread.

    Keys are text and values are bytes; the types are not checked. Every method that talks to the store raises
    `RendezvousError` if the store is gone: its host ended, or the connection was closed.

    Example:
        store.set("color", b"red")
        assert store.get("color", timeout=5.0) == b"red"
    """

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets a key, replacing any earlier value.

        Args:
            key: The key. It need not exist.
            value: The new value; may be empty.

        Raises:
            RendezvousError: The store is gone.
        """

    @abstractmethod
    def set_new(self, key: str, value: bytes) -> bytes:
        """Sets a key only if it does not exist, and returns the value that the key has afterwards.

        Of several workers that call this for one key, all get the value of the first.

        Args:
            key: The key.
            value: Its value if it is new; may be empty.

        Returns:
            `value` if this call set the key, otherwise the earlier value, which is left unchanged.

        Raises:
            RendezvousError: The store is gone.
        """

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Returns the value of a key, and waits for the key if it does not exist yet.

        Args:
            key: The key to wait for.
            timeout: How many seconds to wait. 0 does not wait: it returns the value or raises at once.

        Raises:
            RendezvousTimeoutError: The key did not appear in time.
            RendezvousError: The store is gone.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the new sum. A key that does not exist counts as 0.

        Args:
            key: The key of the counter. Its value is the number as decimal text.
            amount: What to add; may be negative or 0.

        Raises:
            RendezvousError: The store is gone, the key holds a value that is not a decimal number, or the sum would
                exceed 64 bits. Nothing is added in the last two cases.
        """

    @abstractmethod
    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Deletes a key.

        Args:
            key: The key to delete.
            expected: If given, the key is deleted only if it has this value. None deletes it with any value.

        Returns:
            True if the key was deleted; False if it did not exist or did not have the expected value.

        Raises:
            RendezvousError: The store is gone.
        """

    @abstractmethod
    def read(self, prefix: str) -> Mapping[str, bytes]:
        """Returns all keys that start with `prefix` now, with their values. Does not wait.

        Args:
            prefix: What the keys start with. An empty prefix reads everything.

        Returns:
            The full keys (prefix included) and their values; empty if there are none.

        Raises:
            RendezvousError: The store is gone.
        """

    @abstractmethod
    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        """Waits until at least `count` keys start with `prefix`, then returns all of them with their values.

        Workers use it to exchange values, and to wait for each other.

        Args:
            prefix: What the keys start with.
            count: How many keys to wait for. 0 returns at once.
            timeout: How many seconds to wait. 0 does not wait.

        Returns:
            All full keys that start with the prefix, with their values.

        Raises:
            RendezvousTimeoutError: Fewer keys appeared in time. The attribute `present` has the keys that did.
            RendezvousError: The store is gone, or a worker disconnected without leaving, so the keys can never be
                complete.
        """

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Returns a context manager that limits all requests of this thread inside its block together to `seconds`.

        A request that is not answered by then raises `RendezvousTimeoutError`; with 0 that is every request. Blocks can
        be nested; the shortest limit counts. This default sets no limit, for stores whose requests never wait.

        Example:
            with store.within(2.0):
                store.set("ready", b"1")
        """
        return nullcontext()

    def report_lost(self, rank: int, why: str) -> None:  # noqa: B027 (optional: a store may find out by itself)
        """Tells this end of the store that the group has declared a worker lost.

        The store may not notice by itself, because the connection of a frozen worker stays open. From now on `collect`
        raises `RendezvousError(why)` in this process, also where it is already waiting. If the lost worker hosts the
        store, every request fails. Returns at once and raises nothing. By default, does nothing.

        Args:
            rank: The rank of the lost worker.
            why: The text of the errors.
        """

    def leave_losses_to_group(self) -> None:  # noqa: B027 (optional: some stores never watch their connections)
        """Tells the store that all workers of a fixed group have joined and now detect lost workers themselves.

        From now on the store does not treat a silent connection as a lost worker; the group calls `report_lost`
        instead. Called once. Raises nothing. By default, does nothing.
        """

    @abstractmethod
    def close(self, early: bool = False, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Disconnects from the store. May be called again. Requests raise `RendezvousError` from then on.

        In the worker that hosts the store of a fixed group, waits for the other workers to disconnect and then ends the
        store. In an open group it waits for no worker: another member hosts the store from then on.

        Args:
            early: True if this worker leaves without waiting for the others. Workers that wait for it in `collect` get
                a `RendezvousError` at once.
            timeout: How many seconds the hosting worker waits for the others; 0 does not wait.
        """

    def refusals(self) -> str:
        """Returns a text about the connections that the store has refused, for error messages.

        Returns an empty text if none was refused, or if the store is not in this process.
        """
        return ""

    def abandon(self) -> None:  # noqa: B027 (optional: a store may have no descriptors)
        """Called in a forked child: closes the inherited descriptors without sending anything.

        The parent keeps its connection. Raises nothing. By default, does nothing.
        """

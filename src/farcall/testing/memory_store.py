"""The rendezvous store of a `LocalGroup`, in memory.

A `MemoryStore` is the end of one worker; those that `another_end` returns share its keys. It is a
`farcall.rendezvous.Store` that never reports a lost worker: in one process no worker is lost without the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import monotonic

from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.rendezvous.server_state import MAX_COUNTER
from farcall.rendezvous.store import Store


class _Keys:
    """The keys and values that all ends of one store share. Empty at first.

    Attributes:
        changed: The condition that guards `values`. It is notified when a key is set.
        values: The values by key.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}

    def under(self, prefix: str) -> dict[str, bytes]:
        """Returns a new dict of all keys that begin with `prefix`, with their values; empty if there are none.

        An empty prefix gives all keys. The caller must hold `changed`.
        """
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}


class MemoryStore(Store):
    """One worker's end of a store in memory, for the rendezvous of a `LocalGroup`.

    A new `MemoryStore()` has no keys. `another_end` returns an end for another worker, which shares the keys. Once an
    end is closed, its methods raise `RendezvousError`, except `close` and `another_end`.

    Example:
        >>> store = MemoryStore()
        >>> store.set("key", b"value")
        >>> store.another_end().get("key", 0)
        b'value'
    """

    def __init__(self) -> None:
        self._keys = _Keys()
        self._closed = False

    def another_end(self) -> MemoryStore:
        """Returns another end with the same keys, for another worker. That worker has to close it.

        It works also if this end is closed; the new end is open.
        """
        end = MemoryStore()
        end._keys = self._keys
        return end

    def set(self, key: str, value: bytes) -> None:
        """Sets a key, replacing any earlier value, and wakes threads that wait for the key at any end.

        The types are not checked. Raises `RendezvousError` if this end is closed.
        """
        with self._keys.changed:
            self._check_open()
            self._keys.values[key] = value
            self._keys.changed.notify_all()

    def set_new(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it exists. Returns the value that the key has now: `value`, or the earlier one.

        Raises `RendezvousError` if this end is closed.
        """
        with self._keys.changed:
            self._check_open()
            there = self._keys.values.setdefault(key, value)
            self._keys.changed.notify_all()
            return there

    def get(self, key: str, timeout: float) -> bytes:
        """Waits up to `timeout` seconds for a key, and returns its value. With 0 it does not wait.

        Raises `RendezvousTimeoutError` if the key does not appear in time, and `RendezvousError` if this end is closed,
        also while it waits.
        """
        with self._keys.changed:
            self._check_open()
            if not self._wait(lambda: key in self._keys.values, timeout):
                raise RendezvousTimeoutError(f"after {timeout:g} s the store has no key {key!r}")
            return self._keys.values[key]

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to a counter, which is 0 if the key does not exist, and returns the sum.

        Raises `RendezvousError`, and changes nothing, if the key holds a value that is not a decimal number, the sum
        would exceed 64 bits, or this end is closed.
        """
        with self._keys.changed:
            self._check_open()
            try:
                total = int(self._keys.values.get(key, b"0")) + amount
            except ValueError:
                raise RendezvousError(f"the value of the key {key!r} is not a number; nothing was added") from None
            if abs(total) > MAX_COUNTER:
                raise RendezvousError(f"the counter {key!r} would exceed 64 bits; nothing was added")
            self._keys.values[key] = b"%d" % total
            self._keys.changed.notify_all()
            return total

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Deletes a key, and returns True; returns False if there was nothing to delete.

        Args:
            key: The key. One that does not exist gives False.
            expected: If given, the key is deleted only if it has this value; otherwise False is returned. None for any
                value.

        Raises:
            RendezvousError: This end is closed.
        """
        with self._keys.changed:
            self._check_open()
            there = self._keys.values.get(key)
            if there is None or expected not in (None, there):
                return False
            del self._keys.values[key]
            return True

    def read(self, prefix: str) -> Mapping[str, bytes]:
        """Returns all keys that begin with `prefix`, with their values; empty if there are none. Does not wait.

        An empty prefix gives all keys. Raises `RendezvousError` if this end is closed.
        """
        with self._keys.changed:
            self._check_open()
            return self._keys.under(prefix)

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        """Waits until at least `count` keys begin with `prefix`, and returns all of them with their values.

        Args:
            prefix: How the keys begin; empty for all keys.
            count: How many keys to wait for; 0 does not wait.
            timeout: How many seconds to wait; 0 does not wait.

        Raises:
            RendezvousTimeoutError: There are fewer keys after `timeout` seconds. Its `present` has those that exist.
            RendezvousError: This end is closed, also while it waits.
        """
        with self._keys.changed:
            self._check_open()
            if not self._wait(lambda: len(self._keys.under(prefix)) >= count, timeout):
                present = tuple(sorted(self._keys.under(prefix)))
                raise RendezvousTimeoutError(
                    f"after {timeout:g} s the store has {len(present)} of {count} keys that begin with {prefix!r}",
                    present,
                )
            return self._keys.under(prefix)

    def close(self, early: bool = False, timeout: float = 0.0) -> None:
        """Closes this end. Threads that wait at this end raise `RendezvousError`. The other ends keep the keys.

        Does not wait; both arguments are ignored. May be called again.
        """
        with self._keys.changed:
            self._closed = True
            self._keys.changed.notify_all()

    def _wait(self, there: Callable[[], bool], timeout: float) -> bool:
        """Waits until `there()` is true, and returns True. Returns False after `timeout` seconds; 0 only looks.

        Raises `RendezvousError` if this end is closed meanwhile. The caller must hold the condition `changed`.
        """
        deadline = monotonic() + timeout
        while not there():
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._keys.changed.wait(min(left, threading.TIMEOUT_MAX))
            self._check_open()
        return True

    def _check_open(self) -> None:
        """Raises `RendezvousError` if this end is closed."""
        if self._closed:
            raise RendezvousError("this end of the store was closed; it cannot be asked any more")

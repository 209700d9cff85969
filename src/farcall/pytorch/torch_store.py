"""A store of torch's as farcall's `Store`: workers find each other where torch's `init_process_group` would.

Rules
- The keys are those of farcall's rendezvous, under a prefix of their own.
- In a fixed group each key ends with a rank, so the keys of all workers can be waited for by name. In an open group the
  keys are listed. A key that is deleted there stays, with an empty value, because torch's store can compare and set in
  one step, but not compare and delete.
- No thread waits inside torch's store, because that serves one thread at a time. The store is polled instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch.distributed as dist

from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.rendezvous.store import CLOSE_TIMEOUT_S, Store

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.5e-3
_LONGEST_PAUSE_S: Final = 20e-3


class TorchStore(Store):
    """One worker's end of a `torch.distributed.Store`, with the methods of farcall's own stores.

    Methods that ask that store raise `RendezvousError` if it is gone.
    """

    def __init__(self, store: Any, rank: int, world_size: int | None) -> None:
        """Wraps a store. Nothing is asked, and nothing is checked.

        Args:
            store: A `torch.distributed.Store`.
            rank: The rank of this worker.
            world_size: The number of workers; None for an open group.
        """
        self._store = dist.PrefixStore("farcall", store)
        self._rank = rank
        self._world_size = world_size
        self._lost: str | None = None
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Sets a key, replacing any earlier value. Raises `RendezvousError` if the store is gone."""
        self._ask(lambda: self._store.set(key, value))

    def set_new(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it exists with a value that is not empty, and returns the value that it has now.

        Raises `RendezvousError` if the store is gone.
        """
        return self._ask(lambda: bytes(self._store.compare_set(key, "", value)))

    def get(self, key: str, timeout: float) -> bytes:
        """Waits up to `timeout` seconds for a key, and returns its value. With 0 it does not wait.

        Raises `RendezvousTimeoutError` if the key does not appear in time, and `RendezvousError` if the store is gone
        or a worker was reported lost during the wait.
        """
        if not self._wait([key], timeout):
            raise RendezvousTimeoutError(f"after {timeout:g} s the store has no key {key!r}")
        return self._ask(lambda: bytes(self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        """Adds `amount` to a counter, which is 0 if the key does not exist, and returns the sum.

        Raises `RendezvousError` if the store is gone, or the key holds a value that is not a number.
        """
        try:
            return self._ask(lambda: int(self._store.add(key, amount)))
        except ValueError:  # a `TCPStore` closes the connection instead
            raise RendezvousError(f"the value of the key {key!r} is not a number; nothing was added") from None

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Deletes a key, and returns True; returns False if there was nothing to delete.

        In an open group, the key stays with an empty value, which counts as deleted.

        Args:
            key: The key. One that does not exist gives False.
            expected: If given, the key is deleted only if it has this value; otherwise the result is False.

        Raises:
            RendezvousError: The store is gone.
        """
        found = self.get(key, 0.0) if self._ask(lambda: self._store.check([key])) else None
        if found is None or expected not in (None, found):
            return False
        if self._world_size is None:
            if not found:
                return False  # it was deleted before
            if expected is None:
                self.set(key, b"")
                return True
            return self._ask(lambda: bytes(self._store.compare_set(key, expected, ""))) == b""
        return self._ask(lambda: bool(self._store.delete_key(key)))

    def read(self, prefix: str) -> Mapping[str, bytes]:
        """Returns all keys that begin with `prefix`, with their values; empty if there are none. Does not wait.

        Keys with an empty value are left out. In a fixed group, only keys that are `prefix` and a rank are found.
        Raises `RendezvousError` if the store is gone.
        """
        entries = {key: self.get(key, 0.0) for key in self._present(prefix)}
        return {key: value for key, value in entries.items() if value}

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        """Returns all keys that are `prefix` and a rank, with their values.

        If `count` is the number of workers or more, first waits until every rank has its key. If `count` is less, it
        does not wait, and there must be at least `count` keys. In an open group, the result is empty.

        Args:
            prefix: What the keys begin with.
            count: How many keys are wanted.
            timeout: How many seconds to wait; 0 does not wait.

        Raises:
            RendezvousTimeoutError: There are too few keys, after the wait if there is one. The error has the keys that
                are there.
            RendezvousError: The store is gone, or a worker was reported lost during the wait.
        """
        keys = self._keys(prefix)
        # A caller that asks for fewer keys than there are ranks only checks how many there are, and does not wait.
        if count < len(keys):
            present = self._present(prefix)
            if len(present) >= count:
                return {key: self.get(key, 0.0) for key in present}
        elif self._wait(keys, timeout):
            return {key: self.get(key, 0.0) for key in keys}
        present = self._present(prefix)
        raise RendezvousTimeoutError(
            f"after {timeout:g} s the store has {len(present)} of {count} keys that begin with {prefix!r}",
            tuple(present),
        )

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Context manager that does nothing: the waits of this store have their own limits. `seconds` is ignored."""
        yield

    def report_lost(self, rank: int, why: str) -> None:
        """Makes `collect` and `get` raise `RendezvousError` from now on, where they would have to wait.

        Args:
            rank: The rank of the lost worker; ignored.
            why: The message of the error. Only the first report counts.
        """
        self._lost = self._lost or why

    def close(self, early: bool = False, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Stops using the store. Does nothing the second time. Raises nothing if the store is gone.

        Rank 0, whose process may host torch's store, waits until all other workers have closed it, unless the group is
        open or a worker was lost.

        Args:
            early: True if this worker leaves without waiting for the others. Then rank 0 does not wait, and any other
                worker does not tell rank 0 that it has closed the store.
            timeout: How many seconds rank 0 waits at most; 0 does not wait.
        """
        if self._closed:
            return
        self._closed = True
        if early or self._world_size is None:
            return
        try:
            self._store.set(f"bye/{self._rank}", b"1")
            if self._rank == 0 and self._lost is None:
                self._wait(self._keys("bye/"), timeout)
        except (RuntimeError, RendezvousError):
            pass  # the host of the store has ended before

    # -- waiting

    def _keys(self, prefix: str) -> list[str]:
        """Returns `prefix` followed by each rank, whether such a key exists or not; an empty list in an open group."""
        return [f"{prefix}{rank}" for rank in range(self._world_size or 0)]

    def _present(self, prefix: str) -> list[str]:
        """Returns the keys with this prefix that exist now; an empty list if there are none.

        In an open group, deleted keys are included. Raises `RendezvousError` if the store is gone.
        """
        if self._world_size is None:
            return [key for key in self._ask(self._store.list_keys) if key.startswith(prefix)]
        return [key for key in self._keys(prefix) if self._ask(lambda key=key: self._store.check([key]))]  # type: ignore[misc]

    def _wait(self, keys: Iterable[str], timeout: float) -> bool:
        """Polls until all keys exist, and returns True; also for no keys. Returns False after `timeout` seconds.

        With a timeout of 0 it looks once. Raises `RendezvousError` if a key is missing and a worker was reported lost,
        or if the store is gone.
        """
        deadline = time.monotonic() + timeout
        missing = list(keys)
        pause = _FIRST_PAUSE_S
        while True:
            missing = [key for key in missing if not self._ask(lambda key=key: self._store.check([key]))]  # type: ignore[misc]
            if not missing:
                return True
            if self._lost is not None:
                raise RendezvousError(self._lost)
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _ask(self, request: Callable[[], T]) -> T:
        """Calls `request`, which asks the store, and returns its result. Raises `RendezvousError` if it is gone."""
        try:
            return request()
        except RuntimeError as error:  # includes torch's DistError and its subclasses
            raise RendezvousError(f"the store of the group does not answer any more: {error}") from None

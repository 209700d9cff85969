"""A store of torch's as farcall's: workers find each other where torch's `init_process_group` would, too.

The keys are those that farcall's rendezvous uses, under a prefix of their own. In a fixed group each ends in a rank, so
that those of all workers can be waited for by name. In an open one they are listed; there a key that is deleted stays,
with an empty value, as a store that compares and sets in one step cannot compare and delete.

Nothing here waits inside torch's store, which answers one thread at a time: it is asked again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch.distributed as dist

from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.rendezvous.store import PATIENCE, Store

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.5e-3
_LONGEST_PAUSE: Final = 20e-3


class TorchStore(Store):
    """One worker's end of a torch store. Without a world size the group is open."""

    def __init__(self, store: Any, rank: int, world_size: int | None) -> None:
        self._store = dist.PrefixStore("farcall", store)
        self._rank = rank
        self._world_size = world_size
        self._lost: str | None = None
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def set_new(self, key: str, value: bytes) -> bytes:
        return self._ask(lambda: bytes(self._store.compare_set(key, "", value.decode("latin-1"))))

    def get(self, key: str, timeout: float) -> bytes:
        if not self._wait([key], timeout):
            raise RendezvousTimeoutError(f"after {timeout:g} s the store has no key {key!r}")
        return self._ask(lambda: bytes(self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: int(self._store.add(key, amount)))

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        if self._world_size is None:
            found = self.read(key).get(key)
            if found is None or found != (expected or found):
                return False
            if expected is None:
                self.set(key, b"")
                return True
            return self._ask(lambda: bytes(self._store.compare_set(key, expected.decode("latin-1"), ""))) == b""
        if expected is not None and self.read(key).get(key) != expected:
            return False
        return self._ask(lambda: bool(self._store.delete_key(key)))

    def read(self, prefix: str) -> Mapping[str, bytes]:
        entries = {key: self.get(key, 0.0) for key in self._present(prefix)}
        return {key: value for key, value in entries.items() if value}

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        keys = self._keys(prefix)
        # All of them, or, as whoever asks for fewer only wants to know whether they are there, no matter which.
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
        """See `Store`. The waits here have limits of their own."""
        yield

    def lost(self, rank: int, why: str) -> None:
        """See `Store`."""
        self._lost = self._lost or why

    def close(self, early: bool = False, patience: float = PATIENCE) -> None:
        """See `Store`. Rank 0 may host the store: it waits for the others to say good-bye."""
        if self._closed:
            return
        self._closed = True
        if early or self._world_size is None:
            return
        try:
            self._store.set(f"bye/{self._rank}", b"1")
            if self._rank == 0 and self._lost is None:
                self._wait(self._keys("bye/"), patience)
        except (RuntimeError, RendezvousError):
            pass  # its host has gone first

    # Waiting

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}{rank}" for rank in range(self._world_size or 0)]

    def _present(self, prefix: str) -> list[str]:
        if self._world_size is None:
            return [key for key in self._ask(self._store.list_keys) if key.startswith(prefix)]
        return [key for key in self._keys(prefix) if self._ask(lambda key=key: self._store.check([key]))]  # type: ignore[misc]

    def _wait(self, keys: Iterable[str], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        missing = list(keys)
        pause = _FIRST_PAUSE
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
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:  # DistError and all of its kind
            raise RendezvousError(f"the store of the group does not answer any more: {error}") from None

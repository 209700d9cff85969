"""What a store is: a few keys that all workers of a group can read and write while they find each other.

Small on purpose, so that a distributed store (Redis, etcd) can stand behind it. Nothing here is on the path of a call.
Keys are text, values are bytes; neither is unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

PATIENCE: Final = 5.0
"""Seconds that the worker which hosts a store waits for the others to say good-bye."""


class Store(ABC):
    """Keys and values shared by a group. Safe to use from several threads."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets it, whatever was there. Raises `RendezvousError` if the store is gone."""

    @abstractmethod
    def set_new(self, key: str, value: bytes) -> bytes:
        """Sets it unless there is a value already; gives the value that is there now (one's own, or the earlier).

        Raises `RendezvousError` if the store is gone.
        """

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Waits for the key. Raises `RendezvousTimeoutError`; `RendezvousError` if the store is gone."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to a counter (0 at first) and gives the sum. Raises `RendezvousError` if the store is gone."""

    @abstractmethod
    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Whether it was there and is gone now; with `expected`, nothing happens if it has another value.

        Raises `RendezvousError` if the store is gone.
        """

    @abstractmethod
    def read(self, prefix: str) -> Mapping[str, bytes]:
        """All that is there now under the prefix, without waiting. Raises `RendezvousError` if the store is gone."""

    @abstractmethod
    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        """Waits until `count` keys begin with the prefix, then gives them all: a gather and a barrier in one.

        Raises `RendezvousTimeoutError`, whose `present` says which keys were there;
        `RendezvousError` at once if a worker that had introduced itself is gone without a good-bye.
        """

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """What this thread asks inside is answered in so many seconds, or fails with `RendezvousTimeoutError`.

        A store that never keeps anybody waiting may take no notice of it.
        """
        return nullcontext()

    def lost(self, rank: int, why: str) -> None:  # noqa: B027 (a store may find out by itself, or live elsewhere)
        """The group knows that the worker of that rank is dead or frozen, which the store may never find out.

        Whoever waits for all workers hears why at once, in a `RendezvousError`, and so does who asks for them later. If
        the store is in that very worker, nothing can be asked any more. Must not block; raises nothing.
        """

    @abstractmethod
    def close(self, early: bool = False, patience: float = PATIENCE) -> None:
        """Says good-bye. If `early`, those who wait for this worker are told that it has left without them.

        At the worker that hosts the store: waits for the others to say good-bye, `patience` seconds, then ends it. In
        an open group nobody is waited for: somebody else hosts it from then on.
        """

    def refusals(self) -> str:
        """Whom the store has refused, in words, if it is in this worker and knows; empty if there is nobody."""
        return ""

    def abandon(self) -> None:  # noqa: B027 (a store that has no descriptors has nothing to do)
        """In a forked child: gives the descriptors back and says nothing; the parent goes on. Raises nothing."""

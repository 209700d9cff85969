"""The file behind `file://path`: where the store of this run is.

The worker that hosts the store (rank 0, or any in an open group) writes it when its store listens, and removes it when
the store is closed and nobody else is to host it. It holds JSON: an id of the run, the port, and the addresses to try.
A file that an earlier run left behind has another id, and nobody answers for it.

Rules
- Writers hold the lock (flock) of the file that is at the path *now*; since the file is replaced as a whole, whoever
  got the lock looks again whether it is still that file.
- Readers take no lock: they see the old file or the new one, never half of one.
- A host replaces a file only if no store answers for it, and never one that holds something else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

import msgspec

from farcall.errors import RendezvousError, RendezvousTimeoutError


class Location(msgspec.Struct, frozen=True):
    """Where a store is."""

    run: str
    port: int
    addresses: tuple[str, ...]


class HostedElsewhereError(RendezvousError):
    """The file leads to another store, which is alive. For who may look on instead; programs get its text."""


def read_location(path: str) -> Location | None:
    """What the file says; None if it is not there, or says nothing sensible (yet). Raises `OSError`."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(64 * 1024), type=Location)
    except (FileNotFoundError, ValueError):
        return None


def publish_location(path: str, location: Location, is_alive: Callable[[Location], bool], timeout: float) -> None:
    """Puts our location into the file, in place of one for which nobody answers.

    Raises `HostedElsewhereError` if another store is alive there; `RendezvousError` if the file holds something else or
    cannot be written;
    `RendezvousTimeoutError` if another process keeps it locked.
    """
    try:
        with _locked(path, timeout):
            earlier = read_location(path)
            if earlier is None and os.path.getsize(path):
                raise RendezvousError(
                    f"the file {path} of init_method file:// holds something that no farcall worker wrote; "
                    "use another file, or remove this one"
                )
            if earlier is not None and is_alive(earlier):
                raise HostedElsewhereError(
                    f"somebody else hosts a store for the file {path}: another worker with rank 0, or an open group. "
                    "End that first, or use another file. To join that run give this worker another rank; to join an "
                    "open group give it no world_size"
                )
            _replace(path, location)
    except OSError as error:
        if isinstance(error, RendezvousTimeoutError):
            raise
        raise RendezvousError(f"the file {path} of init_method file:// cannot be written: {error}") from error


def remove_location(path: str, location: Location, timeout: float = 1.0) -> None:
    """Removes the file if it still is ours; what cannot be removed stays, and the next run replaces it."""
    try:
        if read_location(path) == location:
            with _locked(path, timeout):
                if read_location(path) in (location, None):
                    os.unlink(path)
    except (OSError, RendezvousError):
        pass


def _replace(path: str, location: Location) -> None:
    draft = f"{path}.{location.run}"
    try:
        with open(draft, "xb") as file:
            file.write(msgspec.json.encode(location))
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


@contextlib.contextmanager
def _locked(path: str, timeout: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if _try_lock(descriptor) and _is_still_at(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)  # and with it the lock
        if time.monotonic() >= deadline:
            raise RendezvousTimeoutError(f"the file {path} is locked by another process; use another file")
        time.sleep(0.01)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

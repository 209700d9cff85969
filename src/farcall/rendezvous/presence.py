"""Whether workers of an open group are on this machine: a file that all of them have locked together.

When the worker that hosts a group's store dies, the others host it again in a moment. Who comes just then finds nobody
at the place, and would begin a group of its own beside the one that goes on. The lock tells it that there is one.

The kernel gives a lock back when its process ends, however it ends; so this is never out of date. The file is in the
directory for temporary files and has a user's id in its name: it says nothing of other machines and other users. The
last one to go removes it; those of groups that were killed as a whole are swept away by the next worker of any. Where
it cannot be opened there is no presence, and nothing else is amiss.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import tempfile
import time
from typing import Final

from farcall.rendezvous.urls import FilePlace, TcpPlace

_SHARE_PATIENCE: Final = 0.5


class Presence:
    """This worker's share of the lock, until `end`."""

    def __init__(self, place: TcpPlace | FilePlace) -> None:
        self._path = _path(place)
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = _share(self._path)
        _sweep()

    def end(self) -> None:
        """Gives it back. May be called twice; raises nothing."""
        if self._descriptor is not None:
            # First given back, then tried anew: of two that end at once and still had it, neither would be alone.
            self.abandon()
            with contextlib.suppress(OSError):
                _remove_if_alone(self._path)

    def abandon(self) -> None:
        """In a forked child: closes its copy of the descriptor; the lock is the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_anybody_here(place: TcpPlace | FilePlace) -> bool:
    """Whether workers of an open group that meets at this place are alive on this machine."""
    try:
        descriptor = os.open(_path(place), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _path(place: TcpPlace | FilePlace) -> str:
    what = f"file {os.path.realpath(place.path)}" if isinstance(place, FilePlace) else f"tcp {place.group}"
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:16]
    return _name(digest)


def _name(digest: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"farcall-{os.getuid()}-{digest}.open")


def _sweep() -> None:
    for path in glob.iglob(_name("*")):
        with contextlib.suppress(OSError):
            _remove_if_alone(path)


def _remove_if_alone(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever has opened it meanwhile, to share it, finds that it is not at its place any more, and makes another.
        if _is_still_at(descriptor, path):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _is_still_at(descriptor: int, path: str) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def _share(path: str) -> int | None:
    deadline = time.monotonic() + _SHARE_PATIENCE
    while time.monotonic() < deadline:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_still_at(descriptor, path):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # somebody looks, or removes the file: done in a moment
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.002)
    return None

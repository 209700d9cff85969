"""Tells whether workers of an open group run on this machine: a file on which each of them holds a shared lock.

When the worker that hosts a group's store dies, another member hosts the store again a moment later. A worker that
joins just then finds no store, and would start a second group beside the existing one. The lock tells it that the group
still exists.

Rules
- The kernel releases a lock when its process ends, however it ends, so the lock is never out of date.
- The file is in this user's private directory, where the Unix sockets are. Another user who could hold the lock would
  keep a group from starting for `PRESENCE_WAIT_S`. A file that belongs to another user is ignored.
- The lock says nothing about other machines and other users.
- The last worker to leave removes the file. If all workers of a group were killed, the next worker of any group removes
  the file.
- If the file cannot be opened there is no lock, and nothing else fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import logging
import os
import stat
import tempfile
import time
from typing import Final

from farcall.rendezvous.urls import FilePlace, TcpPlace
from farcall.transports.unix import private_directory

_SHARE_TIMEOUT_S: Final = 0.5
"""How many seconds to try for the shared lock while another process checks or removes the file."""

_log = logging.getLogger(__name__)


class PresenceLock:
    """The shared lock by which this worker shows that its open group exists, from the constructor to `release`.

    It tells other workers on this machine, under this user, not to start a second group at the same place. `place` is
    the address or the file by which workers find the group.
    """

    def __init__(self, place: TcpPlace | FilePlace) -> None:
        """Takes the lock of the group at `place`, the address or file by which workers find the group.

        Holds no lock if the lock file cannot be used; logs a warning if there is no private directory for it. Also
        removes the lock files of groups that have ended. Raises nothing.
        """
        self._path = _lock_path(place)
        self._descriptor: int | None = None
        if self._path is None:
            _log.warning(
                "the directory farcall-%d in %s cannot be created, or other users can write to it. A worker that joins "
                "this open group just after its host has died may start a second group. Remove the directory, or set "
                "TMPDIR to another one",
                os.geteuid(),
                tempfile.gettempdir(),
            )
            return
        with contextlib.suppress(OSError):
            self._descriptor = _acquire_shared_lock(self._path)
        _remove_unused_files(os.path.dirname(self._path))

    def release(self) -> None:
        """Releases the lock, and removes its file if no other worker holds it. May be called again; raises nothing."""
        if self._descriptor is not None and self._path is not None:
            # Release first, then try for the exclusive lock. If two workers leave at the same time and both still held
            # their shared locks, neither would get the exclusive one and the file would stay.
            self.abandon()
            with contextlib.suppress(OSError):
                _remove_if_unlocked(self._path)

    def abandon(self) -> None:
        """Called in a forked child: closes the inherited descriptor. The parent keeps the lock.

        Does nothing if no lock is held.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_group_on_this_machine(place: TcpPlace | FilePlace) -> bool:
    """Returns True if workers of an open group at this place run on this machine, under this user.

    `place` is the address or the file by which workers find the group. Returns False if there are none, or that cannot
    be found out. Raises nothing.
    """
    path = _lock_path(place)
    if path is None:
        return False
    try:
        descriptor = _open_own_file(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock_path(place: TcpPlace | FilePlace) -> str | None:
    """Returns the path of the lock file of a place, which is the address or the file by which workers find a group.

    The file need not exist. Returns None if there is no directory that only this user can write to.
    """
    directory = private_directory()
    if directory is None:
        return None
    what = f"file {os.path.realpath(place.path)}" if isinstance(place, FilePlace) else f"tcp {place.group}"
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:16]
    return os.path.join(directory, f"{digest}.open")


def _open_own_file(path: str, flags: int = 0) -> int:
    """Opens a file for reading and writing, and returns its descriptor.

    Args:
        path: The file.
        flags: Further flags for `os.open`, such as `O_CREAT`.

    Raises:
        OSError: The file cannot be opened, or is not a regular file of this user.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "not a regular file of this user", path)


def _remove_unused_files(directory: str) -> None:
    """Removes the lock files in a directory that no process holds a lock on. Files that cannot be removed stay.

    Does nothing if there are none. Raises nothing.
    """
    for path in glob.iglob(os.path.join(glob.escape(directory), "*.open")):
        with contextlib.suppress(OSError):
            _remove_if_unlocked(path)


def _remove_if_unlocked(path: str) -> None:
    """Removes the lock file at `path`, if it is a regular file of this user.

    Raises `OSError`, and removes nothing, if a process holds a lock on it, or if it does not exist or cannot be opened.
    """
    descriptor = _open_own_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A worker that has opened the file meanwhile to share the lock sees that it was removed, and creates another.
        if _is_still_at(descriptor, path):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _is_still_at(descriptor: int, path: str) -> bool:
    """Returns True if the open file is the one at the path, and False if another file is there now.

    Raises `FileNotFoundError` if there is none.
    """
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def _acquire_shared_lock(path: str) -> int | None:
    """Takes a shared lock on the file, which is created if needed, and returns its descriptor.

    Returns None if other processes kept it locked, or removed it, for `_SHARE_TIMEOUT_S` seconds. Raises `OSError` if
    it cannot be opened.
    """
    deadline = time.monotonic() + _SHARE_TIMEOUT_S
    while time.monotonic() < deadline:
        descriptor = _open_own_file(path, os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_still_at(descriptor, path):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # another process checks or removes the file, which takes a moment
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.002)
    return None

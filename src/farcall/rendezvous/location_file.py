"""The file behind `file:///path`: it holds the address of the store of the current run.

The worker that hosts the store writes the file once its store listens. It removes the file when the store closes and no
other worker will host it. The file holds JSON: an id of the run, the port, and the addresses to try. A file that an
earlier run left behind has another id, and no store answers for it.

Rules
- Writers hold the lock (flock) of the file that is at the path *now*. The file is replaced as a whole, so a writer that
  got the lock checks that its file is still at the path.
- Readers take no lock: they see the old file or the new one, never a part of one.
- A host replaces a file only if no store answers for it. It never replaces a file that farcall did not write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Final

import msgspec

from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.protocol.fields import Addresses, Text

_PERMANENT_ERRNOS: Final = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Failures of `stat` that no worker can make go away by creating a file."""


class Location(msgspec.Struct, frozen=True):
    """The contents of a location file: the address of a group's store.

    `run` is the id of the run of the group, which no other run has. `port` is the port of the store. `addresses` are
    its numeric addresses, the best first. Fields are checked where a file is read, not here.
    """

    run: Text
    """The id of the run of the group, which no other run has."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """The port at which the store listens."""
    addresses: Addresses
    """The numeric addresses at which the store can be reached, the best first."""


class HostedElsewhereError(RendezvousError):
    """The location file, which holds the address of a group's store, leads to another store, which is or may be alive.

    A worker of an open group connects to that store instead. For rank 0 of a fixed group it is an error.
    """


def read_location(path: str) -> Location | None:
    """Returns the location in the file at `path`, which is the address of a group's store.

    Returns None if the file does not exist, is not a regular file, or does not hold a location (yet). Raises `OSError`
    if the file exists but cannot be read.
    """
    try:
        # O_NONBLOCK: a user who can write to the directory can put a FIFO there. Opening a FIFO would block for ever.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return msgspec.json.decode(file.read(64 * 1024), type=Location)
    except (FileNotFoundError, ValueError):
        return None


def check_path(path: str) -> None:
    """Raises `RendezvousError` if no file can ever be written at the path: a directory, a device, an impossible name.

    Returns for a regular file, whatever it holds, and for a path whose file or directory does not exist yet.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in _PERMANENT_ERRNOS:
            return  # the file or its directory may be created later, or be visible to another worker only
        raise RendezvousError(f"init_method file://{path} cannot name a file: {error}; use another path") from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise RendezvousError(f"init_method file://{path} needs a file, and {path} is {kind}; use another path")


def explain_unusable_path(path: str) -> str:
    """Returns why no worker could write the file with the store's address at `path`, as text for a message.

    Tries to write another file into its directory. Returns an empty text if this worker sees no reason.
    """
    directory = os.path.dirname(path)
    try:
        if os.path.exists(path) and os.path.getsize(path) and read_location(path) is None:
            return f"the file {path} was not written by farcall; use another file, or remove this one"
        if not os.path.isdir(directory):
            return f"the directory {directory} does not exist on this host; create it, or use another path"
    except OSError as error:
        return f"the file {path} cannot be read by this worker ({error})"
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1000))  # as much as a location needs: a full file system may still allow an empty file
    except OSError as error:
        return f"no file can be written in the directory {directory} on this host ({error})"
    return ""


def publish_location(path: str, location: Location, is_alive: Callable[[Location], bool], timeout: float) -> None:
    """Writes a location, the address of a store, into the file. Replaces an earlier one whose store does not answer.

    Args:
        path: The file. It is created if it does not exist; its directory must exist.
        location: What to write.
        is_alive: Called with the earlier location, if there is one; returns True if it must not be replaced.
        timeout: How many seconds to wait for the lock of the file. 0 tries once.

    Raises:
        HostedElsewhereError: `is_alive` returned True.
        RendezvousTimeoutError: Another process keeps the file locked.
        RendezvousError: The file holds something that farcall did not write, or cannot be written.
    """
    try:
        with _locked(path, timeout):
            earlier = read_location(path)
            if earlier is None and os.path.getsize(path):
                raise RendezvousError(
                    f"the file {path} of init_method file:// was not written by farcall; "
                    "use another file, or remove this one"
                )
            if earlier is not None and is_alive(earlier):
                raise HostedElsewhereError(
                    f"another process already hosts a store for the file {path}: another worker with rank 0, or an "
                    "open group. End that process, or use another file. To join that run, give this worker another "
                    "rank; to join an open group, give it no world_size"
                )
            _replace(path, location)
    except OSError as error:
        if isinstance(error, RendezvousTimeoutError):
            raise
        raise RendezvousError(f"the file {path} of init_method file:// cannot be written: {error}") from error


def remove_location(path: str, location: Location, timeout: float = 1.0) -> None:
    """Removes the file if it still holds `location`, the address of a store. Raises nothing.

    A file that does not exist or holds another location is left alone. A file that cannot be removed, or that another
    process keeps locked for `timeout` seconds (0 tries once), stays. The next run replaces it.
    """
    try:
        if read_location(path) == location:
            with _locked(path, timeout):
                if read_location(path) in (location, None):
                    os.unlink(path)
    except (OSError, RendezvousError):
        pass


def _replace(path: str, location: Location) -> None:
    """Writes the location into a new file beside `path` and renames it to `path`, replacing any file there.

    Raises `OSError` if that fails, and removes the new file then.
    """
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
    """Context manager: holds the lock of the file at `path`, which is created if it does not exist.

    Raises `RendezvousTimeoutError` if another process holds the lock for more than `timeout` seconds (0 tries once),
    and `OSError` if the file cannot be opened.
    """
    deadline = time.monotonic() + timeout
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if _try_lock(descriptor) and _is_still_at(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)  # this also releases the lock
        if time.monotonic() >= deadline:
            raise RendezvousTimeoutError(f"the file {path} is locked by another process; use another file")
        time.sleep(0.01)


def _try_lock(descriptor: int) -> bool:
    """Takes the exclusive lock on an open file without waiting, and returns True.

    Returns False if another process has it. Raises `OSError` for a descriptor that is not open.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_at(descriptor: int, path: str) -> bool:
    """Returns True if the open file is the one that is at the path now; False if another file, or none, is there."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False

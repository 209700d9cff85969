"""Unix sockets with a path: the fast transport between processes of one user on one host.

Addresses: `unix:/tmp/farcall-1000/6f1c….sock`. Linux' abstract sockets are not used: they have no permissions, so that
every user of the machine could connect.

Rules
- Sockets live in one directory for each user, `<temporary directory>/farcall-<uid>`. Only a real directory that is ours
  and closed to others will do; if somebody else holds the name, a fresh directory stands in for it and goes with its
  listener.
- The permissions keep other users out: the directory's and the socket's own. Who is at the other end is asked of the
  kernel all the same, on both sides, and it must be the same user: a directory may be misjudged, the kernel not.
- A killed process cannot unlink its socket, so `listen` clears away what has no listener. Nobody is disturbed by that:
  a datagram socket that connects is refused where nobody is, and told that it is of the wrong type where somebody is.
- A name without `.new` has been bound for sure. A socket's file is there a moment before the socket is, so it is made
  under a name with `.new`, which the sweep leaves alone for a minute, and renamed when it listens.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterable
from typing import Any, Final

from farcall.transports.sockets import BACKLOG, SocketChannel, SocketListener

_LONGEST_PATH: Final = 107  # unix(7): 108 bytes with the null byte
_GRACE: Final = 60.0  # seconds between making a directory or a file and putting it to use, generously
_REMEMBERED: Final = 64
_SEND_BUFFER: Final = 2 << 20
"""Bytes, bookkeeping included, that may wait for the reader: some 5,000 small messages, where the default stops a
burst of calls after 280. The kernel may grant less, and uses it only as needed."""

_log = logging.getLogger(__name__)


class UnixTransport:
    """The `Transport` whose scheme is `unix`.

    `roots` are the directories to try for ours to be made in: the system's temporary directory, and `/tmp` in case
    that one's path is too long for a socket.
    """

    scheme = "unix"

    def __init__(self, roots: Iterable[str] | None = None) -> None:
        self._roots = None if roots is None else tuple(roots)

    def listen(self, host: str | None = None) -> SocketListener:
        """A listener under a random name; `host` is ignored.

        Raises `OSError` if there is no directory for it: none can be written, or all have too long a path.
        """
        roots = (tempfile.gettempdir(), "/tmp") if self._roots is None else self._roots
        for root in roots:
            _sweep(_shared(root))
            for directory in glob.glob(f"{glob.escape(_shared(root))}-*"):
                _sweep(directory)
                if _is_private(directory) and _age(directory) > _GRACE:
                    _remove(None, directory)  # unless somebody lives there
        directory, ours_alone = _directory(roots)
        path = os.path.join(directory, f"{secrets.token_hex(8)}.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:  # closed unless the listener has taken it over
            try:
                sock.bind(path + ".new")
                os.chmod(path + ".new", 0o600)
                sock.listen(BACKLOG)
                os.rename(path + ".new", path)
                return _UnixListener(sock, path, directory if ours_alone else None)
            except OSError:
                _remove(path + ".new", directory if ours_alone else None)
                raise

    def connect(self, address: str, timeout: float) -> SocketChannel:
        """A channel to the listener at that address.

        Raises `OSError` if nobody listens there, `TimeoutError` if its queue stays full.
        """
        path = _parse(address)
        deadline = time.monotonic() + timeout
        pause = 0.0005
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:  # closed unless the channel has taken it over
            sock.setblocking(False)
            while True:
                try:
                    sock.connect(path)
                    process = _checked_process(sock, address)
                    return SocketChannel(_tune(sock), address, process)
                except BlockingIOError:
                    left = deadline - time.monotonic()
                except OSError as error:
                    raise OSError(error.errno, error.strerror, address) from error
                if left <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, f"not accepted within {timeout:g} s", address)
                time.sleep(min(pause, left))  # the listener's queue is full, and nothing can be polled for that
                pause = min(pause * 2, 0.02)


class _UnixListener(SocketListener):
    __slots__ = ("_directory", "_path", "_turned_away")

    def __init__(self, sock: socket.socket, path: str, directory: str | None) -> None:
        super().__init__(sock, f"unix:{path}", self._admit)
        self._path = path
        self._turned_away: set[int] = set()
        self._directory = directory
        """To be removed too, as it was made for this listener."""

    def _admit(self, sock: socket.socket, _: Any) -> SocketChannel | None:
        pid, user, _ = _peer_credentials(sock)
        if user == os.geteuid():
            # The connecting side has no name; its process id is of more use to a person than nothing.
            return SocketChannel(_tune(sock), f"unix:process {pid}", pid or None)
        sock.close()
        if user not in self._turned_away and len(self._turned_away) < _REMEMBERED:
            self._turned_away.add(user)
            _log.warning("a connection of user %d to %s was closed: it is for one user only", user, self.address)
        return None

    def close(self) -> None:
        """No more channels, and no file. Any thread may call it, more than once; it raises nothing."""
        if self._socket is not None:
            _remove(self._path, self._directory)
        super().close()


def _parse(address: str) -> bytes:
    scheme, _, path = address.partition(":")
    try:
        encoded = os.fsencode(path)
    except UnicodeError:
        encoded = b""
    if scheme != "unix" or not encoded.startswith(b"/") or b"\0" in encoded or len(encoded) > _LONGEST_PATH:
        raise OSError(errno.EINVAL, "no unix address; it looks like unix:/directory/name.sock", address)
    return encoded


def _peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel has them. Raises `OSError`."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, group = struct.unpack("3i", found)
    return pid, user, group


def _checked_process(sock: socket.socket, address: str) -> int | None:
    """Who listens there; None if it cannot be seen from here.

    Raises `PermissionError` if it is another user: the name may have been taken over.
    """
    process, user, _ = _peer_credentials(sock)
    if user != os.geteuid():
        message = f"user {user} listens there, not {os.geteuid()}; workers of several users reach each other by tcp"
        raise PermissionError(errno.EACCES, message, address)
    return process or None


def _tune(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return sock


def _shared(root: str) -> str:
    """The one directory of this user."""
    return os.path.join(root, f"farcall-{os.geteuid()}")


def _directory(roots: Iterable[str]) -> tuple[str, bool]:
    """Where to put a socket, and whether the directory was made for it alone."""
    refused = []
    for root in roots:
        shared = _shared(root)
        # 8 characters may follow in the name of a directory of our own, with a dash.
        longest = os.path.join(f"{shared}-{'x' * 8}", f"{'x' * 16}.sock.new")
        if len(os.fsencode(longest)) > _LONGEST_PATH:
            refused.append(f"{root} is too long a path for a socket")
            continue
        try:
            os.mkdir(shared, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            refused.append(f"{root}: {error.strerror}")
            continue
        if _is_private(shared):
            return shared, False
        try:
            return tempfile.mkdtemp(prefix=f"{os.path.basename(shared)}-", dir=root), True
        except OSError as error:
            refused.append(f"{root}: {error.strerror}")
    message = f"no directory for unix sockets ({'; '.join(refused)}). Set TMPDIR to a short path that you may write to"
    raise OSError(errno.EACCES, message)


def _is_private(directory: str) -> bool:
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _sweep(directory: str) -> None:
    """Removes the sockets of dead processes. What cannot be swept stays; that is no reason not to listen."""
    if not _is_private(directory):
        return
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        path = os.path.join(directory, name)
        if name.endswith((".sock", ".sock.new")) and _is_dead(path):
            _remove(path, None)


def _is_dead(path: str) -> bool:
    if path.endswith(".new") and _age(path) < _GRACE:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False


def _age(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0  # another process was quicker


def _remove(file: str | None, directory: str | None) -> None:
    try:
        if file is not None:
            os.unlink(file)
    except OSError:
        pass  # swept by somebody, or on its way
    try:
        if directory is not None:
            os.rmdir(directory)
    except OSError:
        pass  # somebody lives there

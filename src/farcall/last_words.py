"""What a worker tells the launcher that has started it, when it ends through no fault of its own.

When a worker dies, the others fail because of it (`WorkerLost`, `ShutdownError`, `RendezvousError`), and often end
before it: it still has its exit to go through. So that `farcall run` can tell cause from consequence, a worker that
ends by one of these errors says so first. The word is an empty datagram to a socket of the launcher, whose name the
workers have in `FARCALL_LAUNCHER`. Some of these errors are nobody else's fault (a port that is taken), which does no
harm: if all who fail say the word, the launcher takes the first.

Rules
- The kernel says who sent a word (its pid), so nobody can speak for a worker, and a worker's children do not.
- A word is there before its worker's end can be noticed; whoever drains the socket then has heard it.
- The name is an abstract one: nothing is left in the file system, however the launcher ends.
- Where there is no launcher, or none to be reached, everything is as if this module did not exist.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError, WorkerLost

LAUNCHER: Final = "FARCALL_LAUNCHER"
"""The environment variable with the name of the launcher's socket."""


_OWN_CODE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_CREDENTIALS: Final = struct.Struct("iii")  # struct ucred: pid, uid, gid; see unix(7)
_SEND_TIMEOUT: Final = 1.0


class Ear:
    """The launcher's side: hears who ends because of another worker."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the system chooses an abstract name that is free

    @property
    def name(self) -> str:
        """What the workers are told in `FARCALL_LAUNCHER`."""
        return "@" + self._socket.getsockname()[1:].decode()  # type: ignore[no-any-return]

    def fileno(self) -> int:
        """Readable when there is a word."""
        return self._socket.fileno()

    def listen(self) -> set[int]:
        """The pids of those who have said the word since the last time. Never waits."""
        pids: set[int] = set()
        while True:
            try:
                _, ancillary, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return pids
            for _, kind, data in ancillary:
                if kind == socket.SCM_CREDENTIALS:
                    pids.add(_CREDENTIALS.unpack(data)[0])

    def close(self) -> None:
        """Hears no more."""
        self._socket.close()


class _Hook:
    """An `excepthook` that says the word, and prints one line where the traceback would tell of another's end."""

    def __init__(self, launcher: str) -> None:
        self._launcher = launcher
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _is_consequence(error):
            self._before(kind, error, trace)
            return
        _say(self._launcher)
        print(f"{_place(trace)}{kind.__name__}: {error}", file=sys.stderr)


def prepare_last_words(environ: Mapping[str, str]) -> None:
    """The worker's side: if a launcher listens, it hears of an end because of another. May be called twice."""
    launcher = environ.get(LAUNCHER)
    if launcher and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(launcher)


def _is_consequence(error: BaseException) -> bool:
    # Who did not come to the meeting in time is still on its way, and not about to fail.
    return isinstance(error, (ShutdownError, WorkerLost, RendezvousError)) and not isinstance(
        error, RendezvousTimeoutError
    )


def _say(launcher: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_SEND_TIMEOUT)
            sock.sendto(b"", "\0" + launcher[1:])
    except OSError:
        pass  # it has ended, or is elsewhere


def _place(trace: TracebackType | None) -> str:
    """The last line of the user's own code, as a compiler would name it."""
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_OWN_CODE)]
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""

"""Lets a worker tell the launcher its name, and that it failed because of another worker.

When a worker dies, the others fail because of it (`WorkerLostError`, `ShutdownError`, `RendezvousError`), and often end
first, because the worker that died is still running its own exit handlers. To tell the cause from its consequences, a
worker that ends with one of these errors first sends the launcher a *report*: an empty datagram to a Unix socket, whose
name is in the environment variable `FARCALL_LAUNCHER`. Some of these errors have another cause, such as a port that is
taken. The report does no harm then: if every worker that fails has sent one, the launcher blames the first.

A datagram that is not empty is the name of the worker, which it sends before it joins its group. From then on the
launcher calls it by that name.

Rules
- The kernel adds the sender's pid to a report, so no process can report for another.
- A report is in the socket before the launcher can notice the end of its worker. So a launcher that notices an end and
  then reads the socket has seen the report.
- The socket has an abstract name, so no file is left behind when the launcher is killed.
- Without a launcher, or if it cannot be reached, this module has no effect.
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

from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError, WorkerLostError

LAUNCHER_VARIABLE: Final = "FARCALL_LAUNCHER"
"""The environment variable with the name of the launcher's socket."""
NAME_VARIABLE: Final = "FARCALL_WORKER_NAME"
"""The environment variable with the name that the launcher has given to a worker."""


_OWN_CODE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The directory of the package, with a slash at its end."""
_CREDENTIALS: Final = struct.Struct("iii")  # struct ucred: pid, uid, gid; see unix(7)
_SEND_TIMEOUT_S: Final = 1.0
_MAX_NAME_BYTES: Final = 1024
"""A name has at most 255 characters, of at most four bytes each."""


class ExitReports:
    """The launcher's end of the socket over which workers send their names and reports.

    A report says that a worker fails because of another worker. Start the workers with the environment variable
    `FARCALL_LAUNCHER` set to `name`. Call `read` when `fileno` is readable: it returns the reports. Then `take_names`
    returns the names. After `close`, `name` and `read` raise `OSError`.
    """

    def __init__(self) -> None:
        """Opens the socket, with a name that the system chooses. Raises `OSError` if no descriptors are left."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the system chooses an abstract name that is free
        self._names: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The name of the socket, such as "@00c3f", which workers need in `FARCALL_LAUNCHER`."""
        return "@" + self._socket.getsockname()[1:].decode()  # type: ignore[no-any-return]

    def fileno(self) -> int:
        """Returns the descriptor of the socket, readable when a report or a name is there; -1 after `close`."""
        return self._socket.fileno()

    def read(self) -> set[int]:
        """Reads all datagrams that have arrived, and returns the pids of the workers that have reported a failure.

        These are the reports since the last call: an empty set if there are none. Names are kept for `take_names`. A
        name that is not printable is ignored. Does not block.
        """
        pids: set[int] = set()
        while True:
            try:
                body, ancillary, _, _ = self._socket.recvmsg(_MAX_NAME_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return pids
            for _, kind, data in ancillary:
                if kind == socket.SCM_CREDENTIALS:
                    pid = _CREDENTIALS.unpack(data)[0]
                    if not body:
                        pids.add(pid)
                    elif (name := body.decode(errors="replace")).isprintable():
                        self._names[pid] = name

    def take_names(self) -> dict[int, str]:
        """Returns the names that `read` has read since the last call of this method, by the pids of the workers.

        Returns an empty dict if there are none.
        """
        names, self._names = self._names, {}
        return names

    def close(self) -> None:
        """Closes the socket. Later reports are lost. May be called again."""
        self._socket.close()


class _Hook:
    """A `sys.excepthook` that sends the launcher a report, and prints one line instead of a traceback.

    It does so for errors that mean that another worker failed, such as `WorkerLostError`. All other errors go to the
    hook that was installed before.

    Args:
        launcher: The name of the launcher's socket, such as "@00c3f".
    """

    def __init__(self, launcher: str) -> None:
        self._launcher = launcher
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Called by Python with the type, the exception and the traceback of an error that ends the program.

        For an error that means that another worker failed, reports to the launcher and prints one line. Passes any
        other error to the earlier hook.
        """
        if not _is_consequence(error):
            self._before(kind, error, trace)
            return
        _send_report(self._launcher)
        print(f"{_user_location(trace)}{kind.__name__}: {error}", file=sys.stderr)


def install_exit_report(environ: Mapping[str, str]) -> None:
    """Makes this process report to its launcher if it fails because of another worker. Sets `sys.excepthook`.

    Does nothing without a launcher, or if it was called before. Whether the launcher can be reached is not checked.

    Args:
        environ: The environment of the process, with `FARCALL_LAUNCHER` if there is a launcher.
    """
    launcher = environ.get(LAUNCHER_VARIABLE)
    if launcher and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(launcher)


def report_name(environ: Mapping[str, str], name: str) -> None:
    """Tells the launcher the name of this worker, which it then writes before each line of output.

    Does nothing without a launcher, or if it cannot be reached. Never waits longer than a second.

    Args:
        environ: The environment of the process, with `FARCALL_LAUNCHER` if there is a launcher.
        name: The name of this worker, not empty: the launcher would take an empty one for a report of a failure.
    """
    launcher = environ.get(LAUNCHER_VARIABLE)
    if launcher:
        _send_report(launcher, name.encode())


def _is_consequence(error: BaseException) -> bool:
    """Returns True for an error that means that another worker has failed, else False.

    Those are `ShutdownError`, `WorkerLostError` and `RendezvousError`, but not `RendezvousTimeoutError`.
    """
    # A rendezvous timeout means that a worker has not started. That worker has not failed, so it is not the cause.
    return isinstance(error, (ShutdownError, WorkerLostError, RendezvousError)) and not isinstance(
        error, RendezvousTimeoutError
    )


def _send_report(launcher: str, body: bytes = b"") -> None:
    """Sends a datagram to the socket named `launcher`, waiting a second at most; does nothing if it cannot be reached.

    `body` is the name of this worker; empty means a report that it failed because of another worker.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_SEND_TIMEOUT_S)
            sock.sendto(body, "\0" + launcher[1:])
    except OSError:
        pass  # the launcher has ended, or runs in another network namespace


def _user_location(trace: TracebackType | None) -> str:
    """Returns the place of the last entry of a traceback outside of farcall, as "file:line: " with a blank at its end.

    Returns an empty text for None, or if all entries are in farcall.
    """
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_OWN_CODE)]
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""

"""A socket whose descriptor stays open until the last reference to the socket is gone.

A thread that enters `recv` reads the *number* of the descriptor and then releases the interpreter's lock. If another
thread closes the descriptor at that moment and opens something else, the kernel reuses the number, and the first thread
reads bytes of the new file. (With a thread that spins on `recv`, this happened in one of a thousand closes.) So
`release` only shuts the socket down, which ends the stream in both directions at once. The descriptor is closed when
the last reference to the socket is gone.
"""

from __future__ import annotations

import socket
from typing import Final

BACKLOG: Final = 4096
"""The most connections that wait to be accepted. Large, because all workers of a group start at once. The kernel may
have a lower limit."""


class OwnSocket(socket.socket):
    """A non-blocking socket whose descriptor is closed when nothing refers to the socket any more.

    Call `release` to end the stream. If neither `release` nor `abandon` was called before the socket is freed, a
    `ResourceWarning` is given.

    Args:
        sock: The socket whose descriptor this one takes over and makes non-blocking. `sock` cannot be used any more.
    """

    __slots__ = ("released",)

    def __init__(self, sock: socket.socket) -> None:
        self.released = False
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)

    def release(self) -> None:
        """Ends the stream in both directions now. The descriptor is closed later, when nothing refers to this object.

        May be called twice. Raises nothing.
        """
        self.released = True
        try:
            self.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def abandon(self) -> None:
        """Closes the descriptor at once. Only for a forked child, which has a copy: the parent's stream stays open.

        May be called twice.
        """
        self.released = True
        self.close()

    def __del__(self) -> None:
        if self.released:
            self.close()
        else:
            super().__del__()  # type: ignore[misc]  # exists, and warns about an unclosed socket

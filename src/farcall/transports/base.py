"""What a transport is: how buffers travel. It knows no message, no worker and no thread.

A transport makes *channels*: ordered, reliable, two-way streams of bytes between two workers. Everything is
non-blocking but `Transport.connect`; whoever wants to wait polls `fileno()`. An address is text,
`scheme:rest`, for example `tcp:127.0.0.1:4000`, `tcp:[::1]:4000`, `unix:/run/x/y.sock`, `memory:a1`.

Rules for an implementation
- `receive` and `receive_into` raise `BlockingIOError` when nothing is there, and give `b""` or 0 at the end of
  the stream. Once the stream has ended or failed, `fileno()` stays readable.
- `send` and `send_gather` take what fits now and say how many bytes that was; `BlockingIOError` when nothing fits. Who
  was told that not all was taken sends the rest next, as a stream demands anyway: an encrypted channel may have begun
  with it.
- `connect` may need the other end to accept, and to try to `receive`, before it returns: an encrypted channel does.
  Meanwhile `receive` raises `BlockingIOError`.
- A channel that is encrypted has an attribute `binding`: bytes that both of its ends have alike, and that no two
  channels through somebody in between have.
- A channel may have an attribute `process`: the id of the process at its other end, if the kernel vouches for it. Both
  can then share memory (`shared_memory`).
- A broken channel raises another `OSError` (`ConnectionError`, mostly) from any of them, never anything else.
- `close` may be called twice and from another thread; after it every method raises `OSError`, `fileno` too. A thread
  that waits on `fileno()` must be told by other means: closing need not wake a poll.
- The descriptor lives until the last call on the channel has returned, so that a call that is under way while another
  thread closes never meets the next owner of its number. Who keeps a method of a channel keeps its descriptor.
- `send*` may be called by one thread while another calls `receive*`; two senders, or two receivers, must take turns.
- A process that dies leaves nothing behind but what `listen` of a later process clears away.

The methods of a channel but `close` are attributes on purpose: a socket channel binds the socket's own C methods, so
that the fast path runs no Python frame here. `testing.conformance` checks all of this, for a transport of your own as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Channel(Protocol):
    """One two-way stream of bytes."""

    address: str
    """The other end, for messages to people."""

    fileno: Callable[[], int]
    """A descriptor that polls readable when `receive` has something, and writable when `send` takes something."""

    receive: Callable[[int], bytes]
    """Up to that many bytes. Raises `BlockingIOError`, or another `OSError` when the channel is broken."""

    receive_into: Callable[[memoryview], int]
    """Fills as much of the buffer as is there now. Raises as `receive`."""

    send: Callable[[Buffer], int]
    """Sends some of it. Raises `BlockingIOError`, or another `OSError` when the channel is broken."""

    send_gather: Callable[[Sequence[Buffer]], int]
    """Sends some of these, in this order; at most 64 buffers a call. Raises as `send`."""

    def close(self) -> None:
        """Ends the stream in both directions. What was sent before may still arrive. Raises nothing."""

    def abandon(self) -> None:
        """In a forked child: gives the descriptor back and leaves the stream to the parent. Raises nothing."""


class Listener(Protocol):
    """Where others connect to."""

    address: str
    """What `connect` takes on the other side."""

    def fileno(self) -> int:
        """A descriptor that polls readable when `accept` has a channel."""

    def accept(self) -> Channel | None:
        """The next channel, or None if there is none now. Raises `OSError` after `close`, or out of descriptors."""

    def close(self) -> None:
        """No more channels; those made already live on. May be called twice."""

    def abandon(self) -> None:
        """In a forked child: gives the descriptor back; the parent goes on listening. Raises nothing."""


class Transport(Protocol):
    """A way to travel. One object serves a whole agent; it has no threads."""

    scheme: str
    """The first part of its addresses."""

    def listen(self, host: str | None = None) -> Listener:
        """A listener at a free address.

        `host` is the address of the interface to use; transports that stay on one host ignore it.
        Raises `OSError` if this transport cannot be used here (no directory for sockets, say).
        """

    def connect(self, address: str, timeout: float) -> Channel:
        """A channel to a listener. Blocks, `timeout` seconds at most.

        Raises `OSError` (`TimeoutError` among them) if nobody listens there or the time is over.
        """

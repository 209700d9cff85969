"""The interfaces of this package: `Link`, `Listener` and `Transport`.

A *link* carries frames between two workers in both directions, reliably and in order. A frame has bytes (for example a
header and a pickle) and any number of large buffers. How a link sends them is not visible to its user: it may split
large frames into chunks, put buffers into shared memory, or queue frames that cannot be sent yet.

A link begins with its *handshake*. In the handshake it carries only frames without buffers, of at most
`handshake_limit` bytes each, so that a stranger cannot use much memory of this worker. When both ends are
authenticated, both call `establish`. From then on frames of any size are allowed, and the link may set up shared
memory.

Rules for every link
- `send` keeps the order of frames, and never waits for the other end. The one exception is a large frame that is sent
  through a socket or a ring: its sender waits, at most until the given deadline. Where `gate.must_not_sleep()` is true,
  as on the thread of an event loop, it does not wait: what there is no room for is copied and queued.
- Only one thread at a time may call `receive` or `wait`. Any number of threads may call `send`. `close` may be called
  at any time.
- `receive` returns all frames that were sent before the other end closed the link, and raises `ConnectionError` after
  the last of them. It raises `ProtocolError` for bytes that are not a frame; the link cannot be used any more then.
- An address is text, `scheme:rest`: `unix:/tmp/farcall-1000/ab12.sock`, `tcp:192.0.2.7:4000`, `memory:3`.

`farcall.testing.conformance` tests these rules, also for a transport of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from farcall.transports.buffer_pool import BufferPool
    from farcall.transports.poller import Poller
    from farcall.transports.shm_segments import CommonSegment, SegmentPool

Buffer: TypeAlias = bytes | bytearray | memoryview
Frame: TypeAlias = tuple[bytes, Sequence[memoryview]]
"""A received frame: its bytes and its buffers. The buffers are writable."""


class CommonBuffers(list[memoryview]):
    """The buffers of a frame that is sent on several links. Each link gets its own list, and empties it.

    Args:
        broadcast: Has the buffers. It also has the shared segment into which they are copied once for all links.
    """

    def __init__(self, broadcast: Broadcast) -> None:
        super().__init__(broadcast.buffers)
        self.broadcast = broadcast


class Broadcast:
    """Buffers that are sent on several links. Links that can share memory copy them once for all of their peers.

    Use it as a context manager around the sending, and give each link its own `for_link()`.

    Args:
        buffers: The buffers. They must not change inside of `with`.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.segment: CommonSegment | None = None
        """The segment with the copy; None before the first link has made it."""

    def for_link(self) -> CommonBuffers:
        """Returns a new list of all buffers, for the `send` of one link. The link empties the list."""
        return CommonBuffers(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the sending: the shared copy of the buffers may be reused once all peers have dropped it.

        Does nothing if no link has made a copy.
        """
        if self.segment is not None:
            self.segment.is_held = False


FOREVER = float("inf")
"""The deadline of a caller that waits without a limit."""


class LinkOptions(NamedTuple):
    """The options that all established links of one worker share.

    Attributes:
        poller: Waits for frames on all links of this worker, and flushes links that have queued frames.
        segments: Creates the shared memory that this worker writes into.
        received: Provides the memory for large buffers that arrive.
        spin_s: Seconds for which a thread that waits for frames checks for them again and again before it sleeps; 0 to
            sleep at once.
        copy_shared: Whether buffers that arrive in shared memory are copied at once. Set it if buffers are checked
            before they are used, because the other end could change shared memory in between.
        max_frame_size: The most bytes of a frame with its buffers. The link refuses larger frames from the other end.
    """

    poller: Poller
    segments: SegmentPool
    received: BufferPool
    spin_s: float
    copy_shared: bool
    max_frame_size: int


class LinkCounts(NamedTuple):
    """The numbers of bytes that a link has received and sent so far, buffers included.

    Attributes:
        bytes_in: All bytes that were received.
        bytes_out: All bytes that were sent.
        bytes_shared_in: The part of `bytes_in` that arrived in shared memory.
        bytes_shared_out: The part of `bytes_out` that was sent in shared memory.
        bytes_returned: The part of `bytes_shared_in` in segments that this end had created. The other end has sent them
            back without a copy.
    """

    bytes_in: int
    bytes_out: int
    bytes_shared_in: int = 0
    bytes_shared_out: int = 0
    bytes_returned: int = 0


class Link(Protocol):
    """One end of a connection between two workers. It carries whole frames.

    Only one thread at a time may be in `receive` or `wait`. Any thread may call the other methods.

    Attributes:
        address: The address of the other end, for log and error messages.
        is_established: Whether `establish` was called, so that the handshake is over.
    """

    address: str
    is_established: bool

    @property
    def backlog(self) -> int:
        """The number of bytes that wait in this process to be sent; 0 if all were sent.

        An implementation should have a plain attribute of this name, because every call reads it.
        """

    @property
    def network(self) -> str:
        """Text that names the network namespace of this end, for an unencrypted link on loopback.

        Two ends with the same text are in one network namespace. Empty text says nothing: links of other kinds have
        it, and so has the accepting end if its worker has no certificates. Valid only after the first frame was
        received.
        """

    @property
    def binding(self) -> bytes:
        """The fingerprint of the certificate of the end that accepted the link; the same at both ends.

        Empty for a link without encryption. Valid only after the first frame was received.
        """

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when frames may have arrived.

        Raises:
            OSError: The link is closed.
        """

    def send(self, frame: bytes, buffers: list[memoryview] | None = None, deadline: float = FOREVER) -> None:
        """Sends one frame, or queues it if the other end does not read fast enough.

        Args:
            frame: The bytes of the frame.
            buffers: The buffers of the frame; None or an empty list for none. The link empties the list. Buffers that
                nothing else refers to may be sent without a copy.
            deadline: Until when to wait while a large frame is sent, as a time of the monotonic clock. After that the
                rest of the frame is copied and queued, and no error is raised.

        Raises:
            ConnectionError: The link is closed or broken. The frame was sent in part or not at all.
        """

    def send_kept(self, frame: bytes, buffers: list[memoryview], deadline: float = FOREVER) -> list[memoryview]:
        """Sends one frame, and returns copies of its buffers, so that the frame can be sent again on another link.

        Queues the frame if the other end does not read fast enough.

        Args:
            frame: The bytes of the frame.
            buffers: The buffers of the frame; an empty list for none. The list may be empty afterwards.
            deadline: Until when to wait while a large frame is sent, as a time of the monotonic clock. After that the
                rest of the frame is copied and queued, and no error is raised.

        Returns:
            A copy of each buffer; an empty list for no buffers. A copy does not change when the program changes the
            original.

        Raises:
            ConnectionError: The link is closed or broken.
        """

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived since the last call; an empty list if there are none. Does not wait.

        Raises:
            ConnectionError: This end has closed the link; or the link is broken or closed by the other end, and all
                frames that have arrived were returned before.
            ProtocolError: The other end has sent bytes that are not a frame, or a frame that is too large. The link
                cannot be used any more.
        """

    def wait(self, seconds: float | None) -> bool:
        """Waits until frames may have arrived, the link is closed, or the time is over. Only for the thread that reads.

        Signal handlers run during the wait, and their exceptions are raised here. If a signal handler receives the
        frames of this link itself, this returns False within a second.

        Args:
            seconds: How long to wait at most; None for no limit, 0 to only look.

        Returns:
            True if `receive` should be called. False when the time is over, and perhaps earlier after `wake` or a
            signal.

        Raises:
            ConnectionError: This end has closed the link before.
        """

    def has_hung_up(self) -> bool:
        """Returns whether the other end has closed the link. Even then, `receive` may still have frames to return.

        Raises:
            ConnectionError: This end has closed the link.
        """

    def note_hang_up(self) -> None:
        """Tells this link that the other end has closed it. `wait` in another thread ends; later waits end at once."""

    def wake(self) -> None:
        """Ends `wait` in another thread early; if no thread waits, the next `wait` returns at once. Raises nothing."""

    def flush(self) -> None:
        """Sends queued frames as far as that is possible without waiting. Does nothing if none are queued.

        Raises:
            ConnectionError: The link is closed or broken.
        """

    def unsent_bytes(self) -> int:
        """Returns the number of bytes that wait in this process to be sent. If it is 0, `close` loses nothing.

        The result is also at least 1 while the other end has not yet opened a shared segment that it was sent. `close`
        removes that segment.
        """

    def establish(self, options: LinkOptions, deadline: float | None = None) -> None:
        """Completes the handshake: from now on, frames of up to `options.max_frame_size` bytes are received.

        Both ends must call this when both are authenticated.

        Args:
            options: The options of all links of this worker.
            deadline: Until when the connecting end waits for the other end to agree on shared memory, as a time of the
                monotonic clock. None at the accepting end, which does not wait.

        Raises:
            ConnectionError: The other end has closed the link.
            TimeoutError: The other end did not answer before `deadline`.
            ProtocolError: The answer of the other end cannot be read.
        """

    def counts(self) -> LinkCounts:
        """Returns the numbers of bytes that this link has received and sent so far, also after `close`."""

    def sweep(self, before: float) -> None:
        """Frees unused shared memory of this link that was last used before `before`. Does nothing if there is none.

        Args:
            before: A time of the monotonic clock.
        """

    def prepare_fork(self) -> None:
        """Must be called before this process forks, so that received buffers do not change in the child.

        The child inherits buffers that are in shared memory. From now on neither end reuses that memory for other
        frames.
        """

    def close(self) -> None:
        """Closes the link in both directions, and drops queued frames. May be called twice.

        Frames that have left this process may still arrive. From now on `send`, `receive` and `wait` raise
        `ConnectionError`.
        """

    def abandon(self) -> None:
        """Closes the descriptors in a forked child. The link stays open in the parent. Raises nothing."""


class Listener(Protocol):
    """Accepts connections from other workers at one address.

    Attributes:
        address: The address to pass to `Transport.connect`.
    """

    address: str

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when a link can be accepted.

        Raises:
            OSError: The listener is closed.
        """

    def accept(self) -> Link | None:
        """Returns the next link, which is in its handshake; None if nobody has connected. Does not wait.

        Raises:
            OSError: The listener is closed, or the process has no file descriptors left.
        """

    def close(self) -> None:
        """Stops listening. Links that were accepted stay open. May be called twice."""

    def abandon(self) -> None:
        """Closes the descriptor in a forked child. The parent continues to listen. Raises nothing."""


class Transport(Protocol):
    """A way to connect workers, such as TCP. A worker has one object of each transport. Transports have no threads.

    Attributes:
        scheme: The first part of all addresses of this transport, before the colon: `tcp`, for example.
    """

    scheme: str

    def listen(self, host: str | None, handshake_limit: int) -> Listener:
        """Returns a listener at a free address of this host.

        Args:
            host: The address of the network interface to listen at; None to let the transport choose. Transports that
                stay on one host ignore it.
            handshake_limit: The most bytes of a frame that an accepted link receives before it is established.

        Raises:
            OSError: `host` is not an address of this host, or the transport cannot be used here, for example because
                there is no directory for sockets.
        """

    def connect(self, address: str, timeout: float, handshake_limit: int) -> Link:
        """Connects to a listener, and returns the link, which is in its handshake.

        Args:
            address: The `address` of the listener.
            timeout: How many seconds to wait for the connection at most; 0 to not wait.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            OSError: The address is not valid, or nothing listens there.
            TimeoutError: The timeout has expired.
            ProtocolError: The program that listens there is not a worker, or only one end uses encryption.
        """

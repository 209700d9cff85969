"""How the large buffers of a connection travel: in shared memory where both ends can, else on the channel itself.

Each end offers a segment of its own in the greeting, and tries to open the other's (`transports.shared_memory`). Who
could says so, and only then does the other put anything there. So two workers of one host that cannot share memory
(another container, no `/proc`) just do not.

Rules
- Of an end that has not proved itself nothing is opened.
- What is in no segment, as it is small or all of them are lent, goes on the channel. Nobody waits for shared memory.
- Replies may have their buffers in what the other side has lent for a call, which goes back with them (`returning`).
  Where so much of that is kept that calls would find no memory, what comes back is copied, and its segment is free.
- A lane ends with its connection; what was received is its receiver's, and stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

from farcall.agent.sending import LARGE, InParts
from farcall.errors import ProtocolError
from farcall.protocol.control import HANDLE_SIZE, SECTION_SIZE
from farcall.protocol.wire import HUGE, MAX_BUFFERS, Bytes, Sizes, encode_in_parts, encode_shared, encode_start
from farcall.transports.base import Buffer, Channel
from farcall.transports.borrowed_memory import Borrower, Loan
from farcall.transports.received_memory import ReceivedMemory
from farcall.transports.segments import Place, copy
from farcall.transports.shared_memory import Lender, Pool

logger = logging.getLogger("farcall")

LEAST: Final = 1 << 16
"""Bytes from which on the buffers of a message go into shared memory. Less is faster through a socket."""
_USUAL: Final = 4 << 30
_MOST_KEPT: Final = 1 << 30
"""Bytes that were received into and are kept for the next message, at most."""
_MOST_SEGMENTS: Final = 128
"""At one worker: each has a descriptor."""
FEW_HANDLES: Final = 16
SMALL_HEAD: Final = 400
SMALL_BODY: Final = 60_000
"""What every worker takes, whatever its limits are."""
IDLE: Final = 10.0
"""Seconds after which memory that nobody uses is given back."""


def pool_for(name: str, limit: int | None) -> Pool:
    """What worker `name` may lend: so many bytes; None leaves the choice to us."""
    if limit is None:
        limit = min(_USUAL, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)

    def trouble(what: str) -> None:
        logger.warning("worker %r: %s; large data goes through sockets instead, and slower", name, what)

    return Pool(limit, _MOST_SEGMENTS, trouble)


def received_memory() -> ReceivedMemory:
    """What a worker receives large messages into, where they do not come in shared memory."""
    return ReceivedMemory(min(_MOST_KEPT, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16))


def _new_memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


class Lane:
    """That of one connection. It carries nothing until both ends have agreed."""

    __slots__ = ("_borrower", "_lender", "_pool", "_process", "limits", "new_memory", "on_large", "told")

    def __init__(self, pool: Pool, channel: Channel) -> None:
        self._pool = pool
        self._process: int | None = getattr(channel, "process", None)  # at the other end, if that is on this host
        self.limits = Sizes()
        """How large a message the other side takes."""
        self.new_memory: Callable[[int], memoryview] = _new_memory
        """Gives so many bytes, for a large buffer that is copied."""
        self.on_large: Callable[[int], object] = int  # which does nothing
        """Told how many bytes go or come, if they do in shared memory."""
        self._lender: Lender | None = None
        self._borrower: Borrower | None = None
        self.told = 0
        """Bytes that went to the other side behind the greeting, and not through a `Sender`."""

    # The greeting

    def offer(self) -> tuple[int, bytes]:
        """The descriptor and the token for the other side to try; -1 if this side lends nothing to it."""
        descriptor = self._pool.probe() if self._process is not None else -1
        return descriptor, self._pool.token if descriptor >= 0 else b""

    def accept(self, descriptor: int, token: bytes) -> bool:
        """Tries what the other side has offered; whether its buffers may come in shared memory."""
        if self._process is None or descriptor < 0:
            return False
        borrower = Borrower(self._process, token)
        try:
            borrower.check(descriptor)
        except (OSError, ValueError) as error:
            logger.info("process %d cannot share its memory with this one: %s", self._process, error)
            return False
        self._borrower = borrower
        return True

    def open(self) -> None:
        """The other side could open what was offered to it."""
        self._lender = self._lender or Lender(self._pool)

    def agree(self, limits: tuple[int, int]) -> None:
        """The other side has said how large a head and a message it takes."""
        if all(limits):
            self.limits = Sizes(*limits)

    # Messages

    def excess(self, head: int, handles: int, body: bytes, buffers: Sequence[memoryview]) -> str | None:
        """Why the other side would not take such a message, with so many bytes in its head besides the handles.

        It would close the connection, and whoever waits on it would hear of a worker that was lost.
        """
        head += SECTION_SIZE + handles * HANDLE_SIZE
        total = head + len(body)
        for buffer in buffers:
            total += buffer.nbytes
        limits = self.limits
        if total > limits.message:
            return f"about {total:,} bytes, and it takes {limits.message:,} at most (its option max_message_size)"
        if head > limits.head:
            return f"a head of about {head:,} bytes, and it takes {limits.head:,} at most (its option max_head_size)"
        return None

    def pieces(
        self, kind: int, call_id: int, head: bytes, body: bytes, buffers: Sequence[memoryview]
    ) -> Sequence[Buffer] | InParts:
        """A message with its buffers, as it goes on the channel. Raises `ProtocolError` if there are too many."""
        sizes = [buffer.nbytes for buffer in buffers]
        total = sum(sizes)
        lender = self._lender
        if lender is not None and total >= LEAST and len(buffers) <= MAX_BUFFERS:
            place = lender.lend(buffers)
            if place is not None:
                self.on_large(total)
                return (encode_shared(kind, call_id, head, body, sizes, *place),)
        if total + len(body) >= LARGE:
            return InParts(encode_in_parts(kind, call_id, head, body, buffers), call_id, (head, body, *buffers))
        return (encode_start(kind, call_id, head, body, buffers), *buffers)

    def keep(self, buffers: Sequence[memoryview]) -> tuple[Place, list[memoryview]] | None:
        """Puts the buffers of a message into shared memory that is not used again while the views of it are there.

        None if they go on the channel.
        """
        lender = self._lender
        if lender is None or len(buffers) > MAX_BUFFERS or sum([buffer.nbytes for buffer in buffers]) < LEAST:
            return None
        return lender.keep(buffers)

    def take_back(self, place: Place) -> None:
        """The message with what was kept there is not going to be sent."""
        if self._lender is not None:
            self._lender.take_back(place)

    def keep_rings(self, size: int) -> tuple[Place, memoryview] | None:
        """So much shared memory, all zeros, for as long as the lane lasts; None if there is none to be had for that."""
        if self._lender is None or not self._pool.may_have_rings(self):
            return None
        kept = self.keep([memoryview(bytes(size))])
        if kept is None:
            self._pool.take_rings_back(self)
            return None
        return kept[0], kept[1][0]

    def take(self, descriptor: int, number: int, sizes: Sequence[int]) -> Sequence[Bytes]:
        """The buffers of a message that the other side has put into a segment. Raises `ProtocolError`."""
        borrower = self._borrower
        if borrower is None:
            raise ProtocolError("a message came in shared memory, which this side has not agreed to")
        self.on_large(sum(sizes))
        try:
            return borrower.take(Place(descriptor, number), sizes)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a message came in shared memory that cannot be had: {error}") from None

    def loan_of(self, buffers: Sequence[memoryview]) -> Loan | None:
        """What these buffers are of, if they may go back in the memory that the other side has lent: see there."""
        borrower = self._borrower
        if borrower is None or not buffers or sum([buffer.nbytes for buffer in buffers]) < LEAST:
            return None
        return borrower.loan_of(buffers)

    def take_returned(self, number: int, offsets: Sequence[int], sizes: Sequence[int]) -> Sequence[Bytes]:
        """The buffers of a reply, which are in a segment of ours again. Raises `ProtocolError`."""
        lender = self._lender
        if lender is None:
            raise ProtocolError("a reply came in shared memory of this side, which has lent none")
        self.on_large(sum(sizes))
        try:
            views = lender.take_returned(number, offsets, sizes)
        except OSError as error:
            raise ProtocolError(f"a reply came in shared memory of this side that cannot be: {error}") from None
        return [self._copied(view) for view in views] if lender.is_short() else views

    def _copied(self, view: memoryview) -> memoryview:
        memory = self.new_memory(view.nbytes) if view.nbytes >= HUGE else _new_memory(view.nbytes)
        copy(memory, view)
        return memory

    # Time, and the end

    def has_unseen(self) -> bool:
        """Whether the other side has not yet opened something that it can open only while this lane lasts."""
        return self._lender is not None and self._lender.has_unseen()

    def sweep(self, now: float) -> None:
        """Gives memory back that has not been used for a while."""
        if self._lender is not None:
            self._lender.sweep(now - IDLE)
        borrower = self._borrower
        if borrower is not None:
            borrower.sweep(now - 2 * IDLE)  # later than the lender: it would only have to be opened again

    def pin(self) -> None:
        """This process is about to fork."""
        borrower = self._borrower
        if borrower is not None:
            borrower.pin()
        if self._lender is not None:
            self._lender.pin()

    def close(self) -> None:
        """Lends and borrows no more. May be called twice."""
        self._pool.take_rings_back(self)
        self._borrower = None  # what nobody uses is unmapped now, though somebody may keep the connection
        if self._lender is not None:
            self._lender.close()

    def abandon(self) -> None:
        """In a forked child: what was lent is the parent's business."""
        self._borrower = None
        if self._lender is not None:
            self._lender.abandon()

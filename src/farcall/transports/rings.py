"""Two rings of bytes in memory that two processes share: a way for small messages, beside a socket.

A message takes two system calls on each side of a socket, and a ring takes none. But a ring wakes nobody. So a message
goes through it only while its reader is polling just now, and through the socket at all other times.

One direction, of `RING_SIZE` bytes; the first is that of who has made the memory, the second the other's:

    offset  size   what (numbers of 8 bytes, in the machine's own order)
    0       8      HEAD: bytes ever put in; set by the writer
    64      8      TAIL: bytes ever taken out; set by the reader, as are the next two
    128     8      AWAKE: 0 if the reader sleeps, or may; 1 if who sleeps next will look before that
    136     8      READ: bytes that the reader has had from the socket so far
    256     65536  the bytes: number n of all is at n modulo 65536

A ring carries a stream: whole messages, one behind the other, with nothing in between.

Rules
- *Order.* The writer puts something in only if the reader has had all that went on the socket before (READ). So what is
  in the ring was always sent before what is still in the socket. A reader that has received from the socket looks into
  the ring after that, and before it sets READ: what it finds there comes first.
- *Sleep.* Whoever is about to sleep until the socket has something sets AWAKE to 0 first, and then looks into the ring
  (`rest`). The writer sets HEAD, and then looks at AWAKE once more: if it is 0, it sends a *knock* through the socket.
  So either the reader sees what is there, or the knock wakes it.
- *Fences.* In these two places, and nowhere else, something is read after something was written, and the order matters.
  An x86 keeps all other order by itself (`is_possible`), but it may read first there: what is written waits in a buffer
  of the core. So both have a `fence` in between. The sender's lock is none: it may be taken twice by one thread, and
  then only a number is counted down when it is released.
- *Trust.* What the other side writes is a number that may be anything. Nobody reads or writes outside of the ring for
  it, or waits for it. A reader whose HEAD cannot be says so by a `ProtocolError`; a writer takes the socket.
- An interrupt (Ctrl-C) in the midst of `put` or `take` leaves the connection of no use, as one in a socket's would.
- A forked child has the memory, too. It lets go of both ends (`abandon`) before it does anything else.

AWAKE stays 1 while the reader deals with what it has found, or does something else altogether: what comes meanwhile
waits in the ring, as it would wait in the socket, and nobody is to be woken for it. For whoever could be woken by the
socket has let the ring rest before. These are all who sleep there, and how each comes to that:

    who sleeps                                  where it lets the ring rest
    a thread that waits for its reply           `Spinning.look` gives nothing only after that: the time is over, others
      (`Outgoing.read_until`)                   want the core, or spinning does not pay
    the same, around a wait of a signal         the inner wait does so on its every way out, and takes what is there
      handler or finalizer in that thread
    the serving pool, for a connection that     as it is asked to watch (`Outgoing.watch_in_background`), before the
      nobody reads (`Reading`)                  role is free; nobody reads while it watches
    the background reader, for a moment         `Outgoing.receive_in_background`
    the leader of the serving pool              `Serving._handle_events`: by `look`, or at once while functions run
    the leader, a ring being no longer hot      `HotRings.warm`, for the one that makes room
    nobody, as the connection is closed         not at all: the other side sees the socket's end

So these leave AWAKE as it is: a hit; an error or Ctrl-C anywhere; a reader that leaves the role or gives way to threads
that take turns; a leader that runs a function or is deposed. The next one who reads, or sleeps, finds what has come,
and if there is none, nobody waits for it: the supervisor has a connection watched on which something is awaited.

Not locked: one thread at a time may write, and one may read.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock
from collections.abc import Sequence
from typing import Any, Final

from farcall.errors import ProtocolError

CAPACITY: Final = 1 << 16
MOST: Final = 1 << 14
"""Bytes of the largest message that goes through a ring. What is larger is as fast through a socket."""
HEAD: Final = 0
TAIL: Final = 8
AWAKE: Final = 16
READ: Final = 17
"""Where the numbers are, counted in numbers. What is written for each message has a line of the cache of its own."""

_WORDS: Final = 256
_WITHIN: Final = CAPACITY - 1
RING_SIZE: Final = _WORDS + CAPACITY
PAIR_SIZE: Final = 2 * RING_SIZE


def is_possible() -> bool:
    """Whether this machine keeps the order of what it writes, and of what it reads, and this interpreter does."""
    return os.uname().machine == "x86_64" and sys.implementation.name == "cpython"


def fence() -> None:
    """What was written before is there for all to see before anything is read after it.

    To take a lock that is free is one instruction that has this effect, in every version: it compares and exchanges. A
    lock that is taken would not do. It is seen by a plain read that it is, in C, and nothing else is done. Hence a new
    one each time: it is free, whoever else is here, and an interrupt leaves nothing locked.
    """
    allocate_lock().acquire(False)


def _words(memory: memoryview) -> memoryview:
    # A memoryview moves a number of this format by one instruction, so that nobody sees half of it.
    return memory[:_WORDS].cast("Q")


def _nothing() -> tuple[memoryview, memoryview]:
    memory = memoryview(bytearray(RING_SIZE))
    return _words(memory), memory[_WORDS:]


class RingWriter:
    """The end of a ring that puts in."""

    __slots__ = ("_behind", "_data", "_tail", "head", "words")

    def __init__(self, memory: memoryview, behind: int) -> None:
        """Of `RING_SIZE` bytes of memory, zeros at first. `behind`: what `put` is told that READ does not count."""
        self.words, self._data = _words(memory), memory[_WORDS:]
        self._behind = behind
        self._tail = 0  # as it was when it was last looked at
        self.head = 0
        """How many bytes were put in so far."""

    def put(self, message: bytes, sent: int) -> bool:
        """Puts the message in, if the reader is awake; whether it did. Then AWAKE must be looked at: see `is_unseen`.

        `sent`: how many bytes have gone to the other side before it, through the ring or not.
        """
        size = len(message)  # first: a signal handler may fork as this returns, and `abandon` there
        words, head = self.words, self.head
        if not words[AWAKE] or size > MOST or words[READ] + head + self._behind != sent:
            return False
        if head + size - self._tail > CAPACITY:
            tail = words[TAIL]
            if not 0 <= head - tail <= CAPACITY - size:
                return False
            self._tail = tail
        begin = head & _WITHIN
        end = begin + size
        if end <= CAPACITY:
            self._data[begin:end] = message
        else:
            fits = CAPACITY - begin
            self._data[begin:] = message[:fits]
            self._data[: end - CAPACITY] = message[fits:]
        self.head = words[HEAD] = head + size
        fence()
        return True

    def is_unseen(self) -> bool:
        """Whether the reader, which has slept by now, may have missed something: it needs a knock."""
        words = self.words
        return bool(not words[AWAKE] and words[TAIL] != self.head)

    def abandon(self) -> None:
        """In a forked child: the ring is the parent's. Nothing is put in here any more, by whoever is about to."""
        self.words, self._data = _nothing()


class RingReader:
    """The end of a ring that takes out."""

    __slots__ = ("_data", "event", "is_open", "taken", "words")

    def __init__(self, memory: memoryview, event: Any = None) -> None:
        """Of `RING_SIZE` bytes of memory."""
        self.words, self._data = _words(memory), memory[_WORDS:]
        self.event = event
        """What stands for it where somebody waits for several."""
        self.is_open = True
        """Whether anybody still cares for it."""
        self.taken = 0
        """How many bytes were taken out so far: there are some more while HEAD is another number."""

    def take(self) -> bytes:
        """All that is in it. Raises `ProtocolError` if the other side has written what cannot be."""
        words, taken = self.words, self.taken
        head = words[HEAD]
        size = head - taken
        if not size:
            return b""
        if not 0 < size <= CAPACITY:
            raise ProtocolError(f"a ring of {CAPACITY} bytes of shared memory was said to hold {size}")
        begin = taken & _WITHIN
        end = begin + size
        if end <= CAPACITY:
            data = self._data[begin:end].tobytes()
        else:
            data = self._data[begin:].tobytes() + self._data[: end - CAPACITY].tobytes()
        self.taken = words[TAIL] = head
        return data

    def has_some(self) -> bool:
        """Whether there is something to take."""
        return bool(self.words[HEAD] != self.taken)

    def had(self, received: int) -> None:
        """So many bytes have come so far, through the ring or not. All that is still in the ring is newer."""
        self.words[READ] = received - self.taken

    def abandon(self) -> None:
        """In a forked child: the ring is the parent's. Nothing is taken out here any more, by whoever is about to."""
        self.words, self._data = _nothing()
        self.taken = 0


def rest(rings: Sequence[RingReader]) -> list[Any]:
    """Somebody is about to sleep; the events of those that have something, which must be taken instead."""
    if not rings:
        return []
    for ring in rings:
        ring.words[AWAKE] = 0
    fence()
    return found(rings)


def found(rings: Sequence[RingReader]) -> list[Any]:
    """The events of those that have something."""
    return [ring.event for ring in rings if ring.words[HEAD] != ring.taken]

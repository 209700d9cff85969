"""A member on the same host that writes garbage into the ring it shares with a worker, or sets it up wrongly."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hostile_member import CALL, CALLS, RESULT, SETUP, SETUP_DONE, HandMade, header
from test_hostile_frames import DICT, call, framed, internal
from test_hostile_members import SECRET, OpenGroup

import farcall as rpc
from eventually import eventually

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not rpc.native_available(), reason="rings need the C extension"),
]

CAPACITY = 1 << 16
HEAD, TAIL, READER_SLEEPS, POLLER, WRITER_WAITS, RING_HEADER = 0, 64, 128, 132, 192, 256
"""Where the words of a ring are in its header; the second ring's header follows the first one's."""
BYTES = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
INTERNAL = 1 << 31


@pytest.fixture
def group() -> Iterator[OpenGroup]:
    group = OpenGroup("unix")
    yield group
    rpc.shutdown(graceful=False)


@contextmanager
def member(group: OpenGroup) -> Iterator[HandMade]:
    """A connection of a member that was let in, and has not set its ring up."""
    with HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand)["type"] == "welcome"
        yield hand


def setup_frame(has_ring: bool = True, capacity: int = CAPACITY) -> bytes:
    return internal(struct.pack("<BBxxIi16s", SETUP, has_ring, capacity, -1, bytes(16)))


def new_memory(size: int = BYTES + 2 * CAPACITY, seals: int = SEALS) -> int:
    memory = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


class Ring:
    """A ring that was set up by hand: whatever is written there, the worker sees."""

    def __init__(self, hand: HandMade, stack: ExitStack) -> None:
        memory = new_memory()
        events = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
        for descriptor in (memory, *events):
            stack.callback(os.close, descriptor)
        self.hand = hand
        self.bytes = stack.enter_context(mmap.mmap(memory, BYTES + 2 * CAPACITY))
        socket.send_fds(hand.sock, [setup_frame()], [memory, *events])
        data, self._events, _, _ = socket.recv_fds(hand.sock, 100, 4)
        for event in self._events:
            stack.callback(os.close, event)
        _, kind, flags = struct.unpack_from("<IBB", data)
        assert (kind, flags & 1, len(self._events)) == (SETUP_DONE, 1, 2)

    def write(self, data: bytes) -> None:
        """Puts bytes where the next frame belongs, and says so."""
        (head,) = struct.unpack_from("<Q", self.bytes, HEAD)
        for at, byte in enumerate(data, head):
            self.bytes[BYTES + at % CAPACITY] = byte
        self.set_word(HEAD, head + len(data))

    def set_word(self, at: int, value: int) -> None:
        """Changes one of the positions, and wakes the worker."""
        struct.pack_into("<Q", self.bytes, at, value)
        for event in self._events:
            os.eventfd_write(event, 1)

    def reply(self) -> bytes:
        """Waits for the next bytes of the worker's ring; all that it has written."""
        eventually(lambda: struct.unpack_from("<Q", self.bytes, RING_HEADER + HEAD)[0])
        (head,) = struct.unpack_from("<Q", self.bytes, RING_HEADER + HEAD)
        return self.bytes[BYTES + CAPACITY : BYTES + CAPACITY + head]


@contextmanager
def ring_of(group: OpenGroup) -> Iterator[Ring]:
    with member(group) as hand, ExitStack() as stack:
        yield Ring(hand, stack)


def check_well(group: OpenGroup) -> None:
    """Another connection is served, through its ring."""
    with ring_of(group) as ring:
        ring.write(framed(header(CALL, 0, len(DICT), 0, 5) + DICT))
        assert ring.reply()[4:20] == header(RESULT, call_id=5)


ATTACKS: dict[str, Callable[[Ring], object]] = {
    "a head that is far ahead": lambda ring: ring.set_word(HEAD, 1 << 40),
    "a head that is behind": lambda ring: ring.set_word(HEAD, 2**64 - 1),
    "a head just beyond the capacity": lambda ring: ring.set_word(HEAD, CAPACITY + 1),
    "half a word": lambda ring: ring.write(b"\1\0"),
    "a frame that is larger than what was written": lambda ring: ring.write(struct.pack("<I", 100) + bytes(16)),
    "a frame that is larger than the ring": lambda ring: ring.write(struct.pack("<I", 0x7FFFFFFF) + bytes(16)),
    "an internal frame that is larger than the ring": lambda ring: ring.write(b"\xff" * 20),
    "an empty frame": lambda ring: ring.write(framed(b"")),
    "a short frame": lambda ring: ring.write(framed(bytes(15))),
    "a result": lambda ring: ring.write(framed(header(RESULT, call_id=1))),
    "an empty internal frame": lambda ring: ring.write(internal(b"")),
    **{
        f"internal frame {kind}": lambda ring, kind=kind: ring.write(internal(bytes([kind]) + b"\xff" * 40))  # type: ignore[misc]
        for kind in (*range(1, 7), 8, 9, 10, 12, 255)
    },
    "pieces of an internal frame that do not end": lambda ring: [
        ring.write(internal(struct.pack("<BBxxI", 11, 0, number))) for number in range(70)
    ],
    "an internal frame inside of itself": lambda ring: ring.write(internal(struct.pack("<BBxxI", 11, 1, 1) + b"\x0b")),
    "garbage all over the ring": lambda ring: ring.write(os.urandom(CAPACITY - 8)),
    "a tail of the worker's ring that is far ahead": lambda ring: (
        ring.set_word(RING_HEADER + TAIL, 1 << 40),
        ring.write(framed(header(CALL, 0, len(DICT), 0, 1) + DICT)),
    ),
}


def test_garbage_in_a_ring_closes_its_link(group: OpenGroup) -> None:
    for what, attack in ATTACKS.items():
        with ring_of(group) as ring:
            attack(ring)
            assert ring.hand.is_closed(), what
        check_well(group)


def test_the_words_by_which_ends_wake_each_other_and_bytes_beside_the_ring_harm_nobody(group: OpenGroup) -> None:
    with ring_of(group) as ring:
        for at in (READER_SLEEPS, POLLER, WRITER_WAITS):
            for begin in (0, RING_HEADER):
                struct.pack_into("<I", ring.bytes, begin + at, 0xFFFFFFFF)
        ring.hand.sock.sendall(b"beside the ring")
        ring.write(framed(header(CALL, 0, len(DICT), 0, 5) + DICT))
        assert ring.reply()[4:20] == header(RESULT, call_id=5)
    check_well(group)


def send_setup(hand: HandMade, memory: int, events: list[int], frame: bytes | None = None) -> None:
    socket.send_fds(hand.sock, [setup_frame() if frame is None else frame], [memory, *events])


@contextmanager
def descriptors() -> Iterator[tuple[int, list[int], int]]:
    """Memory and events for a ring, and the descriptor of a pipe that nobody reads."""
    reading, writing = os.pipe()
    memory, events = new_memory(), [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    try:
        yield memory, events, writing
    finally:
        for each in (memory, *events, reading, writing):
            os.close(each)


@pytest.mark.parametrize(
    "attack",
    [
        lambda hand, memory, events, pipe: send_setup(hand, memory, [events[0], pipe]),
        lambda hand, memory, events, pipe: send_setup(hand, memory, [pipe, pipe]),
        lambda hand, memory, events, pipe: send_setup(hand, memory, events, internal(bytes([SETUP]))),
        lambda hand, memory, events, pipe: send_setup(hand, memory, events, internal(bytes([SETUP_DONE]) + bytes(27))),
        lambda hand, memory, events, pipe: hand.sock.sendall(internal(b"")),
        lambda hand, memory, events, pipe: hand.sock.sendall(setup_frame(False) * 2),
        lambda hand, memory, events, pipe: hand.frame(CALL, DICT, callee_size=len(DICT), call_id=1),
        lambda hand, memory, events, pipe: hand.internal(bytes([1, 0, 0, 0, 16, 0, 0, 0]) + header(CALL)),
    ],
    ids=[
        "one event is a pipe",
        "both events are pipes",
        "too short",
        "the wrong kind",
        "empty",
        "twice",
        "a call before",
        "an internal frame before",
    ],
)
def test_a_ring_that_is_set_up_wrongly_closes_its_link(group: OpenGroup, attack: Callable[..., None]) -> None:
    check_well(group)  # which also makes what the first link of a worker makes
    before = len(os.listdir("/proc/self/fd"))
    with member(group) as hand, descriptors() as given:
        attack(hand, *given)
        assert hand.is_closed()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    check_well(group)


@pytest.mark.parametrize(
    "made",
    [
        lambda: new_memory(seals=0),
        lambda: new_memory(seals=fcntl.F_SEAL_GROW),
        lambda: new_memory(seals=SEALS | fcntl.F_SEAL_WRITE),
        lambda: new_memory(size=BYTES),
        lambda: new_memory(size=1 << 30),
        lambda: os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR, 0o600),
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open("/dev/null", os.O_RDONLY),
    ],
    ids=["no seals", "may shrink", "read-only", "too small", "too large", "a file", "a device", "a device to read"],
)
def test_memory_that_is_no_ring_is_not_used(group: OpenGroup, made: Callable[[], int]) -> None:
    """The frames go through the socket then."""
    with member(group) as hand, descriptors() as (_, events, _):
        memory = made()
        try:
            send_setup(hand, memory, events)
            kind, flags = hand.receive_frame()[:2]
            assert (kind, flags & 1) == (SETUP_DONE, 0)
            assert call(hand, 3)[:16] == header(RESULT, call_id=3)
        finally:
            os.close(memory)
    check_well(group)

"""The rules of `farcall.transports.base`, as tests that any transport can be put to. Needs pytest.

    class TestMyTransport(TransportConformance):
        @pytest.fixture
        def transport(self):
            return MyTransport()

        @pytest.fixture
        def full_address(self):
            ...  # yield an address where no more connections can wait to be accepted, and clean up

The suite checks what an agent relies on. It does not check how fast a transport is, nor what its own options do. For
readable failures put `pytest.register_assert_rewrite("farcall.testing.conformance")` into `conftest.py`.

Each test has two stand-ins for workers (`FakeWorker`), one for each end of a link. They have no threads: a test calls
`turn` where the leader of a worker would handle what has come.

Rules for the tests: every wait ends after `TIMEOUT_S`; everything that was opened is closed.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any, Final, NamedTuple

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.handshake import pack_prologue
from farcall.transports.base import Frame, Link, LinkOptions, Listener, Transport
from farcall.transports.buffer_pool import BufferPool
from farcall.transports.poller import Poller
from farcall.transports.shm_segments import SegmentPool

TIMEOUT_S: Final = 20.0
"""Seconds after which a test gives up on something that should happen at once."""
HANDSHAKE_LIMIT: Final = 1000
"""The largest frame, in bytes, that the links of these tests accept before `Link.establish` was called."""

_FRAME_SIZES: Final = (0, 1, 3, 4, 5, 100, 4096, 16_000, 16_384, 16_385, 65_535, 65_536, 65_537, 600_000, 5 << 20)
"""The frame sizes, in bytes, that `test_frames_of_all_sizes_arrive` sends, around typical limits of links."""
_BUFFER_SIZES: Final[tuple[list[int], ...]] = (
    [0],
    [1],
    [0, 0, 5, 0],
    [1, 63, 64, 65, 4096],
    [16_300],
    [16_384],
    [65_536],
    [65_537, 0, 1],
    [1 << 20],
    [3 << 20, 7, 0, 1 << 18],
    [10] * 1000,
    [40_000] * 20,
)
"""The lists of buffer sizes, in bytes, that `test_buffers_arrive_beside_their_frame` sends; one list for each frame."""


class FakeWorker:
    """Stands for a worker: the poller, the memory and the options that its links share. It has no threads of its own.

    A test passes `options` to `Link.establish`, registers links with `poller`, and calls `turn` to handle their events.

    Args:
        use_rings: Whether its links may have rings, queues of frames in shared memory.
        shared_memory: How many bytes of shared memory it may use; 0 for none.
        max_frame_size: The largest frame, with its buffers, that its links accept, in bytes.
        spin_s: How many seconds a waiting thread polls before it sleeps; 0 to sleep at once.

    Attributes:
        problems: The warnings of the pool of shared memory, as texts; empty if there were none.
        poller: Waits for events of the links that were registered with it.
        options: The `LinkOptions` that `Link.establish` takes.
    """

    def __init__(
        self, use_rings: bool = True, shared_memory: int = 1 << 28, max_frame_size: int = 1 << 40, spin_s: float = 2e-5
    ) -> None:
        """Creates a worker without links. The arguments are not checked.

        Args:
            use_rings: Whether its links may have rings, queues of frames in shared memory.
            shared_memory: How many bytes of shared memory it may use; 0 for none.
            max_frame_size: The largest frame, with its buffers, that its links accept, in bytes.
            spin_s: How many seconds a waiting thread polls before it sleeps; 0 to sleep at once.
        """
        self.problems: list[str] = []
        """The warnings of the pool of shared memory, as texts; empty if there were none."""
        segments = SegmentPool(shared_memory, 128, self.problems.append)
        self.poller = Poller(spin_s, use_rings)
        self.options = LinkOptions(
            self.poller, segments, BufferPool(1 << 26), spin_s, copy_shared=False, max_frame_size=max_frame_size
        )

    def turn(self, seconds: float = 0.0) -> int:
        """Waits up to `seconds` for events of the links that the poller watches, and calls their handlers.

        0 does not wait. Returns how many handlers were called; 0 if nothing has happened. Raises what a handler raises.
        """
        handlers = self.poller.wait(seconds)
        for handler in handlers:
            handler()
        return len(handlers)

    def turn_until(self, condition: Callable[[], object]) -> None:
        """Calls the handlers of this worker's links, as events come, until `condition()` is true; not at all if it is.

        Raises `AssertionError` after `TIMEOUT_S` seconds, and what a handler or `condition` raises.
        """
        deadline = monotonic() + TIMEOUT_S
        while not condition():
            assert monotonic() < deadline, "it did not come to hold"
            self.turn(0.01)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Context manager: inside it, a thread calls the handlers of this worker's links as events come.

        At its end, what a handler raised in that thread is raised here. The thread has ended then.
        """
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                self.turn(TIMEOUT_S)

        join = in_thread(serve)
        try:
            yield
        finally:
            is_over.set()
            self.poller.wake()
            join()

    def close(self) -> None:
        """Closes the poller and the pools of memory. The links of this worker must be closed before."""
        self.poller.close()
        self.options.segments.close()
        self.options.received.close()


class LinkPair(NamedTuple):
    """The two ends of one connection, in their handshake or established, and the workers that they belong to.

    A test sends on one end and receives on the other. `close` must be called at the end.

    Attributes:
        ours: The end that connected.
        theirs: The end that was accepted.
        our_worker: The worker of `ours`.
        their_worker: The worker of `theirs`.
    """

    ours: Link
    theirs: Link
    our_worker: FakeWorker
    their_worker: FakeWorker

    def directions(self) -> tuple[tuple[Link, Link], tuple[Link, Link]]:
        """Returns two pairs, each of a sending and a receiving end: (`ours`, `theirs`) and (`theirs`, `ours`)."""
        return (self.ours, self.theirs), (self.theirs, self.ours)

    def close(self) -> None:
        """Closes both ends, and removes them from the pollers of their workers. May be called again."""
        self.our_worker.poller.unwatch(self.ours)
        self.their_worker.poller.unwatch(self.theirs)
        self.ours.close()
        self.theirs.close()


class TransportConformance:
    """The tests that a transport must pass. Subclass it, and override the fixtures `transport` and `full_address`.

    A subclass also sets the class attributes, if their defaults do not fit its transport. pytest runs the tests. Each
    test raises `AssertionError` if the transport breaks the rule, and none takes longer than a few `TIMEOUT_S`.

    Attributes:
        use_rings: Whether the links may use rings, queues of frames in shared memory. They do only if both ends are on
            one host and there is the C extension.
        shared_memory: How many bytes of shared memory each worker of a test may use; 0 for none.
        large_bytes: The size of a large frame. It is more bytes than the transport itself takes, for example in socket
            buffers, while the other end does not receive.
        large_frames_wait: Whether `send` of a frame of `large_bytes` waits until the other end receives. False if the
            link puts such a frame into shared memory.

    Example:
        class TestMyTransport(TransportConformance):
            @pytest.fixture
            def transport(self):
                return MyTransport()

            @pytest.fixture
            def full_address(self):
                ...  # yield an address where no more connections can wait to be accepted, and clean up
    """

    use_rings = True
    shared_memory = 1 << 28
    large_bytes = 32 << 20
    large_frames_wait = True

    @pytest.fixture
    def transport(self) -> Transport:
        """Fixture: returns the transport to test, a new one for each test.

        A subclass must override it. This one raises `NotImplementedError`.
        """
        raise NotImplementedError("override the fixture `transport`: return the transport to test")

    @pytest.fixture
    def full_address(self) -> Iterator[str]:
        """Fixture: yields an address whose listener never accepts and whose queue of waiting connections is full.

        A subclass must override it, and free the listener after the `yield`. This one raises `NotImplementedError`.
        """
        raise NotImplementedError("override the fixture `full_address`: yield an address whose queue is full")

    @pytest.fixture
    def connect_raw(self) -> Callable[[str], Any]:
        """Fixture: returns a function that takes an address and connects to it without a link.

        The function returns an object with the methods `sendall`, `recv` and `close` of a socket, which carries bytes
        as they are on the wire. Override this fixture for a transport that uses `StreamLink`. If it is not overridden,
        the tests that need it are skipped.
        """
        pytest.skip("the bytes of this transport are its own business")

    @pytest.fixture
    def new_worker(self) -> Iterator[Callable[..., FakeWorker]]:
        """Fixture: yields a function that creates and returns a `FakeWorker`, a stand-in for a worker without threads.

        The function takes the keyword arguments `max_frame_size` and `spin_s`. The workers are closed after the test.
        """
        workers = []

        def new(**options: Any) -> FakeWorker:
            workers.append(FakeWorker(self.use_rings, self.shared_memory, **options))
            return workers[-1]

        yield new
        for worker in workers:
            worker.close()

    @pytest.fixture
    def listener(self, transport: Transport) -> Iterator[Listener]:
        """Fixture: yields a listener of the transport at a free address, and closes it after the test."""
        listener = transport.listen(None, HANDSHAKE_LIMIT)
        yield listener
        listener.close()

    @pytest.fixture
    def new_pair(
        self, transport: Transport, listener: Listener, new_worker: Callable[..., FakeWorker]
    ) -> Iterator[Callable[..., LinkPair]]:
        """Fixture: yields a function that opens and establishes a connection, and returns its two ends as a `LinkPair`.

        The function takes the keyword arguments `max_frame_size` and `spin_s`, for both ends. It raises
        `AssertionError` if the connection is not established in time. The connections are closed after the test.
        """
        pairs = []

        def new(**options: Any) -> LinkPair:
            pair = LinkPair(*open_links(transport, listener), new_worker(**options), new_worker(**options))
            pairs.append(pair)
            establish(pair)
            return pair

        yield new
        for pair in pairs:
            pair.close()

    @pytest.fixture
    def pair(self, new_pair: Callable[..., LinkPair]) -> LinkPair:
        """Fixture: returns both ends of one established connection, as a `LinkPair`. They are closed after the test."""
        return new_pair()

    @pytest.fixture
    def handshake(self, transport: Transport, listener: Listener) -> Iterator[tuple[Link, Link]]:
        """Fixture: yields the connecting and the accepted end of a connection, before `establish` was called on them.

        Both are closed after the test.
        """
        ours, theirs = open_links(transport, listener)
        yield ours, theirs
        ours.close()
        theirs.close()

    # Addresses, listening, connecting

    def test_addresses_begin_with_the_scheme(
        self, transport: Transport, listener: Listener, handshake: tuple[Link, Link]
    ) -> None:
        """Checks that `address` of the listener and of both links is the transport's `scheme`, a colon, and more."""
        for address in (listener.address, handshake[0].address, handshake[1].address):
            assert address.startswith(transport.scheme + ":")
            assert len(address) > len(transport.scheme) + 1

    def test_each_listener_has_an_address_of_its_own(self, transport: Transport, listener: Listener) -> None:
        """Checks that two listeners have different addresses, and that only the one that was connected to accepts."""
        other = transport.listen(None, HANDSHAKE_LIMIT)
        try:
            assert other.address != listener.address
            for link in open_links(transport, other):
                link.close()
            assert listener.accept() is None
        finally:
            other.close()

    def test_accept_returns_none_if_nobody_connects(self, listener: Listener) -> None:
        """Checks that `Listener.accept` returns None and `fileno()` is not readable if nobody has connected."""
        assert listener.accept() is None
        assert not is_readable(listener, 0)

    def test_listener_polls_readable_until_all_are_accepted(self, transport: Transport, listener: Listener) -> None:
        """Checks that `fileno()` of a listener is readable while connections wait, and not after the last was accepted.

        Three threads connect. After the third `accept`, another one must return None.
        """
        ours: list[Link] = []

        def connect() -> None:
            ours.append(transport.connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT))

        joins = [in_thread(connect) for _ in range(3)]
        theirs = [accept(listener) for _ in joins]
        receive_until(theirs, lambda: len(ours) == len(joins))
        assert not is_readable(listener, 0)
        assert listener.accept() is None
        for join in joins:
            join()
        for link in ours + theirs:
            link.close()

    def test_connecting_to_nobody_fails_at_once(self, transport: Transport, listener: Listener) -> None:
        """Checks that `Transport.connect` to the address of a closed listener raises an `OSError` at once.

        The text of the error must contain the address. The error must not be a `TimeoutError`.
        """
        listener.close()
        begin = monotonic()
        error = oserror_of(transport.connect, listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)
        assert not isinstance(error, TimeoutError)
        assert listener.address in str(error)
        assert monotonic() - begin < TIMEOUT_S / 4

    @pytest.mark.parametrize("rest", ["", ":", "nonsense", "[", "\0", "a:b:c", "/" + "x" * 300, "ü..", "/\ud800"])
    def test_connecting_to_nonsense_raises_oserror(self, transport: Transport, rest: str) -> None:
        """Checks that `Transport.connect` to `scheme:rest` with a `rest` that is no address raises an `OSError`.

        The error must not be a `TimeoutError`, nor any other kind, such as `ValueError` or `UnicodeError`.
        """
        error = oserror_of(transport.connect, f"{transport.scheme}:{rest}", TIMEOUT_S, HANDSHAKE_LIMIT)
        assert not isinstance(error, TimeoutError)

    def test_connecting_ends_at_its_timeout(self, transport: Transport, full_address: str) -> None:
        """Checks that `Transport.connect` raises `TimeoutError` after its timeout, 0.2 s, if nobody accepts.

        The text of the error must contain the address.
        """
        begin = monotonic()
        error = oserror_of(transport.connect, full_address, 0.2, HANDSHAKE_LIMIT)
        assert isinstance(error, TimeoutError)
        assert full_address in str(error)
        assert 0.19 < monotonic() - begin < TIMEOUT_S / 4

    def test_many_links_are_kept_apart(self, transport: Transport, listener: Listener) -> None:
        """Checks that a frame on each of 32 open connections, and its answer, arrive on the same connection."""
        pairs = [open_links(transport, listener) for _ in range(32)]
        for number, (ours, _) in enumerate(pairs):
            ours.send(bytes([number]))
        for number, (ours, theirs) in enumerate(pairs):
            assert receive(theirs) == bytes([number])
            theirs.send(bytes([number, number]))
            assert receive(ours) == bytes([number, number])
        for ours, theirs in pairs:
            ours.close()
            theirs.close()

    def test_links_outlive_their_listener(self, listener: Listener, pair: LinkPair) -> None:
        """Checks that a listener can be closed twice, and that its links still carry frames both ways."""
        listener.close()
        listener.close()
        for sender, receiver in pair.directions():
            sender.send(b"still here")
            assert receive(receiver) == b"still here"

    def test_closed_listener_raises_oserror(self, listener: Listener) -> None:
        """Checks that `accept` and `fileno` of a listener raise `OSError` after its `close`."""
        listener.close()
        oserror_of(listener.accept)
        oserror_of(listener.fileno)

    def test_link_that_was_never_accepted_ends_with_the_listener(
        self, transport: Transport, listener: Listener
    ) -> None:
        """Checks that closing a listener ends a connection that waits to be accepted.

        `Transport.connect` or `receive` of its link must raise `ConnectionError`.
        """

        def connect_and_receive() -> None:
            try:
                ours = transport.connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)
            except ConnectionError:
                return
            assert_ends(ours)
            ours.close()

        join = in_thread(connect_and_receive)
        assert is_readable(listener)
        listener.close()
        join()

    # The handshake

    def test_new_link_has_nothing_to_receive(self, handshake: tuple[Link, Link]) -> None:
        """Checks the state of both links after connecting, before any frame was sent.

        `is_established` and `has_hung_up()` are False, `receive()` is an empty list, and `unsent_bytes()` and `backlog`
        are 0.
        """
        for link in handshake:
            assert not link.is_established
            assert link.receive() == []
            assert not link.has_hung_up()
            assert link.unsent_bytes() == link.backlog == 0

    def test_both_ends_have_the_same_binding(self, handshake: tuple[Link, Link]) -> None:
        """Checks that both ends of a link have the same `binding`, and that one of `network` and `binding` is empty.

        `binding` is the fingerprint of the certificate of an encrypted link, `network` a text for an unencrypted
        loopback link.
        """
        ours, theirs = handshake
        assert ours.binding == theirs.binding
        assert isinstance(ours.network, str)
        assert not (ours.network and ours.binding)

    def test_frames_of_the_handshake_arrive_in_order(self, handshake: tuple[Link, Link]) -> None:
        """Checks that 10 frames that are sent before `establish` arrive unchanged and in order, in both directions."""
        for sender, receiver in (handshake, handshake[::-1]):
            for number in range(10):
                sender.send(b"%d" % number * number)
            frames = [bytes(frame) for frame, _ in receive_frames(receiver, 10)]
            assert frames == [b"%d" % number * number for number in range(10)]

    def test_handshake_takes_frames_up_to_its_limit(self, handshake: tuple[Link, Link]) -> None:
        """Checks that a frame of exactly `handshake_limit` bytes is received before `establish`, in both directions.

        `handshake_limit` is the argument of `Transport.listen` and `Transport.connect`; here `HANDSHAKE_LIMIT`.
        """
        for sender, receiver in (handshake, handshake[::-1]):
            sender.send(b"x" * HANDSHAKE_LIMIT)
            assert receive(receiver) == b"x" * HANDSHAKE_LIMIT

    @pytest.mark.parametrize("size", [HANDSHAKE_LIMIT + 1, 60_000])
    def test_handshake_refuses_larger_frames(self, handshake: tuple[Link, Link], size: int) -> None:
        """Checks that before `establish`, `receive` raises `ProtocolError` for a frame above `handshake_limit`.

        `handshake_limit` is the argument of `Transport.listen` and `Transport.connect`. The text of the error must
        contain "at most".
        """
        for sender, receiver in (handshake, handshake[::-1]):
            sender.send(b"x" * size)
            with pytest.raises(ProtocolError, match="at most"):
                receive(receiver)

    @pytest.mark.parametrize("sizes", [(), (10,)])
    def test_handshake_refuses_frames_with_buffers_and_large_ones(
        self, handshake: tuple[Link, Link], sizes: tuple[int, ...]
    ) -> None:
        """Checks that before `establish`, `receive` raises `ProtocolError` for frames with buffers and for huge ones.

        The huge frame has 100,000 bytes. A link sends both by internal frames of its own, which the other end must not
        accept from a stranger.
        """
        ours, theirs = handshake
        in_thread(ignore_connection_error, ours.send, bytes(0 if sizes else 100_000), new_buffers(sizes), monotonic())()
        with pytest.raises(ProtocolError):
            receive(theirs)

    def test_establish_ends_at_its_deadline_if_the_other_end_is_silent(
        self, handshake: tuple[Link, Link], new_worker: Callable[..., FakeWorker]
    ) -> None:
        """Checks that `establish` of the connecting end raises `TimeoutError` at its deadline if nobody answers.

        The text of the error must contain the address of the link. A link that has nothing to agree on may return
        instead, without waiting longer.
        """
        ours, theirs = handshake
        exchange(ours, theirs)
        begin = monotonic()
        failure = None
        try:
            ours.establish(new_worker().options, begin + 0.2)
        except TimeoutError as error:
            failure = error
        assert monotonic() - begin < TIMEOUT_S / 4
        if failure is not None:
            assert ours.address in str(failure)
            assert monotonic() - begin > 0.19

    def test_establish_raises_nothing_but_connection_error_if_the_other_end_is_gone(
        self, handshake: tuple[Link, Link], new_worker: Callable[..., FakeWorker]
    ) -> None:
        """Checks that `establish` of the connecting end ends soon if the other end has closed the link.

        It must return, or raise `ConnectionError`.
        """
        ours, theirs = handshake
        exchange(ours, theirs)
        theirs.close()
        begin = monotonic()
        ignore_connection_error(ours.establish, new_worker().options, begin + TIMEOUT_S)
        assert monotonic() - begin < TIMEOUT_S / 4

    def test_frames_that_are_sent_while_the_link_is_set_up_arrive_in_order(
        self, transport: Transport, listener: Listener, new_worker: Callable[..., FakeWorker]
    ) -> None:
        """Checks that frames of the accepted end arrive in order though the other end calls `establish` later.

        Also checks that `send` has emptied the list of buffers, and that the program may change a buffer after `send`.
        """
        pair = LinkPair(*open_links(transport, listener), new_worker(), new_worker())
        exchange(pair.ours, pair.theirs)
        pair.theirs.establish(pair.their_worker.options)
        changed = memoryview(bytearray(b"x" * 70_000))
        buffers = [changed]
        for number in range(20):
            pair.theirs.send(b"%d" % number)
        pair.theirs.send(b"with a buffer", buffers, monotonic())
        assert buffers == []
        changed[:] = bytes(len(changed))
        finish_establishing(pair)
        pair.theirs.send(b"last")
        frames = receive_frames(pair.ours, 22, pair.theirs.flush)
        sent = [*(b"%d" % number for number in range(20)), b"with a buffer", b"last"]
        assert [bytes(frame) for frame, _ in frames] == sent
        assert frames[20][1][0] == b"x" * 70_000
        pair.close()

    # Frames

    def test_established_link_says_so(self, pair: LinkPair) -> None:
        """Checks that `is_established` is True at both ends after both have called `establish`."""
        assert pair.ours.is_established
        assert pair.theirs.is_established

    @pytest.mark.parametrize("size", _FRAME_SIZES)
    def test_frames_of_all_sizes_arrive(self, pair: LinkPair, size: int) -> None:
        """Checks that one frame of `size` bytes, from 0 to 5 MiB, arrives unchanged and once, in both directions."""
        for seed, (sender, receiver) in enumerate(pair.directions()):
            data = random.Random(seed).randbytes(size)
            join = in_thread(sender.send, data)
            assert receive(receiver) == data
            join()
            assert receiver.receive() == []

    def test_frames_of_one_thread_arrive_in_order(self, pair: LinkPair) -> None:
        """Checks that 500 frames of 4 to 70,004 bytes that one thread sends arrive in order and with their sizes."""
        sizes = [random.Random(1).choice((0, 1, 50, 3000, 20_000, 70_000)) for _ in range(500)]
        for sender, receiver in pair.directions():

            def send_all(sender: Link = sender) -> None:
                for number, size in enumerate(sizes):
                    sender.send(number.to_bytes(4, "little") + bytes(size))

            with pair.our_worker.serving(), pair.their_worker.serving():
                watch_all(pair)
                join = in_thread(send_all)
                frames = receive_frames(receiver, len(sizes))
                join()
            assert [int.from_bytes(frame[:4], "little") for frame, _ in frames] == list(range(len(sizes)))
            assert [len(frame) - 4 for frame, _ in frames] == sizes

    def test_receive_returns_nothing_if_nothing_was_sent(self, pair: LinkPair) -> None:
        """Checks that `receive` returns an empty list at once, also the second time, if nothing was sent."""
        for link in (pair.ours, pair.theirs):
            assert link.receive() == []
            assert link.receive() == []

    def test_counts_grow_with_the_frames(self, pair: LinkPair) -> None:
        """Checks that the bytes of 10 frames are counted in `counts()` of both ends.

        `bytes_out` of the sender and `bytes_in` of the receiver must grow by at least as many bytes.
        """
        for sender, receiver in pair.directions():
            before = sender.counts()[1], receiver.counts()[0]
            for _ in range(10):
                sender.send(b"x" * 1000)
            receive_frames(receiver, 10)
            assert sender.counts()[1] - before[0] >= 10_000
            assert receiver.counts()[0] - before[1] >= 10_000

    # Buffers

    @pytest.mark.parametrize("sizes", _BUFFER_SIZES, ids=lambda sizes: f"{len(sizes)}x{max(sizes)}")
    @pytest.mark.parametrize("frame_size", [0, 9000])
    def test_buffers_arrive_beside_their_frame(self, pair: LinkPair, frame_size: int, sizes: list[int]) -> None:
        """Checks that buffers arrive with their frame: unchanged, in order and writable.

        The frame has `frame_size` bytes, the buffers have `sizes` bytes. Both directions are tested, twice each.
        """
        for sender, receiver in pair.directions():
            for seed in range(2):
                frame, buffers = random.Random(seed).randbytes(frame_size), new_buffers(sizes, seed)
                expected = [bytes(buffer) for buffer in buffers]
                join = in_thread(sender.send, frame, buffers)
                received, arrived = receive_with_buffers(receiver)
                join()
                assert received == frame
                assert [bytes(buffer) for buffer in arrived] == expected
                assert not any(buffer.readonly for buffer in arrived)

    def test_send_empties_the_list_of_buffers(self, pair: LinkPair) -> None:
        """Checks that the list that was passed as `buffers` is empty when `send` has returned."""
        for sender, receiver in pair.directions():
            for sizes in ([5], [16_384], [1 << 20, 1]):
                buffers = new_buffers(sizes)
                join = in_thread(sender.send, b"frame", buffers)
                receive(receiver)
                join()
                assert buffers == []

    @pytest.mark.parametrize("size", [100, 20_000, 1 << 20])
    def test_buffers_belong_to_the_end_that_has_them(self, pair: LinkPair, size: int) -> None:
        """Checks that writing into a sent buffer does not change the received one, nor the other way round."""
        for sender, receiver in pair.directions():
            mine = memoryview(bytearray(b"a" * size))
            join = in_thread(sender.send, b"", [mine])
            _, (theirs,) = receive_with_buffers(receiver)
            join()
            mine[:] = b"b" * size
            assert theirs == b"a" * size
            theirs[:] = b"c" * size
            assert mine == b"b" * size

    @pytest.mark.parametrize("size", [100, 20_000, 300_000])
    def test_received_buffers_stay_as_they_are_while_others_come(self, pair: LinkPair, size: int) -> None:
        """Checks that buffers that the program still holds do not change while 40 later buffers arrive.

        So the link may use the memory of a received buffer again only when the program has dropped the buffer.
        """
        held: list[tuple[int, memoryview]] = []
        for seed in range(40):
            (sent,) = new_buffers([size], seed)
            checksum = zlib.crc32(sent)
            join = in_thread(pair.ours.send, b"", [sent])
            _, (arrived,) = receive_with_buffers(pair.theirs)
            join()
            held.append((checksum, arrived))
            if seed % 3 == 2:
                del held[random.Random(seed).randrange(len(held))]
        assert all(zlib.crc32(buffer) == checksum for checksum, buffer in held)

    @pytest.mark.parametrize("size", [100, 20_000, 1 << 20])
    def test_received_buffers_outlive_the_link(self, pair: LinkPair, size: int) -> None:
        """Checks that a received buffer can be read and written after both ends of the link were closed."""
        (sent,) = new_buffers([size], 5)
        expected = bytes(sent)
        join = in_thread(pair.ours.send, b"", [sent])
        _, (arrived,) = receive_with_buffers(pair.theirs)
        join()
        pair.close()
        assert arrived == expected
        arrived[:1] = b"!"

    @pytest.mark.parametrize("sizes", [[100], [20_000], [1 << 20], [1 << 18, 0, 5, 1 << 19]])
    def test_buffers_that_are_sent_back_and_forth_keep_up_with_what_is_written_to_them(
        self, pair: LinkPair, sizes: list[int]
    ) -> None:
        """Checks that buffers that go back and forth, and change before each `send`, arrive with the last contents.

        A link may send a received buffer back in the shared memory that it came in; it must not send old contents.
        """
        buffers: Sequence[memoryview] = new_buffers(sizes, 3)
        expected = [bytearray(buffer) for buffer in buffers]
        for hop in range(10):
            sender, receiver = pair.directions()[hop % 2]
            for buffer, copy in zip(buffers, expected, strict=True):
                if buffer.nbytes:
                    buffer[hop % buffer.nbytes] = copy[hop % buffer.nbytes] = hop
            handed_over = list(buffers)
            del buffer, buffers
            join = in_thread(sender.send, b"hop", handed_over)
            _, buffers = receive_with_buffers(receiver)
            join()
            assert [bytes(buffer) for buffer in buffers] == expected

    @pytest.mark.parametrize("size", [100, 20_000, 1 << 20])
    def test_send_kept_returns_copies_that_stay_as_they_are(self, pair: LinkPair, size: int) -> None:
        """Checks that `send_kept` sends the frame with its buffer, and returns a copy of the buffer that never changes.

        The program changes its buffer afterwards, and sends it again four times; the first copies must stay as they
        were.
        """
        for sender, receiver in pair.directions():
            mine = memoryview(bytearray(b"a" * size))
            kept: list[memoryview] = []
            for seed in range(5):  # the second one may find memory that the first one has used
                mine[:] = bytes([seed]) * size
                join = in_thread(lambda: kept.extend(sender.send_kept(b"frame", [mine])))  # noqa: B023
                received, (arrived,) = receive_with_buffers(receiver)
                join()
                mine[:] = b"b" * size
                assert received == b"frame"
                assert arrived == bytes([seed]) * size
                del arrived
            assert [bytes(each) for each in kept] == [bytes([seed]) * size for seed in range(5)]

    def test_too_large_frames_are_refused(self, new_pair: Callable[..., LinkPair]) -> None:
        """Checks that `receive` raises `ProtocolError` for a frame that, with its buffers, exceeds `max_frame_size`.

        The text of the error must contain "max_message_size", the option of a worker that sets the limit.
        """
        limit = 1 << 20
        for sizes in ([limit + 1], [0, limit], [100, limit // 2, limit // 2]):
            pair = new_pair(max_frame_size=limit)
            frame, buffers = bytes(sizes[0]), new_buffers(sizes[1:])
            if sum(sizes) == limit:
                frame += b"!"
            join = in_thread(ignore_connection_error, pair.ours.send, frame, buffers, monotonic() + 1)
            with pytest.raises(ProtocolError, match="max_message_size"):
                receive(pair.theirs)
            pair.close()
            join()

    def test_frames_of_exactly_the_limit_are_taken(self, new_pair: Callable[..., LinkPair]) -> None:
        """Checks that a frame that, with its buffers, has exactly `max_frame_size` bytes is received.

        The bytes that the link itself adds must not count.
        """
        for limit in (1 << 16, 1 << 20):
            pair = new_pair(max_frame_size=limit)
            for sizes in ([limit], [0, limit], [100, limit - 105, 5], [limit - 5000] + [10] * 500):
                frame, buffers = bytes(sizes[0]), new_buffers(sizes[1:])
                join = in_thread(pair.ours.send, frame, buffers)
                received, arrived = receive_with_buffers(pair.theirs)
                join()
                assert [len(received), *(len(buffer) for buffer in arrived)] == sizes

    # Many threads

    def test_many_threads_send_at_once(self, pair: LinkPair) -> None:
        """Checks that frames and buffers of 8 threads at each end arrive unchanged, and in order for each thread."""
        threads, count = 8, 60
        sizes = (0, 10, 3000, 17_000, 70_000, 700_000)

        def send_all(sender: Link, thread: int) -> None:
            rng = random.Random(thread)
            for number in range(count):
                body = rng.randbytes(rng.choice(sizes[:4])) if number % 20 else rng.randbytes(rng.choice(sizes))
                buffers = new_buffers([rng.choice(sizes) for _ in range(rng.randrange(3) if number % 10 == 5 else 0)])
                check = zlib.crc32(b"".join((body, *buffers)))
                sender.send(bytes([thread, number]) + check.to_bytes(4, "little") + body, buffers)

        with pair.our_worker.serving(), pair.their_worker.serving():
            watch_all(pair)
            joins = [in_thread(send_all, sender, n) for sender in (pair.ours, pair.theirs) for n in range(threads)]
            for receiver in (pair.ours, pair.theirs):
                seen: dict[int, list[int]] = {thread: [] for thread in range(threads)}
                for frame, buffers in receive_frames(receiver, threads * count):
                    assert zlib.crc32(b"".join((frame[6:], *buffers))) == int.from_bytes(frame[2:6], "little")
                    seen[frame[0]].append(frame[1])
                assert seen == {thread: list(range(count)) for thread in range(threads)}
            for join in joins:
                join()

    def test_small_frames_pass_a_large_one_that_waits(self, pair: LinkPair) -> None:
        """Checks that `send` of 20 small frames returns at once while `send` of a large frame waits in another thread.

        The large frame must then arrive after all small ones. If the class attribute `large_frames_wait` is False, the
        large frame does not wait, and must arrive before them.
        """
        large = new_buffers([self.large_bytes], 1)
        expected = zlib.crc32(large[0])
        join = in_thread(pair.ours.send, b"large", large)
        if self.large_frames_wait:
            time.sleep(0.05)
        else:
            join()
        begin = monotonic()
        for number in range(20):
            pair.ours.send(b"%d" % number)
        assert monotonic() - begin < TIMEOUT_S / 4
        with pair.our_worker.serving():
            watch_all(pair)
            frames = receive_frames(pair.theirs, 21)
            join()
        names = [bytes(frame) for frame, _ in frames]
        assert [name for name in names if name != b"large"] == [b"%d" % number for number in range(20)]
        assert names.index(b"large") == (20 if self.large_frames_wait else 0)
        assert zlib.crc32(frames[names.index(b"large")][1][0]) == expected

    # A receiver that does not read

    def test_sending_does_not_wait_for_the_receiver(self, pair: LinkPair) -> None:
        """Checks that `send` of small frames does not wait for an end that does not receive, but queues them.

        `backlog` must become more than 0 while frames are queued. When the other end receives, the poller must make the
        link send the rest, all frames must arrive in order, and `backlog` and `unsent_bytes()` must become 0.
        """
        for sender, receiver in pair.directions():
            sent = 0
            begin = monotonic()
            while not sender.backlog or sent % 100:
                sender.send(sent.to_bytes(4, "little") + bytes(5000))
                sent += 1
                assert sent * 5000 < 2 * self.large_bytes, "somebody takes it all"
            assert monotonic() - begin < TIMEOUT_S / 2
            assert sender.unsent_bytes() >= sender.backlog > 0
            with pair.our_worker.serving(), pair.their_worker.serving():
                watch_all(pair)
                frames = receive_frames(receiver, sent)
                pause_until(lambda: not sender.unsent_bytes())  # noqa: B023
            assert sender.backlog == 0
            assert [int.from_bytes(frame[:4], "little") for frame, _ in frames] == list(range(sent))

    def test_flush_sends_what_is_queued(self, pair: LinkPair) -> None:
        """Checks that repeated `flush` sends all queued frames in order while the other end receives, without a poller.

        `backlog` and `unsent_bytes()` must be 0 in the end.
        """
        sent = fill(pair.ours)
        frames = receive_frames(pair.theirs, sent, pair.ours.flush)
        assert [int.from_bytes(frame[:4], "little") for frame, _ in frames] == list(range(sent))
        pair.ours.flush()
        assert pair.ours.backlog == pair.ours.unsent_bytes() == 0

    def test_large_frame_waits_no_longer_than_its_deadline(self, pair: LinkPair) -> None:
        """Checks that `send` of a large frame returns at its deadline, without an error, if nobody receives.

        The link must have copied the rest: the program changes the buffer afterwards, and the old contents must arrive,
        before a frame that is sent later.
        """
        mine = memoryview(bytearray(random.Random(4).randbytes(self.large_bytes)))
        expected = zlib.crc32(mine)
        begin = monotonic()
        pair.ours.send(b"large", [mine], begin + 0.2)
        assert monotonic() - begin < TIMEOUT_S / 4
        mine[:] = bytes(len(mine))
        pair.ours.send(b"after it")
        frames = receive_frames(pair.theirs, 2, pair.ours.flush)
        received = {bytes(frame): buffers for frame, buffers in frames}
        assert list(received) == [b"large", b"after it"]
        assert zlib.crc32(received[b"large"][0]) == expected

    # Waiting

    def test_wait_returns_at_once_if_there_is_something(self, pair: LinkPair) -> None:
        """Checks that `wait` returns True at once, also the second time, while an arrived frame was not received."""
        for sender, receiver in pair.directions():
            sender.send(b"x")
            assert receiver.wait(TIMEOUT_S)
            assert receiver.wait(None)
            assert receive(receiver) == b"x"

    @pytest.mark.parametrize("seconds", [0.0, 0.001, 0.15])
    def test_wait_ends_at_its_time(self, pair: LinkPair, seconds: float) -> None:
        """Checks that `wait(seconds)` returns False after `seconds`, not earlier or much later, if nothing comes."""
        for link in (pair.ours, pair.theirs):
            begin = monotonic()
            assert not link.wait(seconds)
            assert seconds * 0.99 <= monotonic() - begin < seconds + TIMEOUT_S / 4

    @pytest.mark.parametrize("seconds", [None, TIMEOUT_S])
    def test_wait_ends_when_a_frame_comes(self, pair: LinkPair, seconds: float | None) -> None:
        """Checks that an arriving frame ends a `wait` of 20 s, or without a limit, in 50 tries at random moments.

        The frame comes while the receiver polls, is about to sleep or sleeps; no wake-up may be lost.
        """
        for sender, receiver in pair.directions():

            def receive_50(receiver: Link = receiver) -> None:
                for number in range(50):
                    deadline = monotonic() + TIMEOUT_S / 2
                    frames: list[Frame] = []
                    while not frames:
                        receiver.wait(seconds)
                        frames = receiver.receive()
                        assert monotonic() < deadline, "it was not woken"
                    assert [bytes(frame) for frame, _ in frames] == [b"%d" % number]
                    receiver.send(b"got it")

            join = in_thread(receive_50)
            for number in range(50):
                if number % 3:
                    time.sleep(random.Random(number).random() * 2e-3)  # it sleeps, is about to, or looks
                sender.send(b"%d" % number)
                assert receive(sender) == b"got it"
            join()

    def test_wait_ends_when_the_other_end_closes(self, new_pair: Callable[..., LinkPair]) -> None:
        """Checks that a thread in `wait` gets `ConnectionError` from `receive` soon after the other end was closed.

        The poller must report the hang-up, as it does for the leader of a worker, and `note_hang_up` must wake the
        thread.
        """
        for end in (0, 1):
            pair = new_pair()
            worker, waiter = (pair.our_worker, pair.ours) if end == 0 else (pair.their_worker, pair.theirs)
            other = pair.theirs if end == 0 else pair.ours
            waiter_ended = in_thread(assert_ends, waiter)
            with worker.serving():
                # What the leader of a worker does: it tells the thread that waits.
                worker.poller.watch_hang_up(waiter, lambda: note_hang_up(worker, waiter))  # noqa: B023
                time.sleep(0.02)
                other.close()
                waiter_ended()

    def test_wake_ends_the_wait_of_another_thread_or_the_next_one(self, pair: LinkPair) -> None:
        for link in (pair.ours, pair.theirs):
            begin = monotonic()
            link.wake()
            assert not link.wait(TIMEOUT_S)
            ended = in_thread(link.wait, TIMEOUT_S)
            time.sleep(0.02)
            link.wake()
            ended()
            assert monotonic() - begin < TIMEOUT_S / 2
            assert not link.wait(0.0), "each ends one wait"
        pair.ours.wake()
        pair.theirs.send(b"after it")
        assert receive(pair.ours) == b"after it"

    def test_after_a_hang_up_waits_return_at_once(self, pair: LinkPair) -> None:
        """Checks that every `wait` returns at once after the other end has closed and `note_hang_up` was called."""
        pair.theirs.close()
        pause_until(pair.ours.has_hung_up)
        pair.ours.note_hang_up()
        begin = monotonic()
        for _ in range(3):
            pair.ours.wait(TIMEOUT_S)
        assert monotonic() - begin < TIMEOUT_S / 4

    def test_hang_up_is_seen_beside_frames_that_came_before(self, pair: LinkPair) -> None:
        """Checks that `has_hung_up()` is True after the other end has closed, though a frame was not received yet.

        `receive` must return that frame, and only then raise `ConnectionError`.
        """
        for link in (pair.ours, pair.theirs):
            assert not link.has_hung_up()
        pair.theirs.send(b"last")
        pair.theirs.close()
        pause_until(pair.ours.has_hung_up)
        pair.ours.note_hang_up()
        assert receive(pair.ours) == b"last"
        assert_ends(pair.ours)

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timer")
    def test_exception_of_a_signal_handler_ends_the_wait(self, pair: LinkPair) -> None:
        """Checks that `wait` raises at once what a signal handler raises, and that the link still works then."""

        class Interrupted(Exception):
            pass

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise Interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            begin = monotonic()
            with pytest.raises(Interrupted):
                pair.ours.wait(TIMEOUT_S)
            assert monotonic() - begin < TIMEOUT_S / 4
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        pair.theirs.send(b"it goes on")
        assert receive(pair.ours) == b"it goes on"

    # The poller

    def test_poller_calls_the_handler_when_frames_come(self, pair: LinkPair) -> None:
        """Checks that the poller calls the handler of a watched link for each frame that arrives, and not otherwise."""
        for sender, receiver, worker in (
            (pair.ours, pair.theirs, pair.their_worker),
            (pair.theirs, pair.ours, pair.our_worker),
        ):
            received: list[bytes] = []
            worker.poller.watch(
                receiver,
                lambda receiver=receiver, received=received: received.extend(  # type: ignore[misc]
                    bytes(frame) for frame, _ in receiver.receive()
                ),
            )
            while worker.turn():
                pass
            assert received == []
            for number in range(3):
                sender.send(b"%d" % number)
                worker.turn_until(lambda received=received, number=number: len(received) > number)  # type: ignore[misc]
            assert received == [b"0", b"1", b"2"]
            worker.poller.unwatch(receiver)

    def test_poller_calls_the_handler_when_the_other_end_closes(self, pair: LinkPair) -> None:
        """Checks that the poller calls the handler of a watched link when the other end closes.

        `receive` in that handler must then raise `ConnectionError`, and must not return a frame.
        """
        ended: list[ConnectionError] = []

        def read() -> None:
            try:
                assert pair.ours.receive() == []
            except ConnectionError as error:
                ended.append(error)

        pair.our_worker.poller.watch(pair.ours, read)
        pair.theirs.close()
        pair.our_worker.turn_until(lambda: ended)

    # The end

    def test_frames_that_were_sent_before_the_end_arrive(self, pair: LinkPair) -> None:
        """Checks that 100 frames that were sent before `close` arrive in order, and that `ConnectionError` follows.

        The frames are small, so `unsent_bytes()` must be 0 before the `close`.
        """
        sent = [b"%d" % number * (number % 50) for number in range(100)]
        for frame in sent:
            pair.ours.send(frame)
        assert pair.ours.unsent_bytes() == 0
        pair.ours.close()
        assert [bytes(frame) for frame, _ in receive_frames(pair.theirs, len(sent))] == sent
        assert_ends(pair.theirs)

    def test_end_is_raised_again_and_again(self, pair: LinkPair) -> None:
        """Checks that each `receive` raises `ConnectionError`, not only the first, after the other end has closed."""
        pair.ours.close()
        for _ in range(3):
            assert_ends(pair.theirs)

    @pytest.mark.parametrize("size", [10, 100_000])
    def test_sending_to_a_closed_end_raises_connection_error(self, pair: LinkPair, size: int) -> None:
        """Checks that repeated `send` raises `ConnectionError`, and nothing else, soon after the other end has closed.

        The first calls of `send` may succeed. `receive` must raise `ConnectionError` as well.
        """
        pair.theirs.close()

        def send_on() -> None:
            deadline = monotonic() + TIMEOUT_S
            while monotonic() < deadline:  # the first may get through, and a link with a ring notices when it looks
                pair.ours.send(bytes(size), None, monotonic())
                pair.ours.receive()

        with pytest.raises(ConnectionError):
            send_on()
        assert_ends(pair.ours)

    def test_end_that_closes_without_receiving_breaks_the_link_with_connection_error_only(self, pair: LinkPair) -> None:
        """Checks that `receive` raises `ConnectionError` if the other end closes with an unread frame.

        No other error is allowed, nor its subclass `ProtocolError`.
        """
        pair.ours.send(b"unread")
        pair.theirs.close()
        for _ in range(2):
            assert_ends(pair.ours)

    def test_closed_link_raises_connection_error(self, pair: LinkPair) -> None:
        """Checks that `send`, `send_kept` and `receive` raise `ConnectionError` if this end is closed.

        `fileno` must raise `OSError`. A second `close`, and `counts`, `unsent_bytes`, `note_hang_up` and `sweep`, must
        raise nothing.
        """
        for link in (pair.ours, pair.theirs):
            link.close()
            link.close()
            oserror_of(link.fileno)
            for call in (
                lambda: link.send(b"x"),  # noqa: B023
                lambda: link.send(b"x", new_buffers([10])),  # noqa: B023
                lambda: link.send(b"x", new_buffers([100_000])),  # noqa: B023
                lambda: link.send_kept(b"x", new_buffers([100_000])),  # noqa: B023
                link.receive,
            ):
                with pytest.raises(ConnectionError):
                    call()
            link.unsent_bytes()
            link.counts()
            link.note_hang_up()
            link.sweep(monotonic())

    def test_close_ends_a_wait_of_another_thread(self, new_pair: Callable[..., LinkPair]) -> None:
        """Checks that `close` ends a `wait(None)` of another thread at the same end.

        That `wait` must return, or raise `ConnectionError`.
        """
        for delay in (0.0, 0.0, 0.02):
            for end in (0, 1):
                pair = new_pair()
                link = pair.theirs if end else pair.ours
                join = in_thread(ignore_connection_error, link.wait, None)
                time.sleep(delay)
                link.close()
                join()

    def test_close_ends_a_large_send_of_another_thread(self, pair: LinkPair) -> None:
        """Checks that `close` ends the waiting `send` of a large frame of another thread at the same end.

        That `send` must raise `ConnectionError`. If the class attribute `large_frames_wait` is False, `send` does not
        wait, and may have returned before.
        """
        large = new_buffers([self.large_bytes])
        join = in_thread(pair.ours.send, b"", large)
        if self.large_frames_wait:
            time.sleep(0.05)
            pair.ours.close()
            with pytest.raises(ConnectionError):
                join()
        else:
            pair.ours.close()
            ignore_connection_error(join)

    def test_end_of_the_receiver_ends_a_large_send(self, pair: LinkPair) -> None:
        """Checks that a waiting `send` of a large frame ends when the other end closes.

        It must return, or raise `ConnectionError`. The poller must report the hang-up; its handler then closes this
        end, as the leader of a worker does.
        """
        large = new_buffers([self.large_bytes])
        join = in_thread(pair.ours.send, b"", large)
        with pair.our_worker.serving():
            # What the leader of a worker does: it closes a link whose other end is gone.
            pair.our_worker.poller.watch_hang_up(pair.ours, lambda: close_if_hung_up(pair.our_worker, pair.ours))
            time.sleep(0.05)
            pair.theirs.close()
            ignore_connection_error(join)

    def test_threads_that_send_and_receive_while_another_closes_get_connection_error(
        self, new_pair: Callable[..., LinkPair]
    ) -> None:
        """Checks that threads that send and receive get only `ConnectionError` when another thread closes their end."""

        def send_on(link: Link, is_going: threading.Event) -> None:
            while True:
                link.send(b"x" * 100, None, monotonic())
                link.send(b"y", new_buffers([100]), monotonic())
                is_going.set()

        def receive_on(link: Link, is_going: threading.Event) -> None:
            while True:
                link.wait(0.001)
                link.receive()
                is_going.set()

        for delay in (0.0, 0.001, 0.002):
            pair = new_pair()
            events = [threading.Event() for _ in range(3)]
            joins = [
                in_thread(ignore_connection_error, work, pair.ours, event)
                for work, event in zip((send_on, send_on, receive_on), events, strict=True)
            ]
            for event in events:
                assert event.wait(TIMEOUT_S)
            time.sleep(delay)
            pair.ours.close()
            for join in joins:
                join()

    def test_any_number_of_threads_may_close(self, new_pair: Callable[..., LinkPair]) -> None:
        """Checks that four threads can close one end at once without an error, and that the other end notices."""
        for _ in range(3):
            pair = new_pair()
            for join in [in_thread(pair.ours.close) for _ in range(4)]:
                join()
            assert_ends(pair.theirs)

    # Forks

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_forked_child_leaves_the_links_to_its_parent(self, pair: LinkPair, listener: Listener) -> None:
        """Checks that `abandon` of links and listener in a forked child does not disturb those of the parent.

        `prepare_fork` is called before the fork. In the child, `fileno` must raise `OSError` after `abandon`. The
        parent must still be able to send and receive, and a buffer that it received before must not change.
        """
        join = in_thread(pair.ours.send, b"", new_buffers([1 << 20], 1))
        _, (held,) = receive_with_buffers(pair.theirs)
        join()
        before = bytes(held)
        pair.ours.prepare_fork()
        pair.theirs.prepare_fork()
        child = os.fork()
        if not child:
            status = 1
            try:
                for link in (pair.ours, pair.theirs):
                    link.abandon()
                    oserror_of(link.fileno)
                listener.abandon()
                pair.our_worker.poller.abandon()
                pair.their_worker.poller.abandon()
                assert held == before
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        for sender, receiver in pair.directions():
            for number in range(5):
                join = in_thread(sender.send, b"%d" % number, new_buffers([1 << 20], number))
                frame, (arrived,) = receive_with_buffers(receiver)
                join()
                assert frame == b"%d" % number
                assert arrived == new_buffers([1 << 20], number)[0]
                del arrived
        assert held == before
        assert not listener.accept()

    # What is left behind

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors cannot be counted here")
    def test_closed_links_leave_no_descriptor_and_no_thread(self, transport: Transport) -> None:
        """Checks that as many descriptors and threads exist after a use of the transport as before it.

        A use opens and closes a listener, five established links with traffic, one link in its handshake, and two
        workers.
        """

        def use() -> None:
            listener = transport.listen(None, HANDSHAKE_LIMIT)
            workers = FakeWorker(self.use_rings, self.shared_memory), FakeWorker(self.use_rings, self.shared_memory)
            for _ in range(5):
                pair = LinkPair(*open_links(transport, listener), *workers)
                establish(pair)
                for sender, receiver in pair.directions():
                    join = in_thread(sender.send, b"", new_buffers([100, 1 << 19]))
                    receive(receiver)
                    join()
                watch_all(pair)
                pair.close()
            never_established = open_links(transport, listener)
            for link in never_established:
                link.close()
            listener.close()
            for worker in workers:
                worker.close()

        use()  # what is opened once and kept is no leak
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        use()
        pause_until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)

    # What no link sends

    @pytest.mark.parametrize(
        "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 100, b"farcall\0" + b"\xff" * 4]
    )
    def test_beginning_that_is_no_links_raises_protocol_error(
        self, listener: Listener, connect_raw: Callable[[str], Any], garbage: bytes
    ) -> None:
        """Checks that `receive` raises `ProtocolError` if a connection begins with `garbage` that no link sends."""
        with raw_link(listener, connect_raw) as (raw, link):
            raw.sendall(garbage)
            with pytest.raises(ProtocolError):
                receive(link)

    def test_internal_frames_before_the_handshake_is_over_raise_protocol_error(
        self, listener: Listener, connect_raw: Callable[[str], Any]
    ) -> None:
        """Checks that before `establish`, `receive` raises `ProtocolError` for an internal frame of a link.

        Such a frame has the highest bit of its length set. The text of the error must contain "before its handshake was
        over".
        """
        for word in (0x80000000, 0x80000010, 0xFFFFFFFF):
            with raw_link(listener, connect_raw) as (raw, link):
                raw.sendall(PROLOGUE + word.to_bytes(4, "little") + bytes(16))
                with pytest.raises(ProtocolError, match="before its handshake was over"):
                    receive(link)

    def test_frame_that_is_cut_off_is_never_received(
        self, listener: Listener, connect_raw: Callable[[str], Any]
    ) -> None:
        """Checks that `receive` raises `ConnectionError`, and returns nothing, if a connection ends inside a frame."""
        with raw_link(listener, connect_raw) as (raw, link):
            raw.sendall(PROLOGUE + (10).to_bytes(4, "little") + b"only")
            raw.close()
            assert_ends(link)

    @pytest.mark.parametrize("pause", [1, 5])
    def test_bytes_may_come_in_any_pieces(
        self, listener: Listener, connect_raw: Callable[[str], Any], pause: int
    ) -> None:
        """Checks that three frames are received unchanged if their bytes arrive in pieces of `pause` bytes."""
        data = PROLOGUE + b"".join(len(frame).to_bytes(4, "little") + frame for frame in (b"", b"one", b"x" * 50))
        with raw_link(listener, connect_raw) as (raw, link):
            received: list[bytes] = []
            for begin in range(0, len(data), pause):
                raw.sendall(data[begin : begin + pause])
                if begin % 3 == 0:
                    received += [bytes(frame) for frame, _ in link.receive()]
            received += [bytes(frame) for frame, _ in receive_frames(link, 3 - len(received))]
            assert received == [b"", b"one", b"x" * 50]


PROLOGUE: Final = pack_prologue()
"""The bytes with which each direction of a link begins: they say that farcall speaks, and which version."""


def open_links(transport: Transport, listener: Listener) -> tuple[Link, Link]:
    """Connects to `listener`, and returns the connecting end and the accepted end. `establish` was called on neither.

    Raises `AssertionError` if they are not connected within `TIMEOUT_S` seconds, and what `transport.connect` raises.
    """
    ours: list[Link] = []
    join = in_thread(lambda: ours.append(transport.connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)))
    theirs = accept(listener)
    receive_until([theirs], lambda: bool(ours))
    join()
    return ours[0], theirs


def accept(listener: Listener) -> Link:
    """Waits for a connection at `listener`, and returns its accepted end, which is not established.

    Raises `AssertionError` if none comes in `TIMEOUT_S` seconds, and `OSError` if the listener is closed.
    """
    assert is_readable(listener)
    link = listener.accept()
    assert link is not None
    return link


def receive_until(links: Sequence[Link], is_done: Callable[[], bool]) -> None:
    """Reads on all `links` until `is_done()` is true and none is readable.

    It is needed because both ends of TLS must read while they connect. Raises `AssertionError` if a link receives a
    frame, or after `TIMEOUT_S` seconds. Without links it only waits for `is_done()`.
    """
    deadline = monotonic() + TIMEOUT_S
    while not is_done() or any(is_readable(link, 0) for link in links):
        for link in links:
            if is_readable(link, 0.001):
                assert link.receive() == []
        assert monotonic() < deadline, "the two ends do not come together"


def exchange(ours: Link, theirs: Link) -> None:
    """Sends one frame from `ours` to `theirs` and one back. Both links are in their handshake.

    Raises `AssertionError` if one does not arrive within `TIMEOUT_S` seconds, and `ConnectionError` if a link has
    ended.
    """
    ours.send(b"hello")
    assert receive(theirs) == b"hello"
    theirs.send(b"welcome")
    assert receive(ours) == b"welcome"


def establish(pair: LinkPair) -> None:
    """Exchanges a frame each way, as a handshake does, and then calls `establish` on both ends.

    Raises `AssertionError` if that is not done in `TIMEOUT_S` seconds, and what `Link.establish` raises.
    """
    exchange(pair.ours, pair.theirs)
    pair.theirs.establish(pair.their_worker.options)
    finish_establishing(pair)


def finish_establishing(pair: LinkPair) -> None:
    """Calls `establish` on the connecting end of a pair whose accepted end is established, and waits for it.

    Raises `AssertionError` if the accepted end receives a frame, or after `TIMEOUT_S` seconds, and what
    `Link.establish` raises.
    """
    join = in_thread(pair.ours.establish, pair.our_worker.options, monotonic() + TIMEOUT_S)
    deadline = monotonic() + TIMEOUT_S
    while not pair.ours.is_established or join.is_running():
        pair.theirs.wait(0.001)
        assert pair.theirs.receive() == []
        assert monotonic() < deadline, "the link is not established in time"
    join()
    assert pair.theirs.receive() == []  # what the connecting end may have said last


def watch_all(pair: LinkPair) -> None:
    """Makes the poller of each worker watch its end of `pair` for a hang-up, with a handler that does nothing.

    Other threads may receive on both ends meanwhile. Raises `OSError` if a link is closed.
    """
    pair.our_worker.poller.watch_hang_up(pair.ours, lambda: None)
    pair.their_worker.poller.watch_hang_up(pair.theirs, lambda: None)


def close_if_hung_up(worker: FakeWorker, link: Link) -> None:
    """Closes `link` if the other end has closed it, and removes it from the poller of `worker`. Else does nothing.

    A real worker does this if no thread reads the link. Raises `ConnectionError` if this end is closed.
    """
    if link.has_hung_up():
        worker.poller.unwatch(link)
        link.close()


def note_hang_up(worker: FakeWorker, link: Link) -> None:
    """Calls `link.note_hang_up`, which wakes the thread that reads the link, if the other end has closed it.

    Also removes the link from the poller of `worker` then. Otherwise does nothing. Raises `ConnectionError` if this end
    is closed.
    """
    if link.has_hung_up():
        worker.poller.unwatch(link)
        link.note_hang_up()


def receive_frames(link: Link, count: int, meanwhile: Callable[[], object] = lambda: None) -> list[Frame]:
    """Waits for exactly `count` frames and returns them, in their order; an empty list for 0.

    Args:
        link: The link to read.
        count: How many frames.
        meanwhile: Called at least every 10 ms during the wait; by default nothing is.

    Raises:
        AssertionError: Fewer frames came in `TIMEOUT_S` seconds, or more than `count`.
        ConnectionError: The link has ended.
        ProtocolError: The link received something that is not a frame, or a frame that is too large.
    """
    frames: list[Frame] = []
    deadline = monotonic() + TIMEOUT_S
    while len(frames) < count:
        meanwhile()
        link.wait(0.01)
        frames += link.receive()
        assert monotonic() < deadline, f"{len(frames)} of {count} frames came"
    assert len(frames) == count
    return frames


def receive_with_buffers(link: Link) -> tuple[bytes, Sequence[memoryview]]:
    """Waits for exactly one frame, and returns its bytes and its buffers.

    Raises `AssertionError` if none or several come in `TIMEOUT_S` seconds, and `ConnectionError` if the link has ended.
    """
    ((frame, buffers),) = receive_frames(link, 1)
    return bytes(frame), buffers


def receive(link: Link) -> bytes:
    """Waits for exactly one frame, and returns its bytes.

    Raises `AssertionError` if none or several come in `TIMEOUT_S` seconds, and `ConnectionError` if the link has ended.
    """
    return receive_with_buffers(link)[0]


def assert_ends(link: Link) -> None:
    """Waits until `link.receive` raises `ConnectionError`, and returns None.

    Raises `AssertionError` if a frame arrives or the end does not come in `TIMEOUT_S` seconds. A `ProtocolError` of the
    link, although it is a `ConnectionError`, is raised.
    """
    deadline = monotonic() + TIMEOUT_S
    while monotonic() < deadline:
        try:
            link.wait(0.05)
            assert link.receive() == []
        except ProtocolError:
            raise
        except ConnectionError:
            return
    raise AssertionError("the end of the link was not noticed")


def fill(link: Link) -> int:
    """Sends frames of 5004 bytes on `link` until at least 256 KiB are queued. Returns how many frames were sent.

    The first 4 bytes of a frame are its number, from 0. Nobody may receive meanwhile: raises `AssertionError` if the
    link takes 100,000 frames.
    """
    sent = 0
    while link.backlog < 1 << 18:
        link.send(sent.to_bytes(4, "little") + bytes(5000))
        sent += 1
        assert sent < 100_000, "somebody takes it all"
    return sent


def new_buffers(sizes: Sequence[int], seed: int = 0) -> list[memoryview]:
    """Returns writable buffers of the given sizes in bytes, with random contents; an empty list for no sizes.

    The same `sizes` and `seed` give the same contents.
    """
    rng = random.Random(seed)
    return [memoryview(bytearray(rng.randbytes(size))) for size in sizes]


def is_readable(end: Link | Listener, seconds: float = TIMEOUT_S) -> bool:
    """Returns True if the descriptor of a link or listener is or becomes readable within `seconds`; else False.

    0 does not wait. Raises `OSError` if the link or listener is closed.
    """
    poll = select.poll()
    poll.register(end.fileno(), select.POLLIN)
    return any(found & select.POLLIN for _, found in poll.poll(seconds * 1000))


@contextmanager
def raw_link(listener: Listener, connect_raw: Callable[[str], Any]) -> Iterator[tuple[Any, Link]]:
    """Context manager: connects to `listener` without a link. Yields the raw connection and the accepted link.

    Closes both at the end.

    Args:
        listener: Where to connect.
        connect_raw: Takes an address, and returns an object with the methods `sendall`, `recv` and `close` of a socket.

    Raises:
        AssertionError: The two ends are not connected within `TIMEOUT_S` seconds.
    """
    found: list[Any] = []
    join = in_thread(lambda: found.append(connect_raw(listener.address)))
    link = accept(listener)
    receive_until([link], lambda: bool(found))
    join()
    try:
        yield found[0], link
    finally:
        found[0].close()
        link.close()


def pause_until(condition: Callable[[], object]) -> None:
    """Checks `condition()` every millisecond until it is true. Raises `AssertionError` after `TIMEOUT_S` seconds."""
    deadline = monotonic() + TIMEOUT_S
    while not condition():
        assert monotonic() < deadline, "it did not come to hold"
        time.sleep(0.001)


def oserror_of(call: Callable[..., object], *args: object) -> OSError:
    """Calls `call(*args)` and returns the `OSError` that it raises.

    Raises `AssertionError` if it raises nothing. Any other exception is raised.
    """
    try:
        call(*args)
    except OSError as error:
        return error
    raise AssertionError("no OSError was raised")


def ignore_connection_error(call: Callable[..., object], *args: object) -> None:
    """Calls `call(*args)`, and ignores a `ConnectionError`. Other exceptions are raised."""
    try:
        call(*args)
    except ConnectionError:
        pass


class in_thread:  # noqa: N801 (reads as a verb: join = in_thread(work))
    """Starts `work(*args)` in a new thread at once. Call the object to wait for the end of the work.

    That call raises what the work raised: `join = in_thread(link.wait, None)`, then `join()`.

    Args:
        work: The function.
        *args: Its arguments.
    """

    def __init__(self, work: Callable[..., object], *args: object) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, args), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._failure = error

    def is_running(self) -> bool:
        """Returns whether the thread is still running."""
        return self._thread.is_alive()

    def __call__(self) -> None:
        """Waits until the work of the thread has ended, and returns None. Raises what the work raised.

        A second call does not raise that again. Raises `AssertionError` if the work does not end within twice
        `TIMEOUT_S` seconds.
        """
        self._thread.join(2 * TIMEOUT_S)
        assert not self._thread.is_alive(), "the work does not end"
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

"""The rules of `farcall.transports.base`, as tests that any transport can be put to. Needs pytest.

    class TestMyTransport(TransportConformance):
        @pytest.fixture
        def transport(self):
            return MyTransport()

        @pytest.fixture
        def crowded_address(self):
            ...  # yield an address where the queue of connections is full, and clean up

It checks what an agent relies on, not how fast it is, nor what the transport's own options do. For readable failures
put `pytest.register_assert_rewrite("farcall.testing.conformance")` into `conftest.py`.

Rules: no test sleeps; every wait is a poll with an end (`PATIENCE`); everything that was opened is closed.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from farcall.transports.base import Buffer, Channel, Listener, Transport

PATIENCE: Final = 20.0
"""Seconds after which a test gives up on something that should come at once."""

Pair = tuple[Channel, Channel]


class TransportConformance:
    """Subclass it and give it the fixtures `transport` and `crowded_address`."""

    @pytest.fixture
    def transport(self) -> Transport:
        """The transport to test, new for each test."""
        raise NotImplementedError("override the fixture `transport`: return the transport to test")

    @pytest.fixture
    def crowded_address(self) -> Iterator[str]:
        """An address where somebody listens, but never accepts, and no more connections can wait."""
        raise NotImplementedError("override the fixture `crowded_address`: yield an address whose queue is full")

    @pytest.fixture
    def listener(self, transport: Transport) -> Iterator[Listener]:
        listener = transport.listen()
        yield listener
        listener.close()

    @pytest.fixture
    def pair(self, transport: Transport, listener: Listener) -> Iterator[Pair]:
        """The connecting end and the accepted end of one channel."""
        ours, theirs = open_pair(transport, listener)
        yield ours, theirs
        ours.close()
        theirs.close()

    # Addresses, listening, connecting

    def test_addresses_are_text_that_begins_with_the_scheme(
        self, transport: Transport, listener: Listener, pair: Pair
    ) -> None:
        for address in (listener.address, pair[0].address, pair[1].address):
            assert address.startswith(transport.scheme + ":")
            assert len(address) > len(transport.scheme) + 1

    def test_listeners_have_addresses_of_their_own(self, transport: Transport, listener: Listener) -> None:
        other = transport.listen()
        try:
            assert other.address != listener.address
            ours, theirs = open_pair(transport, other)
            assert listener.accept() is None
            ours.close()
            theirs.close()
        finally:
            other.close()

    def test_accept_gives_none_when_nobody_is_there(self, listener: Listener) -> None:
        assert listener.accept() is None
        assert not polls(listener, select.POLLIN, 0)

    def test_a_listener_polls_readable_until_everybody_is_accepted(
        self, transport: Transport, listener: Listener
    ) -> None:
        ours: list[Channel] = []
        joins = [in_thread(lambda: ours.append(transport.connect(listener.address, PATIENCE))) for _ in range(3)]
        theirs = [accept(listener) for _ in joins]
        assert not polls(listener, select.POLLIN, 0)
        assert listener.accept() is None
        for number, end in enumerate(theirs):
            settle(end, lambda number=number: len(ours) > number)  # type: ignore[misc]
        for join in joins:
            join()
        for channel in ours + theirs:
            channel.close()

    def test_connecting_to_nobody_fails_at_once(self, transport: Transport, listener: Listener) -> None:
        listener.close()
        begin = time.monotonic()
        error = refusal(transport.connect, listener.address, PATIENCE)
        assert not isinstance(error, TimeoutError)
        assert listener.address in str(error)
        assert time.monotonic() - begin < PATIENCE / 4

    @pytest.mark.parametrize("rest", ["", ":", "nonsense", "[", "\0", "a:b:c", "/" + "x" * 300, "ü..", "/\ud800"])
    def test_connecting_to_nonsense_raises_oserror(self, transport: Transport, rest: str) -> None:
        assert not isinstance(refusal(transport.connect, f"{transport.scheme}:{rest}", PATIENCE), TimeoutError)

    def test_connecting_ends_at_its_timeout(self, transport: Transport, crowded_address: str) -> None:
        begin = time.monotonic()
        error = refusal(transport.connect, crowded_address, 0.2)
        assert isinstance(error, TimeoutError)
        assert crowded_address in str(error)
        assert 0.19 < time.monotonic() - begin < PATIENCE / 4

    def test_many_connections_are_kept_apart(self, transport: Transport, listener: Listener) -> None:
        pairs = [open_pair(transport, listener) for _ in range(64)]
        for number, (ours, _) in enumerate(pairs):
            assert ours.send(bytes([number])) == 1
        for number, (ours, theirs) in enumerate(pairs):
            assert read(theirs, 1) == bytes([number])
            assert theirs.send(bytes([number, number])) == 2
            assert read(ours, 2) == bytes([number, number])
        for ours, theirs in pairs:
            ours.close()
            theirs.close()

    def test_channels_outlive_their_listener(self, listener: Listener, pair: Pair) -> None:
        listener.close()
        listener.close()
        for sender, receiver in (pair, pair[::-1]):
            assert sender.send(b"still here") == 10
            assert read(receiver, 10) == b"still here"

    def test_a_closed_listener_raises_oserror(self, listener: Listener) -> None:
        listener.close()
        refusal(listener.accept)
        refusal(listener.fileno)

    def test_who_was_never_accepted_sees_the_end_when_the_listener_closes(
        self, transport: Transport, listener: Listener
    ) -> None:
        def connect_and_read() -> None:
            try:
                ours = transport.connect(listener.address, PATIENCE)
            except ConnectionError:
                return
            assert polls(ours, select.POLLIN)
            try:
                assert ours.receive(1) == b""
            except ConnectionError:
                pass
            ours.close()

        join = in_thread(connect_and_read)
        assert polls(listener, select.POLLIN)
        listener.close()
        join()

    # Bytes

    def test_an_empty_channel_raises_blocking_io_error(self, pair: Pair) -> None:
        for channel in pair:
            assert not polls(channel, select.POLLIN, 0)
            with pytest.raises(BlockingIOError):
                channel.receive(10)
            with pytest.raises(BlockingIOError):
                channel.receive_into(memoryview(bytearray(10)))

    def test_a_channel_polls_readable_while_there_is_something(self, pair: Pair) -> None:
        ours, theirs = pair
        ours.send(b"ab")
        assert polls(theirs, select.POLLIN)
        assert theirs.receive(1) == b"a"
        assert polls(theirs, select.POLLIN, 0)
        assert theirs.receive(1) == b"b"
        assert not polls(theirs, select.POLLIN, 0)

    @pytest.mark.parametrize(
        ("sent", "received"), [(1, 1), (1, 4096), (7, 64), (4096, 7), (65537, 65536), (1 << 20, 999)]
    )
    def test_bytes_arrive_whole_and_in_order_however_they_are_cut(self, pair: Pair, sent: int, received: int) -> None:
        data = random.Random(sent).randbytes(min(2000 * min(sent, received), 4 << 20))
        for sender, receiver in (pair, pair[::-1]):
            writer = in_thread(write_pieces, sender, data, sent)
            assert read(receiver, len(data), received) == data
            writer()

    def test_receive_into_fills_the_beginning_of_the_buffer(self, pair: Pair) -> None:
        ours, theirs = pair
        buffer = bytearray(b"." * 8)
        ours.send(b"abcde")
        assert polls(theirs, select.POLLIN)
        assert theirs.receive_into(memoryview(buffer)[:3]) == 3
        assert theirs.receive_into(memoryview(buffer)[4:]) == 2
        assert buffer == b"abc.de.."

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_every_kind_of_buffer_can_be_sent(self, pair: Pair, kind: Callable[[bytes], Buffer]) -> None:
        ours, theirs = pair
        assert ours.send(kind(b"one")) == 3
        assert ours.send_gather([kind(b"two"), kind(b"three")]) == 8
        assert read(theirs, 11) == b"onetwothree"

    def test_gather_sends_64_buffers_in_order_empty_ones_among_them(self, pair: Pair) -> None:
        ours, theirs = pair
        buffers: list[Buffer] = [b"" if number % 5 == 0 else bytes([number]) * number for number in range(64)]
        data = b"".join(buffers)
        assert ours.send_gather(buffers) == len(data)
        assert read(theirs, len(data)) == data

    @pytest.mark.parametrize("gather", [False, True])
    def test_a_full_channel_takes_a_part_then_nothing_then_more(self, pair: Pair, gather: bool) -> None:
        ours, theirs = pair
        large = random.Random(1).randbytes(64 << 20)
        assert polls(ours, select.POLLOUT, 0)
        part = (
            ours.send_gather([large[mib << 20 : (mib + 1) << 20] for mib in range(64)]) if gather else ours.send(large)
        )
        assert 0 < part < len(large)
        total = part + fill(ours, large[part:], gather)
        assert not polls(ours, select.POLLOUT, 0)
        assert read(theirs, total) == large[:total]
        assert polls(ours, select.POLLOUT)
        more = large[total : total + 4]  # what comes next in the stream
        assert ours.send(more) == 4
        assert read(theirs, 4) == more

    def test_both_ends_send_and_receive_at_once(self, pair: Pair) -> None:
        size = 32 << 20
        data = [random.Random(number).randbytes(size) for number in (1, 2)]
        digests: dict[int, bytes] = {}

        def receiver(end: int) -> None:
            digests[end] = hashlib.blake2b(read(pair[end], size, 1 << 20)).digest()

        threads = [in_thread(receiver, end) for end in (0, 1)]
        threads += [in_thread(write, pair[end], data[end]) for end in (0, 1)]
        for join in threads:
            join()
        assert digests == {end: hashlib.blake2b(data[1 - end]).digest() for end in (0, 1)}

    # The end

    def test_what_was_sent_arrives_before_the_end(self, pair: Pair) -> None:
        ours, theirs = pair
        data = random.Random(2).randbytes(64 << 20)
        total = fill(ours, data)
        ours.close()
        assert read(theirs, total) == data[:total]
        assert polls(theirs, select.POLLIN)
        assert theirs.receive(1) == b""

    def test_the_end_is_said_again_and_again(self, pair: Pair) -> None:
        ours, theirs = pair
        ours.close()
        for _ in range(2):
            assert polls(theirs, select.POLLIN)
            assert theirs.receive(10) == b""
            assert theirs.receive_into(memoryview(bytearray(10))) == 0

    @pytest.mark.parametrize("gather", [False, True])
    def test_sending_to_a_closed_end_breaks_the_channel(self, pair: Pair, gather: bool) -> None:
        ours, theirs = pair
        theirs.close()

        def send_on() -> None:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:  # the first may get through: the other end is far away
                _ = ours.send_gather([b"a", b"b"]) if gather else ours.send(b"ab")

        assert isinstance(refusal(send_on), ConnectionError)
        assert polls(ours, select.POLLIN)

    def test_an_end_that_leaves_without_reading_breaks_the_channel_with_oserror_only(self, pair: Pair) -> None:
        ours, theirs = pair
        ours.send(b"unread")
        assert polls(theirs, select.POLLIN)
        theirs.close()
        for _ in range(2):
            assert polls(ours, select.POLLIN)
            try:
                assert ours.receive(10) == b""
            except ConnectionError:
                pass

    def test_after_close_every_method_raises_oserror(self, pair: Pair) -> None:
        for channel in pair:
            channel.close()
            for error in (
                refusal(channel.fileno),
                refusal(channel.receive, 1),
                refusal(channel.receive_into, memoryview(bytearray(1))),
                refusal(channel.send, b"x"),
                refusal(channel.send_gather, [b"x", b"y"]),
            ):
                assert not isinstance(error, BlockingIOError)

    def test_any_number_of_threads_may_close(self, transport: Transport, listener: Listener) -> None:
        for _ in range(20):
            ours, theirs = open_pair(transport, listener)
            for join in [in_thread(ours.close) for _ in range(4)]:
                join()
            ours.close()
            assert polls(theirs, select.POLLIN)
            assert theirs.receive(1) == b""
            theirs.close()

    def test_a_thread_that_receives_while_another_closes_gets_the_end_or_oserror(
        self, transport: Transport, listener: Listener
    ) -> None:
        def spin(channel: Channel, spinning: threading.Event) -> None:
            while True:
                try:
                    assert channel.receive(10) == b""
                    return
                except BlockingIOError:
                    spinning.set()
                except OSError:
                    return

        for _ in range(20):
            ours, theirs = open_pair(transport, listener)
            spinning = threading.Event()

            join = in_thread(spin, ours, spinning)
            assert spinning.wait(PATIENCE)
            ours.close()
            join()
            theirs.close()

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors cannot be counted here")
    def test_closing_gives_every_descriptor_back(self, transport: Transport) -> None:
        def use() -> None:
            listener = transport.listen()
            for ours, theirs in [open_pair(transport, listener) for _ in range(10)]:
                ours.close()
                theirs.close()
            listener.close()
            refusal(transport.connect, listener.address, PATIENCE)

        use()  # what is opened once and kept is no leak
        before = len(os.listdir("/proc/self/fd"))
        use()
        assert len(os.listdir("/proc/self/fd")) == before


def accept(listener: Listener) -> Channel:
    """The next channel of a listener that is about to have one."""
    assert polls(listener, select.POLLIN)
    channel = listener.accept()
    assert channel is not None
    return channel


def open_pair(transport: Transport, listener: Listener) -> Pair:
    """The connecting end and the accepted end of a new channel."""
    ours: list[Channel] = []
    join = in_thread(lambda: ours.append(transport.connect(listener.address, PATIENCE)))
    theirs = accept(listener)
    settle(theirs, lambda: bool(ours))
    join()
    return ours[0], theirs


def settle(theirs: Channel, is_done: Callable[[], bool]) -> None:
    """Reads at the accepted end, where nothing was sent yet, until the other end has connected."""
    deadline = time.monotonic() + PATIENCE
    while not is_done() or polls(theirs, select.POLLIN, 0):
        polls(theirs, select.POLLIN, 0.001)
        with pytest.raises(BlockingIOError):
            theirs.receive(1)
        assert time.monotonic() < deadline, "the two ends do not come together"


def polls(end: Channel | Listener, events: int, timeout: float = PATIENCE) -> bool:
    """Whether it polls so within the time. An end or an error counts for both directions, as it does for an agent."""
    poll = select.poll()
    poll.register(end.fileno(), events)
    return any(found & events for _, found in poll.poll(timeout * 1000))


def read(channel: Channel, size: int, chunk: int = 1 << 16) -> bytes:
    """So many bytes off a channel, in calls of `chunk` bytes at most."""
    whole = bytearray()
    while len(whole) < size:
        try:
            piece = channel.receive(min(chunk, size - len(whole)))
            assert piece, f"the stream ended after {len(whole)} of {size} bytes"
            assert len(piece) <= chunk
            whole += piece
        except BlockingIOError:
            assert polls(channel, select.POLLIN), f"nothing came after {len(whole)} of {size} bytes"
    return bytes(whole)


def write(channel: Channel, data: bytes) -> None:
    """All of it, waiting whenever the channel is full."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[channel.send(rest) :]
        except BlockingIOError:
            assert polls(channel, select.POLLOUT), f"{len(rest)} of {len(data)} bytes were never taken"


def fill(channel: Channel, data: bytes, gather: bool = False) -> int:
    """Sends of the data until the channel takes nothing more, also in a moment; gives how many bytes it took."""
    total = 0
    while True:
        piece = memoryview(data)[total : total + 100_000]
        assert piece, f"the channel took {total} bytes and was not full"
        try:
            total += channel.send_gather([piece[:10], piece[10:]]) if gather else channel.send(piece)
        except BlockingIOError:
            # The kernel may still be moving bytes on to the other end, which makes room here.
            if not polls(channel, select.POLLOUT, 0.1):
                return total


def write_pieces(channel: Channel, data: bytes, size: int) -> None:
    """All of it, in calls of `size` bytes at most."""
    for begin in range(0, len(data), size):
        write(channel, data[begin : begin + size])


def refusal(call: Callable[..., object], *args: object) -> OSError:
    """The `OSError` that the call must raise; of which kind is the caller's to say."""
    try:
        call(*args)
    except OSError as error:
        return error
    raise AssertionError("no OSError was raised")


def in_thread(work: Callable[..., object], *args: object) -> Callable[[], None]:
    """Starts the work in a thread. Call what comes back to wait for it; it raises what the work raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> None:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
        for failure in failures:
            raise failure

    return join

"""Sending on a channel that takes what it likes: whole messages, in order, from many threads; and broken channels."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.agent import sending
from farcall.agent.sending import Sender
from farcall.transports.base import Buffer
from interruption import At, Interrupt

ALL = 1 << 60
NONE = -1
"""What a channel may take: so many bytes at most, or nothing at all (`BlockingIOError`)."""


class Mouth:
    """A channel that takes as much as `appetite` says, call by call, and remembers it."""

    address = "fake:there"

    def __init__(self, appetite: Iterator[int] = itertools.repeat(ALL)) -> None:  # noqa: B008 (it is endless)
        self.appetite = appetite
        self.taken = bytearray()
        self.calls = 0
        self.sizes: list[int] = []
        self.busy = threading.Lock()
        self.error: BaseException | None = None
        self.calm = False

    def send(self, data: Buffer) -> int:
        return self.send_gather([data])

    def send_gather(self, pieces: Sequence[Buffer]) -> int:
        assert self.busy.acquire(blocking=False), "two threads send at once"
        try:
            assert len(pieces) <= 64
            self.calls += 1
            if self.error is not None:
                raise self.error
            data = b"".join(pieces)
            most = next(self.appetite)
            if most == NONE:
                raise BlockingIOError
            self.taken += data[:most]
            self.sizes.append(len(data[:most]))
            return min(most, len(data))
        finally:
            self.busy.release()


def sender_to(mouth: Any) -> tuple[Sender, list[bool]]:
    """A sender, and what it asked of the poller."""
    wanted: list[bool] = []
    return Sender(mouth, wanted.append), wanted


def test_a_small_message_goes_out_at_once_in_one_call() -> None:
    mouth = Mouth()
    sender, wanted = sender_to(mouth)
    sender.send(b"message")
    assert (mouth.taken, mouth.calls, wanted, sender.waiting) == (b"message", 1, [], 0)


def test_the_pieces_of_one_message_go_out_together() -> None:
    mouth = Mouth()
    sender, _ = sender_to(mouth)
    sender.send_all([b"start", memoryview(b"buffer"), bytearray(b"end")])
    assert (mouth.taken, mouth.calls) == (b"startbufferend", 1)


def test_large_pieces_are_not_copied() -> None:
    class Watching(Mouth):
        def send_gather(self, pieces: Sequence[Buffer]) -> int:
            seen.extend(pieces)
            return super().send_gather(pieces)

    seen: list[Buffer] = []
    sender, _ = sender_to(Watching())
    large = memoryview(bytearray(1 << 20))
    sender.send_all([b"start", large])
    assert any(piece is large for piece in seen)


def test_what_the_channel_does_not_take_waits_until_it_does() -> None:
    mouth = Mouth(iter([3, NONE, 2, ALL]))
    sender, wanted = sender_to(mouth)
    sender.send(b"message")
    assert (mouth.taken, sender.waiting, wanted) == (b"mes", 4, [True])
    sender.flush()
    assert (mouth.taken, sender.waiting, wanted) == (b"mes", 4, [True])
    sender.flush()
    assert (mouth.taken, sender.waiting, wanted) == (b"messa", 2, [True])
    sender.flush()
    assert (mouth.taken, sender.waiting, wanted) == (b"message", 0, [True, False])


def test_a_channel_that_is_full_takes_nothing_of_the_first_message() -> None:
    mouth = Mouth(iter([NONE, ALL]))
    sender, wanted = sender_to(mouth)
    sender.send(b"message")
    assert (mouth.taken, sender.waiting, wanted) == (b"", 7, [True])
    sender.flush()
    assert (mouth.taken, wanted) == (b"message", [True, False])


def test_a_message_waits_behind_what_waits_and_nobody_tries_in_vain() -> None:
    mouth = Mouth(iter([1, NONE, ALL]))
    sender, wanted = sender_to(mouth)
    sender.send(b"first")
    sender.send(b"second")
    sender.send_all([b"th", b"ird"])
    assert (mouth.taken, mouth.calls, sender.waiting, wanted) == (b"f", 1, 4 + 6 + 5, [True])
    sender.flush()
    assert (mouth.taken, mouth.calls) == (b"f", 2)
    sender.flush()
    assert (mouth.taken, sender.waiting, wanted) == (b"firstsecondthird", 0, [True, False])


def test_queued_messages_go_out_with_one_call_at_the_flush() -> None:
    mouth = Mouth()
    sender, wanted = sender_to(mouth)
    for number in range(100):
        sender.queue(b"%02d" % number)
    assert mouth.calls == 0
    sender.flush()
    assert mouth.taken == b"".join(b"%02d" % number for number in range(100))
    assert mouth.calls == 1
    sender.flush()
    assert (mouth.calls, wanted) == (1, [])


@pytest.mark.parametrize("send", [Sender.send, lambda sender, data: sender.send_all([data])], ids=["send", "send_all"])
def test_a_message_goes_behind_those_that_were_queued_before(send: Callable[[Sender, bytes], None]) -> None:
    mouth = Mouth()
    sender, _ = sender_to(mouth)
    sender.queue(b"first ")
    send(sender, b"second")
    sender.flush()
    assert mouth.taken == b"first second"


def test_empty_pieces_are_no_trouble() -> None:
    mouth = Mouth(iter([NONE, 1, ALL, ALL, ALL]))
    sender, _ = sender_to(mouth)
    sender.send_all([b"", b"ab", b"", memoryview(b""), b"c"])
    sender.flush()
    sender.flush()
    calls = mouth.calls
    sender.send_all([b""])
    assert (mouth.taken, mouth.calls, sender.waiting) == (b"abc", calls, 0)


def test_one_call_carries_a_chunk_and_no_more_pieces_than_the_system_takes() -> None:
    mouth = Mouth()
    sender, _ = sender_to(mouth)
    sender.send_all([bytes(sending._CHUNK - 1), bytes(10), bytes(10)])
    assert mouth.sizes == [sending._CHUNK + 9, 10]
    sender.send_all([memoryview(bytes(sending._CHUNK // 32))] * 100)
    assert mouth.sizes[2:4] == [sending._CHUNK, sending._CHUNK]


# Copies


@pytest.mark.parametrize("appetite", [[2], [NONE], [0]], ids=["some", "nothing", "none of it"])
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind another"])
def test_buffers_may_be_changed_once_they_are_sent(appetite: list[int], behind: bool) -> None:
    mouth = Mouth(itertools.chain(appetite, itertools.repeat(ALL)))
    sender, _ = sender_to(mouth)
    first = b"first" if behind else b""
    if behind:
        sender.send(first)
    array, view = bytearray(b"abcdef"), bytearray(b"ghi")
    sender.send_all([b"1", array, memoryview(view)])
    array[:] = b"XXXXXX"
    view[:] = b"YYY"
    sender.flush()
    assert mouth.taken == first + b"1abcdefghi"


def test_what_nobody_can_change_is_not_copied() -> None:
    mouth = Mouth(iter([2]))
    sender, _ = sender_to(mouth)
    data = bytes(2 * sending._CHUNK)
    sender.send_all([data])
    (rest,) = sender._queue
    assert isinstance(rest, memoryview)
    assert rest.obj is data


def test_what_was_copied_is_not_copied_again() -> None:
    mouth = Mouth(iter([2, 1, 1]))
    sender, _ = sender_to(mouth)
    sender.send_all([bytearray(2 * sending._CHUNK)])
    (copy,) = sender._queue
    for _ in range(2):
        sender.flush()  # takes some of it
        sender.send_all([b"more"])
    rest = sender._queue[0]
    assert isinstance(rest, memoryview)
    assert rest.obj is (copy.obj if isinstance(copy, memoryview) else copy)


# Broken channels


@pytest.mark.parametrize(
    "send",
    [
        lambda sender: sender.send(b"more"),
        lambda sender: sender.send_all([b"mo", b"re"]),
        lambda sender: (sender.queue(b"more"), sender.flush()),
    ],
    ids=["send", "send_all", "flush"],
)
@pytest.mark.parametrize("error", [ConnectionResetError("reset"), KeyboardInterrupt()], ids=["reset", "interrupted"])
def test_after_the_channel_broke_everything_raises_and_nothing_is_sent(
    send: Callable[[Sender], None], error: BaseException
) -> None:
    mouth = Mouth()
    sender, _ = sender_to(mouth)
    assert not sender.is_broken()
    mouth.error = error
    with pytest.raises(type(error)):
        send(sender)
    mouth.error = None
    calls = mouth.calls
    for again in (lambda: sender.send(b"x"), lambda: sender.send_all([b"x"]), sender.flush, lambda: sender.send(b"y")):
        with pytest.raises(ConnectionError, match="the connection to fake:there is broken"):
            again()
    assert (mouth.calls, mouth.taken) == (calls, b"")
    assert sender.is_broken()
    assert sender.waiting == 0, "what was queued is dropped"


def test_a_channel_that_breaks_while_messages_wait() -> None:
    mouth = Mouth(iter([2]))
    sender, _ = sender_to(mouth)
    sender.send(b"abcd")
    mouth.error = BrokenPipeError("gone")
    with pytest.raises(BrokenPipeError):
        sender.flush()
    with pytest.raises(ConnectionError, match="broken: gone"):
        sender.send(b"x")
    assert sender.waiting == 0


SENDS = pytest.mark.parametrize(
    "send",
    [
        pytest.param(Sender.send, id="send"),
        pytest.param(lambda sender, data: sender.send_all([data[:3], memoryview(data)[3:]]), id="send_all"),
        pytest.param(lambda sender, data: (sender.queue(data), sender.flush()), id="flush"),
    ],
)


@SENDS
def test_a_broken_channel_keeps_nothing_of_those_who_met_it(send: Callable[[Sender, bytes], None]) -> None:
    """The traceback of the error would hold all that the frames of a call hold, references too."""

    class Local:
        pass

    mouth = Mouth()
    sender, _ = sender_to(mouth)

    def attempt() -> weakref.ref[Local]:
        local = Local()
        mouth.error = BrokenPipeError("gone")
        with pytest.raises(BrokenPipeError):
            send(sender, b"more")
        mouth.error = None
        return weakref.ref(local)

    met = attempt()
    gc.collect()
    assert met() is None
    assert sender.is_broken()


@SENDS
@pytest.mark.parametrize("appetite", [[4], [NONE], [ALL]], ids=["some", "nothing", "all"])
def test_an_interrupt_at_any_point_breaks_the_channel_or_harms_nothing(
    send: Callable[[Sender, bytes], None], appetite: list[int]
) -> None:
    for point in itertools.count():
        mouth = Mouth(itertools.chain(appetite, itertools.repeat(ALL)))
        if not interrupted(mouth, send, point):
            assert point >= 3
            return


@SENDS
def test_a_second_interrupt_right_after_the_first_breaks_the_channel_too(
    send: Callable[[Sender, bytes], None],
) -> None:
    class Interrupted(Mouth):
        def send_gather(self, pieces: Sequence[Buffer]) -> int:
            sent = super().send_gather(pieces)
            if self.calls == 1 and not self.calm:
                raise Interrupt  # as the system call returns
            return sent

    for point in itertools.count():
        if not interrupted(Interrupted(iter([4, ALL, ALL, ALL])), send, point):
            assert point >= 3
            return


def interrupted(mouth: Mouth, send: Callable[[Sender, bytes], None], point: int) -> bool:
    """Interrupts a send at that point and looks at what follows; False if there is no such point."""
    sender, _ = sender_to(mouth)
    with contextlib.suppress(Interrupt), At(("agent/sending.py",), (point,)) as at:
        send(sender, b"message")
    mouth.calm = True
    try:
        sender.send(b"|next")
        sender.flush()
    except ConnectionError:
        return at.has_acted
    assert mouth.taken in (b"|next", b"message|next"), f"interrupted in {at.places}"
    return at.has_acted


def test_no_memory_to_join_what_was_queued_breaks_the_channel() -> None:
    class Huge(bytes):
        def __add__(self, _: object) -> bytes:
            raise MemoryError

    mouth = Mouth()
    sender, _ = sender_to(mouth)
    sender.queue(Huge(b"first"))
    sender.queue(b"second")
    with pytest.raises(MemoryError):
        sender.flush()
    assert sender.is_broken(), "what was taken from the queue is lost, and so is the order of what follows"
    with pytest.raises(ConnectionError):
        sender.send(b"x")


# Sending in the midst of a send, as signal handlers and finalizers do


@SENDS
@pytest.mark.parametrize("appetite", [[4, NONE], [NONE], [ALL], [4, 4]], ids=["some", "nothing", "all", "bits"])
@pytest.mark.timeout(60)
def test_a_send_at_any_point_of_a_send_goes_out_whole(
    send: Callable[[Sender, bytes], None], appetite: list[int]
) -> None:
    for point in itertools.count():
        mouth = Mouth(itertools.chain(appetite, itertools.repeat(ALL)))
        sender, wanted = sender_to(mouth)
        buffer = bytearray(b"<handler>")

        def handle(sender: Sender = sender, buffer: bytearray = buffer) -> None:
            sender.send_all([b"[", buffer, b"]"])
            buffer[:] = b"!" * len(buffer)

        with At(("agent/sending.py",), (point,), handle) as at:
            send(sender, b"message")
        if not at.places:
            assert point >= 3
            return
        if wanted[-1:] != [True]:
            assert not sender._later, f"nobody sends it, at {at.places}"
        for _ in range(3):
            sender.flush()
        whole = {b"message[<handler>]", b"[<handler>]message"}
        assert bytes(mouth.taken) in whole, f"at {at.places}"
        assert sender.waiting == 0


def test_whether_this_thread_is_sending() -> None:
    class Asking(Mouth):
        def send_gather(self, pieces: Sequence[Buffer]) -> int:
            asked.append(sender.is_sending_here())
            other = threading.Thread(target=lambda: asked.append(sender.is_sending_here()))
            other.start()
            other.join()
            return super().send_gather(pieces)

    asked: list[bool] = []
    sender, _ = sender_to(Asking())
    assert not sender.is_sending_here()
    sender.send(b"message")
    assert asked == [True, False]
    assert not sender.is_sending_here()


# Any messages, any appetite

messages = st.lists(st.lists(st.binary(max_size=12), min_size=1, max_size=5), max_size=8)
appetites = st.lists(st.one_of(st.just(NONE), st.integers(0, 30)), max_size=30)
acts = st.lists(st.sampled_from(["send", "send_all", "queue", "flush"]), min_size=8, max_size=8)


sizes = st.sampled_from([(sending._CHUNK, sending._PIECES), (8, 3), (20, 2), (1, 1)])


@given(messages, appetites, acts, sizes)
def test_whole_messages_arrive_in_their_order_whatever_the_channel_takes(
    sent: list[list[bytes]], appetite: list[int], how: list[str], sizes: tuple[int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "_CHUNK", sizes[0])  # with small ones, small pieces are as good as large ones
        patch.setattr(sending, "_PIECES", sizes[1])
        send_in_turn(sent, appetite, how)


def send_in_turn(sent: list[list[bytes]], appetite: list[int], how: list[str]) -> None:
    mouth = Mouth(itertools.chain(appetite, itertools.repeat(ALL)))
    sender, wanted = sender_to(mouth)
    stream = b""
    for number, (pieces, act) in enumerate(zip(sent, how, strict=False)):
        message = [b"<%d:" % number, *pieces, b">"]  # numbered, so that the order can be told
        stream += b"".join(message)
        own = [bytearray(piece) for piece in message]
        if act == "queue":
            sender.queue(b"".join(message))
            continue
        if act == "send":
            sender.send(b"".join(message))
        else:
            sender.send_all(own)
        for piece in own:
            piece[:] = b"!" * len(piece)  # the caller does with its buffers what it likes
        if act == "flush":
            sender.flush()
        assert sender.waiting == len(stream) - len(mouth.taken)
        assert (wanted[-1] if wanted else False) == bool(sender.waiting)
    for _ in range(len(appetite) + 1):
        sender.flush()
    assert mouth.taken == stream
    assert wanted == [True, False] * (len(wanted) // 2)


def test_messages_of_many_threads_are_whole_and_those_of_one_in_order() -> None:
    mouth = Mouth(itertools.cycle([5, NONE, 1, 50, ALL, 7, NONE, 13]))
    sender, _ = sender_to(mouth)

    def send(name: int) -> None:
        for number in range(200):
            message = b"<%d %d>" % (name, number)
            if number % 3:
                sender.send(message)
            else:
                sender.send_all([message[:2], memoryview(message)[2:]])
            if number % 10 == 0:
                sender.flush()

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    while sender.waiting:
        sender.flush()
    received = [tuple(map(int, part.split())) for part in bytes(mouth.taken[1:-1]).split(b"><")]
    assert len(received) == 800
    for name in range(4):
        assert [number for of, number in received if of == name] == list(range(200))

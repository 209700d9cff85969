"""Large buffers between two workers of one host: in shared memory where both ends can, else on the channel."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from lanes_stage import NewPair, copied, keep, kept, memfds, returned_to, segments, sent_by

from eventually import eventually
from farcall import WorkerLost
from farcall.agent import agent
from farcall.agent.lanes import LEAST, Lane, pool_for
from farcall.agent.sending import InParts
from farcall.errors import ProtocolError
from farcall.protocol.wire import CALL, MAX_BUFFERS, RESULT, Decoder, encode_shared
from farcall.testing import LocalGroup
from farcall.transports.borrowed_memory import Borrower
from farcall.transports.shared_memory import Pool
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memfds_from_here")]


def spoil(value: Any) -> Any:
    """Writes into what it got; what it was before."""
    before = value.copy()
    value[...] = 0
    return before


def checksum(value: Any) -> int:
    return zlib.crc32(value)


# The greeting


def test_both_ends_agree_and_large_data_goes_to_and_fro_in_shared_memory(new_pair: NewPair) -> None:
    group = new_pair()
    large = np.arange(LEAST, dtype=np.uint8)
    assert np.array_equal(call(group[0], 1, copied, large), large)
    assert sent_by(group) == [LEAST, LEAST]
    assert np.array_equal(call(group[0], 1, copied, large[1:]), large[1:])
    assert sent_by(group) == [LEAST, LEAST], "less goes through the socket"


def test_who_waits_at_either_end_hears_how_much_goes_and_comes(new_pair: NewPair) -> None:
    group = new_pair()
    (out,) = group[0]._connections
    (back,) = group[1]._incoming
    assert out.lane.on_large == out._spinning.after_large
    assert back.lane.on_large == group[1]._serving._spinning.after_large
    here: list[int] = []
    there: list[int] = []
    out.lane.on_large, back.lane.on_large = here.append, there.append
    large = np.arange(LEAST, dtype=np.uint8)
    call(group[0], 1, copied, large)
    assert (here, there) == ([LEAST] * 2, [LEAST] * 2)
    call(group[0], 1, echo, large)
    assert (here, there) == ([LEAST] * 4, [LEAST] * 3), "what is returned was not copied there"
    call(group[0], 1, echo, large[1:])
    assert (len(here), len(there)) == (4, 3), "less goes through the socket"


def test_zero_turns_it_off(new_pair: NewPair, caplog: pytest.LogCaptureFixture) -> None:
    group = new_pair(shared_memory=0)
    large = np.arange(1 << 20)
    assert np.array_equal(call(group[0], 1, echo, large), large)
    assert sent_by(group) == [-1, -1]
    assert memfds() == 0
    assert caplog.text == ""


def test_where_no_segment_can_be_made_one_warning_is_enough(
    new_pair: NewPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    group = new_pair()
    large = np.arange(1 << 20)
    for _ in range(3):
        assert np.array_equal(call(group[0], 1, echo, large), large)
    assert call(group[1], 0, echo, 1) == 1
    for name in ("worker0", "worker1"):
        assert caplog.text.count(f"worker {name!r}: no shared memory can be had") == 1
    assert "large data goes through sockets instead" in caplog.text


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "none"), ValueError()]
)
def test_who_cannot_open_the_others_memory_gets_it_through_the_socket(
    new_pair: NewPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(borrower: Borrower, descriptor: int) -> None:
        raise error

    monkeypatch.setattr(Borrower, "check", refuse)
    with caplog.at_level(logging.INFO, "farcall"):
        group = new_pair()
    large = np.arange(1 << 20)
    assert np.array_equal(call(group[0], 1, echo, large), large)
    assert sent_by(group) == [-1, -1]
    assert caplog.text.count("cannot share its memory with this one") == 2


def test_one_way_may_be_open_and_the_other_not(new_pair: NewPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callee cannot lend, so only arguments go in shared memory."""
    monkeypatch.setattr(agent, "pool_for", lambda name, limit: pool_for(name, 0 if name == "worker1" else None))
    group = new_pair()
    large = np.arange(1 << 20)
    assert np.array_equal(call(group[0], 1, echo, large), large)
    assert sent_by(group) == [large.nbytes, -1]


def test_what_is_not_on_this_host_is_offered_nothing() -> None:
    class Far:
        address = "tcp:far"

    pool = Pool(1 << 20, 4, str)
    lane = Lane(pool, Far())  # type: ignore[arg-type]
    assert lane.offer() == (-1, b"")
    assert not lane.accept(3, b"token")
    assert memfds() == 0
    with pytest.raises(ProtocolError, match="has not agreed to"):
        lane.take(3, 1, [10])


@pytest.mark.parametrize(("limit", "usual"), [(None, True), (0, False), (1 << 20, False)])
def test_the_usual_limit_is_a_part_of_the_machines_memory(limit: int | None, usual: bool) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert pool_for("w", limit)._left == (min(4 << 30, physical // 4) if usual else limit)


# What arrives

# numpy's own pickle makes dates of another byte order native.
dtypes = st.one_of(
    arrays.scalar_dtypes().filter(lambda dtype: dtype.kind not in "mM" or dtype.isnative),
    arrays.array_dtypes(arrays.integer_dtypes() | arrays.floating_dtypes() | arrays.byte_string_dtypes()),
    st.just(np.dtype([("a", ">i4"), ("b", "f8", (2,)), ("c", "S5")])),
    st.just(np.dtype(object)),
)


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array of any type, order and strides; some of no size, some large."""
    dtype = draw(dtypes)
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    if dtype.hasobject:
        made: np.ndarray[Any, Any] = np.full(shape, draw(st.sampled_from([None, "text", 7])), object)
    else:
        size = int(np.prod(shape, dtype=int)) * dtype.itemsize
        made = np.zeros(shape, dtype)
        if size and made.nbytes == size and dtype.kind in "biufc":
            made = np.frombuffer(bytes(range(1, 100)) * (size // 99 + 1), dtype, made.size).reshape(shape)
    repeats = draw(st.sampled_from([1, 1, 300, 7000]))
    if repeats > 1 and made.ndim and made.size and made.nbytes * repeats < 1 << 22:
        made = np.concatenate([made] * repeats)
    made = np.asarray(made, order=draw(st.sampled_from(["C", "F"])))
    if made.ndim and draw(st.booleans()):
        made = made[:: draw(st.sampled_from([2, -1, -3]))]
    if draw(st.booleans()):
        made = made.T
    if draw(st.booleans()):
        made = made.copy("A")
    else:
        made.flags.writeable = False
    return made


def same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return (
        type(left) is type(right)
        and left.dtype == right.dtype
        and left.shape == right.shape
        and (left.tolist() == right.tolist() if left.dtype.hasobject else left.tobytes() == right.tobytes())
    )


plain_memory = st.builds(
    lambda make, size, byte: make(bytes([byte]) * size),
    st.sampled_from(
        [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))[::-2], lambda data: array("i", data)]
    ),
    st.sampled_from([0, 4, 4096, LEAST - 4, LEAST, LEAST * 5]),
    st.integers(0, 255),
)


@pytest.mark.parametrize("shared_memory", [None, 0, 1 << 18], ids=["shared", "socket", "little"])
def test_anything_arrives_as_it_was(new_pair: NewPair, shared_memory: int | None) -> None:
    group = new_pair(shared_memory=shared_memory)

    @example([np.ones(1 << 20, np.uint8), bytes(1 << 20)], False)  # the one goes back as it came, the other is copied
    @given(st.lists(any_array() | plain_memory, min_size=1, max_size=4), st.booleans())
    @settings(deadline=None, max_examples=60)
    def check(values: list[Any], nested: bool) -> None:
        found = call(group[0], 1, echo, [*values]) if nested else [call(group[0], 1, echo, value) for value in values]
        for value, result in zip(values, found, strict=True):
            if isinstance(value, np.ndarray):
                # numpy's own pickle makes some arrays of another byte order native: those that are not contiguous.
                assert same(result, pickle.loads(pickle.dumps(value, 5)))
                assert result.flags.writeable >= value.flags.writeable
                assert result.flags.aligned
            else:
                assert type(result) is type(value)
                assert result == value
                if isinstance(value, memoryview):
                    assert (result.format, result.readonly) == (value.format, value.readonly)

    check()
    if shared_memory is None:
        assert min(*sent_by(group), returned_to(group)) > 0


@pytest.mark.parametrize("shared_memory", [None, 0], ids=["shared", "socket"])
@pytest.mark.parametrize("size", [100, 1 << 14, 1 << 18, 1 << 22])
def test_each_side_has_its_own(new_pair: NewPair, shared_memory: int | None, size: int) -> None:
    group = new_pair(shared_memory=shared_memory)
    ours = np.full(size, 1, np.uint8)
    back = call(group[0], 1, keep, ours)
    (theirs,) = kept
    ours[:] = 2
    assert (theirs == 1).all()
    theirs[:] = 3
    assert (ours == 2).all()
    assert (back == 1).all()
    back[:] = 4
    assert (theirs == 3).all()
    assert (call(group[0], 1, spoil, ours) == 2).all()
    assert (ours == 2).all()


def test_what_is_kept_is_not_overwritten_by_later_messages(new_pair: NewPair) -> None:
    group = new_pair()
    results = [call(group[0], 1, keep, np.full(LEAST, seed, np.uint8)) for seed in range(30)]
    for values in (results, kept):
        assert [int(each[0]) for each in values] == list(range(30))
        assert all((each == each[0]).all() for each in values)
    assert max(len(lane._lender._segments) for lane in group[0]._lanes() if lane._lender) <= 16
    del results[1:], kept[1:], values
    gc.collect()
    eventually(lambda: sum(segment.state() == 0 for segment in segments(group)) >= 28)
    assert (results[0] == 0).all()
    assert call(group[0], 1, checksum, bytes(LEAST)) == zlib.crc32(bytes(LEAST))


def test_a_small_pool_is_not_waited_for(new_pair: NewPair) -> None:
    group = new_pair(shared_memory=1 << 19)
    results = [call(group[0], 1, keep, np.full(1 << 18, seed, np.uint8)) for seed in range(8)]
    assert [int(each[-1]) for each in (*results, *kept)] == [*range(8), *range(8)]
    assert sent_by(group)[0] == 2 << 18


def test_as_many_buffers_as_there_may_be(new_pair: NewPair) -> None:
    group = new_pair()
    lane = group[0]._lanes()[0]
    many = [memoryview(b"xy")] * (MAX_BUFFERS + 1)
    with pytest.raises(ProtocolError, match=f"has {MAX_BUFFERS + 1} out-of-band buffers"):
        lane.pieces(CALL, 1, b"", b"", many)
    assert all(segment.state() == 0 for segment in segments(group))
    pieces = lane.pieces(CALL, 1, b"h", b"b", many[1:])
    assert not isinstance(pieces, InParts)
    decoder = Decoder()
    decoder.shared = group[1]._lanes()[0].take
    ((kind, call_id, head, body, buffers),) = decoder.feed(b"".join(pieces))
    assert (kind, call_id, head, bytes(body), len(buffers)) == (CALL, 1, b"h", b"b", MAX_BUFFERS)
    assert len(pieces) == 1
    assert {bytes(buffer) for buffer in buffers} == {b"xy"}


def test_many_threads_at_once(new_pair: NewPair, background: ThreadPoolExecutor) -> None:
    group = new_pair(shared_memory=8 << 20)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held = []
        for _ in range(30):
            sent = rng.integers(0, 256, int(rng.integers(LEAST // 2, 8 * LEAST)), np.uint8)
            if rng.random() < 0.5:
                assert call(group[seed % 2], 1 - seed % 2, checksum, sent) == zlib.crc32(sent)
            else:
                function = echo if rng.random() < 0.5 else copied
                held.append((zlib.crc32(sent), call(group[seed % 2], 1 - seed % 2, function, sent)))
            if len(held) > 3:
                crc, value = held.pop(0)
                assert zlib.crc32(value) == crc
        assert all(zlib.crc32(value) == crc for crc, value in held)

    for future in [background.submit(work, seed) for seed in range(8)]:
        future.result(SOON * 4)
    assert min(sent_by_all(group)) > 0


def sent_by_all(group: LocalGroup) -> list[int]:
    return [lane._lender.lent for one in group for lane in one._lanes() if lane._lender]


# What cannot be


def answer_with(group: LocalGroup, message: bytes) -> None:
    """Worker1 says that to worker0."""
    (incoming,) = group[1]._incoming
    incoming._sender.send(message)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ((2**31 - 1, 1), "No such file"),
        ((0, 1), "cannot be had"),
        (("probe", 77), "is number 1, not 77"),
        (("probe", 1), r"shared memory of 4096 bytes.*was said to hold"),
    ],
    ids=["closed", "another file", "number", "size"],
)
def test_a_reply_in_memory_that_is_not_there_ends_the_connection(
    new_pair: NewPair, place: tuple[Any, int], reason: str
) -> None:
    group = new_pair()
    gate = new_gate("bad reply")
    future = start(group[0], 1, wait_at, "bad reply")
    assert arrived["bad reply"].wait(SOON)
    descriptor = group[1]._pool.probe() if place[0] == "probe" else place[0]
    maps = Path("/proc/self/maps").read_text().count("/memfd:farcall")
    answer_with(group, encode_shared(RESULT, 1, b"", b"", [100_000], descriptor, place[1]))
    with pytest.raises(WorkerLost, match=reason):
        future.wait()
    gate.set()
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("/memfd:farcall") <= maps + 1
    assert call(group[0], 1, echo, 3) == 3, "the next call connects anew"


def test_a_call_in_memory_that_is_not_there_closes_the_connection_with_a_line(
    new_pair: NewPair, caplog: pytest.LogCaptureFixture
) -> None:
    group = new_pair()
    (connection,) = group[0]._connections
    connection._sender.send(encode_shared(CALL, 99, b"builtins\0len", b"", [100_000], 2**31 - 1, 1))
    eventually(lambda: "connection from worker 'worker0' closed" in caplog.text)
    assert "in shared memory that cannot be had: [Errno 2]" in caplog.text
    eventually(lambda: not group[0]._connections)
    assert call(group[0], 1, echo, 3) == 3

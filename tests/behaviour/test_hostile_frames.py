"""A member of the group that sends garbage instead of frames loses its connection, and harms nobody else."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hostile_member import (
    ANNOUNCE,
    CALL,
    CALLS,
    CANCEL,
    CHUNK,
    CONTROL,
    FAILURE,
    GOSSIP,
    HAS_ANNOTATIONS,
    HAS_REFERENCES,
    INLINE,
    KEEP,
    LONG,
    REFERENCES,
    RESULT,
    SHARED,
    HandMade,
    HandMadeCallee,
    header,
)
from test_hostile_members import SECRET, OpenGroup

import farcall as rpc
from eventually import eventually
from farcall import Future

pytestmark = pytest.mark.timeout(60)

DICT = b"builtins\0dict"
HANDLE = struct.pack("<IIQ16sIQ", 1, 77, 1, bytes(16), 77, 1)
NESTED = b"\x91" * 100_000


@pytest.fixture
def group() -> Iterator[OpenGroup]:
    group = OpenGroup()
    yield group
    rpc.shutdown(graceful=False)


@contextmanager
def member(group: OpenGroup) -> Iterator[HandMade]:
    """A connection of a member that was let in."""
    with HandMade(group.worker, CALLS, SECRET) as hand:
        assert group.greet_worker(hand)["type"] == "welcome"
        yield hand


def call(hand: HandMade, call_id: int) -> bytes:
    """The reply to an honest call."""
    hand.frame(CALL, DICT, callee_size=len(DICT), call_id=call_id)
    return hand.receive_frame()


def check_well(group: OpenGroup) -> None:
    """Another connection is served."""
    with member(group) as hand:
        assert call(hand, 5)[:16] == header(RESULT, call_id=5)
    assert rpc.rpc_sync("w0", abs, args=(-3,)) == 3


def framed(data: bytes, mark: int = 0) -> bytes:
    return struct.pack("<I", len(data) | mark) + data


def internal(data: bytes) -> bytes:
    return framed(data, 1 << 31)


GARBAGE = {
    "an empty frame": framed(b""),
    "a short frame": framed(bytes(15)),
    "kind 0": framed(header(0)),
    "kind 9": framed(header(9)),
    "kind 255": framed(b"\xff" * 64),
    "a result": framed(header(RESULT, call_id=1)),
    "a failure": framed(header(FAILURE, call_id=1)),
    "a remote call without a number": framed(header(KEEP, 0, len(DICT), 0, 1) + DICT + HANDLE),
    "a remote call without a reference": framed(header(KEEP, HAS_REFERENCES, len(DICT), 0, 1) + DICT),
    "a remote call of another's reference": framed(
        header(KEEP, HAS_REFERENCES, len(DICT), 0, 1)
        + DICT
        + struct.pack("<IIQ16sIQ", 1, 1, 1, bytes(16), 1, 1)
        + struct.pack("<QH", 1, 0)
    ),
    "references that are not there": framed(header(CALL, HAS_REFERENCES, len(DICT), 0, 1) + DICT + bytes(9)),
    "fewer references than announced": framed(
        header(CALL, HAS_REFERENCES, len(DICT), 0, 1) + DICT + struct.pack("<QH", 1, 65535) + HANDLE
    ),
    "annotations that are not there": framed(header(CALL, HAS_ANNOTATIONS, len(DICT), 0, 1) + DICT),
    "fewer annotations than announced": framed(
        header(CALL, HAS_ANNOTATIONS, len(DICT), 0, 1) + DICT + struct.pack("<I", 2**32 - 1)
    ),
    "annotations that are no map": framed(
        header(CALL, HAS_ANNOTATIONS, len(DICT), 0, 1) + DICT + struct.pack("<I", 3) + b"\x93\1\2"
    ),
    "annotations that nest without end": internal(
        struct.pack("<BBHI", INLINE, 0, 0, 16 + len(DICT) + 4 + len(NESTED))
        + header(CALL, HAS_ANNOTATIONS, len(DICT), 0, 1)
        + DICT
        + struct.pack("<I", len(NESTED))
        + NESTED
    ),
    "a callee that is longer than its frame": framed(header(CALL, 0, 65535, 0, 1) + DICT),
    "a method of no reference": framed(header(CALL, 0, 5, 0, 1) + b"\1abcd"),
    "a value of no reference": framed(header(CALL, 0, 1, 0, 1) + b"\2"),
    "references of another worker": framed(header(REFERENCES) + struct.pack("<QH", 1, 1)),
    "half a message about references": framed(header(CONTROL) + bytes(9)),
    "an unknown message about references": framed(header(CONTROL) + bytes(8) + struct.pack("<QB44s", 1, 200, HANDLE)),
    "an acknowledgement of what was never sent": framed(header(CONTROL) + b"\xff" * 8),
    "news that cannot be read": framed(header(GOSSIP) + b"\xc1"),
    "news of nothing": framed(header(GOSSIP)),
    "a huge frame": struct.pack("<I", 0x7FFFFFFF),
    "a frame that should have come in chunks": struct.pack("<I", 1 << 20),
    "a huge internal frame": struct.pack("<I", 0xFFFFFFFF) + b"\1",
    "an empty internal frame": internal(b""),
    "sizes that do not add up": internal(struct.pack("<BBHIQ", INLINE, 0, 1, 16, 5) + bytes(20)),
    "sizes that overflow": internal(struct.pack("<BBHIQQ", INLINE, 0, 2, 16, 2**64 - 1, 2**64 - 1) + bytes(20)),
    "a table that is not there": internal(struct.pack("<BBHI", INLINE, 0, 65535, 0)),
    "a frame announced twice": internal(struct.pack("<BBHIQ", ANNOUNCE, 0, 0, 1, 20)) * 2,
    "the announcement of a huge frame": internal(struct.pack("<BBHIQ", ANNOUNCE, 0, 0, 1, 1 << 62)),
    "the announcement of many huge buffers": internal(
        struct.pack("<BBHIQ", ANNOUNCE, 0, 3, 1, 16) + struct.pack("<Q", 1 << 62) * 3
    ),
    "too many announcements": b"".join(
        internal(struct.pack("<BBHIQ", ANNOUNCE, 0, 0, number, 20)) for number in range(100)
    ),
    "buffers that were not asked for": internal(struct.pack("<BBHIQ", ANNOUNCE, 1, 0, 1, 20)),
    "a chunk of nothing": internal(struct.pack("<BxxxI", CHUNK, 7) + b"chunk"),
    "half a header of a chunk": internal(bytes([CHUNK, 0])) + bytes(20),
    "an empty chunk": internal(struct.pack("<BBHIQ", ANNOUNCE, 0, 0, 1, 20))
    + internal(struct.pack("<BxxxI", CHUNK, 1)),
    "a chunk that is too large": internal(struct.pack("<BBHIQ", ANNOUNCE, 0, 0, 1, 20))
    + internal(struct.pack("<BxxxI", CHUNK, 1) + bytes(21)),
    **{f"internal frame {kind} over TCP": internal(bytes([kind]) + bytes(40)) for kind in range(SHARED, LONG + 2)},
}


def test_garbage_closes_the_connection_that_it_came_on(group: OpenGroup) -> None:
    for what, garbage in GARBAGE.items():
        with member(group) as hand:
            assert call(hand, 1)[:16] == header(RESULT, call_id=1)
            try:
                hand.sock.sendall(garbage)
            except ConnectionError:
                pass  # it was closed before it had read all of it
            assert hand.is_closed(), what
        check_well(group)


def test_a_call_id_may_be_any_number_and_is_only_given_back(group: OpenGroup) -> None:
    with member(group) as hand:
        for call_id in (2**64 - 1, 7, 7, 1):
            assert call(hand, call_id)[:16] == header(RESULT, call_id=call_id)


def test_a_cancellation_of_a_call_that_is_not_there_changes_nothing(group: OpenGroup) -> None:
    with member(group) as hand:
        for call_id in (1, 1, 2**64 - 1):
            hand.sock.sendall(framed(header(CANCEL, call_id=call_id)))
            assert call(hand, call_id)[:16] == header(RESULT, call_id=call_id)


def test_a_frame_that_comes_byte_by_byte_is_the_same_frame(group: OpenGroup) -> None:
    with member(group) as hand:
        for byte in framed(header(CALL, 0, len(DICT), 0, 9) + DICT):
            hand.sock.sendall(bytes([byte]))
        assert hand.receive_frame()[:16] == header(RESULT, call_id=9)


# A member that is called, and answers garbage


@contextmanager
def called_member(group: OpenGroup, number: int) -> Iterator[tuple[Future[Any], HandMade, int]]:
    """A member that is called: the future of the call, the connection on which it came, and its id."""
    name = f"callee{number}"
    with (
        HandMadeCallee(SECRET, name, number) as callee,
        HandMade(group.worker, CALLS, SECRET) as hand,
        ThreadPoolExecutor(1) as pool,
    ):
        hello = {"name": name, "number": number, "host": "elsewhere", "addresses": [callee.address]}
        assert group.greet_worker(hand, **hello)["type"] == "welcome"
        eventually(lambda: name in group.names())
        accepted = pool.submit(callee.accept)
        future: rpc.Future[Any] = rpc.rpc_async(name, dict, timeout=20)
        with accepted.result() as connection:
            (call_id,) = struct.unpack_from("<Q", connection.receive_frame(), 8)
            yield future, connection, call_id


ANSWERS: dict[str, Callable[[int], bytes]] = {
    "an empty frame": lambda call_id: framed(b""),
    "a short frame": lambda call_id: framed(bytes(15)),
    "a call": lambda call_id: framed(header(CALL, 0, len(DICT), 0, call_id) + DICT),
    "a remote call": lambda call_id: framed(header(KEEP, HAS_REFERENCES, 0, 0, call_id) + HANDLE + bytes(10)),
    "kind 255": lambda call_id: framed(b"\xff" * 64),
    "a result that cannot be read": lambda call_id: framed(header(RESULT, call_id=call_id) + b"garbage"),
    "a result that is no pickle": lambda call_id: framed(header(RESULT, call_id=call_id) + b"\x80\x05\xff."),
    "a failure that cannot be read": lambda call_id: framed(header(FAILURE, call_id=call_id) + b"garbage"),
    "a failure of nothing": lambda call_id: framed(header(FAILURE, call_id=call_id)),
    "a result that was kept": lambda call_id: framed(header(RESULT, 4, call_id=call_id)),
    "a result with all flags": lambda call_id: framed(header(RESULT, 255, call_id=call_id) + bytes(200)),
    "references that are not there": lambda call_id: framed(header(RESULT, HAS_REFERENCES, call_id=call_id)),
    "references of others": lambda call_id: framed(
        header(RESULT, HAS_REFERENCES, call_id=call_id) + struct.pack("<QH", 1, 1) + HANDLE + b"garbage"
    ),
    "annotations that are no map": lambda call_id: framed(
        header(RESULT, HAS_ANNOTATIONS, call_id=call_id) + struct.pack("<I", 1) + b"\xc1"
    ),
    "news that cannot be read": lambda call_id: framed(header(GOSSIP) + b"\xc1"),
    "messages about references that cannot be read": lambda call_id: framed(header(CONTROL) + b"\xc1"),
    "a huge frame": lambda call_id: struct.pack("<I", 0x7FFFFFFF),
    "an empty internal frame": lambda call_id: internal(b""),
    "the announcement of a huge frame": lambda call_id: internal(struct.pack("<BBHIQ", ANNOUNCE, 0, 0, 1, 1 << 62)),
    **{
        f"a result that begins with {first}": lambda call_id, first=first: framed(  # type: ignore[misc]
            header(RESULT, call_id=call_id) + bytes([first]) + b"\xff" * 40
        )
        for first in (0, 1, 2, 3, 4, 5, 127, 128, 255)
    },
}


def outcome_of(future: Future[Any]) -> object:
    try:
        return future.wait()
    except Exception as error:
        return error


def test_a_call_that_is_answered_with_garbage_fails(group: OpenGroup) -> None:
    for number, (what, answer) in enumerate(ANSWERS.items(), 1000):
        with called_member(group, number) as (future, hand, call_id):
            hand.sock.sendall(answer(call_id))
            outcome = outcome_of(future)
            assert isinstance(outcome, rpc.RpcError), (what, outcome)
            assert not isinstance(outcome, TimeoutError), f"nobody has noticed {what}"
        check_well(group)


def test_replies_to_nobody_are_passed_over(group: OpenGroup) -> None:
    with called_member(group, 1000) as (future, hand, call_id):
        for nobody in (0, call_id + 1, 2**64 - 1):
            for kind in (RESULT, FAILURE):
                hand.frame(kind, b"garbage", call_id=nobody)
        hand.frame(RESULT, b"", call_id=call_id)
        hand.frame(RESULT, b"garbage", call_id=call_id)
        assert future.wait() is None
        later: rpc.Future[Any] = rpc.rpc_async("callee1000", dict, timeout=20)
        (call_id,) = struct.unpack_from("<Q", hand.receive_frame(), 8)
        hand.frame(RESULT, b"", call_id=call_id)
        assert later.wait() is None
    check_well(group)

"""What is to be said about references: kept until it is acknowledged, sent together, sent again on the next link."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError, WorkerLostError
from farcall.protocol.frames import CONTROL, HEADER_SIZE, REFERENCES, pack_request, unpack_header
from farcall.protocol.ids import TOKEN_SIZE, ForkId, RRefId
from farcall.protocol.reference_messages import (
    CancelCreate,
    Carried,
    ChildAccepted,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    Message,
    UserDeleted,
)
from farcall.runtime import reference_outbox
from farcall.runtime.reference_outbox import (
    Outboxes,
    OutboxSender,
    UnackedKeep,
    UnackedReferences,
    pack_control,
    unpack_control,
)

PEER = 7
REFERENCE = RRefId(0, 1, 1, bytes(range(TOKEN_SIZE)))
TYPES = [ForkRequest, ForkAccepted, ForkRefused, ChildAccepted, UserDeleted, CancelCreate]
DELETED = UserDeleted(REFERENCE, ForkId(1, 1))
ACCEPTED = ForkAccepted(REFERENCE, ForkId(2, 1))
REQUEST = ForkRequest(REFERENCE, ForkId(3, 1))


# -- CONTROL frames

NUMBERS = st.integers(0, 2**64 - 1)
WORKERS = st.integers(0, 2**32 - 1)
MESSAGES = st.builds(
    lambda kind, reference, fork: kind(reference, fork),
    st.sampled_from(TYPES),
    st.builds(RRefId, WORKERS, WORKERS, NUMBERS, st.binary(min_size=TOKEN_SIZE, max_size=TOKEN_SIZE)),
    st.builds(ForkId, WORKERS, NUMBERS),
)


@given(NUMBERS, st.lists(st.tuples(NUMBERS, MESSAGES), max_size=5))
def test_what_is_packed_is_unpacked(acknowledged: int, messages: list[tuple[int, Message]]) -> None:
    unpacked = unpack_control(memoryview(pack_control(acknowledged, messages)))
    assert unpacked == (acknowledged, messages)
    assert [type(message) for _, message in unpacked[1]] == [type(message) for _, message in messages]


@pytest.mark.parametrize("size", [0, 7, 9, 60, 62, 8 + 2 * 53 - 1])
def test_a_frame_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"a control message of {size} bytes came"):
        unpack_control(bytes(size))


@pytest.mark.parametrize("code", [len(TYPES), 255])
def test_a_message_of_an_unknown_type_is_refused(code: int) -> None:
    payload = bytearray(pack_control(0, [(1, DELETED)]))
    payload[16] = code
    with pytest.raises(ProtocolError, match=f"unknown type {code}"):
        unpack_control(bytes(payload))


def test_a_request_to_create_is_no_control_message() -> None:
    from farcall.protocol.reference_messages import CreateRequest

    with pytest.raises(KeyError):
        pack_control(0, [(1, CreateRequest(REFERENCE, ForkId(1, 1)))])


# -- Outboxes


@pytest.fixture
def outboxes() -> Outboxes:
    made = Outboxes()
    made.delivery.joined(PEER)
    made.delivery.joined(8)
    return made


def taken(outboxes: Outboxes, to: int = PEER) -> tuple[int, list[tuple[int, Message]]] | None:
    frame = outboxes.take_frame(to)
    return unpack_control(frame.payload) if frame is not None else None


def test_messages_gather_and_go_out_in_one_frame(outboxes: Outboxes) -> None:
    outboxes.add(PEER, DELETED)
    outboxes.add(8, DELETED)
    outboxes.add(PEER, REQUEST)
    assert outboxes.receivers() == [PEER, 8]
    assert taken(outboxes) == (0, [(1, DELETED), (2, REQUEST)])
    assert taken(outboxes) is None
    assert outboxes.receivers() == [8]


def test_a_frame_brings_the_acknowledgement_along(outboxes: Outboxes) -> None:
    outboxes.delivery.receive(PEER, 1)
    outboxes.owed[PEER] = None
    outboxes.add(PEER, DELETED)
    assert taken(outboxes) == (1, [(1, DELETED)])
    assert not outboxes.owed


def test_an_acknowledgement_goes_alone_if_nothing_else_is_to_be_said(outboxes: Outboxes) -> None:
    outboxes.delivery.receive(PEER, 1)
    outboxes.owed[PEER] = None
    assert outboxes.receivers() == [PEER]
    frame = outboxes.take_frame(PEER)
    assert frame is not None
    assert (frame.is_bare, frame.has_only_answers) == (True, False)
    assert unpack_control(frame.payload) == (1, [])
    assert outboxes.take_frame(PEER) is None


@pytest.mark.parametrize(
    ("messages", "only_answers"),
    [([ACCEPTED], True), ([ACCEPTED, ForkRefused(*ACCEPTED)], True), ([ACCEPTED, DELETED], False), ([DELETED], False)],
)
def test_it_is_known_whether_there_are_only_answers(
    outboxes: Outboxes, messages: list[Message], only_answers: bool
) -> None:
    for message in messages:
        outboxes.add(PEER, message)
    frame = outboxes.take_frame(PEER)
    assert frame is not None
    assert (frame.has_only_answers, frame.is_bare) == (only_answers, False)


def test_very_many_messages_go_in_several_frames(outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_outbox, "MAX_MESSAGES_PER_FRAME", 2)
    for number in range(5):
        outboxes.add(PEER, UserDeleted(REFERENCE, ForkId(1, number)))
    sizes = []
    while (frame := taken(outboxes)) is not None:
        sizes.append([number for number, _ in frame[1]])
    assert sizes == [[1, 2], [3, 4], [5]]


def test_what_is_not_acknowledged_is_sent_again_and_what_was_unsent_is_among_it(outboxes: Outboxes) -> None:
    outboxes.add(PEER, DELETED)
    outboxes.take_frame(PEER)
    outboxes.add(PEER, REQUEST)
    assert outboxes.take_unacked(PEER) == [(1, DELETED), (2, REQUEST)]
    assert outboxes.take_frame(PEER) is None
    outboxes.delivery.acknowledged(PEER, 1)
    assert outboxes.take_unacked(PEER) == [(2, REQUEST)]


def test_an_acknowledgement_that_is_sent_is_not_owed_any_more(outboxes: Outboxes) -> None:
    outboxes.delivery.receive(PEER, 1)
    outboxes.owed[PEER] = None
    assert outboxes.take_acknowledgement(PEER) == 1
    assert not outboxes.receivers()


def test_an_owner_is_awaited_until_it_has_acknowledged_and_answered(outboxes: Outboxes) -> None:
    assert not outboxes.awaits(PEER)
    outboxes.add(PEER, REQUEST)
    outboxes.delivery.acknowledged(PEER, 1)
    assert outboxes.awaits(PEER)
    outboxes.asked[PEER] -= 1
    assert not outboxes.awaits(PEER)


def test_nothing_is_kept_for_a_worker_that_is_gone(outboxes: Outboxes) -> None:
    outboxes.add(PEER, REQUEST)
    outboxes.owed[PEER] = None
    outboxes.remove_worker(PEER)
    assert outboxes.receivers() == []
    assert outboxes.take_unacked(PEER) == []
    assert not outboxes.awaits(PEER)


# -- OutboxSender


class Connection:
    """A client or server connection that keeps what is sent on it."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.lost = False
        self.expects = 0

    def send(self, frame: bytes, buffers: Any = None) -> None:
        self.sent.append((frame, buffers))

    def is_lost(self) -> bool:
        return self.lost

    def expect_acknowledgement(self) -> None:
        self.expects += 1

    def messages(self) -> list[tuple[int, list[tuple[int, Message]]]]:
        frames = [frame for frame, _ in self.sent if unpack_header(frame)[0] == CONTROL]
        return [unpack_control(frame[HEADER_SIZE:]) for frame in frames]


class Stage:
    """A sender, the connections that it may use, and the threads that it asks for."""

    number = PEER
    is_lost = False
    is_closing = False

    def __init__(self, outboxes: Outboxes) -> None:
        self.outboxes = outboxes
        self.connection: Connection | None = None
        self.server: Connection | None = None
        self.tasks: list[Callable[[], None]] = []
        self.attempts: list[Connection | WorkerLostError] = []
        self.unreachable = 0
        place: Any = self
        self.sender = OutboxSender(place, place, place, lambda: place.server, self.note_unreachable)

    def note_unreachable(self) -> None:
        self.unreachable += 1

    def take_control_frame(self, to: int) -> Any:
        return self.outboxes.take_frame(to)

    def take_unacked(self, to: int) -> Any:
        return self.outboxes.take_unacked(to)

    def take_acknowledgement(self, to: int) -> int:
        return self.outboxes.take_acknowledgement(to)

    def is_over(self) -> bool:
        return False

    def connect(self, deadline: float) -> Connection:
        attempt = self.attempts.pop(0)
        if isinstance(attempt, WorkerLostError):
            raise attempt
        self.connection = attempt
        return attempt

    def run_aside(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def run_tasks(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


@pytest.fixture
def stage(outboxes: Outboxes, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(reference_outbox, "_CONNECT_PAUSES_S", (0.0, 0.0))
    return Stage(outboxes)


def test_answers_go_where_they_were_asked_for_and_all_else_on_our_own_connection(stage: Stage) -> None:
    stage.connection, stage.server = Connection(), Connection()
    stage.outboxes.add(PEER, ACCEPTED)
    stage.sender.send()
    assert stage.server.messages() == [(0, [(1, ACCEPTED)])]
    stage.outboxes.add(PEER, ACCEPTED)
    stage.outboxes.add(PEER, DELETED)
    stage.sender.send()
    assert stage.connection.messages() == [(0, [(2, ACCEPTED), (3, DELETED)])]
    assert stage.connection.expects == 1
    assert not stage.tasks


def test_a_bare_acknowledgement_goes_on_any_connection_and_expects_none(stage: Stage) -> None:
    stage.server = Connection()
    stage.outboxes.owed[PEER] = None
    stage.sender.send()
    assert stage.server.messages() == [(0, [])]
    stage.connection = Connection()
    stage.outboxes.owed[PEER] = None
    stage.sender.send()
    assert stage.connection.messages() == [(0, [])]
    assert stage.connection.expects == 0


def test_without_a_connection_one_is_made_aside(stage: Stage) -> None:
    stage.outboxes.add(PEER, DELETED)
    stage.sender.send()
    stage.sender.send()
    assert len(stage.tasks) == 1
    stage.attempts = [Connection()]
    stage.run_tasks()
    assert stage.connection is not None
    assert stage.connection.messages() == [(0, [(1, DELETED)])]
    assert stage.connection.expects == 1


def test_what_only_the_other_worker_can_be_told_on_its_connection_needs_one_of_ours(stage: Stage) -> None:
    stage.server = Connection()
    stage.outboxes.add(PEER, DELETED)
    stage.sender.send()
    assert stage.server.sent == []
    stage.attempts = [Connection()]
    stage.run_tasks()
    assert stage.connection is not None
    assert stage.connection.messages() == [(0, [(1, DELETED)])]


def test_what_was_sent_on_a_connection_that_broke_is_sent_again(stage: Stage) -> None:
    stage.connection = broken = Connection()
    broken.lost = True
    stage.outboxes.add(PEER, DELETED)
    stage.sender.send()
    stage.attempts = [Connection()]
    stage.run_tasks()
    assert stage.connection is not broken
    assert stage.connection.messages() == [(0, [(1, DELETED)])]
    assert stage.sender.resends == 1


def test_what_is_under_way_on_a_connection_that_works_is_not_sent_again(stage: Stage) -> None:
    works, broken = Connection(), Connection()
    broken.lost = True
    frame = pack_request(5, b"callee", b"payload", 0, b"", b"", b"")
    for via in (works, broken):
        keep = UnackedKeep(via, None)
        keep.frame, keep.buffers = frame, ()
        stage.outboxes.delivery.send(PEER, keep)
        stage.outboxes.delivery.send(PEER, UnackedReferences([Carried(REFERENCE, ForkId(1, 2))], via))
    unsent = UnackedKeep(broken, None)  # its thread is just sending it
    stage.outboxes.delivery.send(PEER, unsent)
    stage.attempts = [Connection()]
    stage.sender.connect_and_send()
    stage.run_tasks()
    assert stage.connection is not None
    kinds = [(unpack_header(sent)[0], unpack_header(sent)[4]) for sent, _ in stage.connection.sent]
    # The call is numbered 0: the reply that its caller waited for has failed with its connection.
    assert kinds == [(unpack_header(frame)[0], 0), (REFERENCES, 0)]
    assert [type(unacked) for _, unacked in stage.outboxes.take_unacked(PEER)] == [
        UnackedKeep, UnackedReferences, UnackedKeep, UnackedReferences, UnackedKeep,
    ]  # fmt: skip
    stage.sender.connect_and_send()
    stage.attempts = [stage.connection]
    stage.run_tasks()
    assert len(stage.connection.sent) == 2
    assert stage.sender.resends == 2


def test_a_connection_that_breaks_while_everything_is_sent_again_is_followed_by_another(stage: Stage) -> None:
    first, second = Connection(), Connection()
    first.lost = True
    stage.outboxes.add(PEER, DELETED)
    stage.attempts = [first, second]
    stage.sender.connect_and_send()
    stage.run_tasks()
    assert second.messages() == [(0, [(1, DELETED)])]


def test_a_sender_that_could_not_connect_waits_for_the_next_heartbeat(stage: Stage) -> None:
    stage.outboxes.add(PEER, DELETED)
    stage.attempts = [WorkerLostError("not now"), WorkerLostError("not now")]
    stage.sender.send()
    stage.run_tasks()
    assert stage.sender.is_stuck
    stage.sender.send()
    assert not stage.tasks
    stage.attempts = [Connection()]
    stage.sender.connect_and_send()
    stage.run_tasks()
    assert not stage.sender.is_stuck
    assert stage.connection is not None
    assert stage.connection.messages() == [(0, [(1, DELETED)])]
    assert stage.unreachable == 0


def test_the_group_is_told_if_nobody_listens_any_more(stage: Stage) -> None:
    gone = WorkerLostError("nobody listens")
    gone.is_gone = True
    stage.attempts = [gone]
    stage.sender.connect_and_send()
    stage.run_tasks()
    assert stage.unreachable == 1


def test_nothing_is_tried_for_a_worker_that_is_lost_or_when_closing(stage: Stage) -> None:
    stage.is_lost = True
    stage.sender.connect_and_send()
    stage.run_tasks()
    stage.is_lost, stage.is_closing = False, True
    stage.sender.connect_and_send()
    stage.run_tasks()
    assert stage.connection is None


def test_what_is_said_while_it_connects_is_sent_too(stage: Stage) -> None:
    made = [Connection(), Connection()]

    def connect(deadline: float) -> Connection:
        if len(made) == 2:
            stage.outboxes.add(PEER, REQUEST)
            stage.sender.connect_and_send()
        stage.connection = made.pop(0)
        return stage.connection

    stage.connect = connect  # type: ignore[method-assign]
    stage.sender.connect_and_send()
    stage.run_tasks()
    assert made == []  # it went round once more


def test_gossip_goes_on_our_connection_or_is_sent_when_there_is_one_or_dropped(stage: Stage) -> None:
    frame = struct.pack("<B", 0)
    stage.sender.send_gossip(frame)
    stage.attempts = [WorkerLostError("not now"), WorkerLostError("not now")]
    stage.run_tasks()
    stage.sender.send_gossip(frame * 2)
    stage.attempts = [Connection()]
    stage.run_tasks()
    assert stage.connection is not None
    stage.sender.send_gossip(frame * 3)
    assert [sent for sent, _ in stage.connection.sent] == [frame * 2, frame * 3]

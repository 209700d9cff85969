"""The messages, events and effects of the membership protocol (`membership.py`).

A *message* travels from one worker to another, encoded as msgpack. Any message may be lost, duplicated or reordered. An
*event* is something that happened to this worker. `Membership` processes events, and returns *effects*: messages to
send, and changes of the group that the program must know.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from farcall.errors import ProtocolError
from farcall.protocol.fields import Addresses, Digest, Name, Rank, Text, WorkerNumber, check_name, quoted
from farcall.protocol.ids import Worker

MAX_ITEMS: Final = 65_536
"""The most members, targets or ranges in one message: more than any group has members."""

_Ranges: TypeAlias = Annotated[tuple[tuple[WorkerNumber, WorkerNumber], ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker of the group, and its addresses. The fields of a member never change.

    Attributes:
        number: No other worker ever has this number, nor does the same worker after a restart.
        name: The name of the worker. If two members have one name, it belongs to the one with the higher number.
        rank: The rank of the worker; -1 if it has none.
        host: The kernel and network namespace of the worker, as text from `network_identity`.
        addresses: Where the worker listens, as in `tcp:192.0.2.7:4000`.
    """

    number: WorkerNumber
    name: Name
    rank: Rank
    host: Text
    addresses: Addresses = ()


# Messages


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A heartbeat, which a member sends to another member. The receiver answers with `Ack`.

    `digest` is a checksum of the sender's view of the group. Equal views have equal digests.
    """

    digest: Digest


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to `Ping`.

    `digest` is a checksum of the answering worker's view of the group. Equal views have equal digests.
    """

    digest: Digest


class News(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Says which workers are members, which have left and which were lost.

    A worker sends it to other workers when it learns something new, and as the answer to `Compare` and `Wanted`. A
    worker that is both in `members` and in `left` or `lost` is not a member any more.

    Attributes:
        members: The members.
        left: The numbers of workers that have left, as pairs of first and last number.
        lost: The numbers of workers that were lost, as pairs of first and last number. A number that is also in `left`
            has left.
    """

    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    left: _Ranges = ()
    lost: _Ranges = ()


class Compare(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Says which numbers are in the sender's view of the group.

    A worker sends it to a worker whose `Ack` had a digest other than its own. A worker that joins sends it to one
    member. The receiver answers with a `News`, if the sender's view lacks something, and with a `Wanted`, if its own
    view lacks something. If the views are equal, it sends nothing.

    Attributes:
        here: The numbers of the members, as pairs of first and last number.
        gone: The numbers of the workers that have left or were lost, as pairs of first and last number.
    """

    here: _Ranges
    gone: _Ranges


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Asks for all that the receiver knows about some workers. The receiver answers with `News`.

    `numbers` has the numbers of these workers, as pairs of first and last number.
    """

    numbers: _Ranges


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Says that some workers do not answer the sender. The receiver pings them, and sends `Alive` for each answer.

    `targets` has the numbers of these workers.
    """

    targets: Annotated[tuple[WorkerNumber, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Says that the worker number `target` has answered the sender. The receiver has asked about it with `Probe`."""

    target: WorkerNumber


Message: TypeAlias = Ping | Ack | News | Compare | Wanted | Probe | Alive

encode: Final = msgspec.msgpack.Encoder().encode
"""`encode(message)` returns a message, or a `Member`, as bytes."""
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_member_decoder: msgspec.msgpack.Decoder[Member] = msgspec.msgpack.Decoder(Member)
_T = TypeVar("_T")


def decode(body: bytes | bytearray | memoryview) -> Message:
    """Returns the message in these bytes.

    Raises:
        ProtocolError: The bytes are empty or not a message, a field has a wrong type or size, a member's name has
            unprintable characters, or a range ends before it begins.
    """
    message = _read(_decoder, body, "a message about the group's members")
    if isinstance(message, News):
        for member in message.members:
            check_name(member.name)
    for first, last in _ranges_in(message):
        if first > last:
            raise ProtocolError(f"a message about the group's members names workers {first} to {last}, which are none")
    return message


def decode_member(body: bytes) -> Member:
    """Returns the member in these bytes, which a worker has written into the rendezvous store to describe itself.

    Raises:
        ProtocolError: The bytes are empty or not a member, a field has a wrong type or size, or the name has
            unprintable characters.
    """
    member = _read(_member_decoder, body, "what a worker says of itself in the store")
    check_name(member.name)
    return member


def _read(decoder: msgspec.msgpack.Decoder[_T], body: bytes | bytearray | memoryview, what: str) -> _T:
    """Returns what `decoder` finds in these bytes.

    Raises `ProtocolError`, with a message that begins with `what`, if the bytes cannot be decoded.
    """
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors and those of texts are `ValueError`s
        raise ProtocolError(f"{what} cannot be read: {quoted(str(error))}") from None


def _ranges_in(message: Message) -> _Ranges:
    """Returns all ranges of numbers in a message; an empty tuple if it has none."""
    match message:
        case News(_, left, lost):
            return left + lost
        case Compare(here, gone):
            return here + gone
        case Wanted(numbers):
            return numbers
    return ()


# Events


class Started(NamedTuple):
    """An event for `Membership`: this worker has its number and knows some members.

    Attributes:
        members: The members that it knows.
        announce: True if the other members do not know this worker yet, so that it must tell them.
    """

    members: tuple[Member, ...]
    announce: bool


class MessageReceived(NamedTuple):
    """An event for `Membership`: a message of another worker has arrived, perhaps not for the first time.

    Attributes:
        sender: The number of that worker.
        message: The message, decoded.
    """

    sender: Worker
    message: Message


class Ticked(NamedTuple):
    """An event for `Membership`: the time that its `next_tick` returned has come.

    `now` is the current time of the monotonic clock.
    """

    now: float


class PeerHeard(NamedTuple):
    """An event for `Membership`: something that is not a membership message, such as a call, has arrived.

    `worker` is the number of the worker that sent it.
    """

    worker: Worker


class PeerUnreachable(NamedTuple):
    """An event for `Membership`: the process of the worker with the number `worker` has ended.

    Its connection is closed, and its address refuses new ones.
    """

    worker: Worker


class LeaveWanted(NamedTuple):
    """An event for `Membership`: the program wants this worker to leave the group."""


Event: TypeAlias = Started | MessageReceived | Ticked | PeerHeard | PeerUnreachable | LeaveWanted


# Effects


class SendMessage(NamedTuple):
    """An effect that `Membership` returns: its caller must send `message` to the worker number `to`.

    The caller drops the message if it cannot be sent without waiting. `to` is a member, or the sender of the message
    that has just arrived. If no address of that sender is known, the message is sent on the connection on which the
    sender's message arrived.
    """

    to: Worker
    message: Message


class MemberJoined(NamedTuple):
    """An effect of `Membership`: another worker, `member`, has joined the group.

    It comes once for each number, before all other effects about that number.
    """

    member: Member


class MemberLeft(NamedTuple):
    """An effect of `Membership`: `member` has left the group. No effect about its number follows."""

    member: Member


class MemberLost(NamedTuple):
    """An effect of `Membership`: `member` was lost. It died or was silent for too long.

    No effect about its number follows.
    """

    member: Member


class Expelled(NamedTuple):
    """The group has declared this worker lost, or another worker has its name now. This worker must end its work.

    `Membership` returns this effect once. From then on it returns no messages, and its view does not change.
    """


Effect: TypeAlias = SendMessage | MemberJoined | MemberLeft | MemberLost | Expelled

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
    """A worker of the group, and its addresses. The fields of a member never change."""

    number: WorkerNumber
    """No other worker ever has this number, nor does the same worker after a restart."""
    name: Name
    rank: Rank
    host: Text
    addresses: Addresses = ()


# Messages


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A heartbeat. Its receiver answers with `Ack`. The digest is that of the sender's view."""

    digest: Digest


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to `Ping`. The digest is that of the sender's view."""

    digest: Digest


class News(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Says which workers are members, which have left and which were lost. A worker that is gone is not a member."""

    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    left: _Ranges = ()
    lost: _Ranges = ()


class Compare(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender's view, as numbers. The receiver sends what the sender lacks, and asks for what it lacks itself."""

    here: _Ranges
    gone: _Ranges


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Asks for all that the receiver knows about these numbers."""

    numbers: _Ranges


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Says that these workers do not answer the sender. The receiver pings them, and sends `Alive` for each answer."""

    targets: Annotated[tuple[WorkerNumber, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Says that a worker that the receiver has asked about has answered the sender."""

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
        ProtocolError: The bytes are empty or not a message, a field has a wrong type or size, a name has unprintable
            characters, or a range ends before it begins.
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
    """Returns the member in these bytes, which a worker has written into the store.

    Raises:
        ProtocolError: The bytes are empty or not a member, a field has a wrong type or size, or the name has
            unprintable characters.
    """
    member = _read(_member_decoder, body, "what a worker says of itself in the store")
    check_name(member.name)
    return member


def _read(decoder: msgspec.msgpack.Decoder[_T], body: bytes | bytearray | memoryview, what: str) -> _T:
    """Returns what the decoder finds in these bytes. Raises `ProtocolError`, which begins with `what`, if it fails."""
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
    """This worker has its number, and knows these members. `announce` is False if all members know this worker."""

    members: tuple[Member, ...]
    announce: bool


class MessageReceived(NamedTuple):
    """A message has arrived, perhaps not for the first time."""

    sender: Worker
    message: Message


class Ticked(NamedTuple):
    """The time that `Membership.next_tick` returned has come. The clock is monotonic."""

    now: float


class PeerHeard(NamedTuple):
    """Something else has arrived from this worker, such as a call or a reply, so it is alive."""

    worker: Worker


class PeerUnreachable(NamedTuple):
    """This worker has closed its connection, and its address refuses new ones, so its process has ended."""

    worker: Worker


class LeaveWanted(NamedTuple):
    """The program wants this worker to leave the group."""


Event: TypeAlias = Started | MessageReceived | Ticked | PeerHeard | PeerUnreachable | LeaveWanted


# Effects


class SendMessage(NamedTuple):
    """Send this message if that is possible without waiting. It may be lost.

    `to` is a member, or the sender of the message that has just arrived. Such a sender may have no known address: then
    the answer is sent on the connection on which the message arrived.
    """

    to: Worker
    message: Message


class MemberJoined(NamedTuple):
    """Another worker has joined the group. Returned once for each number, before all other effects about it."""

    member: Member


class MemberLeft(NamedTuple):
    """A member has left the group. No effect about this number follows."""

    member: Member


class MemberLost(NamedTuple):
    """A member was lost. No effect about this number follows."""

    member: Member


class Expelled(NamedTuple):
    """The group has declared this worker lost, or another worker has its name now. This worker must end its work.

    Returned once. From then on this worker sends nothing about the group, and its view does not change.
    """


Effect: TypeAlias = SendMessage | MemberJoined | MemberLeft | MemberLost | Expelled

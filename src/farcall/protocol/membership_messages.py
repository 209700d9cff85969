"""What workers tell each other about who is in the group, as objects and as bytes; and what happens to a group's view.

Messages are what travels, as msgpack. Events are facts about this worker, effects what it is to do or to know.
`membership.py` turns one into the other. Nothing here is sent reliably: any message may be lost, doubled or overtaken.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from farcall.errors import ProtocolError
from farcall.protocol.ids import Worker
from farcall.protocol.ranges import LARGEST

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_Ranges: TypeAlias = tuple[tuple[_Number, _Number], ...]
_Digest: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A worker of the group, and where it is reached. The same for as long as its number lives."""

    number: _Number
    """No other worker, nor the same one started again, ever has it."""
    name: str
    rank: int
    host: str
    addresses: tuple[str, ...] = ()


# Messages


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Are you there? The digest is that of the sender's view."""

    digest: _Digest


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """I am, and my view is this."""

    digest: _Digest


class News(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """These are there, these said good-bye, these are lost. Whoever is among the gone is not there, whatever else."""

    members: tuple[Member, ...] = ()
    left: _Ranges = ()
    lost: _Ranges = ()


class Compare(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Our views differ. Mine has these here and these gone: tell me what I lack, and ask for what you lack."""

    here: _Ranges
    gone: _Ranges


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Tell me about these numbers."""

    numbers: _Ranges


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """I do not hear this worker: ask it yourself, and tell me if it answers you."""

    target: _Number


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The worker that you asked about has answered me."""

    target: _Number


Message: TypeAlias = Ping | Ack | News | Compare | Wanted | Probe | Alive

encode: Final = msgspec.msgpack.Encoder().encode
"""A message as bytes."""
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message in these bytes. Raises `ProtocolError` if it is none of ours."""
    try:
        message = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message about the group's members came that cannot be read: {error}") from None
    for first, last in _ranges_in(message):
        if first > last:
            raise ProtocolError(f"a message about the group's members names workers {first} to {last}, which are none")
    return message


def _ranges_in(message: Message) -> _Ranges:
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
    """This worker has its number, and knows these members. `announce` is False if all others know it already."""

    members: tuple[Member, ...]
    announce: bool


class MessageReceived(NamedTuple):
    """A message came, perhaps not for the first time."""

    sender: Worker
    message: Message


class Ticked(NamedTuple):
    """An interval has passed, by a clock that never goes back."""

    now: float


class PeerHeard(NamedTuple):
    """Something else came from this worker: a call, a reply. It is a sign of life."""

    worker: Worker


class PeerUnreachable(NamedTuple):
    """This worker has closed its connection, and its address refuses new ones: its process is no more."""

    worker: Worker


class LeaveWanted(NamedTuple):
    """This worker means to leave the group."""


Event: TypeAlias = Started | MessageReceived | Ticked | PeerHeard | PeerUnreachable | LeaveWanted


# Effects


class SendMessage(NamedTuple):
    """Send this, if that is possible without waiting. Whether it arrives does not matter.

    `to` is there in this worker's view, or it is the sender of the message that has just come: then it may be one of
    whom no address is known (any more), and the answer goes back on the connection on which the message came.
    """

    to: Worker
    message: Message


class MemberJoined(NamedTuple):
    """Another worker is in the group; told once for each number, and before anything else about it."""

    member: Member


class MemberLeft(NamedTuple):
    """It said good-bye. It will not be heard of under this number again."""

    member: Member


class MemberLost(NamedTuple):
    """It died, or was taken for dead. It will not be heard of under this number again."""

    member: Member


class Expelled(NamedTuple):
    """The group has taken this worker for dead, or another one has its name now: it must end its work.

    Told once. From then on this worker sends nothing about the group, and nothing that it hears changes its view.
    """


Effect: TypeAlias = SendMessage | MemberJoined | MemberLeft | MemberLost | Expelled

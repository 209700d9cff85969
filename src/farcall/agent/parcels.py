"""What is kept until a peer has acknowledged it, and the letters in which reference messages go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, Message
from farcall.transports.base import Buffer


class Way(Protocol):
    """The connection on which something went."""

    def is_lost(self) -> bool:
        """Whether it may not have arrived."""


class RemoteFrame:
    """A whole remote call, what it creates, and on what connection it went."""

    __slots__ = ("buffers", "fork", "frame", "keeps", "reference", "via")

    def __init__(self, reference: RRefId, fork: ForkId, buffers: Sequence[Buffer], via: Way, keeps: object) -> None:
        self.reference = reference
        self.fork = fork
        self.frame = b""
        self.buffers = buffers
        """What follows the frame, out of band."""
        self.via = via
        self.keeps = keeps
        """What must live until it has arrived: the handle whose method is called."""


new_remote_frame: Final[Callable[[type[RemoteFrame]], RemoteFrame]] = RemoteFrame.__new__
"""`new_remote_frame(RemoteFrame)`: with nothing in it, and without a frame of Python's."""


class CarriedFrame:
    """The handles in a call or a reply, and on what connection it went."""

    __slots__ = ("carried", "via")

    def __init__(self, carried: Sequence[Carried], via: Way) -> None:
        self.carried = carried
        self.via = via


Parcel: TypeAlias = Message | CarriedFrame | RemoteFrame
"""What is kept until it is acknowledged: a message, the handles of a call or reply, or a whole remote call."""


class Letter(NamedTuple):
    """A control message, and what its sender must know of it."""

    body: bytes
    only_answers: bool
    """The receiver waits for what is in it on the connection where it asked."""
    is_bare: bool = False
    """There is nothing in it but an acknowledgement."""

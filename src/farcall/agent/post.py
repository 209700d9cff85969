"""Sends control messages: what the reference protocol has to say to a peer.

Nothing in that protocol is urgent: it decides when values go, and nobody waits for it. So messages for one peer gather
in the book's outbox. They go along with the next call or remote call to it that has to do with references
(`calling.py`), or all together after a moment, by the supervisor's clock.

Rules
- Answers go back on the connection on which they were asked for, where the peer waits for them. All else goes out on
  our own connection, which the peer's serving pool reads at once.
- What cannot be sent stays with the book, which keeps it until it is acknowledged or the peer is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from farcall.agent.book import ReferenceBook
from farcall.agent.incoming import Incoming
from farcall.agent.outgoing import Outgoing
from farcall.agent.parcels import CarriedFrame, RemoteFrame, Way
from farcall.agent.peers import Peer
from farcall.agent.serving import Answerable, Serving
from farcall.errors import WorkerLost
from farcall.protocol.control import pack_control, pack_section
from farcall.protocol.reference_messages import Message
from farcall.protocol.wire import CARRIED, CONTROL, encode

_CONNECT_TIMEOUT: Final = 5.0
_PAUSES: Final = (0.02, 0.05, 0.1, 0.0)
"""Seconds after an attempt to connect that failed. A connection may break in the midst of its greeting, too."""


class Post:
    """The control messages to one peer."""

    def __init__(
        self, peer: Peer, book: ReferenceBook, serving: Serving, incoming: Callable[[], Incoming | None]
    ) -> None:
        self._peer = peer
        self._book = book
        self._serving = serving
        self._incoming = incoming  # the peer's connection to us, if there is one
        self.must_run = False
        self.origin: Answerable | None = None
        self.kind: object = "post"
        self.resends = 0
        """How many messages were sent once more."""

    def send(self) -> None:
        """Sends what is in the outbox. Never raises, never waits."""
        connection = self._peer.connection
        incoming = self._incoming()
        if connection is None and incoming is None:
            self._serving.submit(self)
            return
        letter = self._book.outbox(self._peer.info.id)
        if letter is None:
            return
        frame = encode(CONTROL, 0, b"", letter.body)
        way: Way | None = connection
        if incoming is not None and letter.only_answers:
            incoming.answer(frame)
            way = incoming
        elif connection is not None:
            connection.send_control([frame])
        if way is None or way.is_lost():
            self._serving.submit(self)  # it is kept with what is not acknowledged

    def run(self) -> None:
        """See `Job`: connects, which may take a while, and sends again whatever the peer has not acknowledged."""
        connection = self._connect()
        if connection is None:
            return
        self._resend(connection)
        if connection.is_lost():  # and that may have been noticed before this was sent
            self._serving.submit(self)

    def _connect(self) -> Outgoing | None:
        """The connection, made if need be. None if the peer is dead: several attempts in a row have failed."""
        for pause in _PAUSES:
            if self._peer.is_lost:
                return None
            try:
                return self._peer.connect(monotonic() + _CONNECT_TIMEOUT)
            except WorkerLost:
                threading.Event().wait(pause)
        if self._peer.info.id != self._book.me:
            self._peer.lose()
        return None

    def _resend(self, connection: Outgoing) -> None:
        """Everything that is not acknowledged, and not under way on a connection that works. Each is taken once."""
        messages: list[tuple[int, Message]] = []
        for number, parcel in self._book.unacknowledged(self._peer.info.id):
            if isinstance(parcel, RemoteFrame):
                if parcel.via.is_lost():
                    parcel.via = connection
                    self.resends += 1
                    connection.send_control(parcel.frame)
            elif isinstance(parcel, CarriedFrame):
                if parcel.via.is_lost():
                    parcel.via = connection
                    self.resends += 1
                    connection.send_control([encode(CARRIED, 0, pack_section(number, parcel.carried), b"")])
            else:
                messages.append((number, parcel))
        if messages:
            self.resends += len(messages)
            body = pack_control(self._book.acknowledgement(self._peer.info.id), messages)
            connection.send_control([encode(CONTROL, 0, b"", body)])

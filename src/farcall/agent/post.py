"""Sends what the protocols have to say to a peer: control messages of references, and news of the group.

Nothing in that protocol is urgent: it decides when values go, and nobody waits for it. So messages for one peer gather
in its outbox (`mailboxes.py`). They go along with the next call or remote call to it that has to do with references
(`calling.py`), or all together after a moment, by the supervisor's clock.

Rules
- Answers go back on the connection on which they were asked for, where the peer waits for them. All else goes out on
  our own connection, which the peer's serving pool reads at once; a bare acknowledgement too, if there is one: what it
  acknowledges may be an answer, and who has answered does not wait. If there is none, nobody can have answered us.
- What cannot be sent stays in the mailboxes until it is acknowledged or the peer is lost.
- News need not arrive: what cannot be sent is dropped.
- Connecting may take a while, so it is done in the serving pool, by one thread for each peer. If nobody listens there
  any more the group is told; if it fails for another reason it is tried again, at the group's next tick.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from farcall.agent.incoming import Incoming
from farcall.agent.jobs import Answerable
from farcall.agent.mailboxes import Mailboxes
from farcall.agent.outgoing import Outgoing
from farcall.agent.parcels import CarriedFrame, RemoteFrame, Way
from farcall.agent.peers import Peer
from farcall.agent.serving import Serving
from farcall.errors import WorkerLost
from farcall.protocol.control import pack_control, pack_section
from farcall.protocol.reference_messages import Message
from farcall.protocol.wire import CARRIED, CONTROL, encode, unanswered

logger = logging.getLogger("farcall")

_CONNECT_TIMEOUT: Final = 5.0
_MOST_NEWS: Final = 64
"""So many news wait for a connection; older ones are dropped for newer ones."""
_PAUSES: Final = (0.02, 0.05, 0.1, 0.0)
"""Seconds after an attempt to connect that failed. A connection may break in the midst of its greeting, too."""


class Post:
    """What goes to one peer."""

    def __init__(
        self,
        peer: Peer,
        mailboxes: Mailboxes,
        serving: Serving,
        incoming: Callable[[], Incoming | None],
        on_unreachable: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._mailboxes = mailboxes
        self._serving = serving
        self._incoming = incoming  # the peer's connection to us, if there is one
        self._on_unreachable = on_unreachable
        self._unsaid: deque[bytes] = deque(maxlen=_MOST_NEWS)
        self._lock = threading.RLock()
        self._wanted = False  # somebody wants it to run, perhaps once more
        self._runs = False
        self.is_stuck = False
        """The last attempt to connect has failed, and there is something to be sent."""
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
            if not self.is_stuck:  # else the group's next tick tries again, not each of the clock's
                self.try_again()
            return
        letter = self._mailboxes.outbox(self._peer.number)
        if letter is None:
            return
        frame = encode(CONTROL, 0, b"", letter.body)
        way: Way | None = connection
        if incoming is not None and (letter.only_answers or (letter.is_bare and connection is None)):
            incoming.answer(frame)
            way = incoming
        elif connection is not None and letter.is_bare:
            connection.send_news(frame)
        elif connection is not None:
            connection.send_control(frame)
        if way is None or way.is_lost():
            self.try_again()  # it is kept with what is not acknowledged

    def say(self, news: bytes) -> None:
        """Sends news, which need not arrive. Never raises, never waits."""
        connection = self._peer.connection
        if connection is not None:
            connection.send_news(news)
        else:
            self._unsaid.append(news)
            self.try_again()

    def try_again(self) -> None:
        """Has it connect, in the serving pool, and send what there is."""
        with self._lock:
            submit = not self._wanted and not self._runs
            self._wanted = True
        if submit:
            self._serving.run_aside(self)

    def run(self) -> None:
        """See `Job`: connects, which may take a while, and sends again whatever the peer has not acknowledged."""
        with self._lock:
            if self._runs:
                return
            self._runs = True
        try:
            while self._wanted:
                self._wanted = False
                connection = self._connect()
                if connection is not None:
                    self._send_all(connection)
        finally:
            with self._lock:
                self._runs = False
                again = self._wanted
        if again:  # said between the last look and the end
            self._serving.run_aside(self)

    def _send_all(self, connection: Outgoing) -> None:
        while self._unsaid:
            connection.send_news(self._unsaid.popleft())
        self._resend(connection)
        if connection.is_lost():  # and that may have been noticed before this was sent
            self.try_again()

    def _connect(self) -> Outgoing | None:
        """The connection, made if need be. None if the peer is gone or cannot be reached."""
        for pause in _PAUSES:
            if self._peer.is_lost or self._peer.is_over() or self._serving.is_closing:
                break
            try:
                connection = self._peer.connect(monotonic() + _CONNECT_TIMEOUT)
            except WorkerLost as error:
                if error.is_gone:
                    logger.info("%s", error)
                    self._on_unreachable()
                    break
                threading.Event().wait(pause)
            else:
                self.is_stuck = False
                return connection
        self.is_stuck = True
        self._unsaid.clear()
        return None

    def _resend(self, connection: Outgoing) -> None:
        """Everything that is not acknowledged, and not under way on a connection that works. Each is taken once.

        And an acknowledgement: the last one may have been lost.
        """
        messages: list[tuple[int, Message]] = []
        for number, parcel in self._mailboxes.unacknowledged(self._peer.number):
            if isinstance(parcel, RemoteFrame):
                if parcel.via.is_lost():
                    parcel.via = connection
                    self.resends += 1
                    connection.send_control(unanswered(parcel.frame), parcel.buffers)
            elif isinstance(parcel, CarriedFrame):
                if parcel.via.is_lost():
                    parcel.via = connection
                    self.resends += 1
                    connection.send_control(encode(CARRIED, 0, pack_section(number, parcel.carried), b""))
            else:
                messages.append((number, parcel))
        acknowledged = self._mailboxes.acknowledgement(self._peer.number)
        if messages or acknowledged:
            self.resends += len(messages)
            connection.send_control(encode(CONTROL, 0, b"", pack_control(acknowledged, messages)))

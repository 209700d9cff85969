"""A peer in a made-up world: what is at which address, and what the other side has already answered."""

from __future__ import annotations

import socket
from time import monotonic
from typing import Any

import msgspec
import pytest

from farcall.agent.lanes import Lane
from farcall.agent.peers import Peer
from farcall.errors import WorkerLost
from farcall.protocol.handshake import (
    PREAMBLE_SIZE,
    Challenge,
    Greeting,
    Hello,
    Proof,
    Purpose,
    Welcome,
    body_length,
    pack,
    unpack,
)
from farcall.protocol.membership_messages import Member
from farcall.protocol.wire import Sizes
from farcall.security import Applicant, Credentials, Secret
from farcall.security.proof import proof_of
from farcall.sleeping import FOREVER
from farcall.transports.shared_memory import Pool
from farcall.transports.sockets import SocketChannel

UNIX, TCP, TCP6 = "unix:/run/b.sock", "tcp:10.0.0.2:4000", "tcp:[fd00::2]:4000"
WELCOME = pack(Purpose.CALLS, Welcome("b", 1, 1))

Answer = bytes | OSError
"""What the other side has already sent when we connect, behind its proof of the secret, or what connecting raises."""

SECRET = Secret("the secret of the group")
US = Member(0, "a", 0, "here", ("unix:a",))


class Predictable(Credentials):
    """Credentials whose nonce is known beforehand, so that the other side's proof is, too."""

    def applicant(self, purpose: Purpose, hello: Hello, other: str, binding: bytes) -> tuple[Applicant, Hello]:
        hello = msgspec.structs.replace(hello, nonce=bytes(32))
        return Applicant(self.secret, purpose, hello, other, binding), hello


def hello_to(address: str, lends: int = -1, token: bytes = b"") -> Hello:
    """What `a` says to `b` there."""
    return Hello(
        "group",
        "a",
        0,
        "b",
        0,
        "here",
        ("unix:a",),
        wanted_number=1,
        dialed=address,
        nonce=bytes(32),
        lends=lends,
        token=token,
        limits=Sizes(),
    )


def challenge_and_proof(hello: Hello, secret: Secret) -> bytes:
    """What somebody who knows that secret answers."""
    body, nonce = pack(Purpose.CALLS, hello)[PREAMBLE_SIZE:], b"n" * 32
    mac = proof_of(secret, b"the side that listens", Purpose.CALLS, body, nonce, b"")
    return pack(Purpose.CALLS, Challenge(nonce)) + pack(Purpose.CALLS, Proof(mac))


class World:
    """What is at which address. Remembers who was tried, and closes all in the end."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.tried: list[tuple[str, float]] = []
        self.other_ends: list[socket.socket] = []
        self.channels: list[SocketChannel] = []
        self.hangs_up = False
        self.secret: Secret | None = SECRET  # what the other side knows
        self.lost: list[str] = []
        self.is_over = False
        self.pool = Pool(0, 0, str)
        self.process: int | None = None

    def connect(self, address: str, timeout: float) -> SocketChannel:
        self.tried.append((address, timeout))
        answer = self.answers.get(address, ConnectionRefusedError("nobody listens there"))
        if isinstance(answer, OSError):
            raise answer
        ours, theirs = socket.socketpair()
        if self.secret is not None:
            theirs.sendall(challenge_and_proof(self.hello(address), self.secret))
        theirs.sendall(answer)
        if self.hangs_up:
            theirs.shutdown(socket.SHUT_WR)
        self.other_ends.append(theirs)  # last: who sees it may send more
        self.channels.append(SocketChannel(ours, address, self.process))
        return self.channels[-1]

    def hello(self, address: str) -> Hello:
        """What is said to whoever is there."""
        if self.process is None:
            return hello_to(address)
        return hello_to(address, self.pool.probe(), self.pool.token)

    def heard(self, number: int = 0) -> Greeting:
        """The greeting that came at the other end."""
        data = self.other_ends[number].recv(1 << 16)
        size = body_length(data[:PREAMBLE_SIZE], Purpose.CALLS, "we")
        return unpack(data[PREAMBLE_SIZE : PREAMBLE_SIZE + size], "we")

    def is_closed(self, number: int) -> bool:
        """Whether the other end sees that we have gone."""
        end = self.other_ends[number]
        end.settimeout(5)
        try:
            while end.recv(1 << 16):
                pass
        except ConnectionResetError:  # we left something unread
            pass
        return True

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for end in self.other_ends:
            end.close()
        self.pool.close()


class FakeTransport:
    def __init__(self, scheme: str, world: World) -> None:
        self.scheme = scheme
        self.connect = world.connect

    def listen(self, host: str | None = None) -> Any:
        raise AssertionError("a peer does not listen")


def peer_in(
    world: World,
    addresses: tuple[str, ...] = (UNIX, TCP),
    schemes: tuple[str, ...] = ("unix", "tcp"),
    host: str = "here",
) -> Peer:
    return Peer(
        Member(1, "b", 1, host, addresses),
        US,
        "group",
        {scheme: FakeTransport(scheme, world) for scheme in schemes},
        Connection,  # type: ignore[arg-type]
        lambda: world.lost.append("this one"),
        lambda: world.is_over,
        Predictable(SECRET),
        world.pool,
    )


class Connection:
    """What the agent makes of a channel."""

    def __init__(self, peer: Peer, channel: SocketChannel, lane: Lane) -> None:
        self.info = peer.info
        self.channel, self.lane = channel, lane
        self.lose = lambda *_, **__: peer.forget(self)  # type: ignore[arg-type]


def connect(peer: Peer, seconds: float = FOREVER) -> Connection:
    connection: Any = peer.connect(monotonic() + seconds)
    assert isinstance(connection, Connection)
    return connection


def refusal(peer: Peer, seconds: float = FOREVER) -> str:
    with pytest.raises(WorkerLost) as lost:
        connect(peer, seconds)
    assert lost.value.worker == "b"
    assert peer.connection is None
    return str(lost.value)

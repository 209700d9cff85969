"""The proof that both ends of a connection know the group's secret, before either believes a word of the other.

    the side that connects                                     the side that listens
    Hello: who it is, whom it wants, where, a nonce     →
                                                        ←      Challenge: a nonce
    Proof                                               →
                                                        ←      Proof, and behind it Welcome or Refused

A proof is an HMAC-SHA-256, keyed with the secret, of: which side speaks, what the connection is for, the whole hello
(group, both names and numbers, the address that was dialed), the challenge, and the fingerprint of the certificate, if
the channel is encrypted. So

- a recorded proof is of no use: the next challenge is another one (replay);
- a proof that is sent back is none: it says which side speaks (reflection);
- who stands between two workers cannot hand their proofs through: the one who connects has seen another certificate,
  or dialed another address, than the one who listens has (relay).

Rules
- The side that connects proves itself first: a stranger who knocks learns nothing that the secret has part in.
- Nothing that is said before the other side's proof is believed; a refusal may come before it, and is a text only.
- Proofs are compared in constant time.

Pure: messages in, messages out. Nonces are handed in.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

from farcall.errors import AuthenticationError, ConnectionRefusedByPeer, EncryptionError, ProtocolError
from farcall.protocol.handshake import Challenge, Greeting, Hello, Proof, Purpose, Refused, Welcome, encode, quoted
from farcall.security.secret import Secret

NONCE_SIZE: Final = 32

_CONNECTS: Final = b"the side that connects"
_LISTENS: Final = b"the side that listens"
_SCHEME: Final = b"farcall proof 1"

_SAME_SECRET: Final = (
    "All workers of a group need the same secret: start them with one `farcall run`, or give each the same "
    "FARCALL_SECRET (or option secret), or the same file"
)


def proof_of(secret: Secret, side: bytes, purpose: Purpose, hello: bytes, challenge: bytes, binding: bytes) -> bytes:
    """The proof of one side. `hello` as it was sent; `binding` is the certificate's fingerprint, or empty."""
    parts = (_SCHEME, side, bytes([purpose]), hello, challenge, binding)
    # With their lengths, so that no byte can pass from one part to the next.
    return hmac.digest(secret.key, b"".join(struct.pack("<Q", len(part)) + part for part in parts), "sha256")


def refusal_of(error: ProtocolError) -> Refused:
    """What a stranger is told. Not where this side has its secret from: that is for our own log."""
    if isinstance(error, AuthenticationError) and not isinstance(error, EncryptionError):
        return Refused("who connects must know the secret of this group", stranger=True)
    return Refused(str(error))


class Applicant:
    """The side that connects. `take` what comes and send what it gives, until there is an `outcome`."""

    def __init__(self, secret: Secret, purpose: Purpose, hello: Hello, other: str, binding: bytes = b"") -> None:
        """`other` names the other side in messages to people."""
        self.outcome: Welcome | Refused | None = None
        """The other side's last word."""
        self.is_proven = False
        """Whether the other side knows the secret."""
        self._secret = secret
        self._purpose = purpose
        self._hello = encode(hello)
        self._other = other
        self._binding = binding
        self._challenge: bytes | None = None

    def take(self, message: Greeting) -> Proof | None:
        """What to answer. Raises `AuthenticationError` if the other side knows another secret, or none;
        `ProtocolError` for what is not due."""
        match message:
            case Challenge(nonce) if self._challenge is None and len(nonce) == NONCE_SIZE:
                self._challenge = nonce
                return Proof(self._proof(_CONNECTS, nonce))
            case Proof(mac) if self._challenge is not None and not self.is_proven:
                if not hmac.compare_digest(mac, self._proof(_LISTENS, self._challenge)):
                    raise AuthenticationError(
                        f"{self._other} does not know this group's secret (here it is from {self._secret.source}), or "
                        f"somebody stands in between; nothing was said to it. {_SAME_SECRET}"
                    )
                self.is_proven = True
                return None
            case Refused(stranger=True):
                raise AuthenticationError(
                    f"{self._other} refused the connection: this worker's secret (from {self._secret.source}) is not "
                    f"the group's. {_SAME_SECRET}"
                )
            case Refused():
                self.outcome = message
                return None
            case Welcome() if self.is_proven:
                self.outcome = message
                return None
        raise ProtocolError(f"{self._other} answered {self._said()} with a {type(message).__name__}")

    def welcome(self) -> Welcome:
        """The outcome, if it is one. Raises `ConnectionRefusedByPeer` with the other side's reason."""
        if isinstance(self.outcome, Welcome):
            return self.outcome
        assert self.outcome is not None
        raise ConnectionRefusedByPeer(f"{self._other} refused the connection: {quoted(self.outcome.reason)}")

    def _proof(self, side: bytes, challenge: bytes) -> bytes:
        return proof_of(self._secret, side, self._purpose, self._hello, challenge, self._binding)

    def _said(self) -> str:
        return "a hello" if self._challenge is None else "the proof of the secret"


class Doorkeeper:
    """The side that listens. `take` what comes and send what it gives; let in who `is_proven`, and nobody else."""

    def __init__(self, secret: Secret, purpose: Purpose, nonce: bytes, address: str = "", binding: bytes = b"") -> None:
        """`nonce` must be fresh; `address` is where this side listens, if others must have dialed that."""
        self.hello: Hello | None = None
        """What the other side says it is. Not to be believed before it is proven."""
        self.is_proven = False
        self._secret = secret
        self._purpose = purpose
        self._nonce = nonce
        self._address = address
        self._binding = binding
        self._body = b""

    def take(self, message: Greeting, body: bytes) -> Challenge | Proof:
        """What to answer; `body` is the message as it came.

        Raises `AuthenticationError` if the proof is wrong; another `ProtocolError` for what is not due.
        """
        match message:
            case Hello() if self.hello is None and len(message.nonce) == NONCE_SIZE:
                self.hello, self._body = message, body
                return Challenge(self._nonce)
            case Proof(mac) if self.hello is not None and not self.is_proven:
                if not hmac.compare_digest(mac, self._proof(_CONNECTS)):
                    raise AuthenticationError(
                        f"it says that it is {self.hello.name[:100]!r}, but does not know the secret of this group "
                        f"(here it is from {self._secret.source}, and all workers need the same)"
                    )
                if self._address and self.hello.dialed != self._address:
                    raise AuthenticationError(
                        f"{self.hello.name!r} wanted to reach {self.hello.dialed or 'nobody'}, and was led to "
                        f"{self._address}: somebody stands in between"
                    )
                self.is_proven = True
                return Proof(self._proof(_LISTENS))
        due = "a hello" if self.hello is None else "a proof of the secret"
        raise ProtocolError(f"it sent a {type(message).__name__} where {due} was due")

    def _proof(self, side: bytes) -> bytes:
        return proof_of(self._secret, side, self._purpose, self._body, self._nonce, self._binding)

"""The handshake: both ends of a connection prove that they know the group's secret, before either trusts the other.

    client (the end that connects)                             server (the end that listens)
    Hello: who it is, whom and where it calls, a nonce  →
                                                        ←      Challenge: a nonce
    Proof                                               →
                                                        ←      Proof, followed by Welcome or Refused

Theory of operation: a proof is an HMAC-SHA-256, keyed with the secret, of
- which end sends it, and what the connection is for,
- the whole hello: the group, both names and numbers, the dialed address, the network namespace of the client, and the
  client's nonce,
- the server's nonce, and
- the fingerprint of the server's certificate, if the connection is encrypted.

So three attacks fail:
- Replay: a recorded proof does not fit the nonces of another handshake.
- Reflection: a proof that is sent back to its sender is wrong, because it names the end that sent it.
- Relay: an attacker between two workers cannot pass their proofs on. The client has seen the attacker's certificate, or
  has dialed the attacker's address or in the attacker's network namespace, and the server expects its own.

Two network namespaces (two containers) have two loopback networks with the same addresses. So on unencrypted
connections over loopback the server compares the namespace in the hello with its own. If they differ, it refuses the
connection and asks for TLS, and the client connects again with TLS. An attacker gains nothing by forging or dropping
this refusal, and cannot change the hello, which is part of the proof.

Rules
- The client proves itself first. A stranger that connects to a server gets nothing that was computed from the secret.
- Nothing that the other end sends before its proof is trusted. A refusal may come before the proof; it is text only.
- Proofs are compared in constant time.
- This module takes and returns messages. It has no connection, no clock and no randomness: nonces are parameters.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

from farcall.errors import AuthenticationError, EncryptionError, PeerRefusedError, ProtocolError
from farcall.protocol.fields import quoted
from farcall.protocol.handshake import Challenge, Greeting, Hello, Proof, Purpose, Refused, Welcome, encode
from farcall.security.secret import Secret

NONCE_SIZE: Final = 32
"""The size of a nonce, in bytes."""

# The next three are part of every proof. Changing one is a change of the protocol.
_CLIENT: Final = b"the side that connects"
_SERVER: Final = b"the side that listens"
_SCHEME: Final = b"farcall proof 3"

_SAME_SECRET_ADVICE: Final = (
    "All workers of a group need the same secret: start them with one `farcall run`, or set the same FARCALL_SECRET "
    "(or option secret) for each, or give each the same file"
)


def compute_proof(
    secret: Secret, side: bytes, purpose: Purpose, hello: bytes, challenge: bytes, binding: bytes
) -> bytes:
    """Returns the proof with which one end of a connection shows that it knows the secret: 32 bytes.

    It is an HMAC-SHA-256, keyed with the secret, of all other parameters. None of them is checked.

    Args:
        secret: The secret of the group.
        side: Which end sends the proof: `_CLIENT` for the end that connects, `_SERVER` for the end that listens.
        purpose: What the connection is for: calls, or the store of a rendezvous.
        hello: The client's `Hello` message, encoded as it was sent.
        challenge: The nonce (random bytes that are used once) of the server's `Challenge` message.
        binding: The fingerprint of the server's certificate; empty if the connection is not encrypted.
    """
    parts = (_SCHEME, side, bytes([purpose]), hello, challenge, binding)
    # Each part is preceded by its length, so that no two lists of parts have the same bytes.
    return hmac.digest(secret.key, b"".join(struct.pack("<Q", len(part)) + part for part in parts), "sha256")


class EncryptionRequired(PeerRefusedError):
    """Raised when an unencrypted connection over loopback joins two network namespaces: it must use TLS."""


def refusal_for(error: ProtocolError) -> Refused:
    """Returns the message with which a server refuses a client whose handshake failed with `error`. Does not send it.

    For a wrong secret (`AuthenticationError`) the message does not contain the text of the error, which says where this
    worker has its secret from. For other errors it does. For `EncryptionRequired` it asks the client to connect with
    TLS.
    """
    if isinstance(error, EncryptionRequired):
        return Refused(str(error), encrypt=True)
    if isinstance(error, AuthenticationError) and not isinstance(error, EncryptionError):
        return Refused("a worker that connects must know the secret of this group", stranger=True)
    return Refused(str(error))


class ClientHandshake:
    """The handshake at the end that connects, as a state machine without a connection.

    Send `hello`, pass each message that arrives to `take`, and send what `take` returns, until `outcome` is not None.
    Then call `welcome`. The constructor checks nothing.

    Args:
        secret: The secret of the group.
        purpose: What the connection is for: calls, or the store of a rendezvous.
        hello: The `Hello` message that this end sends, with a nonce of `NONCE_SIZE` random bytes.
        other: The name of the other end, for error messages.
        binding: The fingerprint of the other end's certificate; empty if the connection is not encrypted.

    Attributes:
        outcome: The last message of the other end, `Welcome` or `Refused`; None until it has arrived.
        is_proven: Whether the other end has proved that it knows the secret.
    """

    def __init__(self, secret: Secret, purpose: Purpose, hello: Hello, other: str, binding: bytes = b"") -> None:
        self.outcome: Welcome | Refused | None = None
        self.is_proven = False
        self._secret = secret
        self._purpose = purpose
        self._hello = encode(hello)
        self._other = other
        self._binding = binding
        self._challenge: bytes | None = None

    def take(self, message: Greeting) -> Proof | None:
        """Processes the next message of the other end. A `Welcome` or a `Refused` is kept as `outcome`.

        Args:
            message: The message: a `Challenge`, then a `Proof`, then a `Welcome`. A `Refused` may come at any time.

        Returns:
            This end's proof, to be sent next, after a `Challenge`; None after any other message.

        Raises:
            AuthenticationError: The two ends do not have the same secret, or another process relays the connection.
            EncryptionRequired: This end must connect again with TLS.
            ProtocolError: The message is not valid at this point of the handshake.
        """
        match message:
            case Challenge(nonce) if self._challenge is None and len(nonce) == NONCE_SIZE:
                self._challenge = nonce
                return Proof(self._proof(_CLIENT, nonce))
            case Proof(mac) if self._challenge is not None and not self.is_proven:
                if not hmac.compare_digest(mac, self._proof(_SERVER, self._challenge)):
                    raise AuthenticationError(
                        f"{self._other} does not know this group's secret (this worker has it from "
                        f"{self._secret.source}), or another process relays the connection; no call was sent. "
                        f"{_SAME_SECRET_ADVICE}"
                    )
                self.is_proven = True
                return None
            case Refused(stranger=True):
                raise AuthenticationError(
                    f"{self._other} refused the connection: this worker's secret (from {self._secret.source}) is not "
                    f"the group's. {_SAME_SECRET_ADVICE}"
                )
            case Refused(encrypt=True) if not self._binding:
                raise EncryptionRequired(f"{self._other} refused the connection: {quoted(message.reason)}")
            case Refused():
                self.outcome = message
                return None
            case Welcome() if self.is_proven:
                self.outcome = message
                return None
        raise ProtocolError(f"{self._other} answered {self._last_sent()} with a {type(message).__name__}")

    def welcome(self) -> Welcome:
        """Returns the `Welcome` message of the other end. Call it when `outcome` is not None.

        Raises:
            PeerRefusedError: The other end refused the connection; the message quotes its reason.
            AssertionError: `outcome` is None.
        """
        if isinstance(self.outcome, Welcome):
            return self.outcome
        assert self.outcome is not None
        raise PeerRefusedError(f"{self._other} refused the connection: {quoted(self.outcome.reason)}")

    def _proof(self, side: bytes, challenge: bytes) -> bytes:
        """Returns the proof of the end `side` (`_CLIENT` or `_SERVER`) for this connection.

        `challenge` is the nonce of the server's `Challenge` message.
        """
        return compute_proof(self._secret, side, self._purpose, self._hello, challenge, self._binding)

    def _last_sent(self) -> str:
        """Returns what this end sent last, for error messages: "a hello" or "the proof of the secret"."""
        return "a hello" if self._challenge is None else "the proof of the secret"


class ServerHandshake:
    """The handshake at the end that listens, as a state machine without a connection.

    Pass each message that arrives to `take`, and send what `take` returns, until `is_proven` is True. Then send a
    `Welcome` or a `Refused`. The constructor checks nothing.

    Args:
        secret: The secret of the group.
        purpose: What the connection is for: calls, or the store of a rendezvous.
        nonce: `NONCE_SIZE` random bytes that were never used before.
        address: The address that the other end must have dialed, which is where this end listens; empty for any
            address.
        binding: The fingerprint of this end's certificate; empty if the connection is not encrypted.
        network: The network namespace in which the other end must be; empty for any.

    Attributes:
        hello: What the other end says about itself; None until it has arrived. Do not trust it before `is_proven`.
        is_proven: Whether the other end has proved that it knows the secret. Answer no request while it is False.
    """

    def __init__(
        self,
        secret: Secret,
        purpose: Purpose,
        nonce: bytes,
        address: str = "",
        binding: bytes = b"",
        network: str = "",
    ) -> None:
        self.hello: Hello | None = None
        self.is_proven = False
        self._secret = secret
        self._purpose = purpose
        self._nonce = nonce
        self._address = address
        self._binding = binding
        self._network = network
        self._body = b""

    def take(self, message: Greeting, body: bytes) -> Challenge | Proof:
        """Processes the next message of the other end.

        Args:
            message: The message, decoded: a `Hello`, then a `Proof`.
            body: The same message as bytes, as it arrived. Proofs are computed over these bytes.

        Returns:
            The message to send next: the `Challenge` after a `Hello`; after a `Proof` this end's `Proof`, and
                `is_proven` is True.

        Raises:
            AuthenticationError: The other end's proof is wrong, or it dialed another address than this end listens at.
            EncryptionRequired: The other end is in another network namespace and must connect again with TLS.
            ProtocolError: The message is not valid at this point of the handshake.
        """
        match message:
            case Hello() if self.hello is None and len(message.nonce) == NONCE_SIZE:
                if self._network and message.network != self._network:
                    raise EncryptionRequired(
                        "the two workers are on different hosts or in different network namespaces (containers), and "
                        "are connected over loopback without encryption; connect with TLS (encrypt_between_hosts must "
                        "be the same for all workers)"
                    )
                self.hello, self._body = message, body
                return Challenge(self._nonce)
            case Proof(mac) if self.hello is not None and not self.is_proven:
                if not hmac.compare_digest(mac, self._proof(_CLIENT)):
                    raise AuthenticationError(
                        f"it says that its name is {self.hello.name[:100]!r}, but it does not know the secret of this "
                        f"group (this worker has it from {self._secret.source}; all workers need the same)"
                    )
                if self._address and self.hello.dialed != self._address:
                    raise AuthenticationError(
                        f"{self.hello.name!r} connected to {quoted(self.hello.dialed) or 'no address'}, but arrived at "
                        f"{self._address}: another process relays the connection"
                    )
                self.is_proven = True
                return Proof(self._proof(_SERVER))
        expected = "a hello" if self.hello is None else "a proof of the secret"
        raise ProtocolError(f"it sent a {type(message).__name__} where {expected} was expected")

    def _proof(self, side: bytes) -> bytes:
        """Returns the proof of the end `side` (`_CLIENT` or `_SERVER`) for this connection.

        The `Hello` of the other end must have arrived, which is not checked.
        """
        return compute_proof(self._secret, side, self._purpose, self._body, self._nonce, self._binding)

"""What one worker needs to authenticate connections: the secret, the certificate and the limits for strangers.

An agent and its end of the store share one `Credentials` object. The random nonces of handshakes are drawn here, so
that `proof` has no randomness of its own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from farcall.protocol.handshake import Hello, Purpose
from farcall.security.limits import LimitOptions, Limits, StrangerLog, limits_from_options
from farcall.security.proof import NONCE_SIZE, ClientHandshake, ServerHandshake
from farcall.security.secret import Secret, find_secret

if TYPE_CHECKING:
    from farcall.security.encryption import Encryption


class CredentialOptions(LimitOptions, Protocol):
    """The options from which credentials are made; see `RpcBackendOptions`."""

    secret: str | None
    encrypt_between_hosts: bool
    tls_certificate: str | None
    tls_key: str | None
    tls_authority: str | None


def credentials_from_options(options: CredentialOptions) -> Credentials:
    """Returns the credentials that `options` describe. May create the secret file of this user; see `find_secret`.

    Raises:
        UsageError: There is no usable secret, or a TLS file is missing or not usable. TLS files are checked even if
            `encrypt_between_hosts` is False.
    """
    from farcall.security.encryption import Encryption  # imported here, because `Credentials` can do without it

    encryption = Encryption(options.tls_certificate, options.tls_key, options.tls_authority)
    chosen = encryption if options.encrypt_between_hosts else None
    return Credentials(find_secret(options.secret), chosen, limits_from_options(options))


@dataclass(frozen=True)
class Credentials:
    """What one worker needs to authenticate the connections that it makes and accepts."""

    secret: Secret = field(default_factory=find_secret)
    """The secret of the group. By default that of the environment or of this user's file; see `find_secret`."""
    encryption: Encryption | None = None
    """The certificate for connections to other hosts. None means that no connection is encrypted."""
    limits: Limits = field(default_factory=Limits)
    """What the other end of a connection may do before it has proved that it knows the secret."""
    stranger_log: StrangerLog = field(default_factory=StrangerLog)
    """Which failed handshakes have been logged, so that they are logged only once."""

    def client_handshake(
        self, purpose: Purpose, hello: Hello, other: str, binding: bytes
    ) -> tuple[ClientHandshake, Hello]:
        """Returns a handshake for a connection that this worker makes, and the hello to send first.

        Args:
            purpose: What the connection is for: calls, or the store of a rendezvous.
            hello: Who this worker is and which worker it wants to reach. The returned hello is a copy with a fresh
                nonce.
            other: The name of the other end, for error messages.
            binding: The fingerprint of the other end's certificate; empty if the connection is not encrypted.
        """
        hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_SIZE))
        return ClientHandshake(self.secret, purpose, hello, other, binding), hello

    def server_handshake(self, purpose: Purpose, address: str, binding: bytes, network: str = "") -> ServerHandshake:
        """Returns a handshake for a connection that another process makes to this worker.

        Args:
            purpose: What the connection is for: calls, or the store of a rendezvous.
            address: The address at which this worker listens; the other end must have dialed it. It is not checked on
                encrypted connections to the store, whose address may have been translated on the way (NAT) and which
                are bound to the certificate already.
            binding: The fingerprint of this worker's certificate; empty if the connection is not encrypted.
            network: The network namespace of an unencrypted connection over loopback, in which the other end must be;
                otherwise empty. It is not checked if this worker does not encrypt at all.
        """
        if binding and purpose == Purpose.STORE:
            address = ""
        network = network if self.encryption is not None else ""
        return ServerHandshake(self.secret, purpose, secrets.token_bytes(NONCE_SIZE), address, binding, network)

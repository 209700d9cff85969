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
    """The options from which credentials are made. `RpcBackendOptions` has them all.

    Attributes:
        secret: The secret of the group; None takes it from `FARCALL_SECRET` or from this user's file.
        encrypt_between_hosts: Whether connections between hosts are encrypted with TLS.
        tls_certificate: The path of a PEM file with this worker's certificate; None to create one.
        tls_key: The path of a PEM file with the certificate's private key; None without `tls_certificate`.
        tls_authority: The path of a PEM file with the certificate that signed those of all workers; None without
            `tls_certificate`.
    """

    secret: str | None
    encrypt_between_hosts: bool
    tls_certificate: str | None
    tls_key: str | None
    tls_authority: str | None


def credentials_from_options(options: CredentialOptions) -> Credentials:
    """Returns the credentials that `options` describe: the secret, the TLS certificate, and the limits for handshakes.

    If `options.secret` is None, the secret is taken from `FARCALL_SECRET`, or else from this user's file. The file is
    created if it does not exist. If `encrypt_between_hosts` is False, the credentials have no certificate.

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
    """What one worker needs to authenticate the connections that it makes and accepts. Nothing is checked.

    `client_handshake` and `server_handshake` return a new handshake for each connection.

    Attributes:
        secret: The secret of the group. By default it is taken from `FARCALL_SECRET`, or else from this user's file,
            which is created if it is missing. `UsageError` is raised if that gives no usable secret.
        encryption: The certificate for connections to other hosts. None means that no connection is encrypted.
        limits: What the other end of a connection may do before it has proved that it knows the secret.
        stranger_log: Which failed handshakes have been logged, so that each kind is logged only once for an address.
    """

    secret: Secret = field(default_factory=find_secret)
    encryption: Encryption | None = None
    limits: Limits = field(default_factory=Limits)
    stranger_log: StrangerLog = field(default_factory=StrangerLog)

    def client_handshake(
        self, purpose: Purpose, hello: Hello, other: str, binding: bytes
    ) -> tuple[ClientHandshake, Hello]:
        """Returns a handshake for a connection that this worker makes, and the hello to send first.

        Sends nothing. The arguments are not checked.

        Args:
            purpose: What the connection is for: calls, or the store of a rendezvous.
            hello: Who this worker is and which worker it wants to reach. The returned hello is a copy with a fresh
                nonce (random bytes that are used once).
            other: The name of the other end, for error messages.
            binding: The fingerprint of the other end's certificate; empty if the connection is not encrypted.
        """
        hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_SIZE))
        return ClientHandshake(self.secret, purpose, hello, other, binding), hello

    def server_handshake(self, purpose: Purpose, address: str, binding: bytes, network: str = "") -> ServerHandshake:
        """Returns a handshake for a connection that another process makes to this worker.

        Sends nothing. The arguments are not checked.

        Args:
            purpose: What the connection is for: calls, or the store of a rendezvous.
            address: The address at which this worker listens; the other end must have dialed it. Empty accepts any. It
                is not compared on encrypted connections to the store: such a connection is bound to the certificate
                already, and its address may have been translated on the way (NAT).
            binding: The fingerprint of this worker's certificate; empty if the connection is not encrypted.
            network: The network namespace in which the other end must be. Give it for an unencrypted connection over
                loopback; empty accepts any. It is not compared if this worker does not encrypt at all.
        """
        if binding and purpose == Purpose.STORE:
            address = ""
        network = network if self.encryption is not None else ""
        return ServerHandshake(self.secret, purpose, secrets.token_bytes(NONCE_SIZE), address, binding, network)

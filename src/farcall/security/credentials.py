"""What a worker knows others by, and is known by: the secret, how connections are encrypted, what strangers may do.

One object for an agent and its end of the store. Chance comes in here: the nonces of both sides.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from farcall.protocol.handshake import Hello, Purpose
from farcall.security.limits import Limited, Limits, Notebook, limits_of
from farcall.security.proof import NONCE_SIZE, Applicant, Doorkeeper
from farcall.security.secret import Secret, find_secret

if TYPE_CHECKING:
    from farcall.security.encryption import Encryption


class Chosen(Limited, Protocol):
    """Options that say how this worker is known to others."""

    secret: str | None
    encrypt_between_hosts: bool
    tls_certificate: str | None
    tls_key: str | None
    tls_authority: str | None


def credentials_of(options: Chosen) -> Credentials:
    """What the options say. Raises `UsageError` if there is no secret to be had, or a file cannot be used."""
    from farcall.security.encryption import Encryption  # late: `Credentials` alone do not need it

    encryption = Encryption(options.tls_certificate, options.tls_key, options.tls_authority)
    chosen = encryption if options.encrypt_between_hosts else None  # files are looked at all the same
    return Credentials(find_secret(options.secret), chosen, limits_of(options))


@dataclass(frozen=True)
class Credentials:
    """How this worker and others get to trust each other."""

    secret: Secret = field(default_factory=find_secret)
    """By default the one of the environment, or of this user's file."""
    encryption: Encryption | None = None
    """None: nothing is encrypted, wherever it goes."""
    limits: Limits = field(default_factory=Limits)
    notebook: Notebook = field(default_factory=Notebook)
    """Of which strangers a line was logged."""

    def applicant(self, purpose: Purpose, hello: Hello, other: str, binding: bytes) -> tuple[Applicant, Hello]:
        """For a connection that this worker makes; the hello to send first comes with it."""
        hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_SIZE))
        return Applicant(self.secret, purpose, hello, other, binding), hello

    def doorkeeper(self, purpose: Purpose, address: str, binding: bytes) -> Doorkeeper:
        """For a connection that somebody makes to this worker."""
        return Doorkeeper(self.secret, purpose, secrets.token_bytes(NONCE_SIZE), address, binding)

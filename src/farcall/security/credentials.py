"""What a worker needs to know others by, and to be known: the secret, and what strangers may.

One object for an agent and its end of the store. Chance comes in here: the nonces of both sides.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec

from farcall.protocol.handshake import Hello, Purpose
from farcall.security.proof import NONCE_SIZE, Applicant, Doorkeeper
from farcall.security.secret import Secret, find_secret
from farcall.security.strangers import Limits, Notebook


@dataclass(frozen=True)
class Credentials:
    """How this worker and others get to trust each other."""

    secret: Secret = field(default_factory=find_secret)
    """By default the one of the environment, or of this user's file."""
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

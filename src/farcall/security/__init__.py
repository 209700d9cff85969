"""Who may connect to a worker, and what a connected worker may call.

    secret       finds the secret of the group
    proof        the handshake, in which both ends of a connection prove that they know the secret
    encryption   TLS certificates and contexts
    limits       what the other end of a connection may do before it has proved itself
    credentials  all of the above for one worker
    allowed      the allow-list: the functions that other workers may call, and the types that they may send

A *stranger* is the other end of a connection that has not proved yet that it knows the secret.

This package opens no connections and has no threads.
"""

from farcall.security.credentials import Credentials, credentials_from_options
from farcall.security.limits import Limits, StrangerLog, limits_from_options, stranger_kind
from farcall.security.proof import NONCE_SIZE, ClientHandshake, EncryptionRequired, ServerHandshake, refusal_for
from farcall.security.secret import Secret, find_secret, secret_path

__all__ = [
    "NONCE_SIZE",
    "ClientHandshake",
    "Credentials",
    "EncryptionRequired",
    "Limits",
    "Secret",
    "ServerHandshake",
    "StrangerLog",
    "credentials_from_options",
    "find_secret",
    "limits_from_options",
    "refusal_for",
    "secret_path",
    "stranger_kind",
]

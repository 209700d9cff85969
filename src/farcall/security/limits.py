"""What a stranger may do, and how often its failures are logged.

A stranger is the other end of a connection that has not proved yet that it knows the secret.

This module only counts and decides. The code that uses it closes connections and writes the log.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final, Protocol

from farcall.errors import AuthenticationError, EncryptionError, ProtocolError
from farcall.protocol.handshake import MAX_MESSAGE

_MAX_STRANGERS: Final = 256
_PROOF_TIMEOUT_S: Final = 10.0
_MAX_LOG_ENTRIES: Final = 1024


@dataclass(frozen=True)
class Limits:
    """What strangers may do at a worker or a store. The values are not checked.

    A stranger is the other end of a connection that has not proved yet that it knows the secret.

    Attributes:
        max_strangers: How many strangers may be connected at once, at least 1. When one more connects, the oldest is
            disconnected.
        proof_timeout: How many seconds a stranger has to prove that it knows the secret, more than 0. Then it is
            disconnected.
        max_message_bytes: The largest size, in bytes, of one message of a handshake.
    """

    max_strangers: int = _MAX_STRANGERS
    proof_timeout: float = _PROOF_TIMEOUT_S
    max_message_bytes: int = MAX_MESSAGE


class LimitOptions(Protocol):
    """The options that set the limits for strangers. `RpcBackendOptions` has them all.

    A stranger is the other end of a connection that has not proved yet that it knows the secret. `max_strangers` is how
    many strangers may be connected at once, at least 1. `proof_timeout` is how many seconds a stranger has to prove
    that it knows the secret, more than 0. The third option is the largest size, in bytes, of one message of a
    handshake.
    """

    max_strangers: int
    """How many strangers may be connected at once, at least 1."""
    proof_timeout: float
    """How many seconds a stranger has to prove that it knows the secret, more than 0."""
    max_greeting_size: int
    """The largest size, in bytes, of one message of a handshake."""


def limits_from_options(options: LimitOptions) -> Limits:
    """Returns the limits that the options set. The values are not checked: the options have done that already."""
    return Limits(options.max_strangers, options.proof_timeout, options.max_greeting_size)


def stranger_kind(error: BaseException) -> str:
    """Returns in which way a handshake failed, as a short text; `StrangerLog.is_new` takes it as `kind`.

    "encryption" for `EncryptionError`, "wrong secret" for other `AuthenticationError`s, "no handshake" for other
    `ProtocolError`s, and "broken" for all other exceptions.
    """
    if isinstance(error, EncryptionError):
        return "encryption"
    if isinstance(error, AuthenticationError):
        return "wrong secret"
    return "no handshake" if isinstance(error, ProtocolError) else "broken"


class StrangerLog:
    """Remembers which failed handshakes have been logged, by address and kind, so that no stranger can fill the log.

    A stranger is the other end of a connection that has not proved yet that it knows the secret. One with many
    addresses must not fill the log either. All of loopback counts as one address, because any user of a host may use
    all of 127.0.0.0/8. So does each IPv6 network of 64 bits, because one machine usually has a whole one.

    Args:
        max_entries: How many failures are remembered, at least 1. The oldest is forgotten when there are more. 0 makes
            `is_new` fail with `StopIteration`.
    """

    def __init__(self, max_entries: int = _MAX_LOG_ENTRIES) -> None:
        self._max_entries = max_entries
        self._seen: dict[tuple[str, str], None] = {}

    def is_new(self, address: str, kind: str) -> bool:
        """Returns True if this is the first failure of its kind from that address, and remembers it; else False.

        Args:
            address: Where the other end connected from. A port at its end is ignored. A text that is no IP address
                counts as it is.
            kind: In which way the handshake failed, any text; `stranger_kind` returns one.
        """
        host = _network_of(address.rpartition(":")[0] if address.rpartition(":")[2].isdigit() else address)
        if (host, kind) in self._seen:
            return False
        while len(self._seen) >= self._max_entries:
            self._seen.pop(next(iter(self._seen)), None)
        self._seen[host, kind] = None
        return True


def _network_of(host: str) -> str:
    """Returns a text that is the same for all addresses that count as one in the log of failed handshakes.

    It is "loopback", the IPv6 network of 64 bits, or the IPv4 address; `host` itself if it is not an IP address. Never
    raises.
    """
    try:
        address = ipaddress.ip_address(host.removeprefix("tcp:").strip("[]"))
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    if address.version == 6:
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)

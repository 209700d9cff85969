"""What is allowed to those who have not proved themselves yet, and what is said of them.

Pure: it counts and decides; whoever uses it closes connections and logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from farcall.errors import AuthenticationError, EncryptionError, ProtocolError
from farcall.protocol.handshake import MAX_MESSAGE

MOST: Final = 256
PATIENCE: Final = 10.0

_REMEMBERED: Final = 1024


@dataclass(frozen=True)
class Limits:
    """How far a stranger may go."""

    most: int = MOST
    """So many connections may be there that have not proved themselves; the oldest goes when one more comes."""
    patience: float = PATIENCE
    """Seconds that each has to prove itself."""
    greeting: int = MAX_MESSAGE
    """Bytes that one message of a greeting may have."""


class Limited(Protocol):
    """Options that say how far a stranger may go."""

    max_strangers: int
    proof_timeout: float
    max_greeting_size: int


def limits_of(options: Limited) -> Limits:
    """What the options say."""
    return Limits(options.max_strangers, options.proof_timeout, options.max_greeting_size)


def kind_of(error: BaseException) -> str:
    """What sort of stranger it is whose greeting failed so; for the `Notebook`."""
    if isinstance(error, EncryptionError):
        return "encryption"
    if isinstance(error, AuthenticationError):
        return "wrong secret"
    return "no greeting" if isinstance(error, ProtocolError) else "broken"


class Notebook:
    """Of whom a line was logged already: a stranger that comes again and again must not fill the log."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._noted: dict[tuple[str, str], None] = {}

    def is_new(self, address: str, kind: str) -> bool:
        """Whether it is the first of its kind from there; it is noted then. `address` may end with a port."""
        host = address.rpartition(":")[0] if address.rpartition(":")[2].isdigit() else address
        if (host, kind) in self._noted:
            return False
        while len(self._noted) >= self._most:
            self._noted.pop(next(iter(self._noted)), None)
        self._noted[host, kind] = None
        return True
